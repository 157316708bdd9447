//! `wholemem bench allreduce`, `allgather`, `broadcast` and `barrier`: measures collectives, compared with a flag's round trip
//! and a plain copy.
//!
//! ```text
//!   a round   fill inputs, poison outputs -> barrier -> timed calls -> compare every byte
//! ```
//!
//! Ranks are processes, each pinned to its own core if there are enough. The time of a round is that of the slowest rank,
//! divided by the number of calls. The calls of a round use the same buffers again, as the benchmarks of other libraries do, so
//! that short buffers stay in the caches. In-place calls use several buffers cyclically, because elements would overflow.

mod case;
mod content;
mod limit;
mod report;
mod run;
mod tune;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use wholemem::{Communicator, SymmetricMemory, SymmetricSpec, Tuning};
use wholemem_command::backend::BackendChoice;
use wholemem_command::failure::PeerFailed;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::ranks::RankRole;
use wholemem_command::{backend, memory};
use wholemem_hal::Device;

use self::case::{CollectiveCase, MachineInfo};
use self::limit::{FlagTime, Limits};
use self::report::{CollectiveResult, print_report};
use super::workers;
use crate::args::{BarrierArgs, DataArgs, ReduceArgs};

/// The collective that a benchmark measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CollectiveOp {
    Allreduce,
    Allgather,
    Broadcast,
    Barrier,
}

impl fmt::Display for CollectiveOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Allreduce => "allreduce",
            Self::Allgather => "allgather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        })
    }
}

/// The measurements of one case of a collective benchmark.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct CaseOutcome {
    /// The time of one collective call in each round.
    rounds: Vec<Duration>,
    /// The median of the times of the thread that makes one collective call, on the rank where it is longest.
    caller: Duration,
    algorithm: Option<String>,
    flag: FlagTime,
    copy: Duration,
}

type RankMessage = workers::RankMessage<(), CaseOutcome>;
type Reporter<'a> = workers::Reporter<'a, (), CaseOutcome>;

pub(super) fn reduce(args: &ReduceArgs) -> Result<()> {
    let (device, machine) = open(args.moves.all.backend)?;
    if args.tune {
        return tune::run(args, &device, &machine);
    }
    let measured = measure(&device, &CollectiveCase::reductions(args, &machine)?)?;
    print_report(CollectiveOp::Allreduce, &device, &measured, None, args.moves.all.json)
}

pub(super) fn move_data(what: CollectiveOp, args: &DataArgs) -> Result<()> {
    let (device, machine) = open(args.all.backend)?;
    let measured = measure(&device, &CollectiveCase::of_data(what, args, &machine)?)?;
    print_report(what, &device, &measured, None, args.all.json)
}

pub(super) fn barrier(args: &BarrierArgs) -> Result<()> {
    let (device, machine) = open(args.backend)?;
    let measured = measure(&device, &CollectiveCase::barriers(args, &machine)?)?;
    print_report(CollectiveOp::Barrier, &device, &measured, None, args.json)
}

/// Runs the all-reduce of `wholemem demo`, in windows and in place, and returns the time of one call.
///
/// # Errors
/// If a rank fails or a sum is wrong.
pub fn demo(device: &Device, ranks: u32, len: usize) -> Result<Duration> {
    let case = CollectiveCase::for_demo(ranks, len);
    let measured = measure(device, &[case])?;
    let first = measured.first().context("the benchmark measured nothing")?;
    Ok(Duration::from_secs_f64(first.value / 1e6))
}

fn open(choice: BackendChoice) -> Result<(Device, MachineInfo)> {
    let device = backend::open(choice)?.backend.device(0)?;
    let (kind, available) = (device.backend().kind(), device.available()?);
    let cores = cores()?.len();
    Ok((device, MachineInfo { kind, available, cores }))
}

/// Runs benchmark cases: starts as many ranks as the next cases need, lets them run these cases, and returns the results.
fn measure(device: &Device, cases: &[CollectiveCase]) -> Result<Vec<CollectiveResult>> {
    let most = cases.iter().map(CollectiveCase::footprint).max().unwrap_or(0);
    memory::ensure_available(device, most)?;
    let mut measured = Vec::new();
    for same in cases.chunk_by(|one, next| one.ranks == next.ranks) {
        let Some(first) = same.first() else { continue };
        let mut shown: Option<ProgressDisplay> = None;
        let mut left = same.iter();
        let mut on_message = |message: RankMessage| -> Result<()> {
            let Some(case) = left.as_slice().first() else { return Ok(()) };
            match message {
                RankMessage::Ready => {}
                RankMessage::Round(()) => {
                    let rounds = case.rounds as usize;
                    shown.get_or_insert_with(|| ProgressDisplay::rounds(&case.label(), rounds)).advance(1);
                }
                RankMessage::Done(outcome) => {
                    shown = None;
                    measured.push(CollectiveResult::new(case, &outcome));
                    left.next();
                }
                RankMessage::Failed { message, hint } => return Err(PeerFailed { message, hint }.into()),
            }
            Ok(())
        };
        let role = (RankRole::Collective, first.ranks);
        workers::run(role, device.backend().kind(), same, &mut on_message)?;
    }
    ensure!(
        measured.len() == cases.len(),
        "only {count} of {total} benchmark cases were measured",
        count = measured.len(),
        total = cases.len()
    );
    Ok(measured)
}

/// Runs one rank of a collective benchmark.
///
/// # Errors
/// If the plan is invalid. Errors of the benchmark are sent to the process that started this one.
pub fn rank(plan: &str) -> Result<()> {
    workers::rank(plan, run_cases)
}

/// Runs benchmark cases as one rank, and reports the progress.
fn run_cases(group: &Communicator, cases: &[CollectiveCase], report: Reporter<'_>) -> Result<()> {
    if cases.first().is_some_and(|case| case.bound) {
        bind(group.rank().index())?;
    }
    let mut limits = None;
    for same in cases.chunk_by(CollectiveCase::has_same_algorithm) {
        let Some(first) = same.first() else { continue };
        let usual = Tuning::measured(group.device().backend().kind(), group.size());
        let tuning = first.forced_algorithm().map(|always| Tuning { always: Some(always), ..usual });
        let symmetric =
            SymmetricMemory::create(group, &SymmetricSpec { tuning, ..SymmetricSpec::default() })?;
        let limits = match &limits {
            Some(limits) => limits,
            None => limits.insert(Limits::measure(&symmetric)?),
        };
        for case in same {
            let outcome = run::run_case(&symmetric, case, limits, report)?;
            report(RankMessage::Done(outcome))?;
        }
    }
    Ok(())
}

/// Returns the CPU cores that this process may run on.
fn cores() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read the CPU affinity")?;
    Ok((0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect())
}

/// Pins this thread to the core number `rank` of those that this process may run on.
fn bind(rank: usize) -> Result<()> {
    let core = cores()?.into_iter().nth(rank).context("there are fewer cores than ranks")?;
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).context("cannot set the CPU affinity")
}

#[cfg(test)]
mod tests {
    use wholemem::{CallFaults, Mutant};
    use wholemem_hal::{Backend, HostConfig};

    use super::*;
    use crate::args::{BufferKind, OutputPlace};

    fn groups(ranks: u32) -> Vec<Communicator> {
        let device = Backend::host(HostConfig::virtual_devices(1)).unwrap().device(0).unwrap();
        Communicator::local(&vec![device; ranks as usize]).unwrap()
    }

    /// Runs `work` on every rank in its own thread. A rank that fails drops its communicator.
    fn on_each<T: Send>(
        groups: Vec<Communicator>,
        work: impl Fn(&Communicator) -> Result<T> + Sync,
    ) -> Vec<Result<T>> {
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || work(&group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_type_place_and_algorithm_runs_and_is_verified() {
        let words = ["--ranks", "3", "--sizes", "8,300KiB", "--dtype", "bf16,i64", "--op", "sum,avg"];
        let algorithms = ["--algorithm", "packets,one-shot,two-shot", "--rounds", "1"];
        let mut cases = case::tests::reductions(&[&words[..], &algorithms].concat());
        for case in &mut cases {
            (case.calls, case.slots) = (5, case.slots.min(2));
        }
        let outcomes = on_each(groups(3), |group| {
            let mut done = 0;
            run_cases(group, &cases, &mut |message| {
                done += usize::from(matches!(message, RankMessage::Done(_)));
                Ok(())
            })?;
            Ok(done)
        });
        assert!(outcomes.into_iter().all(|done| done.unwrap() == cases.len()));
    }

    #[test]
    fn a_reduction_without_its_first_barrier_is_detected() {
        let words = ["--ranks", "2", "--sizes", "64KiB", "--rounds", "1", "--algorithm", "one-shot"];
        let cases = case::tests::reductions(&words);
        let staged =
            |case: &&CollectiveCase| case.buffers == BufferKind::Staged && case.place == OutputPlace::Out;
        let mut case = cases.iter().find(staged).unwrap().clone();
        case.calls = 1;
        let outcomes = on_each(groups(2), |group| {
            let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
            let limits = Limits::measure(&symmetric)?;
            if group.rank().0 == 0 {
                symmetric.inject_faults(&CallFaults {
                    delays: vec![(0, 0, 3_000_000)],
                    ..CallFaults::default()
                })?;
            } else {
                symmetric.inject_faults(&CallFaults {
                    mutant: Some(Mutant::NoFirstBarrier),
                    ..CallFaults::default()
                })?;
            }
            run::run_case(&symmetric, &case, &limits, &mut |_| Ok(())).map(|_| ())
        });
        let hasty = outcomes[1].as_ref().unwrap_err();
        assert!(format!("{hasty:#}").starts_with("allreduce of 64 KiB among 2: "), "{hasty:#}");
    }
}
