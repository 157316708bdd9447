//! Gather and scatter of rows as bytes.
//!
//! A random row misses in every cache and in the TLB. The CPU keeps many short rows in flight, and its prefetcher fetches the
//! rest of a long row. Software prefetches, some rows ahead, help only for streaming stores and for scatters; elsewhere they
//! would occupy the line fill buffers.

#[cfg(test)]
mod tests;

use std::ops::Range;

use wholemem_os::SharedSlice;

use super::copy::machine;
use super::parallel::for_each_range;
use super::row_lookup::{Index, RowLookup};
use crate::abi::RowsRequest;
use wholemem_os::width::to_usize;

/// A cache line.
const LINE: usize = 64;

/// Rows up to this length are never prefetched: the CPU keeps enough of them in flight.
const SHORT: usize = 192;

/// The most rows, and about how many bytes, that are looked up and prefetched ahead.
const ROWS_AHEAD: usize = 32;
const BYTES_AHEAD: usize = 8 << 10;

/// From this many bytes of output on, stores bypass the caches, which would not hold them anyway.
const STREAMING: u64 = 32 << 20;

/// Copies one row.
trait Mover: Copy + Sync {
    /// The length of a row.
    fn len(&self) -> usize;

    /// Whether rows are prefetched.
    fn looks_ahead(&self) -> bool {
        false
    }

    /// # Safety
    /// `from` is readable and `to` writable for as many bytes, as raw memory.
    unsafe fn apply(&self, from: *const u8, to: *mut u8);

    /// Called after the rows of a range.
    fn finish(&self) {}
}

/// Rows of a constant length.
#[derive(Clone, Copy)]
struct Exact<const LEN: usize>;

impl<const LEN: usize> Mover for Exact<LEN> {
    #[inline(always)]
    fn len(&self) -> usize {
        LEN
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { machine::exact::<LEN>(from, to) }
    }
}

/// Rows of a few registers, to memory that only this call writes.
#[derive(Clone, Copy)]
struct Ends<const WIDTH: usize, const COUNT: usize>(usize);

impl<const WIDTH: usize, const COUNT: usize> Mover for Ends<WIDTH, COUNT> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees a row on both sides; `gather_by` chooses this only for lengths of `WIDTH * COUNT` to
        // twice that, and for registers that the CPU has.
        unsafe { machine::ends::<WIDTH, COUNT>(from, to, self.0) }
    }

    #[inline(always)]
    fn finish(&self) {
        machine::leave();
    }
}

/// Longer rows, to memory that only this call writes.
#[derive(Clone, Copy)]
struct Long<const WIDTH: usize>(usize);

impl<const WIDTH: usize> Mover for Long<WIDTH> {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees a row on both sides; `gather_by` chooses this only for lengths of at least `4 * WIDTH`, and
        // for registers that the CPU has.
        unsafe { machine::long::<WIDTH>(from, to, self.0) }
    }

    #[inline(always)]
    fn finish(&self) {
        machine::leave();
    }
}

/// Rows of any length, to memory that other ranks may write too.
#[derive(Clone, Copy)]
struct Any(usize);

impl Mover for Any {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: passed on from the caller.
        unsafe { machine::any(from, to, self.0) }
    }

    #[inline(always)]
    fn looks_ahead(&self) -> bool {
        self.0 > SHORT
    }
}

/// Rows of whole cache lines, with stores that bypass the caches.
#[derive(Clone, Copy)]
struct Streaming(usize);

impl Mover for Streaming {
    #[inline(always)]
    fn len(&self) -> usize {
        self.0
    }

    #[inline(always)]
    unsafe fn apply(&self, from: *const u8, to: *mut u8) {
        // SAFETY: the caller guarantees a row on both sides; `gather_by` chooses this only for rows of whole, aligned lines.
        unsafe { machine::streaming(from, to, self.0) }
    }

    #[inline(always)]
    fn finish(&self) {
        machine::finish();
    }

    #[inline(always)]
    fn looks_ahead(&self) -> bool {
        self.0 > SHORT
    }
}

/// Calls `$body` with the mover of the first matching pattern. The choice is made once for all rows, so that little is left to do
/// for each row and the CPU keeps many of them in flight.
macro_rules! with_mover {
    ($what:expr, $mover:ident => $body:expr; $($pattern:pat => $choice:expr,)+) => {
        match $what {
            $($pattern => {
                let $mover = $choice;
                $body
            })+
        }
    };
}

/// Copies rows of the table to the dense array. Rows of bad indices become zero.
///
/// # Safety
/// All memory of the request is mapped: the indices and the rows of all valid indices are readable, the dense array is writable.
/// Other threads and processes may write it concurrently.
pub(super) unsafe fn gather<I: Index>(request: &RowsRequest) {
    // SAFETY: the caller guarantees what `gather_by` requires, and `widest` is what the CPU has.
    unsafe { gather_by::<I>(machine::widest(), request) }
}

/// As [`gather`], with registers of at most `widest` bytes.
///
/// # Safety
/// As [`gather`]; the CPU has such registers.
unsafe fn gather_by<I: Index>(widest: usize, request: &RowsRequest) {
    // SAFETY: the caller guarantees that all memory of the request is mapped, the directory included, which never changes.
    let lookup = unsafe { RowLookup::new(request) };
    let len = to_usize(request.row_len);
    let whole_lines = (request.rows | request.rows_stride | request.row_len).is_multiple_of(LINE as u64);
    if whole_lines && request.count.saturating_mul(request.row_len) >= STREAMING {
        // SAFETY: passed on from the caller.
        return unsafe { move_all::<I, _, true>(lookup, request, Streaming(len)) };
    }
    with_mover!((widest, len), mover => {
        // SAFETY: passed on from the caller.
        unsafe { move_all::<I, _, true>(lookup, request, mover) }
    };
        (_, 1) => Exact::<1>,
        (_, 2) => Exact::<2>,
        (_, 4) => Exact::<4>,
        (_, 8) => Exact::<8>,
        (_, 12) => Exact::<12>,
        (_, 16) => Exact::<16>,
        (_, ..16) => Any(len),
        (_, ..=32) => Ends::<16, 1>(len),
        (16, _) => Any(len),
        (_, ..=64) => Ends::<32, 1>(len),
        (32, ..=128) => Ends::<32, 2>(len),
        (32, _) => Long::<32>(len),
        (_, ..=128) => Ends::<64, 1>(len),
        (_, ..=256) => Ends::<64, 2>(len),
        _ => Long::<64>(len),
    );
}

/// Copies rows of the dense array to the table. Rows of bad indices are skipped.
///
/// # Safety
/// As [`gather`], with the table writable and the dense array readable.
pub(super) unsafe fn scatter<I: Index>(request: &RowsRequest) {
    // SAFETY: the caller guarantees that all memory of the request is mapped, the directory included, which never changes.
    let lookup = unsafe { RowLookup::new(request) };
    let len = to_usize(request.row_len);
    with_mover!(len, mover => {
        // SAFETY: passed on from the caller.
        unsafe { move_all::<I, _, false>(lookup, request, mover) }
    };
        1 => Exact::<1>,
        2 => Exact::<2>,
        4 => Exact::<4>,
        8 => Exact::<8>,
        12 => Exact::<12>,
        16 => Exact::<16>,
        24 => Exact::<24>,
        32 => Exact::<32>,
        48 => Exact::<48>,
        64 => Exact::<64>,
        96 => Exact::<96>,
        128 => Exact::<128>,
        _ => Any(len),
    );
}

/// Copies all rows, in several threads if there are many.
///
/// # Safety
/// As [`gather`] or [`scatter`].
unsafe fn move_all<I: Index, M: Mover, const GATHER: bool>(
    lookup: RowLookup<'_>,
    request: &RowsRequest,
    mover: M,
) {
    for_each_range(request.count, request.row_len, |range| {
        // SAFETY: passed on from the caller.
        unsafe { move_rows::<I, M, GATHER>(lookup, mover, range) };
        mover.finish();
    });
}

/// Copies the rows of a range of positions.
///
/// The lookup is passed by value: the compiler would reload a reference after each `asm!`, which may write memory.
///
/// # Safety
/// As [`gather`] or [`scatter`].
unsafe fn move_rows<I: Index, M: Mover, const GATHER: bool>(
    lookup: RowLookup<'_>,
    mover: M,
    range: Range<u64>,
) {
    if !mover.looks_ahead() {
        for position in range {
            // SAFETY: a position of the request.
            let row = unsafe { lookup.table_row::<I>(position) };
            // SAFETY: passed on from the caller.
            unsafe {
                move_row::<I, M, GATHER>(&lookup, mover, position, row.unwrap_or(std::ptr::null_mut()))
            };
        }
        return;
    }
    let batch = (BYTES_AHEAD / mover.len()).clamp(1, ROWS_AHEAD) as u64;
    let (mut found, mut next) = ([std::ptr::null_mut(); ROWS_AHEAD], [std::ptr::null_mut(); ROWS_AHEAD]);
    let ahead = |start: u64| start..range.end.min(start + batch);
    // SAFETY: passed on from the caller.
    unsafe { look_ahead::<I, M, GATHER>(&lookup, mover, ahead(range.start), &mut found) };
    let mut start = range.start;
    while start < range.end {
        let now = ahead(start);
        start = now.end;
        // SAFETY: passed on from the caller.
        unsafe { look_ahead::<I, M, GATHER>(&lookup, mover, ahead(start), &mut next) };
        for (position, row) in now.zip(found) {
            // SAFETY: passed on from the caller.
            unsafe { move_row::<I, M, GATHER>(&lookup, mover, position, row) };
        }
        std::mem::swap(&mut found, &mut next);
    }
}

/// Copies the row of a position. `row` is the row of the table, null for a bad index.
///
/// # Safety
/// As [`gather`] or [`scatter`].
#[inline(always)]
unsafe fn move_row<I: Index, M: Mover, const GATHER: bool>(
    lookup: &RowLookup<'_>,
    mover: M,
    position: u64,
    row: *mut u8,
) {
    let dense = lookup.dense_row(position);
    if row.is_null() {
        // SAFETY: passed on from the caller.
        unsafe { bad::<I, GATHER>(*lookup, position, dense, mover.len()) };
    } else if GATHER {
        // SAFETY: `row` is a row of the table and `dense` one of the dense array; the caller guarantees that both are mapped for
        // the length of a row, with the rights of a gather.
        unsafe { mover.apply(row, dense) };
    } else {
        // SAFETY: `row` is a row of the table and `dense` one of the dense array; the caller guarantees that both are mapped for
        // the length of a row, with the rights of a scatter.
        unsafe { mover.apply(dense, row) };
    }
}

/// Looks up rows, null for bad indices, and prefetches them.
///
/// # Safety
/// As [`gather`] or [`scatter`].
#[inline(always)]
unsafe fn look_ahead<I: Index, M: Mover, const GATHER: bool>(
    lookup: &RowLookup<'_>,
    mover: M,
    range: Range<u64>,
    found: &mut [*mut u8; ROWS_AHEAD],
) {
    for (position, place) in range.zip(found) {
        // SAFETY: a position of the request.
        let row = unsafe { lookup.table_row::<I>(position) };
        *place = row.unwrap_or(std::ptr::null_mut());
        if let Some(row) = row {
            // The same number of iterations for each row, for the branch predictor.
            let last = mover.len() - 1;
            for at in (0..last).step_by(LINE).chain([last]) {
                let line = row.wrapping_add(at);
                if GATHER { machine::will_read(line) } else { machine::will_write(line) }
            }
        }
    }
}

/// Handles an index that names no row.
///
/// # Safety
/// As [`gather`] or [`scatter`].
#[cold]
unsafe fn bad<I: Index, const GATHER: bool>(
    lookup: RowLookup<'_>,
    position: u64,
    dense: *mut u8,
    len: usize,
) {
    // SAFETY: a position of the request, and the record is among what it names.
    unsafe { lookup.store_bad_index::<I>(position) };
    if GATHER {
        // SAFETY: a row of the dense side, which is not at null.
        unsafe { zero(dense, len) };
    }
}

/// Sets bytes to zero.
///
/// # Safety
/// They are writable, as raw memory.
pub(super) unsafe fn zero(at: *mut u8, len: usize) {
    if let Some(at) = std::ptr::NonNull::new(at) {
        // SAFETY: the caller guarantees that `len` bytes are writable at `at`, as raw memory.
        let bytes = unsafe { SharedSlice::new(at, len, true) };
        // A writable view is filled.
        let _ = bytes.fill(0);
    }
}
