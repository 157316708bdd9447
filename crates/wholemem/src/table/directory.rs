//! The directory of a chunked table (the addresses and first rows of its chunks), and the [`GlobalRef`] of a [`Partition`].
//!
//! ```text
//!   directory --> [ address of chunk 0 | of chunk 1 | ... ][ first row of chunk 0 | of chunk 1 | ... | number of rows ]
//! ```

use super::Partition;
use crate::abi::{Division, GlobalRef};

impl GlobalRef {
    /// Creates a reference to a table with a chunk for each rank, whose [directory](Self::directory) is at the address
    /// `directory`.
    #[must_use]
    pub fn chunked(directory: u64, partition: &Partition, stride: u64) -> Self {
        let step = partition.step().and_then(Division::by);
        let Division { by, magic, shift } = step.unwrap_or(Division { by: 0, magic: 0, shift: 0 });
        Self {
            base: directory,
            chunk_rows: by,
            magic,
            shift,
            chunks: partition.ranks(),
            ..Self::continuous(0, partition.rows(), stride)
        }
    }

    /// Returns the bytes of the directory of a chunked table: the address of each chunk, then the first row of each chunk and the
    /// number of rows.
    #[must_use]
    pub fn directory(bases: &[u64], partition: &Partition) -> Vec<u8> {
        bases.iter().chain(partition.starts()).flat_map(|word| word.to_ne_bytes()).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn chunks_of_one_row_are_found_by_binary_search() {
        let table = GlobalRef::chunked(0, &Partition::even(5, 5).unwrap(), 8);
        assert_eq!(table.chunk_rows, 0);
        assert_eq!(table.locate(3, &[0, 1, 2, 3, 4, 5]), (3, 0));
    }

    proptest! {
        #[test]
        fn every_row_is_found_in_the_chunk_of_its_rank(
            rows_of_each in prop::collection::vec(prop_oneof![Just(0), Just(1), Just(4), 0_u64..300], 1..19),
            first in 0_u64..50,
        ) {
            let partition = Partition::given(&rows_of_each).unwrap();
            let rows = partition.rows();
            let table = GlobalRef::chunked(0, &partition, 8).part(first.min(rows), rows - first.min(rows), 4);
            for index in 0..table.rows {
                let row = index + table.first_row;
                let (chunk, place) = table.locate(row, partition.starts());
                let owner = partition.owner(row).unwrap();
                prop_assert_eq!((chunk, place), (owner.index(), row - partition.range(owner).start));
            }
        }
    }
}
