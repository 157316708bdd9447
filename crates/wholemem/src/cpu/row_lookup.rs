//! Row lookup: from an index in memory to the address of its row.

use std::convert::Infallible;
use std::sync::atomic::AtomicU64;

use crate::abi::{BadIndexRecord, BadIndexWord, GlobalRef, RowsRequest};
use wholemem_os::width::to_usize;

/// The type of indices: `i32` or `i64`.
pub(super) trait Index: Copy + 'static {
    fn widen(self) -> i64;
}

impl Index for i32 {
    fn widen(self) -> i64 {
        self.into()
    }
}

impl Index for i64 {
    fn widen(self) -> i64 {
        self
    }
}

/// The decoded addresses of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowLookup<'a> {
    table: GlobalRef,
    /// The address and the first row of each chunk; empty if there is one chunk.
    bases: &'a [u64],
    starts: &'a [u64],
    indices: u64,
    rows: u64,
    rows_stride: u64,
    bad: u64,
}

impl<'a> RowLookup<'a> {
    /// Decodes a request.
    ///
    /// # Safety
    /// The directory of the request's table, if it has one, is readable and does not change during `'a`.
    pub(super) unsafe fn new(request: &RowsRequest) -> Self {
        let RowsRequest { table, indices, rows, rows_stride, bad, .. } = *request;
        let (mut bases, mut starts): (&[u64], &[u64]) = (&[], &[]);
        if table.chunks > 1 {
            let at = pointer(table.base).cast::<u64>();
            let chunks = table.chunks as usize;
            // SAFETY: the directory begins with a base for each chunk, is aligned, and does not change.
            bases = unsafe { std::slice::from_raw_parts(at, chunks) };
            // SAFETY: after the bases come the first rows, one more than there are chunks.
            starts = unsafe { std::slice::from_raw_parts(at.wrapping_add(chunks), chunks + 1) };
        }
        Self { table, bases, starts, indices, rows, rows_stride, bad }
    }

    /// The address of the row that the index at `position` names; `None` for a bad index.
    ///
    /// # Safety
    /// The index is readable and aligned; others may write it concurrently.
    #[inline(always)]
    pub(super) unsafe fn table_row<I: Index>(&self, position: u64) -> Option<*mut u8> {
        // SAFETY: the caller guarantees that the index is readable and aligned. It is read once, so the checked value is the used
        // one.
        let index = unsafe { self.index_at::<I>(position) };
        // As an unsigned number, a negative index is larger than every row.
        let row = index.cast_unsigned();
        if row >= self.table.rows {
            return None;
        }
        let at = if self.bases.is_empty() {
            self.table.base.wrapping_add(row.wrapping_mul(self.table.stride))
        } else {
            let (chunk, place) = self.table.locate(row + self.table.first_row, self.starts);
            self.bases[chunk] + place * self.table.stride + self.table.offset
        };
        Some(pointer(at))
    }

    /// The index at a position.
    ///
    /// # Safety
    /// As [`table_row`](Self::table_row).
    #[inline(always)]
    unsafe fn index_at<I: Index>(&self, position: u64) -> i64 {
        let at = pointer(self.indices).cast::<I>().wrapping_add(to_usize(position));
        // SAFETY: the caller guarantees that the index is readable and aligned.
        unsafe { at.read_volatile() }.widen()
    }

    /// The address of a row of the row buffer.
    #[inline(always)]
    pub(super) fn dense_row(&self, position: u64) -> *mut u8 {
        pointer(self.rows + position * self.rows_stride)
    }

    /// Records that the index at `position` names no row.
    ///
    /// # Safety
    /// As [`table_row`](Self::table_row); the request's record for bad indices, if it names one, is four aligned words that are
    /// accessed as atomics only.
    #[cold]
    pub(super) unsafe fn store_bad_index<I: Index>(&self, position: u64) {
        if self.bad == 0 {
            return;
        }
        let words = pointer(self.bad).cast::<u64>();
        let Ok(record) = BadIndexRecord::of(|word: BadIndexWord| {
            let word = words.wrapping_add(word as usize);
            // SAFETY: the caller guarantees that the record has four aligned words, which are accessed as atomics only.
            Ok::<_, Infallible>(unsafe { AtomicU64::from_ptr(word) })
        });
        // SAFETY: the caller guarantees that the index is readable and aligned. A concurrent writer may have replaced it since
        // it was checked.
        let index = unsafe { self.index_at::<I>(position) };
        record.store(position, index, self.table.rows);
    }
}

/// The pointer to an address of this process. Requests hold integers, of mappings whose addresses were exposed.
#[inline(always)]
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(to_usize(address))
}
