//! `GlobalRef`: 64 bytes from which a kernel computes the address of any row of a table.

use wholemem_os::width::to_usize;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The addresses of the rows of a table, whose rows are in one or several chunks (ranges of addresses).
///
/// ```text
///   chunks = 1    base ------------------> row 0, row 1, row 2 ...            one range of addresses
///
///   chunks = 3    base --> [ A | B | C ][ 0 | 4 | 8 | 10 ]                    an address for each chunk, then the
///                            |   |   |                                        first row of each and the number of rows
///                            v   v   +----------> rows 8, 9
///                         rows  rows              a row's chunk: row / chunk_rows if the chunks are equal,
///                         0..4  4..8              otherwise a binary search in the first rows
/// ```
///
/// A kernel divides by a multiplication with a precomputed factor, which is exact for every row.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct GlobalRef {
    /// For one chunk, the address of row 0. For several chunks, the address of a directory: `u64 bases[chunks]`, then
    /// `u64 starts[chunks + 1]`.
    pub base: u64,
    /// The number of rows. Valid indices are less than this number.
    pub rows: u64,
    /// The number that is added to an index before its chunk is looked up. With one chunk it is zero, because it is part of
    /// `base`.
    pub first_row: u64,
    /// The number of bytes from one row to the next, in every chunk.
    pub stride: u64,
    /// The number of bytes that is added to the address of a row. With one chunk it is zero, because it is part of `base`.
    pub offset: u64,
    /// The number of rows in every chunk but the last that is not empty. Zero selects a binary search for the chunk, because the
    /// chunks differ or have one row each.
    pub chunk_rows: u64,
    /// The multiplier with which kernels divide a row by `chunk_rows`.
    pub magic: u64,
    /// The shift with which kernels divide a row by `chunk_rows`.
    pub shift: u32,
    /// The number of chunks, each of which has its own range of addresses; zero for a table without rows.
    pub chunks: u32,
}

layout!(GlobalRef: 64 {
    base: 0, rows: 8, first_row: 16, stride: 24, offset: 32, chunk_rows: 40, magic: 48, shift: 56, chunks: 60,
});

impl GlobalRef {
    /// Creates a reference to a table whose rows are in one chunk, `stride` bytes apart from `base` on.
    #[must_use]
    pub fn continuous(base: u64, rows: u64, stride: u64) -> Self {
        let [first_row, offset, chunk_rows, magic] = [0; 4];
        Self { base, rows, first_row, stride, offset, chunk_rows, magic, shift: 0, chunks: 1 }
    }

    /// Returns a view of the table: `rows` rows from `first_row` on, without the first `offset` bytes of each row.
    #[must_use]
    pub fn part(self, first_row: u64, rows: u64, offset: u64) -> Self {
        if self.chunks == 1 {
            Self { base: self.base + first_row * self.stride + offset, rows, ..self }
        } else {
            Self { first_row: self.first_row + first_row, rows, offset: self.offset + offset, ..self }
        }
    }

    /// Returns the chunk of a row and the number of the row in that chunk, given the first row of each chunk.
    ///
    /// `row` is a valid index with `first_row` added; `starts` is the second half of the directory.
    #[must_use]
    pub fn locate(&self, row: u64, starts: &[u64]) -> (usize, u64) {
        let chunk = if self.chunk_rows == 0 {
            starts.partition_point(|start| *start <= row) - 1
        } else {
            to_usize(self.division().quotient(row))
        };
        (chunk, row - starts[chunk])
    }

    fn division(&self) -> Division {
        Division { by: self.chunk_rows, magic: self.magic, shift: self.shift }
    }
}

/// An exact division of any 64-bit number by a constant, which needs only a multiplication and shifts.
///
/// With `l = ceil(log2 by)`, `n / by` is the upper part of `n * ceil(2^(64+l) / by)`. That multiplier has 65 bits, of
/// which the highest is always set: only the other bits are stored, and `n` is added after the multiplication, in two halves so
/// that the sum does not overflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Division {
    pub(crate) by: u64,
    pub(crate) magic: u64,
    pub(crate) shift: u32,
}

impl Division {
    /// Creates a division by the constant `by`. Returns `None` for 0, for 1 (its multiplier has too many bits), and for constants
    /// above 2^63.
    pub(crate) fn by(by: u64) -> Option<Self> {
        if !(2..=1 << 63).contains(&by) {
            return None;
        }
        let log = u64::BITS - (by - 1).leading_zeros();
        let magic = (1_u128 << (64 + log)).div_ceil(u128::from(by)) - (1 << 64);
        Some(Self { by, magic: u64::try_from(magic).ok()?, shift: log - 1 })
    }

    pub(crate) fn quotient(self, number: u64) -> u64 {
        let (_, high) = number.widening(self.magic);
        (high + ((number - high) >> 1)) >> self.shift
    }
}

/// Multiplies two 64-bit numbers to a 128-bit product, and returns its low and high half.
trait Widening {
    fn widening(self, other: u64) -> (u64, u64);
}

impl Widening for u64 {
    #[expect(clippy::cast_possible_truncation, reason = "each half is meant")]
    fn widening(self, other: u64) -> (u64, u64) {
        let product = u128::from(self) * u128::from(other);
        (product as u64, (product >> 64) as u64)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn divisors_without_a_multiplier_have_none() {
        assert_eq!([0, 1, (1 << 63) + 1, u64::MAX].map(Division::by), [None; 4]);
    }

    #[test]
    fn numbers_around_every_multiple_are_divided_exactly() {
        for by in (2..200).chain([641, 1 << 20, (1 << 31) - 1, (1 << 33) + 1, (1 << 62) + 3, 1 << 63]) {
            let division = Division::by(by).unwrap();
            let far = (u64::MAX / by) * by;
            for near in [0, by, 3 * by.min(1 << 61), far / 2 / by * by, far] {
                for number in [near.wrapping_sub(1), near, near.saturating_add(1), u64::MAX] {
                    assert_eq!(division.quotient(number), number / by, "{number} / {by}");
                }
            }
        }
    }

    #[test]
    fn a_view_of_one_chunk_is_only_another_base() {
        let table = GlobalRef::continuous(4096, 100, 64);
        assert_eq!(table.part(3, 10, 8), GlobalRef::continuous(4096 + 3 * 64 + 8, 10, 64));
    }

    proptest! {
        #[test]
        fn any_number_is_divided_exactly(number: u64, by in 2_u64..=1 << 63, small in 2_u64..1_000_000) {
            for by in [by, small] {
                prop_assert_eq!(Division::by(by).unwrap().quotient(number), number / by);
            }
        }
    }
}
