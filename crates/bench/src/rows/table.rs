//! The table of a gather or scatter benchmark: a tensor of bytes that is divided among the ranks and contains a pattern.

use std::ops::Range;

use anyhow::{Result, ensure};
use wholemem::{Communicator, Dtype, Kind, Location, Rank, TensorSpec, WholeTensor};
use wholemem_hal::pattern::Pattern;
use wholemem_hal::{BackendKind, Span, Stream};
use wholemem_os::Deadline;
use wholemem_os::width::to_usize;

use super::case::RowsCase;
use super::content::{cores, join_thread, sum_rows};
use crate::args::{KindChoice, LocationChoice};

/// The seed of the pattern that a benchmark table contains.
pub(super) const SEED: u64 = 0x0b57_ac1e_0000_0001;

const WORD: usize = size_of::<u64>();

/// The least length of host memory that is filled by all cores in parallel.
const PARALLEL_MIN: usize = 32 << 20;

/// One rank's handle of a benchmark table, which contains the pattern of [`SEED`].
#[derive(Debug)]
pub(super) struct BenchTable {
    pub(super) group: Communicator,
    pub(super) tensor: WholeTensor,
}

impl BenchTable {
    /// Creates a benchmark table, and fills it with the pattern of [`SEED`]. Collective: all ranks must call it.
    pub(super) fn create(group: &Communicator, case: &RowsCase) -> Result<Self> {
        let spec = TensorSpec::new(Dtype::U8, &[case.table_rows, case.row_len as u64]);
        let kind = match case.kind {
            KindChoice::Continuous => Kind::Continuous,
            KindChoice::Chunked => Kind::Chunked,
        };
        let location = match case.location {
            LocationChoice::Device => Location::Device,
            LocationChoice::Host => Location::Host,
        };
        let rows_of_each = Some(case.rows_of_each());
        let tensor = WholeTensor::create(group, &TensorSpec { kind, location, rows_of_each, ..spec })?;
        let table = Self { group: group.clone(), tensor };
        if let Some(own) = table.tensor.local() {
            let (stream, pattern) = (group.device().stream()?, Pattern::load(group.device())?);
            fill(&own.span, &stream, &pattern, SEED, table.offset_of(own.rows.start))?;
        }
        // Maps all pages of the table now, so that gathers have no page faults.
        table.tensor.memory().populate()?;
        group.barrier_on(&group.device().stream()?)?;
        Ok(table)
    }

    /// Returns the offset of a row in the table, in bytes.
    pub(super) fn offset_of(&self, row: u64) -> usize {
        to_usize(row).saturating_mul(self.tensor.row_len())
    }

    /// Returns the `len` bytes of the table from `offset` on, as parts that are each on one rank. The first byte of the table
    /// follows the last.
    pub(super) fn pieces(&self, offset: usize, len: usize) -> Result<Vec<TablePart>> {
        let memory = self.tensor.memory();
        let ranks = (0..memory.partition().ranks()).map(Rank);
        let parts: Vec<Range<usize>> = ranks
            .map(|rank| memory.partition().range(rank))
            .map(|rows| self.offset_of(rows.start)..self.offset_of(rows.end))
            .filter(|bytes| !bytes.is_empty())
            .collect();
        let (mut pieces, mut done, mut from) = (Vec::new(), 0, offset % memory.len());
        while done < len {
            let part = parts.iter().find(|part| part.contains(&from));
            let Some(part) = part else {
                anyhow::bail!("the byte at offset {from} of the table is stored on no rank")
            };
            let now = (part.end - from).min(len - done);
            pieces.push(TablePart { at: done, offset: from, span: memory.span(from, now)? });
            done += now;
            from = (from + now) % memory.len();
        }
        Ok(pieces)
    }

    /// Verifies that this rank's part of the table contains the original pattern.
    pub(super) fn check(&self, stream: &Stream, pattern: &Pattern) -> Result<()> {
        let Some(own) = self.tensor.local() else { return Ok(()) };
        let (first, count) = (own.rows.start, own.rows.end - own.rows.start);
        let expected = sum_rows(SEED, self.tensor.row_len(), count, |position| first + position);
        let seen = pattern.checksum(stream, &own.span)?;
        ensure!(
            seen == expected,
            "some of the rows {rows:?} of the table have changed, although no call scattered to them",
            rows = own.rows
        );
        Ok(())
    }
}

/// A contiguous part of the table on one rank: its position in a requested range (`at`), its offset in the table, and its
/// memory.
#[derive(Debug)]
pub(super) struct TablePart {
    pub(super) at: usize,
    pub(super) offset: usize,
    pub(super) span: Span,
}

/// Returns the seed of the pattern that equals the pattern of `seed` from `offset` on.
pub(super) fn seed_at(seed: u64, offset: usize) -> u64 {
    seed.wrapping_add((offset / WORD) as u64)
}

/// Fills memory with the pattern of `seed` from `offset` on, and waits until it is filled.
pub(super) fn fill(to: &Span, stream: &Stream, pattern: &Pattern, seed: u64, offset: usize) -> Result<()> {
    let device = stream.device();
    if device.backend().kind() != BackendKind::Host || to.len() < PARALLEL_MIN {
        pattern.fill(stream, to, seed_at(seed, offset))?;
        return Ok(stream.synchronize(Deadline::NEVER)?);
    }
    let step = to.len().div_ceil(cores()).next_multiple_of(4096);
    let parts = (0..to.len()).step_by(step).map(|start| (start, step.min(to.len() - start)));
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = parts
            .map(|(start, len)| {
                scope.spawn(move || {
                    let (pattern, stream) = (Pattern::load(device)?, device.stream()?);
                    pattern.fill(&stream, &to.part(start, len)?, seed_at(seed, offset + start))?;
                    Ok(stream.synchronize(Deadline::NEVER)?)
                })
            })
            .collect();
        threads.into_iter().map(join_thread).collect()
    });
    outcomes.into_iter().collect()
}
