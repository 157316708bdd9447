//! `wholemem bench allreduce`, `allgather`, `broadcast` and `barrier`: what ranks do together, beside a flag's round trip
//! and a plain copy.
//!
//! ```text
//!   a round   inputs filled, outputs spoilt -> all begin together -> calls, timed -> every byte compared
//! ```
//!
//! Ranks are processes, each on a core of its own where there are enough. The time of a round is the slowest rank's, and is
//! told as that of one call. Calls of a round use the same buffers again and again, as the benches of others do, and so
//! they are in the caches where they fit; in place they use several in turn, lest all elements become infinite.

mod content;
mod course;
mod lap;
mod limit;
mod report;
mod tune;

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use wholemem::{Communicator, SymmetricMemory, SymmetricSpec, Tuning};
use wholemem_hal::Device;

use self::course::{Course, Machine};
use self::limit::{Flag, Limits};
use self::report::{Measured, tell};
use super::crew;
use crate::cli::{BackendChoice, BarrierArgs, MovesArgs, RankRole, ReduceArgs};
use crate::failure::PeerFailed;
use crate::progress::Progress;
use crate::{backend, memory};

/// What ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum What {
    Allreduce,
    Allgather,
    Broadcast,
    Barrier,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Allreduce => "allreduce",
            Self::Allgather => "allgather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
        })
    }
}

/// What came of a course.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Outcome {
    /// How long a call took, in each round.
    rounds: Vec<Duration>,
    algorithm: Option<String>,
    flag: Flag,
    copy: Duration,
}

type Told = crew::Told<(), Outcome>;
type Tell<'a> = crew::Tell<'a, (), Outcome>;

pub(super) fn reduce(args: &ReduceArgs) -> Result<()> {
    let (device, machine) = open(args.moves.all.backend)?;
    if args.tune {
        return tune::run(args, &device, &machine);
    }
    let cases = measure(&device, &Course::reductions(args, &machine)?)?;
    tell(What::Allreduce, &device, &cases, None, args.moves.all.json)
}

pub(super) fn moves(what: What, args: &MovesArgs) -> Result<()> {
    let (device, machine) = open(args.all.backend)?;
    let cases = measure(&device, &Course::moves(what, args, &machine)?)?;
    tell(what, &device, &cases, None, args.all.json)
}

pub(super) fn barrier(args: &BarrierArgs) -> Result<()> {
    let (device, machine) = open(args.backend)?;
    let cases = measure(&device, &Course::barriers(args, &machine)?)?;
    tell(What::Barrier, &device, &cases, None, args.json)
}

/// A reduction for the tour, in windows and in place: how long a call took.
pub(crate) fn tour(device: &Device, ranks: u32, len: usize) -> Result<Duration> {
    let course = Course::of_the_tour(ranks, len);
    let cases = measure(device, &[course])?;
    let case = cases.first().context("nothing was measured")?;
    Ok(Duration::from_secs_f64(case.value / 1e6))
}

fn open(choice: BackendChoice) -> Result<(Device, Machine)> {
    let device = backend::open(choice)?.backend.device(0)?;
    let (kind, available) = (device.backend().kind(), device.available()?);
    let cores = cores()?.len();
    Ok((device, Machine { kind, available, cores }))
}

/// Has ranks play courses, in groups of one number of ranks.
fn measure(device: &Device, courses: &[Course]) -> Result<Vec<Measured>> {
    let most = courses.iter().map(Course::footprint).max().unwrap_or(0);
    memory::ensure_room(device, most)?;
    let mut measured = Vec::new();
    for same in courses.chunk_by(|one, next| one.ranks == next.ranks) {
        let Some(first) = same.first() else { continue };
        let mut shown: Option<Progress> = None;
        let mut left = same.iter();
        let mut hear = |told: Told| -> Result<()> {
            let Some(course) = left.as_slice().first() else { return Ok(()) };
            match told {
                Told::Ready => {}
                Told::Round(()) => {
                    let rounds = course.rounds as usize;
                    shown.get_or_insert_with(|| Progress::of_rounds(&course.label(), rounds)).advance(1);
                }
                Told::Done(outcome) => {
                    shown = None;
                    measured.push(Measured::new(course, &outcome));
                    left.next();
                }
                Told::Failed { what, hint } => return Err(PeerFailed { what, hint }.into()),
            }
            Ok(())
        };
        let role = (RankRole::Collective, first.ranks);
        crew::play(role, device.backend().kind(), same, &mut hear)?;
    }
    ensure!(measured.len() == courses.len(), "{} of {} were measured", measured.len(), courses.len());
    Ok(measured)
}

/// Plays one rank.
pub(crate) fn rank(plan: &str) -> Result<()> {
    crew::rank(plan, play)
}

/// Plays courses as one rank, and tells how it goes.
fn play(group: &Communicator, courses: &[Course], tell: Tell<'_>) -> Result<()> {
    if courses.first().is_some_and(|course| course.bound) {
        bind(group.rank().index())?;
    }
    let mut limits = None;
    for same in courses.chunk_by(Course::has_the_algorithm_of) {
        let Some(first) = same.first() else { continue };
        let usual = Tuning::measured(group.device().backend().kind(), group.size());
        let tuning = first.wanted().map(|always| Tuning { always: Some(always), ..usual });
        let symmetric =
            SymmetricMemory::create(group, &SymmetricSpec { tuning, ..SymmetricSpec::default() })?;
        let limits = match &limits {
            Some(limits) => limits,
            None => limits.insert(Limits::measure(&symmetric)?),
        };
        for course in same {
            let outcome = lap::play(&symmetric, course, limits, tell)?;
            tell(Told::Done(outcome))?;
        }
    }
    Ok(())
}

/// The cores that this process may run on.
fn cores() -> Result<Vec<usize>> {
    let allowed = sched_getaffinity(None).context("cannot read the affinity")?;
    Ok((0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect())
}

/// Ties this thread to a core of its own.
fn bind(rank: usize) -> Result<()> {
    let core = cores()?.into_iter().nth(rank).context("there are fewer cores than ranks")?;
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).context("cannot set the affinity")
}

#[cfg(test)]
mod tests {
    use wholemem::{Chaos, Mutant};
    use wholemem_hal::{Backend, HostConfig};

    use super::*;
    use crate::cli::{Buffers, Place};

    fn groups(ranks: u32) -> Vec<Communicator> {
        let device = Backend::host(HostConfig::virtual_devices(1)).unwrap().device(0).unwrap();
        Communicator::local(&vec![device; ranks as usize]).unwrap()
    }

    /// Has every rank do something; one that fails is gone for the others.
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
    fn every_type_place_and_algorithm_is_played_and_checked() {
        let words = ["--ranks", "3", "--sizes", "8,300KiB", "--dtype", "bf16,i64", "--op", "sum,avg"];
        let algorithms = ["--algorithm", "packets,one-shot,two-shot", "--rounds", "1"];
        let mut courses = course::tests::reductions(&[&words[..], &algorithms].concat());
        for course in &mut courses {
            (course.calls, course.slots) = (5, course.slots.min(2));
        }
        let outcomes = on_each(groups(3), |group| {
            let mut done = 0;
            play(group, &courses, &mut |told| {
                done += usize::from(matches!(told, Told::Done(_)));
                Ok(())
            })?;
            Ok(done)
        });
        assert!(outcomes.into_iter().all(|done| done.unwrap() == courses.len()));
    }

    #[test]
    fn a_reduction_that_waits_for_nobody_is_found_out() {
        let words = ["--ranks", "2", "--sizes", "64KiB", "--rounds", "1", "--algorithm", "one-shot"];
        let courses = course::tests::reductions(&words);
        let staged = |course: &&Course| course.buffers == Buffers::Staged && course.place == Place::Out;
        let mut course = courses.iter().find(staged).unwrap().clone();
        course.calls = 1;
        let played = on_each(groups(2), |group| {
            let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
            let limits = Limits::measure(&symmetric)?;
            if group.rank().0 == 0 {
                symmetric.disturb(&Chaos { delays: vec![(0, 0, 3_000_000)], ..Chaos::default() })?;
            } else {
                symmetric.disturb(&Chaos { mutant: Some(Mutant::NoFirstBarrier), ..Chaos::default() })?;
            }
            lap::play(&symmetric, &course, &limits, &mut |_| Ok(())).map(|_| ())
        });
        let hasty = played[1].as_ref().unwrap_err();
        assert!(format!("{hasty:#}").starts_with("allreduce of 64 KiB among 2: "), "{hasty:#}");
    }
}
