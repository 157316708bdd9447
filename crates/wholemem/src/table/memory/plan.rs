//! The plan of a shared memory: a pure function of the memory's specification and the number of ranks, so that it is equal on all
//! ranks.

use std::ops::Range;

use wholemem_comm::Rank;
use wholemem_hal::{Granularity, Granule};

use super::MemorySpec;
use crate::{Error, Kind, Location, Partition, Placement, Result};
use wholemem_os::width::to_usize;

/// The minimum number of recommended granules in a rank's share of a memory for which the recommended granule is used, so that
/// less than a sixteenth is unused.
const MIN_RECOMMENDED_GRANULES: u128 = 16;

/// Chooses the granule of a memory: the recommended one if the ranks' shares are long enough, otherwise the minimum.
fn choose_granule(spec: &MemorySpec, ranks: u32, granularity: Granularity) -> Granule {
    let share = u128::from(spec.rows) * spec.row_len as u128 / u128::from(ranks.max(1));
    let Granularity { minimum, recommended } = granularity;
    if share / recommended.len() as u128 >= MIN_RECOMMENDED_GRANULES { recommended } else { minimum }
}

/// The plan of a shared memory: partition, placement and granule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryPlan {
    pub(crate) kind: Kind,
    pub(crate) location: Location,
    pub(crate) row_len: usize,
    pub(crate) partition: Partition,
    pub(crate) placement: Placement,
    pub(crate) granule: Granule,
    pub(crate) equal_addresses: bool,
}

impl MemoryPlan {
    pub(crate) fn new(spec: &MemorySpec, ranks: u32, granularity: Granularity) -> Result<Self> {
        let granule = choose_granule(spec, ranks, granularity);
        let MemorySpec { rows, row_len, kind, location, equal_addresses, .. } = *spec;
        let partition = match &spec.rows_of_each {
            None => Partition::even_by_granules(rows, ranks, row_len.max(1), granule)?,
            Some(each) if each.len() != ranks as usize => {
                return Err(Error::RanksDiffer { given: each.len(), ranks });
            }
            Some(each) => Partition::given(each)?,
        };
        if partition.rows() != rows {
            return Err(Error::RowsDiffer { given: partition.rows(), rows });
        }
        let placement = Placement::plan(kind, &partition, row_len, granule)?;
        Ok(Self { kind, location, row_len, partition, placement, granule, equal_addresses })
    }

    /// Returns the range of bytes of a rank's rows in the memory.
    pub(crate) fn bytes_of(&self, rank: Rank) -> Range<usize> {
        let rows = self.partition.range(rank);
        let bytes = |row: u64| to_usize(row) * self.row_len;
        bytes(rows.start)..bytes(rows.end)
    }

    /// Returns the length in bytes of the address range that the memory needs: the sum of all allocations.
    pub(crate) fn address_len(&self) -> usize {
        self.placement.extents().iter().map(|extent| extent.allocated).sum()
    }
}

impl MemorySpec {
    /// Encodes the specification. Two encodings are equal if and only if the specifications are.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let Self { rows, row_len, kind, location, rows_of_each, equal_addresses } = self;
        let kind = match kind {
            Kind::Continuous => 0,
            Kind::Chunked => 1,
        };
        let location = match location {
            Location::Device => 0,
            Location::Host => 1,
        };
        let words = [*rows, *row_len as u64, kind, location, u64::from(*equal_addresses)];
        let each = rows_of_each.iter().flat_map(|each| [&[each.len() as u64][..], each].concat());
        words.into_iter().chain(each).flat_map(u64::to_le_bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: usize = 64 << 10;

    fn granularity() -> Granularity {
        let granule = |len| Granule::new(len).unwrap();
        Granularity { minimum: granule(GRANULE), recommended: granule(2 << 20) }
    }

    #[test]
    fn long_shares_use_the_recommended_granule() {
        let granule = |len, ranks| {
            MemoryPlan::new(&MemorySpec::new(len, 1), ranks, granularity()).unwrap().granule.len()
        };
        assert_eq!(granule(64 << 20, 2), 2 << 20);
        assert_eq!(granule(64 << 20, 3), GRANULE);
        assert_eq!(granule((64 << 20) - 1, 2), GRANULE);
        assert_eq!(granule(0, 1), GRANULE);
    }

    #[test]
    fn inconsistent_specifications_are_rejected() {
        let plan = |spec: &MemorySpec, ranks| MemoryPlan::new(spec, ranks, granularity()).unwrap_err();
        let spec = MemorySpec::new(10, 8);
        let given = |each: &[u64]| MemorySpec { rows_of_each: Some(each.to_vec()), ..spec.clone() };
        assert_eq!(plan(&given(&[5, 5]), 3), Error::RanksDiffer { given: 2, ranks: 3 });
        assert_eq!(plan(&given(&[5, 6]), 2), Error::RowsDiffer { given: 11, rows: 10 });
        assert_eq!(plan(&MemorySpec::new(10, 0), 2), Error::EmptyRow);
        assert_eq!(plan(&MemorySpec::new(u64::MAX, 1), 2), Error::TooManyRows);
    }

    #[test]
    fn encodings_of_different_specifications_differ() {
        let spec = MemorySpec::new(10, 8);
        let others = [
            MemorySpec { rows: 11, ..spec.clone() },
            MemorySpec { row_len: 9, ..spec.clone() },
            MemorySpec { kind: Kind::Chunked, ..spec.clone() },
            MemorySpec { location: Location::Host, ..spec.clone() },
            MemorySpec { rows_of_each: Some(vec![]), ..spec.clone() },
            MemorySpec { rows_of_each: Some(vec![10]), ..spec.clone() },
            MemorySpec { equal_addresses: true, ..spec.clone() },
        ];
        assert!(others.iter().all(|other| other.to_bytes() != spec.to_bytes()));
        assert_ne!(others[4].to_bytes(), others[5].to_bytes());
    }

    #[test]
    fn the_address_range_has_the_length_of_all_allocations() {
        let spec = MemorySpec { rows_of_each: Some(vec![1, 0, 9]), ..MemorySpec::new(10, 40_000) };
        let chunked = MemorySpec { kind: Kind::Chunked, ..spec.clone() };
        assert_eq!(MemoryPlan::new(&spec, 3, granularity()).unwrap().address_len(), 7 * GRANULE);
        let chunked = MemoryPlan::new(&chunked, 3, granularity()).unwrap();
        assert_eq!(chunked.address_len(), (1 + 6) * GRANULE);
        assert_eq!(chunked.bytes_of(Rank(2)), 40_000..400_000);
    }
}
