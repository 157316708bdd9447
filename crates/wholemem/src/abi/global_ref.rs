//! `GlobalRef`: 64 bytes from which a kernel computes the address of any row.
//!
//! ```text
//!   chunks = 1    base ------------------> row 0, row 1, row 2 ...                 one range of addresses
//!
//!   chunks = 3    base --> [ A | B | C ][ 0 | 4 | 8 | 10 ]                         a base for each rank, and the
//!                            |   |   |                                             first row of each
//!                            v   v   +----------> rows 8, 9
//!                         rows  rows              a row's chunk: row / chunk_rows where the chunks are equal,
//!                         0..4  4..8              otherwise a binary search in the starts
//! ```
//!
//! A kernel divides by a multiplication with a precomputed factor, which is exact for every row.

/// The addresses of the rows of a table, as CPU and GPU kernels read them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GlobalRef {
    /// With one chunk, the address of row 0. With more, the address of the chunks' addresses, and behind them of the
    /// first row of each and the number of all.
    pub base: u64,
    /// Valid indices are below this.
    pub rows: u64,
    /// Added to an index before its chunk is looked up; zero with one chunk.
    pub first_row: u64,
    /// Bytes from one row to the next.
    pub stride: u64,
    /// Bytes from the start of a row in its chunk to the start of the row of this view; zero with one chunk.
    pub offset: u64,
    /// The rows of every chunk but the last; zero to search.
    pub chunk_rows: u64,
    /// The multiplier of the division by `chunk_rows`.
    pub magic: u64,
    /// The shift of the division by `chunk_rows`.
    pub shift: u32,
    /// The number of chunks; zero for a table without rows.
    pub chunks: u32,
}

const _: () = assert!(size_of::<GlobalRef>() == 64);

impl GlobalRef {
    /// A table whose rows follow each other from `base` on.
    #[must_use]
    pub fn continuous(base: u64, rows: u64, stride: u64) -> Self {
        let [first_row, offset, chunk_rows, magic] = [0; 4];
        Self { base, rows, first_row, stride, offset, chunk_rows, magic, shift: 0, chunks: 1 }
    }

    /// A view of the table: `rows` rows from `first_row` on, each from byte `offset` on.
    #[must_use]
    pub fn part(self, first_row: u64, rows: u64, offset: u64) -> Self {
        if self.chunks == 1 {
            Self { base: self.base + first_row * self.stride + offset, rows, ..self }
        } else {
            Self { first_row: self.first_row + first_row, rows, offset: self.offset + offset, ..self }
        }
    }

    /// The chunk of a row and the number of the row in the chunk, given the first row of each chunk.
    ///
    /// `row` is a valid index with `first_row` added; `starts` is the second half of the directory.
    #[must_use]
    pub fn locate(&self, row: u64, starts: &[u64]) -> (usize, u64) {
        let chunk = if self.chunk_rows == 0 {
            starts.partition_point(|start| *start <= row) - 1
        } else {
            usize::try_from(self.division().quotient(row)).unwrap_or(usize::MAX)
        };
        (chunk, row - starts[chunk])
    }

    fn division(&self) -> Division {
        Division { by: self.chunk_rows, magic: self.magic, shift: self.shift }
    }

    /// Encodes it as a kernel reads it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 64] {
        let Self { base, rows, first_row, stride, offset, chunk_rows, magic, shift, chunks } = *self;
        let words = [base, rows, first_row, stride, offset, chunk_rows, magic];
        let mut bytes = [0; 64];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        bytes[56..60].copy_from_slice(&shift.to_ne_bytes());
        bytes[60..].copy_from_slice(&chunks.to_ne_bytes());
        bytes
    }

    /// Decodes what [`to_bytes`](Self::to_bytes) encoded.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
            u64::from_ne_bytes(word)
        };
        let half = |at: usize| {
            let mut half = [0; 4];
            half.copy_from_slice(&bytes[at..at + 4]);
            u32::from_ne_bytes(half)
        };
        Self {
            base: word(0),
            rows: word(1),
            first_row: word(2),
            stride: word(3),
            offset: word(4),
            chunk_rows: word(5),
            magic: word(6),
            shift: half(56),
            chunks: half(60),
        }
    }
}

/// An exact division of any 64-bit number by a fixed one.
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
    /// `None` for 0, for 1, whose multiplier has too many bits, and for divisors above 2^63.
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

/// A product in two halves.
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

        #[test]
        fn bytes_are_read_as_they_were_written(words: [u64; 7], shift: u32, chunks: u32) {
            let [base, rows, first_row, stride, offset, chunk_rows, magic] = words;
            let table = GlobalRef { base, rows, first_row, stride, offset, chunk_rows, magic, shift, chunks };
            prop_assert_eq!(GlobalRef::from_bytes(&table.to_bytes()), table);
        }
    }
}
