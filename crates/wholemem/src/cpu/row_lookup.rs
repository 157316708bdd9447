//! Finding rows: from an index in memory to the address of its row.

use std::sync::atomic::AtomicU64;

use crate::abi::{BadIndexRecord, GlobalRef, RowsRequest};

/// A type of index.
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

/// A request, ready to be walked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finder<'a> {
    table: GlobalRef,
    /// The address of each chunk, and the first row of each; none where there is but one.
    bases: &'a [u64],
    starts: &'a [u64],
    indices: u64,
    rows: u64,
    rows_stride: u64,
    bad: u64,
}

impl<'a> Finder<'a> {
    /// Looks at what a request names.
    ///
    /// # Safety
    /// A directory that the request's table names is readable, and does not change, for all of `'a`.
    pub(super) unsafe fn new(request: &RowsRequest) -> Self {
        let RowsRequest { table, indices, rows, rows_stride, bad, .. } = *request;
        let (mut bases, mut starts): (&[u64], &[u64]) = (&[], &[]);
        if table.chunks > 1 {
            let at = pointer(table.base).cast::<u64>();
            let chunks = table.chunks as usize;
            // SAFETY: the directory begins with a base for each chunk, is aligned, and does not change.
            bases = unsafe { std::slice::from_raw_parts(at, chunks) };
            // SAFETY: the starts follow, one more of them.
            starts = unsafe { std::slice::from_raw_parts(at.wrapping_add(chunks), chunks + 1) };
        }
        Self { table, bases, starts, indices, rows, rows_stride, bad }
    }

    /// The address of the row that the index at `position` names; `None` if it names none.
    ///
    /// # Safety
    /// The index is readable and aligned; others may write it meanwhile.
    #[inline(always)]
    pub(super) unsafe fn table_row<I: Index>(&self, position: u64) -> Option<*mut u8> {
        // SAFETY: by the caller's word. Once: what is checked below is what is used.
        let index = unsafe { self.index_at::<I>(position) };
        // Negative numbers are larger than all rows.
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
        let at = pointer(self.indices).cast::<I>().wrapping_add(usize_of(position));
        // SAFETY: by the caller's word.
        unsafe { at.read_volatile() }.widen()
    }

    /// The address of a row of the dense side.
    #[inline(always)]
    pub(super) fn dense_row(&self, position: u64) -> *mut u8 {
        pointer(self.rows + position * self.rows_stride)
    }

    /// Notes that the index at `position` names no row.
    ///
    /// # Safety
    /// As [`table_row`](Self::table_row); the request's record for bad indices, if it names one, is four aligned words that are
    /// reached as atomics alone.
    #[cold]
    pub(super) unsafe fn note<I: Index>(&self, position: u64) {
        if self.bad == 0 {
            return;
        }
        let words = pointer(self.bad).cast::<u64>();
        let word = |at: usize| {
            let word = words.wrapping_add(at);
            // SAFETY: by the caller's word.
            unsafe { AtomicU64::from_ptr(word) }
        };
        let record =
            BadIndexRecord { position: word(0), index: word(1), rows: word(2), recorded_for: word(3) };
        // SAFETY: by the caller's word. A concurrent writer may have replaced it since it was checked.
        let index = unsafe { self.index_at::<I>(position) };
        record.note(position, index, self.table.rows);
    }
}

/// An address of this process as a pointer. Requests carry numbers, which came from maps whose addresses are exposed.
#[inline(always)]
pub(super) fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize_of(address))
}

/// A number of things in memory: it fits.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "wholemem runs where addresses have 64 bits")]
pub(super) fn usize_of(number: u64) -> usize {
    number as usize
}
