//! Row lookup on the CPU, which finds the address of the table row that an index names.

use std::convert::Infallible;
use std::sync::atomic::AtomicU64;

use crate::abi::{BadIndexRecord, BadIndexWord, GlobalRef, RowsRequest};
use wholemem_os::width::to_usize;

/// The integer type of row indices: `i32` or `i64`.
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

/// The decoded addresses of a gather or scatter request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowLookup<'a> {
    table: GlobalRef,
    /// The address and the first row of each chunk of the table; empty if the table has one chunk.
    bases: &'a [u64],
    starts: &'a [u64],
    indices: u64,
    rows: u64,
    rows_stride: u64,
    bad: u64,
}

impl<'a> RowLookup<'a> {
    /// Decodes the addresses of a gather or scatter request.
    ///
    /// # Safety
    /// The directory of the request's table, if it has one, is readable and does not change during `'a`.
    pub(super) unsafe fn new(request: &RowsRequest) -> Self {
        let RowsRequest { table, indices, rows, rows_stride, bad, .. } = *request;
        let (mut bases, mut starts): (&[u64], &[u64]) = (&[], &[]);
        if table.chunks > 1 {
            let at = pointer(table.base).cast::<u64>();
            let chunks = table.chunks as usize;
            // SAFETY: the directory of the table begins with a base address for each chunk, is aligned, and does not change.
            bases = unsafe { std::slice::from_raw_parts(at, chunks) };
            // SAFETY: after the base addresses, the directory of the table has the first rows, one more than there are chunks.
            starts = unsafe { std::slice::from_raw_parts(at.wrapping_add(chunks), chunks + 1) };
        }
        Self { table, bases, starts, indices, rows, rows_stride, bad }
    }

    /// Returns the address of the table row that the index at `position` names; `None` for an index that names no row.
    ///
    /// # Safety
    /// The index is readable and aligned; other threads or processes may write it concurrently.
    #[inline(always)]
    pub(super) unsafe fn table_row<I: Index>(&self, position: u64) -> Option<*mut u8> {
        // SAFETY: the caller of `table_row` guarantees that the index is readable and aligned. The index is read once, so the
        // checked value is the used one.
        let index = unsafe { self.index_at::<I>(position) };
        // As an unsigned number, a negative index is larger than the number of rows.
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

    /// Returns the row index at a position in the request.
    ///
    /// # Safety
    /// As [`table_row`](Self::table_row).
    #[inline(always)]
    unsafe fn index_at<I: Index>(&self, position: u64) -> i64 {
        let at = pointer(self.indices).cast::<I>().wrapping_add(to_usize(position));
        // SAFETY: the caller of `index_at` guarantees that the index at `position` is readable and aligned.
        unsafe { at.read_volatile() }.widen()
    }

    /// Returns the address of the row at a position in the row buffer.
    #[inline(always)]
    pub(super) fn dense_row(&self, position: u64) -> *mut u8 {
        pointer(self.rows + position * self.rows_stride)
    }

    /// Stores in the bad-index record that the index at `position` names no row of the table.
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
            // SAFETY: the caller of `store_bad_index` guarantees that the record has four aligned words, which are accessed as
            // atomics only.
            Ok::<_, Infallible>(unsafe { AtomicU64::from_ptr(word) })
        });
        // SAFETY: the caller of `store_bad_index` guarantees that the index is readable and aligned. A concurrent writer may have
        // replaced the index since it was checked.
        let index = unsafe { self.index_at::<I>(position) };
        record.store(position, index, self.table.rows);
    }
}

/// Returns the pointer to an address of this process. Requests have addresses as integers, of mappings whose provenance was
/// exposed.
#[inline(always)]
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(to_usize(address))
}
