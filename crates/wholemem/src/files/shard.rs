//! The file format of a shard, one file of a saved tensor: type and shape, a checksum for each block of rows, and the rows.
//!
//! ```text
//!   0       8         12      16        32       36      40          48     56        64           72        80
//!   | magic | version | dtype | save id | number | count | first row | rows | row len | block rows | data at |
//!   80           84        88                                                          data at, a multiple of 4 KiB
//!   | dimensions | meaning | shape, 8 bytes each | digests, 16 bytes each | digest | zeros ... | rows
//! ```
//!
//! All numbers are little-endian. A digest is the first 16 bytes of a BLAKE3 hash: of a block of rows, or for the last digest of
//! the header before it. A reader of some rows reads and checks only the blocks that contain them.

use std::ops::Range;

use super::FileProblem;
use crate::Dtype;

const MAGIC: &[u8; 8] = b"wholemem";
const VERSION: u32 = 1;

/// The length in bytes of a file header without the shape and the digests.
const FIXED_LEN: usize = 88;

/// The length in bytes of a digest, which is the checksum of a block of rows or of a header.
pub(super) const DIGEST_LEN: usize = 16;

/// The alignment in bytes of the rows in a file of a saved tensor, so that they can be mapped.
const PAGE: u64 = 4096;

/// The maximum number of dimensions of a tensor in a file.
const MAX_DIMENSIONS: usize = 64;

/// The maximum length in bytes of a block of rows with one checksum, unless a single row is longer.
pub(super) const BLOCK_LEN: u64 = 4 << 20;

/// The maximum length in bytes of a file header: enough for half a petabyte of blocks.
const MAX_HEADER_LEN: u64 = 2 << 30;

pub(super) type Digest = [u8; DIGEST_LEN];

pub(super) fn digest(bytes: &[u8]) -> Digest {
    let mut digest = [0; DIGEST_LEN];
    digest.copy_from_slice(&blake3::hash(bytes).as_bytes()[..DIGEST_LEN]);
    digest
}

/// The header of a shard (one file of a saved tensor).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) dtype: Dtype,
    /// The shape of the whole tensor.
    pub(super) shape: Vec<u64>,
    /// The id of the saved tensor, which is equal in all of its files.
    pub(super) save: [u8; 16],
    pub(super) number: u32,
    pub(super) count: u32,
    pub(super) first_row: u64,
    pub(super) rows: u64,
    /// The number of rows in each block with one checksum, except for the last block.
    pub(super) block_rows: u64,
    pub(super) digests: Vec<Digest>,
}

fn malformed(what: &'static str) -> FileProblem {
    FileProblem::Malformed { format: "file of a saved tensor", reason: what }
}

impl Shard {
    /// Returns the number of rows of `row_len` bytes that share one checksum.
    pub(super) fn rows_of_a_block(row_len: u64) -> u64 {
        (BLOCK_LEN / row_len.max(1)).max(1)
    }

    pub(super) fn row_len(&self) -> u64 {
        // The product does not overflow, because `decode`, or the creation of the tensor, has checked it.
        self.shape[1..].iter().product::<u64>() * self.dtype.len() as u64
    }

    /// Returns the number of blocks, each with a checksum, into which `rows` rows are divided.
    pub(super) fn blocks(rows: u64, block_rows: u64) -> u64 {
        rows.div_ceil(block_rows)
    }

    /// Returns the rows of the tensor that are in one block of this file.
    pub(super) fn rows_of(&self, block: u64) -> Range<u64> {
        let start = block * self.block_rows;
        let end = (start + self.block_rows).min(self.rows);
        self.first_row + start..self.first_row + end
    }

    /// Returns the offset in this file of one of its rows, numbered as in the whole tensor.
    pub(super) fn offset_of(&self, row: u64) -> u64 {
        self.data_at() + (row - self.first_row) * self.row_len()
    }

    fn header_len(&self) -> u64 {
        (FIXED_LEN + 8 * self.shape.len() + DIGEST_LEN * (self.digests.len() + 1)) as u64
    }

    fn data_at(&self) -> u64 {
        self.header_len().next_multiple_of(PAGE)
    }

    /// Returns the length in bytes of this file of a saved tensor.
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
        let dimensions = u32::try_from(self.shape.len()).expect("the number of dimensions is a `u32`");
        bytes.extend(
            [dimensions, self.dtype.info().saved_meaning].iter().flat_map(|number| number.to_le_bytes()),
        );
        bytes.extend(self.shape.iter().flat_map(|len| len.to_le_bytes()));
        bytes.extend(self.digests.iter().flatten());
        let own = digest(&bytes);
        bytes.extend(own);
        bytes
    }

    /// Decodes the length of the header from the first [`PAGE`] bytes of a file of a saved tensor.
    pub(super) fn len_of_header(front: &[u8]) -> Result<usize, FileProblem> {
        let numbers = LittleEndianReader(front);
        if front.len() < FIXED_LEN || &front[..8] != MAGIC {
            return Err(malformed("it does not begin with the magic bytes"));
        }
        if numbers.u32(8) != VERSION {
            return Err(malformed("unknown version"));
        }
        let (rows, block_rows) = (numbers.u64(48), numbers.u64(64));
        let dimensions = numbers.u32(80) as usize;
        if dimensions == 0 || dimensions > MAX_DIMENSIONS || block_rows == 0 {
            return Err(malformed("the header is inconsistent"));
        }
        let digests = Self::blocks(rows, block_rows)
            .checked_add(1)
            .and_then(|count| count.checked_mul(DIGEST_LEN as u64));
        let len = digests.and_then(|len| len.checked_add((FIXED_LEN + 8 * dimensions) as u64));
        let len = len.filter(|len| *len <= MAX_HEADER_LEN).and_then(|len| usize::try_from(len).ok());
        len.ok_or_else(|| malformed("the header is inconsistent"))
    }

    /// Decodes the header of a file of `file_len` bytes. `header` has the length from [`len_of_header`](Self::len_of_header).
    pub(super) fn decode(header: &[u8], file_len: u64) -> Result<Self, FileProblem> {
        let inconsistent = || malformed("the header is inconsistent");
        if Self::len_of_header(header)? != header.len() {
            return Err(inconsistent());
        }
        let (rest, own) = header.split_at(header.len() - DIGEST_LEN);
        if own != digest(rest) {
            return Err(malformed("the checksum of the header differs"));
        }
        let numbers = LittleEndianReader(header);
        let dtype = Dtype::from_saved(numbers.u32(12), numbers.u32(84)).ok_or_else(inconsistent)?;
        let dimensions = numbers.u32(80) as usize;
        let shape: Vec<_> = (0..dimensions).map(|n| numbers.u64(FIXED_LEN + 8 * n)).collect();
        let digests = rest[FIXED_LEN + 8 * dimensions..].as_chunks::<DIGEST_LEN>().0.to_vec();
        let mut save = [0; 16];
        save.copy_from_slice(&header[16..32]);
        let (number, count) = (numbers.u32(32), numbers.u32(36));
        let (first_row, rows, block_rows) = (numbers.u64(40), numbers.u64(48), numbers.u64(64));
        let row_len = shape[1..].iter().try_fold(dtype.len() as u64, |len, count| len.checked_mul(*count));
        let within = first_row.checked_add(rows).is_some_and(|end| end <= shape[0]);
        let len =
            row_len.and_then(|row_len| row_len.checked_mul(shape[0])?.checked_add(MAX_HEADER_LEN + PAGE));
        if row_len != Some(numbers.u64(56)) || !within || len.is_none() || number >= count {
            return Err(inconsistent());
        }
        // A block of rows is read into memory at once, so blocks that are longer than the writer creates are rejected, and so are
        // rows without bytes.
        if row_len.is_none_or(|row_len| row_len == 0 || block_rows > Self::rows_of_a_block(row_len)) {
            return Err(inconsistent());
        }
        let shard = Self { dtype, shape, save, number, count, first_row, rows, block_rows, digests };
        if numbers.u64(72) != shard.data_at() {
            return Err(inconsistent());
        }
        if file_len != shard.file_len() {
            return Err(FileProblem::WrongLength { len: file_len, needed: shard.file_len() });
        }
        Ok(shard)
    }
}

/// Reads little-endian integers at offsets in a file header.
struct LittleEndianReader<'a>(&'a [u8]);

impl LittleEndianReader<'_> {
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
            digests: vec![[1; DIGEST_LEN], [2; DIGEST_LEN], [3; DIGEST_LEN], [4; DIGEST_LEN]],
        }
    }

    #[test]
    fn shard_headers_round_trip() {
        let bytes = shard().encode();
        assert_eq!(Shard::len_of_header(&bytes), Ok(bytes.len()));
        assert_eq!(Shard::decode(&bytes, shard().file_len()), Ok(shard()));
        assert_eq!(shard().rows_of(3), 633..667);
        assert_eq!(shard().offset_of(334), 4096 + 42);
        let needed = shard().file_len();
        assert_eq!(Shard::decode(&bytes, 5), Err(FileProblem::WrongLength { len: 5, needed }));
    }

    #[test]
    fn blocks_longer_than_the_writer_creates_are_rejected() {
        let of = |shape: &[u64], block_rows: u64| {
            let digests = vec![[0; DIGEST_LEN]; usize::try_from(Shard::blocks(1000, block_rows)).unwrap()];
            let shard =
                Shard { shape: shape.to_vec(), first_row: 0, rows: 1000, block_rows, digests, ..shard() };
            Shard::decode(&shard.encode(), shard.file_len()).map(|_| ())
        };
        // With rows of 64 KiB, a block of 4 MiB has 64 rows.
        assert_eq!(of(&[1000, 32 << 10], 64), Ok(()));
        let inconsistent = Err(malformed("the header is inconsistent"));
        assert_eq!(of(&[1000, 32 << 10], 65), inconsistent);
        assert_eq!(of(&[1000, 0], 64), inconsistent);
    }

    proptest! {
        #[test]
        fn any_changed_bit_of_the_header_is_detected(at: prop::sample::Index, bit in 0u8..8) {
            let mut bytes = shard().encode();
            bytes[at.index(shard().encode().len())] ^= 1 << bit;
            prop_assert!(Shard::decode(&bytes, shard().file_len()).is_err());
        }

        /// Changes the header but not the validity of its digest, so that the checks after the digest run.
        #[test]
        fn arbitrary_headers_never_panic(at in 8usize..88, number: u64, len: u64) {
            let mut bytes = shard().encode();
            let end = (at + 8).min(88);
            bytes[at..end].copy_from_slice(&number.to_le_bytes()[..end - at]);
            let rest = bytes.len() - DIGEST_LEN;
            let own = digest(&bytes[..rest]);
            bytes[rest..].copy_from_slice(&own);
            if let Ok(shard) = Shard::decode(&bytes, len) {
                prop_assert_eq!(shard.file_len(), len);
            }
            let _ = Shard::decode(&bytes, shard().file_len());
        }
    }
}
