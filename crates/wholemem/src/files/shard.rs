//! The file of a saved tensor's part: what it is a part of, a checksum for each block of rows, and the rows.
//!
//! ```text
//!   0       8         12      16        32       36      40          48     56        64           72        80
//!   | magic | version | dtype | save id | number | count | first row | rows | row len | block rows | data at |
//!   80           84        88                                                          data at, a multiple of 4 KiB
//!   | dimensions | meaning | shape, 8 bytes each | digests, 16 bytes each | digest | zeros ... | rows
//! ```
//!
//! All numbers are little-endian. A digest is the first 16 bytes of a BLAKE3 hash, of a block or, the last one, of all
//! that is in front of it. A reader of some rows reads and checks the blocks that they are in, and no others.

use std::ops::Range;

use super::FileProblem;
use crate::Dtype;

const MAGIC: &[u8; 8] = b"wholemem";
const VERSION: u32 = 1;

/// How long the header is without its lists.
const FIXED: usize = 88;

/// How long a digest is.
pub(super) const DIGEST: usize = 16;

/// Where rows may begin, so that they can be mapped.
const PAGE: u64 = 4096;

/// How many dimensions a tensor has at most in a file.
const MOST_DIMENSIONS: usize = 64;

/// How long a block is, unless a single row is longer.
pub(super) const BLOCK: u64 = 4 << 20;

/// The longest header that is read: that of half a petabyte in blocks.
const LONGEST: u64 = 2 << 30;

pub(super) type Digest = [u8; DIGEST];

pub(super) fn digest(bytes: &[u8]) -> Digest {
    let mut digest = [0; DIGEST];
    digest.copy_from_slice(&blake3::hash(bytes).as_bytes()[..DIGEST]);
    digest
}

/// What a shard says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) dtype: Dtype,
    /// The shape of the whole tensor.
    pub(super) shape: Vec<u64>,
    /// The same in all shards of one save, and in no others.
    pub(super) save: [u8; 16],
    pub(super) number: u32,
    pub(super) count: u32,
    pub(super) first_row: u64,
    pub(super) rows: u64,
    /// How many rows a block has, but for the last.
    pub(super) block_rows: u64,
    pub(super) digests: Vec<Digest>,
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: "part of a saved tensor", what }
}

impl Shard {
    /// How many rows of `row_len` bytes a block has.
    pub(super) fn rows_of_a_block(row_len: u64) -> u64 {
        (BLOCK / row_len.max(1)).max(1)
    }

    pub(super) fn row_len(&self) -> u64 {
        // Looked at when it was read, and when the tensor was made.
        self.shape[1..].iter().product::<u64>() * self.dtype.len() as u64
    }

    /// How many blocks there are.
    pub(super) fn blocks(rows: u64, block_rows: u64) -> u64 {
        rows.div_ceil(block_rows)
    }

    /// Which rows of the tensor a block has.
    pub(super) fn rows_of(&self, block: u64) -> Range<u64> {
        let start = block * self.block_rows;
        let end = (start + self.block_rows).min(self.rows);
        self.first_row + start..self.first_row + end
    }

    /// Where a row of the tensor, one of this shard, begins in the file.
    pub(super) fn place_of(&self, row: u64) -> u64 {
        self.data_at() + (row - self.first_row) * self.row_len()
    }

    fn header_len(&self) -> u64 {
        (FIXED + 8 * self.shape.len() + DIGEST * (self.digests.len() + 1)) as u64
    }

    fn data_at(&self) -> u64 {
        self.header_len().next_multiple_of(PAGE)
    }

    /// How long the whole file is.
    pub(super) fn file_len(&self) -> u64 {
        self.data_at() + self.rows * self.row_len()
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::from(*MAGIC);
        bytes.extend([VERSION, self.dtype.storage().code()].iter().flat_map(|number| number.to_le_bytes()));
        bytes.extend(self.save);
        bytes.extend([self.number, self.count].iter().flat_map(|number| number.to_le_bytes()));
        let numbers = [self.first_row, self.rows, self.row_len(), self.block_rows, self.data_at()];
        bytes.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        let dimensions = u32::try_from(self.shape.len()).expect("a tensor has far fewer dimensions");
        bytes.extend(
            [dimensions, self.dtype.info().saved_meaning].iter().flat_map(|number| number.to_le_bytes()),
        );
        bytes.extend(self.shape.iter().flat_map(|len| len.to_le_bytes()));
        bytes.extend(self.digests.iter().flatten());
        let own = digest(&bytes);
        bytes.extend(own);
        bytes
    }

    /// How long the header is, from the first [`PAGE`] bytes of the file.
    pub(super) fn len_of_header(front: &[u8]) -> Result<usize, FileProblem> {
        let numbers = Numbers(front);
        if front.len() < FIXED || &front[..8] != MAGIC {
            return Err(malformed("its first bytes are others"));
        }
        if numbers.u32(8) != VERSION {
            return Err(malformed("its version is unknown"));
        }
        let (rows, block_rows) = (numbers.u64(48), numbers.u64(64));
        let dimensions = numbers.u32(80) as usize;
        if dimensions == 0 || dimensions > MOST_DIMENSIONS || block_rows == 0 {
            return Err(malformed("its header contradicts itself"));
        }
        let digests =
            Self::blocks(rows, block_rows).checked_add(1).and_then(|count| count.checked_mul(DIGEST as u64));
        let len = digests.and_then(|len| len.checked_add((FIXED + 8 * dimensions) as u64));
        let len = len.filter(|len| *len <= LONGEST).and_then(|len| usize::try_from(len).ok());
        len.ok_or_else(|| malformed("its header contradicts itself"))
    }

    /// Reads the header, which is [so long](Self::len_of_header), of a file of `file_len` bytes.
    pub(super) fn decode(header: &[u8], file_len: u64) -> Result<Self, FileProblem> {
        let contradiction = || malformed("its header contradicts itself");
        if Self::len_of_header(header)? != header.len() {
            return Err(contradiction());
        }
        let (rest, own) = header.split_at(header.len() - DIGEST);
        if own != digest(rest) {
            return Err(malformed("the checksum of its header differs"));
        }
        let numbers = Numbers(header);
        let dtype = Dtype::from_saved(numbers.u32(12), numbers.u32(84)).ok_or_else(contradiction)?;
        let dimensions = numbers.u32(80) as usize;
        let shape: Vec<_> = (0..dimensions).map(|n| numbers.u64(FIXED + 8 * n)).collect();
        let digests = rest[FIXED + 8 * dimensions..].as_chunks::<DIGEST>().0.to_vec();
        let mut save = [0; 16];
        save.copy_from_slice(&header[16..32]);
        let (number, count) = (numbers.u32(32), numbers.u32(36));
        let (first_row, rows, block_rows) = (numbers.u64(40), numbers.u64(48), numbers.u64(64));
        let row_len = shape[1..].iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        let within = first_row.checked_add(rows).is_some_and(|end| end <= shape[0]);
        let len = row_len.and_then(|row_len| row_len.checked_mul(shape[0])?.checked_add(LONGEST + PAGE));
        if row_len != Some(numbers.u64(56)) || !within || len.is_none() || number >= count {
            return Err(contradiction());
        }
        // A block is read at once: nobody makes longer ones, nor rows of nothing.
        if row_len.is_none_or(|row_len| row_len == 0 || block_rows > Self::rows_of_a_block(row_len)) {
            return Err(contradiction());
        }
        let shard = Self { dtype, shape, save, number, count, first_row, rows, block_rows, digests };
        if numbers.u64(72) != shard.data_at() {
            return Err(contradiction());
        }
        if file_len != shard.file_len() {
            return Err(FileProblem::WrongLength { len: file_len, needed: shard.file_len() });
        }
        Ok(shard)
    }
}

/// Numbers at fixed places of bytes that are long enough.
struct Numbers<'a>(&'a [u8]);

impl Numbers<'_> {
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|n| self.0[at + n]))
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|n| self.0[at + n]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shard() -> Shard {
        Shard {
            dtype: Dtype::F16,
            shape: vec![1000, 3, 7],
            save: [9; 16],
            number: 1,
            count: 3,
            first_row: 333,
            rows: 334,
            block_rows: 100,
            digests: vec![[1; DIGEST], [2; DIGEST], [3; DIGEST], [4; DIGEST]],
        }
    }

    #[test]
    fn a_shard_survives_its_bytes() {
        let bytes = shard().encode();
        assert_eq!(Shard::len_of_header(&bytes), Ok(bytes.len()));
        assert_eq!(Shard::decode(&bytes, shard().file_len()), Ok(shard()));
        assert_eq!(shard().rows_of(3), 633..667);
        assert_eq!(shard().place_of(334), 4096 + 42);
        let needed = shard().file_len();
        assert_eq!(Shard::decode(&bytes, 5), Err(FileProblem::WrongLength { len: 5, needed }));
    }

    #[test]
    fn blocks_are_never_longer_than_they_are_written() {
        let of = |shape: &[u64], block_rows: u64| {
            let digests = vec![[0; DIGEST]; usize::try_from(Shard::blocks(1000, block_rows)).unwrap()];
            let shard =
                Shard { shape: shape.to_vec(), first_row: 0, rows: 1000, block_rows, digests, ..shard() };
            Shard::decode(&shard.encode(), shard.file_len()).map(|_| ())
        };
        // Rows of 64 KiB, of which 64 are a block.
        assert_eq!(of(&[1000, 32 << 10], 64), Ok(()));
        let contradiction = Err(malformed("its header contradicts itself"));
        assert_eq!(of(&[1000, 32 << 10], 65), contradiction);
        assert_eq!(of(&[1000, 0], 64), contradiction);
    }

    proptest! {
        #[test]
        fn any_changed_bit_of_the_header_is_noticed(at: prop::sample::Index, bit in 0u8..8) {
            let mut bytes = shard().encode();
            bytes[at.index(shard().encode().len())] ^= 1 << bit;
            prop_assert!(Shard::decode(&bytes, shard().file_len()).is_err());
        }

        /// With a digest that fits, so that everything behind it is reached.
        #[test]
        fn no_header_makes_it_panic(at in 8usize..88, number: u64, len: u64) {
            let mut bytes = shard().encode();
            let end = (at + 8).min(88);
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            let rest = bytes.len() - DIGEST;
            let own = digest(&bytes[..rest]);
            bytes[rest..].copy_from_slice(&own);
            if let Ok(shard) = Shard::decode(&bytes, len) {
                prop_assert_eq!(shard.file_len(), len);
            }
            let _ = Shard::decode(&bytes, shard().file_len());
        }
    }
}
