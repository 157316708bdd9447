//! Runs one case of a gather or scatter benchmark on one rank: rounds whose buffers are prepared, timed and verified in groups.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use wholemem::{Dtype, Indices, Order, RowBuffer};
use wholemem_command::memory;
use wholemem_hal::limits::RawDevice;
use wholemem_hal::pattern::{Pattern, word};
use wholemem_hal::{BackendKind, Event, EventKind, Mapping, Rights, Span, Stream};
use wholemem_os::Deadline;

use super::case::RowsCase;
use super::content::{POISON, cores, first_difference, join_thread, sum_rows, write_rows};
use super::indices::IndexSequence;
use super::table::{BenchTable, SEED, TablePart, fill, seed_at};
use super::{RankMessage, RowOp};
use crate::alloc::raw_error;
use crate::args::IndexChoice;
use crate::sample::{Implementation, PairedTimes, Summary, TimedRun};

/// The minimum length in bytes of a plain copy that is divided among all cores on the host backend, as gathers are.
const PARALLEL_MIN: usize = 16 << 20;

/// Runs a benchmark case as one rank. Reports the beginning and the end of each measured round.
pub(super) fn run_case(
    table: &BenchTable,
    case: &RowsCase,
    report: &mut impl FnMut(RankMessage) -> Result<()>,
) -> Result<Summary> {
    let mut runner = RowsRunner::new(table, case)?;
    // The first round is a warm-up, and its time is discarded.
    runner.run(&mut PairedTimes::default(), 1, &mut |_| Ok(()))?;
    let mut paired = PairedTimes::default();
    while paired.rounds() < case.rounds {
        let rounds = case.pairs.min(case.rounds - paired.rounds());
        runner.run(&mut paired, rounds, report)?;
    }
    if case.op == RowOp::Scatter {
        table.check(&runner.stream, &runner.pattern)?;
    }
    Ok(paired.summary())
}

/// The state of a rank while it runs a case of a gather or scatter benchmark.
struct RowsRunner<'a> {
    table: &'a BenchTable,
    case: &'a RowsCase,
    stream: Stream,
    raw: RawDevice,
    pattern: Pattern,
    events: [Event; 2],
    pairs: Vec<BufferPair>,
    /// Memory to which scattered rows are gathered again for verification.
    check: Option<Span>,
    /// Host buffer for row contents that are written to the device.
    rows: Vec<u8>,
    runs: u64,
    draws: u64,
}

/// The buffers of one round: those of the gather or scatter, and that of the plain copy with which it is compared.
struct BufferPair {
    dense: Span,
    indices: Span,
    draw: IndexSequence,
    /// The contiguous memory of the plain copy with which a gather or scatter is compared: the destination of the copy
    /// for a gather, the source for a scatter.
    plain: Span,
    pieces: Vec<TablePart>,
}

impl<'a> RowsRunner<'a> {
    fn new(table: &'a BenchTable, case: &'a RowsCase) -> Result<Self> {
        let device = table.group.device();
        let pairs = if Self::moves(table, case) { case.pairs as usize } else { 0 };
        let dense_len = case.dense_len();
        let index_len = usize::try_from(case.batch_rows())? * case.index_len();
        let map = |len: usize| -> Result<Mapping> {
            let map = device.allocate(memory::whole_granules(device, len)?)?.map(Rights::ReadWrite)?;
            // Maps all pages at once, which is about twenty times faster than a page fault for each. If populating fails, pages
            // are mapped on first use.
            let _ = map.populate();
            Ok(map)
        };
        let mut all = Vec::new();
        for _ in 0..pairs {
            let dense = map(dense_len)?.span(0, dense_len)?;
            let indices = map(index_len)?.span(0, index_len)?;
            let plain = map(dense_len)?.span(0, dense_len)?;
            let draw = IndexSequence::new(case.spread, case.row_bound(), 0);
            all.push(BufferPair { dense, indices, draw, plain, pieces: Vec::new() });
        }
        let check = match case.op {
            RowOp::Scatter if pairs > 0 => Some(map(dense_len)?.span(0, dense_len)?),
            _ => None,
        };
        let event = || Event::create(device, EventKind::Timed);
        Ok(Self {
            table,
            case,
            stream: device.stream()?,
            raw: RawDevice::of(device).map_err(raw_error)?,
            pattern: Pattern::load(device)?,
            events: [event()?, event()?],
            pairs: all,
            check,
            rows: Vec::new(),
            runs: 0,
            draws: 0,
        })
    }

    fn moves(table: &BenchTable, case: &RowsCase) -> bool {
        !case.first_only || table.group.rank().0 == 0
    }

    /// Runs some rounds: prepares the buffers of all of them, measures each round, and then verifies all moved bytes.
    fn run(
        &mut self,
        paired: &mut PairedTimes,
        rounds: u32,
        report: &mut impl FnMut(RankMessage) -> Result<()>,
    ) -> Result<()> {
        self.runs += 1;
        let used = self.pairs.len().min(rounds as usize);
        for pair in 0..used {
            self.prepare(pair)?;
        }
        self.table.group.barrier_on(&self.stream)?;
        for round in 0..rounds as usize {
            report(RankMessage::Ready)?;
            paired.round(&mut |implementation| {
                let took = self.time_on_all_ranks(|| match implementation {
                    Implementation::Wholemem => self.run_wholemem(&self.pairs[round]),
                    Implementation::Raw => self.run_copy(&self.pairs[round]),
                })?;
                Ok(TimedRun { took, mismatch: None })
            })?;
            if let Some(pair) = paired.latest() {
                report(RankMessage::Round(pair))?;
            }
        }
        self.table.group.barrier_on(&self.stream)?;
        self.table.tensor.check()?;
        for pair in 0..used {
            self.check(pair)?;
        }
        self.table.group.barrier_on(&self.stream)?;
        if self.case.op == RowOp::Scatter {
            for pair in 0..used {
                self.restore(pair)?;
            }
            self.table.group.barrier_on(&self.stream)?;
        }
        Ok(())
    }

    /// Returns the seed of the row contents that this run scatters. It is equal on all ranks, so that ranks that write a row at
    /// the same time write the same bytes.
    fn version(&self) -> u64 {
        word(SEED, !self.runs)
    }

    /// Prepares the buffers of a round: chooses new row indices, and a new range of the table for the plain copy, and fills the
    /// sources.
    fn prepare(&mut self, pair: usize) -> Result<()> {
        self.draws += 1;
        let seed = word(word(!SEED, u64::from(self.table.group.rank().0)), self.draws);
        let (case, version) = (self.case, self.version());
        let draw = IndexSequence::new(case.spread, case.row_bound(), seed);
        let BufferPair { dense, indices, plain, .. } = &self.pairs[pair];
        self.stream.write(indices, &draw.bytes(case.index, case.batch_rows()))?;

        // The plain copy uses a random range of the table that begins at a page.
        let place = (u128::from(seed) * self.table.tensor.memory().len() as u128) >> 64;
        let pieces = self.table.pieces(usize::try_from(place)? & !4095, plain.len())?;
        match case.op {
            RowOp::Gather => {
                self.stream.fill(dense, POISON)?;
                self.stream.fill(plain, POISON)?;
            }
            RowOp::Scatter => {
                for TablePart { at, offset, span } in &pieces {
                    fill(&plain.part(*at, span.len())?, &self.stream, &self.pattern, version, *offset)?;
                }
                self.rows.resize(case.batch_len(), 0);
                write_rows(version, case.row_len, |position| draw.at(position), &mut self.rows);
                self.stream.write(&dense.part(0, self.rows.len())?, &self.rows)?;
            }
        }
        let prepared = &mut self.pairs[pair];
        (prepared.draw, prepared.pieces) = (draw, pieces);
        Ok(())
    }

    /// Runs `work` on all ranks at the same time, and returns the time from the first beginning to the last end. If only one
    /// rank moves rows, returns the time that `work` returns.
    fn time_on_all_ranks(&self, work: impl FnOnce() -> Result<Duration>) -> Result<Duration> {
        let comm = self.table.group.bootstrap();
        if self.case.ranks == 1 {
            return work();
        }
        comm.barrier()?;
        let start = now();
        let own = if self.pairs.is_empty() { Duration::ZERO } else { work()? };
        let (start, end) = match self.case.movers() {
            1 => (Duration::ZERO, own),
            _ => (start, now()),
        };
        let words =
            [start, end].map(|moment| u64::try_from(moment.as_nanos()).expect("shorter than 584 years"));
        let all = comm.all_gather(&words.map(u64::to_le_bytes).concat())?;
        let (mut first, mut last) = (u64::MAX, 0);
        for (rank, bytes) in all.iter().enumerate() {
            let (words, _) = bytes.as_chunks::<8>();
            let [start, end] = words else {
                anyhow::bail!("rank {rank} sent no valid start and end times of its timed work")
            };
            (first, last) = (first.min(u64::from_le_bytes(*start)), last.max(u64::from_le_bytes(*end)));
        }
        Ok(Duration::from_nanos(last.saturating_sub(first)))
    }

    /// Gathers or scatters the rows of a round through the public API. The operands are created before the measured time.
    fn run_wholemem(&self, pair: &BufferPair) -> Result<Duration> {
        let (tensor, stream, [begin, end]) = (&self.table.tensor, &self.stream, &self.events);
        let on_device = stream.device().backend().kind() == BackendKind::Cuda;
        let calls = calls(self.case, &pair.dense, &pair.indices)?;
        let start = Instant::now();
        if on_device {
            stream.record(begin)?;
        }
        for (indices, dense) in &calls {
            match self.case.op {
                RowOp::Gather => tensor.gather_on(stream, indices, dense)?,
                RowOp::Scatter => tensor.scatter_on(stream, indices, dense, Order::Any)?,
            }
        }
        if on_device {
            stream.record(end)?;
        }
        stream.synchronize(Deadline::NEVER)?;
        Ok(if on_device { begin.elapsed(end)? } else { start.elapsed() })
    }

    /// Runs the plain copy of a round: copies as many bytes as the gather or scatter between the table and contiguous memory.
    fn run_copy(&self, pair: &BufferPair) -> Result<Duration> {
        let mut took = Duration::ZERO;
        for TablePart { at, span, .. } in &pair.pieces {
            let dense = pair.plain.part(*at, span.len())?;
            let (to, from) = match self.case.op {
                RowOp::Gather => (&dense, span),
                RowOp::Scatter => (span, &dense),
            };
            took += self.copy(to, from)?;
        }
        Ok(took)
    }

    fn copy(&self, to: &Span, from: &Span) -> Result<Duration> {
        let threads = cores() / self.case.movers() as usize;
        let on_host = self.stream.device().backend().kind() == BackendKind::Host;
        if !on_host || threads < 2 || to.len() < PARALLEL_MIN {
            return self.raw.best_copy(to, from, 1).map_err(raw_error);
        }
        let step = to.len().div_ceil(threads).next_multiple_of(4096);
        let parts: Vec<_> =
            (0..to.len()).step_by(step).map(|start| (start, step.min(to.len() - start))).collect();
        let (line, device) = (Barrier::new(parts.len()), self.stream.device());
        let times: Vec<Result<(Instant, Instant)>> = std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .iter()
                .map(|&(start, len)| {
                    let line = &line;
                    scope.spawn(move || {
                        let (to, from) = (to.part(start, len), from.part(start, len));
                        let raw = RawDevice::of(device);
                        line.wait();
                        let (to, from, raw) = (to?, from?, raw.map_err(raw_error)?);
                        let began = Instant::now();
                        raw.best_copy(&to, &from, 1).map_err(raw_error)?;
                        Ok((began, Instant::now()))
                    })
                })
                .collect();
            threads.into_iter().map(join_thread).collect()
        });
        let times = times.into_iter().collect::<Result<Vec<_>>>()?;
        let began = times.iter().map(|(began, _)| *began).min();
        let ended = times.iter().map(|(_, ended)| *ended).max();
        Ok(ended.zip(began).map(|(ended, began)| ended.saturating_duration_since(began)).unwrap_or_default())
    }

    /// Verifies all bytes that were moved with a buffer pair.
    fn check(&self, pair: usize) -> Result<()> {
        let (case, pair) = (self.case, &self.pairs[pair]);
        let (seed, seen) = match (case.op, &self.check) {
            (RowOp::Scatter, Some(check)) => {
                self.stream.fill(check, POISON)?;
                let all = indices(case.index, pair.indices.clone());
                self.table.tensor.gather_on_sync(&self.stream, &all, &dense(check.clone()))?;
                (self.version(), check)
            }
            _ => (SEED, &pair.dense),
        };
        let row_of = |position| pair.draw.at(position);
        let expected = sum_rows(seed, case.row_len, case.batch_rows(), row_of);
        if self.pattern.checksum(&self.stream, seen)? != expected {
            let mut rows = vec![0; case.batch_len()];
            self.stream.read(&seen.part(0, rows.len())?, &mut rows)?;
            let label = case.label();
            let (position, byte) = first_difference(seed, case.row_len, row_of, &rows)
                .with_context(|| format!("{label}: bytes after the last row have changed"))?;
            let row = row_of(position);
            anyhow::bail!("{label}: position {position} (row {row}) is wrong from byte {byte} on");
        }
        for TablePart { at, offset, span } in &pair.pieces {
            let copied = match case.op {
                RowOp::Gather => pair.plain.part(*at, span.len())?,
                RowOp::Scatter => span.clone(),
            };
            let first = seed_at(seed, *offset);
            let expected = sum_rows(first, 8, (span.len() / 8) as u64, |position| position);
            let seen = self.pattern.checksum(&self.stream, &copied)?;
            ensure!(
                seen == expected,
                "the plain copy of {len} bytes, with which the calls are compared, has wrong content",
                len = span.len()
            );
        }
        Ok(())
    }

    /// Restores the original content of the rows that a round has overwritten.
    fn restore(&mut self, pair: usize) -> Result<()> {
        let (case, pair) = (self.case, &self.pairs[pair]);
        write_rows(SEED, case.row_len, |position| pair.draw.at(position), &mut self.rows);
        let rows = pair.dense.part(0, self.rows.len())?;
        self.stream.write(&rows, &self.rows)?;
        let all = indices(case.index, pair.indices.clone());
        self.table.tensor.scatter_on_sync(&self.stream, &all, &dense(rows), Order::Any)?;
        for TablePart { offset, span, .. } in &pair.pieces {
            fill(span, &self.stream, &self.pattern, SEED, *offset)?;
        }
        Ok(())
    }
}

fn indices(kind: IndexChoice, span: Span) -> Indices {
    match kind {
        IndexChoice::I32 => Indices::i32(span),
        IndexChoice::I64 => Indices::i64(span),
    }
}

fn dense(span: Span) -> RowBuffer {
    RowBuffer::new(span, Dtype::U8)
}

/// Divides the buffers of a round into the operands of its gather or scatter calls.
fn calls(case: &RowsCase, rows: &Span, numbers: &Span) -> Result<Vec<(Indices, RowBuffer)>> {
    let count = usize::try_from(case.rows)?;
    (0..usize::try_from(case.calls)?)
        .map(|call| {
            let part = |span: &Span, len: usize| span.part(call * count * len, count * len);
            let of_rows = dense(part(rows, case.row_len)?);
            Ok((indices(case.index, part(numbers, case.index_len())?), of_rows))
        })
        .collect()
}

/// Returns the time of the monotonic clock, which is the same in all processes of a machine.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}
