//! The expected content of table rows: the bytes of a pattern at the offset of each row, generated and summed by all cores.

use std::num::NonZero;
use std::thread;

use wholemem_hal::pattern::{checksum_term, word};

/// The value that bytes have before rows are copied to them, so that bytes that are not copied are detected.
pub(super) const POISON: u8 = 0xEE;

const WORD: usize = size_of::<u64>();

/// Rows are generated in blocks of about `BYTES` bytes, whose number of rows is a multiple of `ROWS`, so that a block is a
/// multiple of 8 bytes.
const ROWS: usize = 8;
const BYTES: usize = 32 << 10;

/// Returns the number of cores.
pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZero::get)
}

/// Fills `target` with the expected bytes of row number `row` of a table that was filled with the pseudorandom pattern of
/// `seed`.
fn write_row(seed: u64, row: u64, target: &mut [u8]) {
    let start = row.wrapping_mul(target.len() as u64);
    let (mut index, mut skipped) = (start / WORD as u64, usize::try_from(start % WORD as u64).unwrap_or(0));
    let mut rest = target;
    while !rest.is_empty() {
        let bytes = word(seed, index).to_ne_bytes();
        let bytes = &bytes[skipped..];
        let (now, later) = rest.split_at_mut(bytes.len().min(rest.len()));
        now.copy_from_slice(&bytes[..now.len()]);
        (rest, skipped, index) = (later, 0, index + 1);
    }
}

/// Fills `target` with the expected bytes of rows of a table that was filled with the pseudorandom pattern of `seed`. `row_of`
/// returns the number of the row to write at a position.
pub(super) fn write_rows(seed: u64, row_len: usize, row_of: impl Fn(u64) -> u64 + Sync, target: &mut [u8]) {
    in_parallel(target, row_len, |first, part| {
        let rows = (first..).zip(part.chunks_exact_mut(row_len));
        rows.for_each(|(position, row)| write_row(seed, row_of(position), row));
    });
}

/// Returns the checksum of `count` contiguous rows, padded with poison bytes to a multiple of 8 bytes.
pub(super) fn sum_rows(seed: u64, row_len: usize, count: u64, row_of: impl Fn(u64) -> u64 + Sync) -> u64 {
    let parts = cores() as u64;
    let step = count.div_ceil(parts).next_multiple_of(ROWS as u64).max(ROWS as u64);
    let sum_part = |first: u64| {
        let end = count.min(first.saturating_add(step));
        if row_len.is_multiple_of(WORD) {
            sum_whole_words(seed, (row_len / WORD) as u64, first..end, &row_of)
        } else {
            sum_bytes(seed, row_len, first..end, &row_of)
        }
    };
    thread::scope(|scope| {
        let firsts = (0..parts).map(|part| part * step).filter(|first| *first < count);
        let threads: Vec<_> = firsts.map(|first| scope.spawn(move || sum_part(first))).collect();
        threads.into_iter().map(join_thread).fold(0, u64::wrapping_add)
    })
}

fn sum_whole_words(
    seed: u64,
    words: u64,
    positions: std::ops::Range<u64>,
    row_of: &impl Fn(u64) -> u64,
) -> u64 {
    let mut sum = 0_u64;
    for position in positions {
        let (from, to) = (row_of(position) * words, position * words);
        for at in 0..words {
            sum = sum.wrapping_add(checksum_term(word(seed, from + at), to + at));
        }
    }
    sum
}

fn sum_bytes(
    seed: u64,
    row_len: usize,
    positions: std::ops::Range<u64>,
    row_of: &impl Fn(u64) -> u64,
) -> u64 {
    let block = (BYTES / row_len).next_multiple_of(ROWS).max(ROWS);
    let mut bytes = vec![0; block * row_len];
    let mut sum = 0_u64;
    for first in positions.clone().step_by(block) {
        let mut filled = 0;
        for position in first..positions.end.min(first + block as u64) {
            write_row(seed, row_of(position), &mut bytes[filled..filled + row_len]);
            filled += row_len;
        }
        let end = filled.next_multiple_of(WORD);
        bytes[filled..end].fill(POISON);
        let index = first * row_len as u64 / WORD as u64;
        let (words, _) = bytes[..end].as_chunks::<WORD>();
        for (word, index) in words.iter().zip(index..) {
            sum = sum.wrapping_add(checksum_term(u64::from_ne_bytes(*word), index));
        }
    }
    sum
}

/// Returns the position of the first wrong row in `seen`, and of the first wrong byte in that row.
pub(super) fn first_difference(
    seed: u64,
    row_len: usize,
    row_of: impl Fn(u64) -> u64,
    seen: &[u8],
) -> Option<(u64, usize)> {
    let mut expected = vec![0; row_len];
    (0..).zip(seen.chunks_exact(row_len)).find_map(|(position, seen)| {
        write_row(seed, row_of(position), &mut expected);
        let byte = seen.iter().zip(&expected).position(|(seen, expected)| seen != expected)?;
        Some((position, byte))
    })
}

/// Returns the result of a thread, or propagates its panic.
pub(super) fn join_thread<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Divides `target`, which has items of `len` bytes, among all cores. `work` gets the index of the first item of its part, and
/// the part.
pub(super) fn in_parallel(target: &mut [u8], len: usize, work: impl Fn(u64, &mut [u8]) + Sync) {
    let items = target.len() / len;
    let step = items.div_ceil(cores()).max(1);
    thread::scope(|scope| {
        for (part, first) in target.chunks_mut(step * len).zip((0..).step_by(step)) {
            let work = &work;
            scope.spawn(move || work(first, part));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generates the first `len` bytes of a table that contains the pattern of `seed`, word by word.
    fn table(seed: u64, len: usize) -> Vec<u8> {
        (0..).flat_map(|index| word(seed, index).to_ne_bytes()).take(len).collect()
    }

    fn row_of(position: u64) -> u64 {
        position * 37 % 50
    }

    #[test]
    fn written_rows_match_the_pattern_and_its_checksum() {
        for row_len in [1, 4, 8, 12, 100, 130, 1024] {
            for count in [1, 7, 8, 300] {
                let table = table(5, 50 * row_len);
                let expected: Vec<u8> = (0..count as u64)
                    .flat_map(|position| {
                        let start = usize::try_from(row_of(position)).unwrap() * row_len;
                        table[start..start + row_len].to_vec()
                    })
                    .collect();
                let mut rows = vec![0; count * row_len];
                write_rows(5, row_len, row_of, &mut rows);
                assert_eq!(rows, expected, "{count} rows of {row_len}");

                rows.resize(rows.len().next_multiple_of(WORD), POISON);
                let words = rows.chunks_exact(WORD).zip(0..);
                let sum = words.fold(0_u64, |sum, (bytes, index)| {
                    sum.wrapping_add(checksum_term(u64::from_ne_bytes(bytes.try_into().unwrap()), index))
                });
                assert_eq!(sum_rows(5, row_len, count as u64, row_of), sum, "{count} rows of {row_len}");
            }
        }
    }

    #[test]
    fn the_first_wrong_byte_is_found() {
        let mut rows = vec![0; 300];
        write_rows(9, 100, row_of, &mut rows);
        assert_eq!(first_difference(9, 100, row_of, &rows), None);
        rows[207] ^= 1;
        assert_eq!(first_difference(9, 100, row_of, &rows), Some((2, 7)));
    }
}
