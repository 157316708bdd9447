//! Cases of the gather and scatter benchmarks: their parameters, and how they are derived from the command line options.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use wholemem_command::size::{ByteCount, RoundedSize};
use wholemem_hal::BackendKind;
use wholemem_os::Size;
use wholemem_os::width::to_usize;

use super::RowOp;
use crate::args::{IndexChoice, IndexDistribution, KindChoice, LocationChoice, RowShare, RowsArgs};

/// Each rank's part of a table has a multiple of `STEP` rows, so that its length is a multiple of 8 bytes for any row length.
const STEP: u64 = 8;

/// Short gather or scatter calls are timed together: as many as move `BATCH_LEN` bytes or the length of the table, and at most
/// `MAX_CALLS`.
const BATCH_LEN: usize = 8 << 20;
const MAX_CALLS: u64 = 2048;

/// The default sizes of a gather or scatter benchmark, which depend on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DefaultSizes {
    /// The length of the table, unless an option sets it.
    pub(super) table: usize,
    /// The bytes that one call gathers or scatters, unless an option sets the number of rows.
    pub(super) payload: usize,
    /// The maximum number of rows in one call, unless an option sets the number.
    pub(super) max_rows: u64,
    /// The bytes that are moved before a buffer is used again, so that the buffer has left the caches by then.
    pub(super) ring: usize,
}

impl DefaultSizes {
    /// Returns the default sizes for a kind of device with `available` bytes of memory.
    pub(super) fn for_device(kind: BackendKind, available: usize) -> Self {
        let power_below = |len: usize| 1_usize << len.max(1).ilog2();
        match kind {
            BackendKind::Cuda => Self {
                table: power_below(available / 3).min(16 << 30),
                payload: 2 << 30,
                max_rows: 32 << 20,
                ring: 8 << 30,
            },
            _ => Self {
                table: power_below(available / 4).min(4 << 30),
                payload: 64 << 20,
                max_rows: 4 << 20,
                ring: 1 << 30,
            },
        }
    }
}

/// The parameters of one case of a gather or scatter benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RowsCase {
    pub(super) op: RowOp,
    pub(super) row_len: usize,
    pub(super) index: IndexChoice,
    pub(super) spread: IndexDistribution,
    pub(super) kind: KindChoice,
    pub(super) location: LocationChoice,
    pub(super) share: RowShare,
    pub(super) ranks: u32,
    pub(super) first_only: bool,
    pub(super) table_rows: u64,
    /// The number of rows in one gather or scatter call.
    pub(super) rows: u64,
    /// The number of gather or scatter calls that are timed together as one round.
    pub(super) calls: u64,
    /// The number of buffer pairs, one for each round that is prepared in advance.
    pub(super) pairs: u32,
    pub(super) rounds: u32,
}

impl RowsCase {
    /// Creates the benchmark cases for the command line options, sorted by the number of ranks and then by table.
    pub(super) fn all(op: RowOp, args: &RowsArgs, defaults: &DefaultSizes) -> Result<Vec<Self>> {
        let defaults = match args.table {
            Some(ByteCount(table)) => DefaultSizes { table, ..*defaults },
            None => *defaults,
        };
        let mut cases = Vec::new();
        for &ranks in &args.ranks {
            for (&location, &kind) in pairs(&args.location, &args.kind) {
                for (&share, &ByteCount(row_len)) in pairs(&args.share, &args.row_bytes) {
                    for (&index, &spread) in pairs(&args.index, &args.spread) {
                        let demo = Self::for_demo(op, ranks, &defaults);
                        let (first_only, rounds) = (args.first_only, args.rounds);
                        let case = Self { index, spread, kind, location, share, first_only, rounds, ..demo };
                        let asked = args.rows.iter().copied().map(Some);
                        let rows: Vec<_> = if args.rows.is_empty() { vec![None] } else { asked.collect() };
                        for rows in rows {
                            cases.push(case.sized(row_len, rows, args.calls, &defaults)?);
                        }
                    }
                }
            }
        }
        Ok(cases)
    }

    /// Creates the case for `wholemem demo`: rows of 1 KiB, in a table that is divided evenly among the ranks.
    pub(super) fn for_demo(op: RowOp, ranks: u32, defaults: &DefaultSizes) -> Self {
        let case = Self {
            op,
            row_len: 1024,
            index: IndexChoice::I64,
            spread: IndexDistribution::Uniform,
            kind: KindChoice::Continuous,
            location: LocationChoice::Device,
            share: RowShare::Even,
            ranks,
            first_only: false,
            table_rows: 0,
            rows: 0,
            calls: 1,
            pairs: 1,
            rounds: 3,
        };
        let rows = (defaults.payload.min(defaults.table) / case.row_len).max(1) as u64;
        Self { calls: 1, ..case.of_rows(case.row_len, rows, defaults.table) }
    }

    /// Returns the case with another row length, and with the numbers of rows and calls that the options set or that follow
    /// from the defaults.
    fn sized(
        &self,
        row_len: usize,
        rows: Option<u64>,
        calls: Option<u64>,
        defaults: &DefaultSizes,
    ) -> Result<Self> {
        let least = length(STEP * u64::from(self.ranks), row_len);
        ensure!(
            least <= defaults.table,
            "a table of {size} in total is too small: each rank needs at least {STEP} rows of {row_size}",
            size = Size(defaults.table),
            row_size = Size(row_len)
        );
        let usual = ((defaults.payload.min(defaults.table) / row_len) as u64).clamp(1, defaults.max_rows);
        let rows = rows.unwrap_or(usual);
        let all = usize::try_from(rows.saturating_mul(calls.unwrap_or(1))).ok();
        let all = all.and_then(|rows| rows.checked_mul(row_len));
        let all = all.filter(|len| *len <= isize::MAX.cast_unsigned() / 8);
        all.with_context(|| format!("{rows} rows of {} exceed the address space", RoundedSize(row_len)))?;
        let mut sized = self.of_rows(row_len, rows, defaults.table);
        sized.calls = calls.unwrap_or(sized.calls);
        let pairs = (defaults.ring.min(defaults.table.saturating_mul(4)) / (2 * sized.dense_len())).max(1);
        Ok(Self { pairs: u32::try_from(pairs).unwrap_or(u32::MAX).min(self.rounds), ..sized })
    }

    /// Returns the case with rows of `row_len` bytes, `rows` rows in a call, and as many rows in the table as fit in `table`
    /// bytes.
    pub(super) fn of_rows(&self, row_len: usize, rows: u64, table: usize) -> Self {
        let step = STEP * u64::from(self.ranks);
        let table_rows = ((table / row_len) as u64 / step * step).max(step);
        let call = length(rows, row_len).max(1);
        let calls = ((BATCH_LEN.min(table) / call) as u64).clamp(1, MAX_CALLS);
        Self { row_len, rows, table_rows, calls, ..self.clone() }
    }

    /// Returns true if both cases can use the same table.
    pub(super) fn has_same_table(&self, other: &Self) -> bool {
        let table =
            |case: &Self| (case.row_len, case.kind, case.location, case.share, case.ranks, case.table_rows);
        table(self) == table(other)
    }

    /// Returns the number of ranks that gather or scatter rows.
    pub(super) fn movers(&self) -> u32 {
        if self.first_only { 1 } else { self.ranks }
    }

    /// Returns the number of table rows that each rank stores.
    pub(super) fn rows_of_each(&self) -> Vec<u64> {
        let ranks = u64::from(self.ranks);
        // The weights of uneven parts are a permutation of 1..=ranks, and those of adjacent ranks differ, unless 7 divides the
        // number of ranks.
        let weights: Vec<u64> = match self.share {
            RowShare::Even => vec![1; self.ranks as usize],
            RowShare::Uneven => (0..ranks).map(|rank| rank * 7 % ranks + 1).collect(),
            RowShare::First => (0..ranks).map(|rank| u64::from(rank == 0)).collect(),
            RowShare::Last => (0..ranks).map(|rank| u64::from(rank + 1 == ranks)).collect(),
        };
        let sum: u64 = weights.iter().sum();
        let mut rows: Vec<_> =
            weights.iter().map(|weight| self.table_rows / STEP * weight / sum * STEP).collect();
        // The rows that remain after rounding down are added to the largest part.
        let left = self.table_rows - rows.iter().sum::<u64>();
        if let Some(most) = rows.iter_mut().max() {
            *most += left;
        }
        rows
    }

    /// Returns the exclusive upper bound of the row indices: the number of rows, or 2^31 for 32-bit indices if the table has
    /// more rows.
    pub(super) fn row_bound(&self) -> u64 {
        match self.index {
            IndexChoice::I32 => self.table_rows.min(1 << 31),
            IndexChoice::I64 => self.table_rows,
        }
    }

    pub(super) fn index_len(&self) -> usize {
        match self.index {
            IndexChoice::I32 => 4,
            IndexChoice::I64 => 8,
        }
    }

    /// Returns the number of rows that one rank moves in a round.
    pub(super) fn batch_rows(&self) -> u64 {
        self.rows * self.calls
    }

    /// Returns the number of bytes that one rank moves in a round.
    pub(super) fn batch_len(&self) -> usize {
        length(self.batch_rows(), self.row_len)
    }

    /// Returns the length of the contiguous rows of a round, rounded up to a multiple of 8 bytes.
    pub(super) fn dense_len(&self) -> usize {
        self.batch_len().next_multiple_of(size_of::<u64>())
    }

    pub(super) fn table_len(&self) -> usize {
        length(self.table_rows, self.row_len)
    }

    /// Returns the approximate number of bytes that the case allocates on all ranks together.
    pub(super) fn footprint(&self) -> usize {
        let indices = length(self.batch_rows(), self.index_len());
        let run = (2 * self.dense_len() + indices).saturating_mul(self.pairs as usize);
        run.saturating_add(self.dense_len())
            .saturating_mul(self.movers() as usize)
            .saturating_add(self.table_len())
    }

    pub(super) fn label(&self) -> String {
        let verb = match self.op {
            RowOp::Gather => "gathering",
            RowOp::Scatter => "scattering",
        };
        format!("{verb} {} rows of {}", self.rows, RoundedSize(self.row_len))
    }
}

/// Returns the length of `rows` rows in bytes. The lengths that options request were checked for overflow before.
fn length(rows: u64, row_len: usize) -> usize {
    to_usize(rows).saturating_mul(row_len)
}

/// Returns all pairs of an item of `these` and an item of `those`.
fn pairs<'a, A, B>(these: &'a [A], those: &'a [B]) -> impl Iterator<Item = (&'a A, &'a B)> {
    these.iter().flat_map(move |this| those.iter().map(move |that| (this, that)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::BenchCommand;
    use crate::args::tests::parse;

    const DEFAULTS: DefaultSizes =
        DefaultSizes { table: 1 << 30, payload: 64 << 20, max_rows: 4 << 20, ring: 1 << 30 };

    fn cases(args: &str) -> Result<Vec<RowsCase>> {
        let words: Vec<_> = ["gather"].into_iter().chain(args.split_whitespace()).collect();
        let BenchCommand::Gather(args) = parse(&words) else { panic!("not a gather") };
        RowsCase::all(RowOp::Gather, &args, &DEFAULTS)
    }

    #[test]
    fn cases_are_all_combinations_grouped_by_table() {
        let line =
            "--row-bytes 4,1KiB --index i32,i64 --spread uniform,zipf --kind continuous,chunked --ranks 1,2";
        let cases = cases(line).unwrap();
        assert_eq!(cases.len(), 32);
        assert_eq!(cases.chunk_by(RowsCase::has_same_table).count(), 8);
        assert_eq!(cases.chunk_by(|one, next| one.ranks == next.ranks).count(), 2);
    }

    #[test]
    fn options_override_the_default_rows_and_calls() {
        let usual = cases("--row-bytes 4,1KiB").unwrap();
        let sizes: Vec<_> = usual.iter().map(|case| (case.rows, case.calls, case.pairs)).collect();
        assert_eq!(sizes, [(4 << 20, 1, 15), (64 << 10, 1, 8)]);
        let few = cases("--row-bytes 1KiB --rows 1,100 --rounds 5").unwrap();
        let sizes: Vec<_> = few.iter().map(|case| (case.rows, case.calls, case.pairs)).collect();
        assert_eq!(sizes, [(1, 2048, 5), (100, 81, 5)]);
        let asked = cases("--row-bytes 1KiB --rows 1,65536 --calls 3").unwrap();
        let sizes: Vec<_> = asked.iter().map(|case| (case.rows, case.calls, case.pairs)).collect();
        assert_eq!(sizes, [(1, 3, 15), (65536, 3, 2)]);
        let error = cases("--row-bytes 1GiB --table 8GiB --rows 1073741824 --calls 8").unwrap_err();
        assert_eq!(error.to_string(), "1073741824 rows of 1 GiB exceed the address space");
    }

    #[test]
    fn parts_of_ranks_are_whole_words_and_cover_all_rows() {
        for share in [RowShare::Even, RowShare::Uneven, RowShare::First, RowShare::Last] {
            for (ranks, row_len) in [(1, 4), (2, 12), (7, 100), (17, 130)] {
                let case = RowsCase { share, ..RowsCase::for_demo(RowOp::Gather, ranks, &DEFAULTS) };
                let case = case.of_rows(row_len, 1, DEFAULTS.table);
                let rows = case.rows_of_each();
                assert_eq!((rows.len(), rows.iter().sum()), (ranks as usize, case.table_rows));
                assert!(rows.iter().all(|rows| rows % STEP == 0), "{rows:?}");
                let alike = rows.windows(2).filter(|two| two[0] == two[1]).count();
                assert!(share != RowShare::Uneven || alike == 0 || ranks == 7, "{rows:?}");
            }
        }
    }

    #[test]
    fn indices_of_32_bits_are_below_2_to_the_31() {
        let defaults = DefaultSizes { table: 16 << 30, ..DEFAULTS };
        let case = RowsCase::for_demo(RowOp::Gather, 1, &defaults).of_rows(4, 1, defaults.table);
        assert_eq!(RowsCase { index: IndexChoice::I32, ..case.clone() }.row_bound(), 1 << 31);
        assert_eq!(case.row_bound(), 4 << 30);
    }

    #[test]
    fn a_table_with_too_few_rows_is_rejected() {
        let error = cases("--row-bytes 1MiB --table 1MiB").unwrap_err();
        assert_eq!(
            error.to_string(),
            "a table of 1 MiB in total is too small: each rank needs at least 8 rows of 1 MiB"
        );
    }
}
