//! Tests of gathers and scatters on the CPU: of rows of every length, of rows beyond 4 GiB, and with streaming stores.

use super::*;
use crate::abi::GlobalRef;

fn address(at: *const u8) -> u64 {
    at.expose_provenance() as u64
}

/// Gathers a row from a table of terabytes of which only that row is mapped, because addresses must be computed in 64 bits, also
/// for 32-bit indices.
#[test]
fn short_indices_address_rows_beyond_4_gib() {
    const STRIDE: u64 = 4096;
    for (index, len) in [(i32::MAX, 100_usize), (i32::MAX - 1, 16), (1 << 21, 4096), (1 << 20, 1)] {
        let row: Vec<u8> = (0..len).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let mut output = vec![0xA5_u8; len + 2];
        let indices = [index];
        let offset = u64::from(index.cast_unsigned()) * STRIDE;
        let table = GlobalRef::continuous(address(row.as_ptr()).wrapping_sub(offset), 1 << 31, STRIDE);
        let request = RowsRequest {
            table,
            indices: address(indices.as_ptr().cast()),
            count: 1,
            rows: address(output[1..].as_mut_ptr()),
            rows_stride: len as u64,
            row_len: len as u64,
            bad: 0,
        };
        // SAFETY: the only index names the row that is mapped, and the output has the length of a row.
        unsafe { gather::<i32>(&request) };
        assert_eq!(output[1..=len], row);
        assert_eq!((output[0], output[len + 1]), (0xA5, 0xA5));
    }
}

#[test]
fn streaming_stores_write_the_same_rows() {
    const LEN: usize = 128;
    let count = usize::try_from(STREAMING).unwrap() / LEN;
    let table: Vec<u8> = (0..64 * LEN).map(|at| u8::try_from(at % 251).unwrap()).collect();
    let indices: Vec<i64> = (0..).map(|at: i64| at * 7 % 64).take(count).collect();
    let mut output = vec![0_u8; count * LEN + LINE];
    let start = output.as_ptr().align_offset(LINE);
    let request = RowsRequest {
        table: GlobalRef::continuous(address(table.as_ptr()), 64, LEN as u64),
        indices: address(indices.as_ptr().cast()),
        count: count as u64,
        rows: address(output[start..].as_mut_ptr()),
        rows_stride: LEN as u64,
        row_len: LEN as u64,
        bad: 0,
    };
    // SAFETY: every index names a row, and the output has the length of all rows.
    unsafe { gather::<i64>(&request) };
    for (row, index) in output[start..].chunks_exact(LEN).zip(&indices) {
        let from = usize::try_from(*index).unwrap() * LEN;
        assert_eq!(row, &table[from..from + LEN]);
    }
}

/// Returns the test bytes of the table row with the given index.
fn row_of(index: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + index * 89 + at / 64).to_le_bytes()[0]).collect()
}

/// Returns all row lengths up to a few registers more than the longest register group, and some longer ones. Miri runs fewer.
fn lens() -> impl Iterator<Item = usize> {
    let around = |middle: usize| middle - 3..=middle + 3;
    let all = (1..=600).chain(around(1024)).chain(around(4096)).chain(around(8192));
    all.step_by(if cfg!(miri) { 61 } else { 1 })
}

const GUARD: u8 = 0xA5;

/// Gathers rows of every length, with registers of every width that the CPU has, at any offset in a cache line. The result must
/// be that of a naive loop, with zeros for a bad index, and no other byte may change.
#[test]
fn rows_of_every_length_are_gathered_by_registers_of_every_width() {
    const INDICES: [i64; 9] = [3, 0, -1, 7, 7, i64::MIN, 2, 8, 5];
    const ROWS: usize = 8;
    const GAP: usize = 5;
    for len in lens() {
        // The offset in a cache line at which rows begin depends on the length, to test many alignments.
        let (from, to) = (len * 7 % 64, len * 13 % 64);
        let stride = len + 3;
        let mut table = vec![GUARD; from + ROWS * stride];
        for index in 0..ROWS {
            table[from + index * stride..][..len].copy_from_slice(&row_of(index, len));
        }
        let mut expected = vec![GUARD; 64 + to + INDICES.len() * (len + GAP) + 64];
        for (at, index) in INDICES.iter().enumerate() {
            let index = usize::try_from(*index).ok().filter(|index| *index < ROWS);
            let row = index.map_or_else(|| vec![0; len], |index| row_of(index, len));
            expected[64 + to + at * (len + GAP)..][..len].copy_from_slice(&row);
        }
        for widest in [16, 32, 64].into_iter().filter(|widest| *widest <= native::widest()) {
            let mut output = vec![GUARD; expected.len()];
            let mut bad = [u64::MAX; 4];
            let request = RowsRequest {
                table: GlobalRef::continuous(address(table[from..].as_ptr()), ROWS as u64, stride as u64),
                indices: address(INDICES.as_ptr().cast()),
                count: INDICES.len() as u64,
                rows: address(output[64 + to..].as_mut_ptr()),
                rows_stride: (len + GAP) as u64,
                row_len: len as u64,
                bad: address(bad.as_mut_ptr().cast()),
            };
            // SAFETY: every valid index names a row, the output has the length of all rows, and the bad-index record has four
            // words.
            unsafe { gather_by::<i64>(widest, &request) };
            assert!(output == expected, "rows of {len} bytes by registers of {widest}");
            assert_eq!(bad[0], 2);
        }
    }
}

/// A scatter must change a row of the table for each valid index, and no other byte.
#[test]
fn rows_of_every_length_are_scattered() {
    const INDICES: [i32; 5] = [3, -1, 0, 8, 7];
    const ROWS: usize = 8;
    for len in lens() {
        let (from, to) = (len * 11 % 64, len * 5 % 64);
        let stride = len + 3;
        let input: Vec<u8> = std::iter::repeat_n(GUARD, from)
            .chain((0..INDICES.len()).flat_map(|at| row_of(at, len)))
            .collect();
        let mut table = vec![GUARD; 64 + to + ROWS * stride + 64];
        let mut expected = table.clone();
        for (at, index) in INDICES.iter().enumerate() {
            if let Some(index) = usize::try_from(*index).ok().filter(|index| *index < ROWS) {
                expected[64 + to + index * stride..][..len].copy_from_slice(&row_of(at, len));
            }
        }
        let mut bad = [u64::MAX; 4];
        let request = RowsRequest {
            table: GlobalRef::continuous(address(table[64 + to..].as_mut_ptr()), ROWS as u64, stride as u64),
            indices: address(INDICES.as_ptr().cast()),
            count: INDICES.len() as u64,
            rows: address(input[from..].as_ptr()),
            rows_stride: len as u64,
            row_len: len as u64,
            bad: address(bad.as_mut_ptr().cast()),
        };
        // SAFETY: every valid index names a row of the table, the input has all rows, and the bad-index record has four words.
        unsafe { scatter::<i32>(&request) };
        assert!(table == expected, "rows of {len} bytes");
        assert_eq!(bad[0], 1);
    }
}
