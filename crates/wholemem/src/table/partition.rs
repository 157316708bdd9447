//! The partition of a table, which assigns rows to ranks.
//!
//! ```text
//!   rows        0         4         8   10      even: equal numbers, fewer for the last ranks
//!               | rank 0  | rank 1  | 2 |       (rank 3 has none)
//!
//!   rows        0 1           7         10      given: any numbers, also zero
//!               |0| rank 1    | rank 3  |       (rank 2 has none)
//! ```
//!
//! A row is never divided between ranks. In continuous memory, the bytes of a rank's rows and the bytes stored on its device
//! differ by less than a granule; the [`Placement`](crate::Placement) describes which bytes are stored on which rank.

use std::ops::Range;

use wholemem_comm::Rank;
use wholemem_hal::Granule;

use crate::{Error, Result};

/// The even partition is rounded to granules only if that increases a rank's share by less than the share divided by this
/// number.
const MAX_GROWTH_DIVISOR: u64 = 16;

/// The partition of a table, which is the number of rows of each rank.
///
/// ```
/// use wholemem::{Partition, Rank};
///
/// let partition = Partition::given(&[1, 6, 0, 3])?;
/// assert_eq!(partition.range(Rank(1)), 1..7);
/// assert_eq!(partition.owner(7), Some(Rank(3))); // rank 2 has no rows
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Partition {
    /// The first row of each rank, then the total number of rows.
    starts: Vec<u64>,
}

impl Partition {
    /// Divides rows evenly among ranks: all ranks have the same number of rows, except the last ones, which have fewer or none.
    ///
    /// # Errors
    /// [`Error::NoRanks`]; [`Error::TooManyRows`].
    pub fn even(rows: u64, ranks: u32) -> Result<Self> {
        Self::stepped(rows, ranks, |share| share)
    }

    /// Divides rows evenly as [`even`](Self::even), but rounded so that the rows of each rank begin and end at a granule, unless
    /// rounding would add a sixteenth or more to a rank's rows.
    ///
    /// # Errors
    /// As [`even`](Self::even).
    pub fn even_by_granules(rows: u64, ranks: u32, row_len: usize, granule: Granule) -> Result<Self> {
        Self::stepped(rows, ranks, |share| {
            // The step is the smallest number of rows whose length is a multiple of the granule.
            let (row_len, granule) = (row_len as u64, granule.len() as u64);
            let step = granule >> row_len.trailing_zeros().min(granule.trailing_zeros());
            match share.checked_next_multiple_of(step) {
                Some(rounded) if (rounded - share).saturating_mul(MAX_GROWTH_DIVISOR) < share => rounded,
                _ => share,
            }
        })
    }

    fn stepped(rows: u64, ranks: u32, round: impl FnOnce(u64) -> u64) -> Result<Self> {
        if ranks == 0 {
            return Err(Error::NoRanks);
        }
        check_rows(Some(rows))?;
        let step = round(rows.div_ceil(u64::from(ranks)));
        let starts = (0..=u64::from(ranks)).map(|rank| rank.saturating_mul(step).min(rows));
        Ok(Self { starts: starts.collect() })
    }

    /// Divides rows among ranks as given: the number of rows of the first rank, of the second, and so on.
    ///
    /// # Errors
    /// [`Error::NoRanks`]; [`Error::TooManyRows`].
    pub fn given(rows_of_each: &[u64]) -> Result<Self> {
        if rows_of_each.is_empty() {
            return Err(Error::NoRanks);
        }
        let mut starts = vec![0];
        let mut sum = 0_u64;
        for rows in rows_of_each {
            sum = check_rows(sum.checked_add(*rows))?;
            starts.push(sum);
        }
        Ok(Self { starts })
    }

    /// Returns the number of ranks.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        u32::try_from(self.starts.len() - 1).expect("the number of ranks is a `u32`")
    }

    /// Returns the number of rows in the table.
    #[must_use]
    pub fn rows(&self) -> u64 {
        *self.starts.last().expect("a partition has a first row")
    }

    /// Returns the rows of one rank; an empty range for a rank that does not exist.
    #[must_use]
    pub fn range(&self, rank: Rank) -> Range<u64> {
        match self.starts.get(rank.index()..).unwrap_or_default() {
            [start, end, ..] => *start..*end,
            _ => self.rows()..self.rows(),
        }
    }

    /// Returns the rank that has a row; `None` after the last row.
    #[must_use]
    pub fn owner(&self, row: u64) -> Option<Rank> {
        // If the rows of several ranks begin at the same row, the last of these ranks has the row, and the other ranks have no
        // rows.
        let next = self.starts.partition_point(|start| *start <= row);
        (row < self.rows()).then(|| Rank(u32::try_from(next - 1).expect("the number of ranks is a `u32`")))
    }

    /// Returns the first row of each rank, then the total number of rows.
    #[must_use]
    pub fn starts(&self) -> &[u64] {
        &self.starts
    }

    /// Returns the number of rows of each rank, if it is equal for all ranks except the last ones. The rank of a row is then the
    /// quotient by this number.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        let (step, rows) = (*self.starts.get(1)?, self.rows());
        let even = (0..).zip(&self.starts).all(|(rank, start)| *start == step.saturating_mul(rank).min(rows));
        (even && step > 0).then_some(step)
    }
}

/// Checks that the number of rows fits in a signed 64-bit index.
fn check_rows(rows: Option<u64>) -> Result<u64> {
    rows.filter(|rows| i64::try_from(*rows).is_ok()).ok_or(Error::TooManyRows)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn granule(len: usize) -> Granule {
        Granule::new(len).unwrap()
    }

    /// Returns the rank that has a row, found by a loop over all ranks.
    fn naive_owner(rows_of_each: &[u64], row: u64) -> Option<Rank> {
        let mut end = 0;
        (0..).map(Rank).zip(rows_of_each).find_map(|(rank, rows)| {
            end += rows;
            (row < end).then_some(rank)
        })
    }

    fn rows_of_each(partition: &Partition) -> Vec<u64> {
        let len = |rank| partition.range(Rank(rank)).end - partition.range(Rank(rank)).start;
        (0..partition.ranks()).map(len).collect()
    }

    #[test]
    fn few_rows_leave_the_last_ranks_empty() {
        let shares = |rows, ranks| rows_of_each(&Partition::even(rows, ranks).unwrap());
        assert_eq!(shares(0, 3), [0, 0, 0]);
        assert_eq!(shares(1, 3), [1, 0, 0]);
        assert_eq!(shares(5, 4), [2, 2, 1, 0]);
        assert_eq!(shares(17, 17), [1; 17]);
        assert_eq!(shares(16, 17)[15..], [1, 0]);
    }

    #[test]
    fn a_rounded_share_is_whole_granules_and_costs_little() {
        let shares = |rows, row_len| {
            rows_of_each(&Partition::even_by_granules(rows, 3, row_len, granule(4096)).unwrap())
        };
        assert_eq!(shares(3000, 1024), [1000, 1000, 1000], "1,000 rows are whole granules");
        assert_eq!(shares(3001, 1024), [1004, 1004, 993], "1,001 rows would end within a granule");
        assert_eq!(shares(150, 1024), [52, 52, 46], "two additional rows of fifty are less than a sixteenth");
        assert_eq!(
            shares(40, 1024),
            [14, 14, 12],
            "two additional rows of fourteen are more than a sixteenth"
        );
        // Only every 1,024th row of 12 bytes ends at a granule of 4,096 bytes.
        assert_eq!(shares(60_000, 12), [20_480, 20_480, 19_040]);
        assert_eq!(
            shares(9, (2 << 20) + 4),
            [3, 3, 3],
            "shares of rows that never end at a granule are not rounded"
        );
    }

    #[test]
    fn invalid_partitions_are_rejected() {
        assert_eq!(Partition::even(1, 0), Err(Error::NoRanks));
        assert_eq!(Partition::given(&[]), Err(Error::NoRanks));
        assert_eq!(Partition::even(1 << 63, 2), Err(Error::TooManyRows));
        assert_eq!(Partition::given(&[u64::MAX, 2]), Err(Error::TooManyRows));
        let most = (1 << 63) - 1;
        assert_eq!(Partition::even(most, 2).unwrap().rows(), most);
    }

    #[test]
    fn a_given_partition_with_equal_shares_has_a_step() {
        let step = |rows: &[u64]| Partition::given(rows).unwrap().step();
        assert_eq!(step(&[4, 4, 2, 0]), Some(4));
        assert_eq!(
            step(&[4, 4, 5]),
            None,
            "the last rank has more rows: a division would give a rank that does not exist"
        );
        assert_eq!(step(&[4, 3, 3]), None);
        assert_eq!(step(&[0, 4]), None);
        assert_eq!(step(&[0, 0]), None);
        assert_eq!(step(&[7]), Some(7));
    }

    proptest! {
        #[test]
        fn owners_match_a_naive_loop(
            rows_of_each in prop::collection::vec(prop_oneof![Just(0), Just(1), 0_u64..9], 1..20),
        ) {
            let partition = Partition::given(&rows_of_each).unwrap();
            for row in 0..partition.rows() + 2 {
                prop_assert_eq!(partition.owner(row), naive_owner(&rows_of_each, row));
            }
            if let Some(step) = partition.step() {
                for row in 0..partition.rows() {
                    prop_assert_eq!(partition.owner(row).map(|rank| u64::from(rank.0)), Some(row / step));
                }
            }
        }

        #[test]
        fn even_partitions_cover_all_rows_and_add_less_than_a_sixteenth(
            rows in prop_oneof![0_u64..40, 0_u64..10_000_000],
            ranks in 1_u32..18,
            row_len in prop_oneof![Just(1), Just(12), Just(100), Just(1024), Just((2 << 20) + 4), 1_usize..5000],
            granule_len in prop_oneof![Just(4096), Just(64 << 10), Just(2 << 20)],
        ) {
            let partition = Partition::even_by_granules(rows, ranks, row_len, granule(granule_len)).unwrap();
            prop_assert_eq!(rows_of_each(&partition).iter().sum::<u64>(), rows);
            let share = rows.div_ceil(u64::from(ranks));
            for rows in rows_of_each(&partition) {
                prop_assert!(rows * 16 < share * 17 || rows <= share);
            }
            prop_assert_eq!(partition.step().is_some(), rows > 0);
        }
    }
}
