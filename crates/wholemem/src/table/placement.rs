//! The placement of a shared memory, which assigns granules to the ranks' devices that store them.
//!
//! ```text
//!   rows of     | rank 0      | rank 1 |2|     rank 3        |      the partition
//!   granules    |     0     |     1     |     2     |   3    |
//!   stored on   |  rank 0   |  rank 1   |  rank 3   | rank 3 |      Continuous: the rank that has the middle of a granule
//!
//!   granules    |     0     |0|   |     0     |   |  0  |  |  0  |1 Chunked: each rank stores its own rows
//! ```
//!
//! A granule cannot be divided between devices. In continuous memory, a granule at a boundary is stored on the rank that has its
//! middle. So the bytes that a rank stores differ from its rows by at most half a granule at either end, and a rank with less than
//! a granule may store none. In chunked memory, the end of each rank's last granule is unused instead.

use wholemem_comm::Rank;
use wholemem_hal::Granule;

use crate::{Error, Kind, Partition, Result};
use wholemem_os::width::to_usize;

/// A range of bytes of a shared memory that one rank's device stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The rank whose device stores the bytes.
    pub rank: Rank,
    /// The offset of the bytes in the shared memory.
    pub offset: usize,
    /// The number of stored bytes that belong to rows.
    pub len: usize,
    /// The number of bytes that the device allocates: whole granules.
    pub allocated: usize,
}

/// The placement of a shared memory: at most one [`Extent`] for each rank, in the order of ranks and offsets. The extents cover
/// the memory.
///
/// ```
/// use wholemem::{Granule, Kind, Partition, Placement, Rank};
///
/// let partition = Partition::given(&[3, 1])?;
/// let granule = Granule::new(64 << 10)?;
/// let placement = Placement::plan(Kind::Continuous, &partition, 40_000, granule)?;
/// let stored: Vec<_> = placement.extents().iter().map(|extent| (extent.rank, extent.allocated)).collect();
/// assert_eq!(stored, [(Rank(0), 128 << 10), (Rank(1), 64 << 10)]); // 120,000 bytes end close to the second granule's end
/// # Ok::<(), wholemem::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    extents: Vec<Extent>,
    len: usize,
}

impl Placement {
    /// Plans which rank's device stores which bytes of rows of `row_len` bytes.
    ///
    /// # Errors
    /// [`Error::EmptyRow`]; [`Error::TooLong`] if they do not fit in an address space.
    pub fn plan(kind: Kind, partition: &Partition, row_len: usize, granule: Granule) -> Result<Self> {
        if row_len == 0 {
            return Err(Error::EmptyRow);
        }
        let len = checked_len(partition.rows(), row_len, granule)?;
        // The product does not overflow, because the end of the last row has been checked.
        let bytes = |row: u64| to_usize(row) * row_len;
        let ranks = (0..partition.ranks()).map(Rank);
        let extents = ranks.filter_map(|rank| {
            let rows = partition.range(rank);
            let (start, end) = (bytes(rows.start), bytes(rows.end));
            let (offset, end) = match kind {
                Kind::Chunked => (start, end),
                Kind::Continuous => {
                    let start = first_granule(start, len, granule.len()) * granule.len();
                    let end = first_granule(end, len, granule.len()) * granule.len();
                    (start, end.min(len))
                }
            };
            let len = end.saturating_sub(offset);
            let allocated = granule.round_up(len)?;
            (len > 0).then_some(Extent { rank, offset, len, allocated })
        });
        Ok(Self { extents: extents.collect(), len })
    }

    /// Returns the extents (ranges of bytes) of all ranks that store bytes.
    #[must_use]
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Returns the extent (range of bytes) of one rank; `None` if the rank stores no bytes.
    #[must_use]
    pub fn on(&self, rank: Rank) -> Option<Extent> {
        self.extents.iter().copied().find(|extent| extent.rank == rank)
    }

    /// Returns the number of bytes in all rows of the memory.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the memory has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the rank that stores the byte at an offset; `None` after the last byte.
    #[must_use]
    pub fn rank_at(&self, offset: usize) -> Option<Rank> {
        let holds = |extent: &&Extent| (extent.offset..extent.offset + extent.len).contains(&offset);
        self.extents.iter().find(holds).map(|extent| extent.rank)
    }
}

/// Returns the length in bytes of all rows, if their granules fit in an address space.
fn checked_len(rows: u64, row_len: usize, granule: Granule) -> Result<usize> {
    let len = usize::try_from(rows).ok().and_then(|rows| rows.checked_mul(row_len));
    len.filter(|len| granule.round_up(*len).is_some_and(|end| isize::try_from(end).is_ok()))
        .ok_or(Error::TooLong { rows, row_len })
}

/// Returns the first granule whose middle is not before `boundary`, in a memory of `len` bytes.
fn first_granule(boundary: usize, len: usize, granule: usize) -> usize {
    let count = len.div_ceil(granule);
    let first = boundary.saturating_sub(granule / 2).div_ceil(granule);
    // The last granule may be partly used, and in that case the middle of its used bytes counts.
    let start = first * granule;
    if first >= count || usize::midpoint(start, len.min(start + granule)) < boundary {
        count.min(first + 1)
    } else {
        first
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use proptest::prelude::*;

    use super::*;

    /// Returns the rank that stores each granule: the owner of the granule's middle byte.
    fn naive(partition: &Partition, row_len: usize, granule: usize) -> Vec<Rank> {
        let len = usize::try_from(partition.rows()).unwrap() * row_len;
        let granules = (0..len).step_by(granule);
        let middle = |start: usize| (start + len.min(start + granule)) / 2;
        granules.map(|start| partition.owner((middle(start) / row_len) as u64).unwrap()).collect()
    }

    fn bytes(partition: &Partition, rank: Rank, row_len: usize) -> Range<usize> {
        let rows = partition.range(rank);
        let byte = |row: u64| usize::try_from(row).unwrap() * row_len;
        byte(rows.start)..byte(rows.end)
    }

    #[test]
    fn a_single_byte_is_stored_on_its_rank() {
        for kind in [Kind::Continuous, Kind::Chunked] {
            let partition = Partition::given(&[0, 1, 0]).unwrap();
            let placement = Placement::plan(kind, &partition, 1, Granule::new(4096).unwrap()).unwrap();
            let extent = Extent { rank: Rank(1), offset: 0, len: 1, allocated: 4096 };
            assert_eq!(placement.extents(), [extent]);
            assert_eq!((placement.rank_at(0), placement.rank_at(1)), (Some(Rank(1)), None));
        }
    }

    #[test]
    fn a_memory_without_rows_has_no_extents() {
        let partition = Partition::even(0, 3).unwrap();
        for kind in [Kind::Continuous, Kind::Chunked] {
            let placement = Placement::plan(kind, &partition, 8, Granule::new(4096).unwrap()).unwrap();
            assert!(placement.extents().is_empty() && placement.is_empty());
        }
    }

    #[test]
    fn memory_longer_than_the_address_space_is_rejected() {
        let granule = Granule::new(4096).unwrap();
        let plan = |rows, row_len| {
            Placement::plan(Kind::Continuous, &Partition::even(rows, 2).unwrap(), row_len, granule)
        };
        assert_eq!(plan(1 << 62, 2).unwrap_err(), Error::TooLong { rows: 1 << 62, row_len: 2 });
        assert_eq!(
            plan(1 << 62, usize::MAX).unwrap_err(),
            Error::TooLong { rows: 1 << 62, row_len: usize::MAX }
        );
        assert_eq!(plan((1 << 63) - 1, 1).unwrap_err(), Error::TooLong { rows: (1 << 63) - 1, row_len: 1 });
        assert_eq!(plan(1, 0).unwrap_err(), Error::EmptyRow);
    }

    fn partitions() -> impl Strategy<Value = Partition> {
        let rows = prop_oneof![Just(0_u64), Just(1), 0_u64..50, 0_u64..3000];
        let given = prop::collection::vec(rows, 1..18).prop_map(|rows| Partition::given(&rows).unwrap());
        let even = (0_u64..20_000, 1_u32..18).prop_map(|(rows, ranks)| Partition::even(rows, ranks).unwrap());
        prop_oneof![given, even]
    }

    fn row_lens() -> impl Strategy<Value = usize> {
        prop_oneof![Just(1_usize), Just(12), Just(100), Just(1024), Just((2 << 20) + 4)]
    }

    proptest! {
        #[test]
        fn each_granule_is_stored_on_the_owner_of_its_middle(partition in partitions(), row_len in row_lens(), large: bool) {
            // Long rows need large granules, because small ones would give millions of granules.
            let granule = Granule::new(if large || row_len > 4096 { 2 << 20 } else { 4096 }).unwrap();
            let placement = Placement::plan(Kind::Continuous, &partition, row_len, granule).unwrap();
            let mut stored = Vec::new();
            for extent in placement.extents() {
                prop_assert_eq!(extent.offset, stored.len() * granule.len(), "extents are adjacent and whole granules");
                prop_assert_eq!(Some(extent.allocated), granule.round_up(extent.len));
                stored.extend(vec![extent.rank; extent.allocated / granule.len()]);
            }
            prop_assert_eq!(&stored, &naive(&partition, row_len, granule.len()));
            // The number of bytes that a rank stores differs from the bytes of its rows by at most half a granule at either end.
            for rank in (0..partition.ranks()).map(Rank) {
                let has = bytes(&partition, rank, row_len).len();
                let stores = placement.on(rank).map_or(0, |extent| extent.len);
                prop_assert!(has.abs_diff(stores) <= granule.len(), "{} has {}, stores {}", rank, has, stores);
            }
        }

        #[test]
        fn each_chunk_is_stored_on_its_rank(partition in partitions(), row_len in row_lens()) {
            let granule = Granule::new(64 << 10).unwrap();
            let placement = Placement::plan(Kind::Chunked, &partition, row_len, granule).unwrap();
            for rank in (0..partition.ranks()).map(Rank) {
                let bytes = bytes(&partition, rank, row_len);
                let (offset, len) = (bytes.start, bytes.len());
                let expected = (len > 0).then(|| {
                    Extent { rank, offset, len, allocated: len.next_multiple_of(granule.len()) }
                });
                prop_assert_eq!(placement.on(rank), expected);
            }
        }
    }
}
