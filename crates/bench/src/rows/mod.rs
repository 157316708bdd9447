//! `wholemem bench gather` and `scatter`: measures gather and scatter, compared with a plain copy of as many bytes.
//!
//! ```text
//!   buffer pair   [ contiguous rows | indices ]   [ contiguous rows ]     for wholemem, and for the plain copy
//!   run           prepare all pairs -> time each -> verify each (scatter: and restore the table)
//! ```
//!
//! The table contains a [pattern](wholemem_hal::pattern), and indices are a function of their position. So all moved bytes are
//! verified by a checksum on the device, without a stored copy. Between its preparation and its measurement a pair leaves the
//! caches, because the other pairs of the run use them.
//!
//! A single rank runs in this process. Several ranks are processes, each with a part of the table, and all move rows at the
//! same time: they access memory of other processes.

mod alternate;
mod case;
mod content;
mod indices;
mod report;
mod run;
mod table;

use anyhow::{Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use wholemem::{Bootstrap, Communicator};
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::ranks::RankRole;
use wholemem_command::{backend, memory};
use wholemem_hal::{Backend, BackendKind, Device, HostConfig};

use self::alternate::Alternate;
use self::case::{DefaultSizes, RowsCase};
pub use self::report::RowsResult;
use super::sample::{Summary, TimePair};
use super::workers;
use crate::args::{LocationChoice, RowsArgs};

/// The operation that a benchmark measures: gather or scatter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RowOp {
    /// Copies rows of the table to contiguous memory.
    Gather,
    /// Copies contiguous rows to the table.
    Scatter,
}

/// A message of a rank about the progress of its gather or scatter cases.
type RankMessage = workers::RankMessage<TimePair, Summary>;

pub(super) fn run(op: RowOp, args: &RowsArgs) -> Result<()> {
    let selected = backend::open(args.backend)?;
    let device = selected.backend.device(0)?;
    let cases = RowsCase::all(op, args, &default_sizes(&device, &args.location)?)?;
    let mut measured = Vec::new();
    let alternate = args.in_turns.then_some(Alternate);
    ensure!(alternate.is_none() || args.ranks == [1], "`--in-turns` supports only one rank");
    for same in cases.chunk_by(|one, next| one.ranks == next.ranks) {
        measured.extend(measure(&device, same, alternate)?);
    }
    report::print_report(op, &device, &measured, args.json || args.in_turns)
}

/// Runs the gather or scatter of `wholemem demo`, with rows of 1 KiB.
///
/// # Errors
/// If a rank fails or a row is wrong.
pub fn demo(op: RowOp, device: &Device, ranks: u32, table: usize) -> Result<RowsResult> {
    let defaults = DefaultSizes { table, ..default_sizes(device, &[])? };
    let mut measured = measure(device, &[RowsCase::for_demo(op, ranks, &defaults)], None)?;
    measured
        .pop()
        .ok_or_else(|| anyhow!("the gather or scatter benchmark of `wholemem demo` returned no measurement"))
}

/// Returns the default sizes for the available memory of the device, and of the host if the table is in host memory.
fn default_sizes(device: &Device, locations: &[LocationChoice]) -> Result<DefaultSizes> {
    let kind = device.backend().kind();
    let mut defaults = DefaultSizes::for_device(kind, device.available()?);
    if kind == BackendKind::Cuda && locations.contains(&LocationChoice::Host) {
        let machine = Backend::host(HostConfig::default())?.device(0)?;
        defaults.table =
            defaults.table.min(DefaultSizes::for_device(BackendKind::Host, machine.available()?).table);
    }
    Ok(defaults)
}

/// Runs benchmark cases that have the same number of ranks, and returns their results.
fn measure(device: &Device, cases: &[RowsCase], alternate: Option<Alternate>) -> Result<Vec<RowsResult>> {
    let mut measured = Vec::new();
    let mut shown: Option<ProgressDisplay> = None;
    let mut on_message = |message: RankMessage| -> Result<()> {
        let Some(case) = cases.get(measured.len()) else { return Ok(()) };
        match message {
            RankMessage::Ready => return alternate.map_or(Ok(()), Alternate::wait),
            RankMessage::Round(pair) => {
                alternate.map_or(Ok(()), |alternate| alternate.end(case, pair))?;
                let rounds = case.rounds as usize;
                shown.get_or_insert_with(|| ProgressDisplay::rounds(&case.label(), rounds)).advance(1);
            }
            RankMessage::Done(summary) => {
                shown = None;
                measured.push(RowsResult::new(case, device, &summary));
            }
            RankMessage::Failed { message, hint } => {
                return Err(wholemem_command::failure::PeerFailed { message, hint }.into());
            }
        }
        Ok(())
    };
    let Some(first) = cases.first() else { return Ok(Vec::new()) };
    let most = cases.iter().map(RowsCase::footprint).max().unwrap_or(0);
    memory::ensure_available(device, most)?;
    if first.ranks == 1 {
        let comm = Bootstrap::local(1)?
            .pop()
            .ok_or_else(|| anyhow!("the new group of one rank contains no rank"))?;
        run_cases(&Communicator::create(comm, device)?, cases, &mut on_message)?;
    } else {
        workers::run((RankRole::Rows, first.ranks), device.backend().kind(), cases, &mut on_message)?;
    }
    ensure!(
        measured.len() == cases.len(),
        "only {count} of {total} benchmark cases were measured",
        count = measured.len(),
        total = cases.len()
    );
    Ok(measured)
}

/// Runs one rank of a gather or scatter benchmark.
///
/// # Errors
/// If the plan is invalid. Errors of the benchmark are sent to the process that started this one.
pub fn rank(plan: &str) -> Result<()> {
    workers::rank(plan, |group, cases: &[RowsCase], mut report| run_cases(group, cases, &mut report))
}

/// Runs benchmark cases as one rank, and reports the progress.
fn run_cases(
    group: &Communicator,
    cases: &[RowsCase],
    report: &mut impl FnMut(RankMessage) -> Result<()>,
) -> Result<()> {
    for same in cases.chunk_by(RowsCase::has_same_table) {
        let Some(first) = same.first() else { continue };
        let table = table::BenchTable::create(group, first)?;
        for case in same {
            let summary = run::run_case(&table, case, report)?;
            report(RankMessage::Done(summary))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{IndexChoice, IndexDistribution, KindChoice, RowShare};

    fn devices(count: usize) -> Vec<Device> {
        let backend = Backend::host(HostConfig::virtual_devices(1)).unwrap();
        vec![backend.device(0).unwrap(); count]
    }

    fn case(op: RowOp, ranks: u32) -> RowsCase {
        let defaults = DefaultSizes { table: 1 << 18, payload: 1 << 16, max_rows: 1 << 20, ring: 1 << 20 };
        RowsCase { rounds: 3, ..RowsCase::for_demo(op, ranks, &defaults) }
    }

    /// Runs benchmark cases with threads as ranks, and counts the rounds and cases that rank 0 reports.
    fn run_by_threads(ranks: u32, cases: &[RowsCase]) -> Result<(usize, usize)> {
        let groups = Communicator::local(&devices(ranks as usize))?;
        let message = std::thread::scope(|scope| {
            let threads: Vec<_> = groups
                .iter()
                .map(|group| {
                    scope.spawn(move || {
                        let (mut rounds, mut done) = (0, 0);
                        run_cases(group, cases, &mut |message| {
                            match message {
                                RankMessage::Ready => {}
                                RankMessage::Round(_) => rounds += 1,
                                RankMessage::Done(_) => done += 1,
                                RankMessage::Failed { message, .. } => panic!("{message}"),
                            }
                            Ok(())
                        })
                        .map(|()| (rounds, done))
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Result<Vec<_>>>()
        })?;
        Ok(message[0])
    }

    #[test]
    fn every_length_type_and_distribution_is_moved_and_verified() {
        let mut cases = Vec::new();
        for op in [RowOp::Gather, RowOp::Scatter] {
            for (row_len, rows) in [(4, 1000), (12, 33), (100, 1), (130, 7), (1024, 100)] {
                let (index, spread) = if row_len < 100 {
                    (IndexChoice::I32, IndexDistribution::Zipf)
                } else {
                    (IndexChoice::I64, IndexDistribution::Uniform)
                };
                let of_length = RowsCase { index, spread, ..case(op, 1).of_rows(row_len, rows, 1 << 18) };
                cases.push(of_length);
            }
        }
        assert_eq!(run_by_threads(1, &cases).unwrap(), (3 * cases.len(), cases.len()));
    }

    #[test]
    fn all_ranks_or_one_rank_move_rows_of_a_divided_table() {
        let mut cases = Vec::new();
        for op in [RowOp::Gather, RowOp::Scatter] {
            for share in [RowShare::Even, RowShare::Uneven, RowShare::First, RowShare::Last] {
                for (kind, first_only) in [(KindChoice::Continuous, false), (KindChoice::Chunked, true)] {
                    let of_length = case(op, 3).of_rows(100, 50, 1 << 18);
                    cases.push(RowsCase { share, kind, first_only, ..of_length });
                }
            }
        }
        assert_eq!(run_by_threads(3, &cases).unwrap(), (3 * cases.len(), cases.len()));
    }

    /// Runs a benchmark case on a table in which row `wrong` has the content of the row before it, and returns the error.
    fn error_on_a_wrong_table(op: RowOp, wrong: u64) -> String {
        let group = &Communicator::local(&devices(1)).unwrap()[0];
        // With 2000 random indices of 40 rows, every row is accessed.
        let case = case(op, 1).of_rows(100, 2000, 1 << 12);
        let table = table::BenchTable::create(group, &case).unwrap();
        let stream = group.device().stream().unwrap();
        let mut row = [0; 100];
        table.tensor.read_rows_on(&stream, wrong - 1, &mut row).unwrap();
        table.tensor.write_rows_on(&stream, wrong, &row).unwrap();
        run::run_case(&table, &case, &mut |_| Ok(())).unwrap_err().to_string()
    }

    #[test]
    fn a_gather_of_a_wrong_row_is_detected() {
        let error = error_on_a_wrong_table(RowOp::Gather, 7);
        assert!(error.starts_with("gathering 2000 rows of 100 B: position "), "{error}");
        assert!(error.ends_with(" (row 7) is wrong from byte 0 on"), "{error}");
    }

    #[test]
    fn a_change_of_a_row_that_is_not_scattered_is_detected() {
        let group = &Communicator::local(&devices(1)).unwrap()[0];
        let case = case(RowOp::Scatter, 1).of_rows(100, 1, 1 << 18);
        let case = RowsCase { calls: 1, pairs: 1, rounds: 1, ..case };
        let table = table::BenchTable::create(group, &case).unwrap();
        let stream = group.device().stream().unwrap();
        run::run_case(&table, &case, &mut |_| Ok(())).unwrap();
        // Overwrites ten of about 2600 rows, which the next scatter of one row does not write.
        table.tensor.write_rows_on(&stream, 1000, &[7; 1000]).unwrap();
        let error = run::run_case(&table, &case, &mut |_| Ok(())).unwrap_err().to_string();
        assert!(error.starts_with("some of the rows 0.."), "{error}");
    }
}
