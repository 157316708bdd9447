//! Gather and scatter of rows as bytes on the CPU.
//!
//! A random row misses in every cache and in the TLB. The CPU keeps many short rows in flight, and its prefetcher fetches the
//! rest of a long row. Software prefetches, some rows ahead, help only for streaming stores and for scatters; elsewhere they
//! would occupy the line fill buffers.

#[cfg(test)]
mod tests;

use std::ops::Range;

use wholemem_os::SharedSlice;

use super::copy::native;
use super::parallel::for_each_range;
use super::row_lookup::{Index, RowLookup};
use crate::abi::RowsRequest;
use wholemem_os::width::to_usize;

/// The length in bytes of a cache line.
const LINE: usize = 64;

/// The maximum length in bytes of rows that are never prefetched, because the CPU keeps enough of them in flight.
const SHORT: usize = 192;

/// The maximum number of rows, and the approximate number of bytes, that a gather or scatter looks up and prefetches before it
/// copies them.
const ROWS_AHEAD: usize = 32;
const BYTES_AHEAD: usize = 8 << 10;

/// The minimum length in bytes of a gather's output for stores that bypass the caches, because the output would not fit in them.
const STREAMING: u64 = 32 << 20;

/// A way to copy one row, chosen once for all rows of a gather or scatter.
trait RowCopier: Copy + Sync {
    /// Returns the length of a row in bytes.
    fn len(&self) -> usize;

    /// Returns true if the rows of the table are prefetched before they are copied.
    fn prefetches(&self) -> bool {
        false
    }

    /// Copies one row.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for `len` bytes, as raw memory.
    unsafe fn apply(&self, from: *const u8, to: *mut u8);

    /// Completes the copies. It is called after the rows of each range.
    fn finish(&self) {}
}

/// Copies rows of a constant length.
#[derive(Clone, Copy)]
struct FixedLen<const LEN: usize>;

impl<const LEN: usize> RowCopier for FixedLen<LEN> {
    #[inline(always)]
    fn len(&self) -> usize {
        LEN
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller of `apply` guarantees that `from` is readable and `to` writable for `LEN` bytes.
        unsafe { native::exact::<LEN>(from, to) }
    }
}

/// Copies rows of at most four registers to memory that only this call writes. The first and last registers may overlap.
#[derive(Clone, Copy)]
struct OverlappingEnds<const WIDTH: usize, const COUNT: usize>(usize);

impl<const WIDTH: usize, const COUNT: usize> RowCopier for OverlappingEnds<WIDTH, COUNT> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller of `apply` guarantees a valid row on both sides; `gather_by` chooses this copier only for lengths of
        // `WIDTH * COUNT` to twice that, and for registers of a width that the CPU has.
        unsafe { native::ends::<WIDTH, COUNT>(from, to, self.0) }
    }

    #[inline(always)]
    fn finish(&self) {
        native::leave();
    }
}

/// Copies rows of more than four registers to memory that only this call writes.
#[derive(Clone, Copy)]
struct LongRow<const WIDTH: usize>(usize);

impl<const WIDTH: usize> RowCopier for LongRow<WIDTH> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller of `apply` guarantees a valid row on both sides; `gather_by` chooses this copier only for lengths of
        // at least `4 * WIDTH`, and for registers of a width that the CPU has.
        unsafe { native::long::<WIDTH>(from, to, self.0) }
    }

    #[inline(always)]
    fn finish(&self) {
        native::leave();
    }
}

/// Copies rows of any length to memory that other ranks may write too.
#[derive(Clone, Copy)]
struct AnyLen(usize);

impl RowCopier for AnyLen {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller of `apply` guarantees that `from` is readable and `to` writable for the length of a row.
        unsafe { native::any(from, to, self.0) }
    }

    #[inline(always)]
    fn prefetches(&self) -> bool {
        self.0 > SHORT
    }
}

/// Copies rows of whole cache lines with stores that bypass the caches.
#[derive(Clone, Copy)]
struct StreamingStores(usize);

impl RowCopier for StreamingStores {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller of `apply` guarantees a valid row on both sides; `gather_by` chooses this copier only for rows of
        // whole, aligned lines.
        unsafe { native::streaming(from, to, self.0) }
    }

    #[inline(always)]
    fn finish(&self) {
        native::finish();
    }

    #[inline(always)]
    fn prefetches(&self) -> bool {
        self.0 > SHORT
    }
}

/// Evaluates `$body` with the row copier of the first matching pattern. The choice is made once for all rows, so that each row
/// needs few instructions and the CPU keeps many rows in flight.
macro_rules! with_mover {
    ($what:expr, $copier:ident => $body:expr; $($pattern:pat => $choice:expr,)+) => {
        match $what {
            $($pattern => {
                let $copier = $choice;
                $body
            })+
        }
    };
}

/// Copies rows of the table to the row buffer. Rows of bad indices become zero.
///
/// # Safety
/// All memory of the request is mapped: the indices and the rows of all valid indices are readable, the row buffer is writable.
/// Other threads and processes may write it concurrently.
pub(super) unsafe fn gather<I: Index>(request: &RowsRequest) {
    // SAFETY: the caller of `gather` guarantees that all memory of the request is mapped, and the CPU has registers of `widest`
    // bytes.
    unsafe { gather_by::<I>(native::widest(), request) }
}

/// Copies rows of the table to the row buffer as [`gather`] does, with vector registers of at most `widest` bytes.
///
/// # Safety
/// As [`gather`]; the CPU has such registers.
unsafe fn gather_by<I: Index>(widest: usize, request: &RowsRequest) {
    // SAFETY: the caller of `gather_by` guarantees that all memory of the request is mapped, including the table's directory,
    // which never changes.
    let lookup = unsafe { RowLookup::new(request) };
    let len = to_usize(request.row_len);
    let whole_lines = (request.rows | request.rows_stride | request.row_len).is_multiple_of(LINE as u64);
    if whole_lines && request.count.saturating_mul(request.row_len) >= STREAMING {
        // SAFETY: the caller of `gather_by` guarantees that all memory of the request is mapped, with the rights of a gather.
        return unsafe { copy_all::<I, _, true>(lookup, request, StreamingStores(len)) };
    }
    with_mover!((widest, len), copier => {
        // SAFETY: the caller of `gather_by` guarantees that all memory of the request is mapped, with the rights of a gather.
        unsafe { copy_all::<I, _, true>(lookup, request, copier) }
    };
        (_, 1) => FixedLen::<1>,
        (_, 2) => FixedLen::<2>,
        (_, 4) => FixedLen::<4>,
        (_, 8) => FixedLen::<8>,
        (_, 12) => FixedLen::<12>,
        (_, 16) => FixedLen::<16>,
        (_, ..16) => AnyLen(len),
        (_, ..=32) => OverlappingEnds::<16, 1>(len),
        (16, _) => AnyLen(len),
        (_, ..=64) => OverlappingEnds::<32, 1>(len),
        (32, ..=128) => OverlappingEnds::<32, 2>(len),
        (32, _) => LongRow::<32>(len),
        (_, ..=128) => OverlappingEnds::<64, 1>(len),
        (_, ..=256) => OverlappingEnds::<64, 2>(len),
        _ => LongRow::<64>(len),
    );
}

/// Copies rows of the row buffer to the table. Rows of bad indices are skipped.
///
/// # Safety
/// As [`gather`], with the table writable and the row buffer readable.
pub(super) unsafe fn scatter<I: Index>(request: &RowsRequest) {
    // SAFETY: the caller of `scatter` guarantees that all memory of the request is mapped, including the table's directory, which
    // never changes.
    let lookup = unsafe { RowLookup::new(request) };
    let len = to_usize(request.row_len);
    with_mover!(len, copier => {
        // SAFETY: the caller of `scatter` guarantees that all memory of the request is mapped, with the rights of a scatter.
        unsafe { copy_all::<I, _, false>(lookup, request, copier) }
    };
        1 => FixedLen::<1>,
        2 => FixedLen::<2>,
        4 => FixedLen::<4>,
        8 => FixedLen::<8>,
        12 => FixedLen::<12>,
        16 => FixedLen::<16>,
        24 => FixedLen::<24>,
        32 => FixedLen::<32>,
        48 => FixedLen::<48>,
        64 => FixedLen::<64>,
        96 => FixedLen::<96>,
        128 => FixedLen::<128>,
        _ => AnyLen(len),
    );
}

/// Copies all rows of a gather or scatter, in several threads if there are many.
///
/// # Safety
/// As [`gather`] or [`scatter`].
unsafe fn copy_all<I: Index, M: RowCopier, const GATHER: bool>(
    lookup: RowLookup<'_>,
    request: &RowsRequest,
    copier: M,
) {
    for_each_range(request.count, request.row_len, |range| {
        // SAFETY: the caller of `copy_all` guarantees that all memory of the request is mapped, and `range` is within its
        // positions.
        unsafe { copy_rows::<I, M, GATHER>(lookup, copier, range) };
        copier.finish();
    });
}

/// Copies the rows of a range of positions of a gather or scatter.
///
/// The lookup is passed by value: the compiler would reload a reference after each `asm!`, which may write memory.
///
/// # Safety
/// As [`gather`] or [`scatter`].
unsafe fn copy_rows<I: Index, M: RowCopier, const GATHER: bool>(
    lookup: RowLookup<'_>,
    copier: M,
    range: Range<u64>,
) {
    if !copier.prefetches() {
        for position in range {
            // SAFETY: the position is less than the number of indices of the request, which the caller guarantees to be readable.
            let row = unsafe { lookup.table_row::<I>(position) };
            // SAFETY: the caller of `copy_rows` guarantees that all memory of the request is mapped; `row` was looked up for
            // `position`.
            unsafe {
                copy_row::<I, M, GATHER>(&lookup, copier, position, row.unwrap_or(std::ptr::null_mut()))
            };
        }
        return;
    }
    let batch = (BYTES_AHEAD / copier.len()).clamp(1, ROWS_AHEAD) as u64;
    let (mut found, mut next) = ([std::ptr::null_mut(); ROWS_AHEAD], [std::ptr::null_mut(); ROWS_AHEAD]);
    let ahead = |start: u64| start..range.end.min(start + batch);
    // SAFETY: the caller of `copy_rows` guarantees that all memory of the request is mapped, and the positions are within
    // `range`.
    unsafe { look_up_ahead::<I, M, GATHER>(&lookup, copier, ahead(range.start), &mut found) };
    let mut start = range.start;
    while start < range.end {
        let now = ahead(start);
        start = now.end;
        // SAFETY: the caller of `copy_rows` guarantees that all memory of the request is mapped, and the positions are within
        // `range`.
        unsafe { look_up_ahead::<I, M, GATHER>(&lookup, copier, ahead(start), &mut next) };
        for (position, row) in now.zip(found) {
            // SAFETY: the caller of `copy_rows` guarantees that all memory of the request is mapped; `row` was looked up for
            // `position`.
            unsafe { copy_row::<I, M, GATHER>(&lookup, copier, position, row) };
        }
        std::mem::swap(&mut found, &mut next);
    }
}

/// Copies the row at one position of a gather or scatter, where `row` is the row of the table, or null for a bad index.
///
/// # Safety
/// As [`gather`] or [`scatter`].
#[inline(always)]
unsafe fn copy_row<I: Index, M: RowCopier, const GATHER: bool>(
    lookup: &RowLookup<'_>,
    copier: M,
    position: u64,
    row: *mut u8,
) {
    let dense = lookup.dense_row(position);
    if row.is_null() {
        // SAFETY: the caller of `copy_row` guarantees that all memory of the request is mapped; `dense` is the row buffer's row
        // at `position`.
        unsafe { handle_bad_index::<I, GATHER>(*lookup, position, dense, copier.len()) };
    } else if GATHER {
        // SAFETY: `row` is a row of the table and `dense` a row of the row buffer; the caller of `copy_row` guarantees that both
        // are mapped for the length of a row, with the rights of a gather.
        unsafe { copier.apply(row, dense) };
    } else {
        // SAFETY: `row` is a row of the table and `dense` a row of the row buffer; the caller of `copy_row` guarantees that both
        // are mapped for the length of a row, with the rights of a scatter.
        unsafe { copier.apply(dense, row) };
    }
}

/// Looks up the table rows of a range of positions and prefetches them. Stores null for a bad index.
///
/// # Safety
/// As [`gather`] or [`scatter`].
#[inline(always)]
unsafe fn look_up_ahead<I: Index, M: RowCopier, const GATHER: bool>(
    lookup: &RowLookup<'_>,
    copier: M,
    range: Range<u64>,
    found: &mut [*mut u8; ROWS_AHEAD],
) {
    for (position, place) in range.zip(found) {
        // SAFETY: the position is less than the number of indices of the request, which the caller guarantees to be readable.
        let row = unsafe { lookup.table_row::<I>(position) };
        *place = row.unwrap_or(std::ptr::null_mut());
        if let Some(row) = row {
            // The loop over the cache lines has the same number of iterations for every row, which the branch predictor learns.
            let last = copier.len() - 1;
            for at in (0..last).step_by(LINE).chain([last]) {
                let line = row.wrapping_add(at);
                if GATHER { native::will_read(line) } else { native::will_write(line) }
            }
        }
    }
}

/// Records an index that names no row. A gather also sets its row of the output to zero.
///
/// # Safety
/// As [`gather`] or [`scatter`].
#[cold]
unsafe fn handle_bad_index<I: Index, const GATHER: bool>(
    lookup: RowLookup<'_>,
    position: u64,
    dense: *mut u8,
    len: usize,
) {
    // SAFETY: the position is within the request, and the caller of `handle_bad_index` guarantees that the bad-index record is
    // mapped.
    unsafe { lookup.store_bad_index::<I>(position) };
    if GATHER {
        // SAFETY: `dense` is a row of the row buffer, which has `len` bytes.
        unsafe { zero(dense, len) };
    }
}

/// Sets `len` bytes of shared memory to zero.
///
/// # Safety
/// `len` bytes at `at` are writable, as raw memory.
pub(super) unsafe fn zero(at: *mut u8, len: usize) {
    if let Some(at) = std::ptr::NonNull::new(at) {
        // SAFETY: the caller of `zero` guarantees that `len` bytes are writable at `at`, as raw memory.
        let bytes = unsafe { SharedSlice::new(at, len, true) };
        // Filling fails only for a view that is not writable, and `bytes` is writable.
        let _ = bytes.fill(0);
    }
}
