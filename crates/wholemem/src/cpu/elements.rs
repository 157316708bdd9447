//! Gather and scatter element by element on the CPU: with type conversion, or with addition to the table.

use std::convert::identity;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use half::{bf16, f16};

use super::parallel::for_each_range;
use super::row_lookup::{Index, RowLookup};
use super::rows::zero;
use crate::abi::ElementsRequest;
use crate::dtype::{ArithmeticElement, Dtype, with_types};
use wholemem_os::width::to_usize;

/// A function that converts the elements of one row and stores them to another row, or adds them to it.
type RowFunction = unsafe fn(from: *const u8, to: *mut u8, elements: usize);

/// Copies rows of the table to the row buffer with type conversion. Rows of bad indices become zero.
///
/// # Safety
/// All memory of the request is mapped and aligned to its elements: the indices and the rows of all valid indices are readable, the
/// row buffer is writable. Other threads and processes may write it concurrently.
pub(super) unsafe fn gather<I: Index>(request: &ElementsRequest) {
    let ElementsRequest { table_dtype: table, rows_dtype: dense, .. } = *request;
    let convert = converter(table, dense).expect("`plan` has checked that the types convert");
    let (elements, len) = (to_usize(request.elements), to_usize(request.elements) * dense.len());
    let row = |row: Option<*mut u8>, dense| match row {
        // SAFETY: `row` is a row of the table and `dense` a row of the row buffer, with `elements` elements each.
        Some(row) => unsafe { convert(row, dense, elements) },
        // SAFETY: `dense` is a row of the row buffer, which has `len` bytes.
        None => unsafe { zero(dense, len) },
    };
    // SAFETY: the caller of `gather` guarantees that the memory of the request is mapped, and `row` accesses only the two rows.
    unsafe { for_rows::<I>(request, row) }
}

/// Copies rows of the row buffer to the table with type conversion. Rows of bad indices are skipped.
///
/// # Safety
/// As [`gather`], with the table writable and the row buffer readable.
pub(super) unsafe fn scatter<I: Index>(request: &ElementsRequest) {
    let ElementsRequest { table_dtype: table, rows_dtype: dense, .. } = *request;
    let convert = converter(dense, table).expect("`plan` has checked that the types convert");
    // SAFETY: the caller of `scatter` guarantees that the memory of the request is mapped, the table writable and the row buffer
    // readable.
    unsafe { for_valid_rows::<I>(request, convert) }
}

/// Adds rows of the row buffer to the table, each element atomically. Rows of bad indices are skipped.
///
/// # Safety
/// As [`scatter`].
pub(super) unsafe fn add<I: Index>(request: &ElementsRequest) {
    let ElementsRequest { table_dtype: table, rows_dtype: dense, .. } = *request;
    let add = adder(dense, table).expect("`plan` has checked that the types convert");
    // SAFETY: the caller of `add` guarantees that the memory of the request is mapped, the table writable and the row buffer
    // readable.
    unsafe { for_valid_rows::<I>(request, add) }
}

/// Calls `function` for each valid index, with the index's row of the row buffer and its row of the table.
///
/// # Safety
/// As [`scatter`].
unsafe fn for_valid_rows<I: Index>(request: &ElementsRequest, function: RowFunction) {
    let elements = to_usize(request.elements);
    let row = |row: Option<*mut u8>, dense: *mut u8| {
        if let Some(row) = row {
            // SAFETY: `row` is a row of the table and `dense` a row of the row buffer, with `elements` elements each.
            unsafe { function(dense, row, elements) };
        }
    };
    // SAFETY: the caller of `for_valid_rows` guarantees that the memory of the request is mapped, and `row` accesses only the two
    // rows.
    unsafe { for_rows::<I>(request, row) }
}

/// Calls `work` for each index of the request, with the row of the table (`None` for a bad index) and the row of the row buffer.
///
/// # Safety
/// As [`gather`]; `work` accesses only these rows.
unsafe fn for_rows<I: Index>(request: &ElementsRequest, work: impl Fn(Option<*mut u8>, *mut u8) + Sync) {
    // SAFETY: the caller of `for_rows` guarantees that the directory of the request is mapped; the directory never changes.
    let lookup = unsafe { RowLookup::new(&request.rows) };
    for_each_range(request.rows.count, request.rows.row_len, |range| {
        for position in range {
            // SAFETY: the position is less than the number of indices of the request, which the caller guarantees to be readable.
            let row = unsafe { lookup.table_row::<I>(position) };
            if row.is_none() {
                // SAFETY: the position is less than the number of indices of the request. The caller of `for_rows` guarantees
                // that the bad-index record is mapped.
                unsafe { lookup.store_bad_index::<I>(position) };
            }
            work(row, lookup.dense_row(position));
        }
    });
}

fn converter(from: Dtype, to: Dtype) -> Option<RowFunction> {
    with_types!(from, From, to, To => convert::<From, To> as RowFunction)
}

fn adder(from: Dtype, to: Dtype) -> Option<RowFunction> {
    with_types!(from, From, to, To => add_row::<From, To> as RowFunction)
}

/// Converts the elements of a row to the type of another row.
///
/// # Safety
/// Both rows are aligned, and accessible for `elements` elements.
unsafe fn convert<From: ArithmeticElement, To: ArithmeticElement<Wide = From::Wide>>(
    from: *const u8,
    to: *mut u8,
    elements: usize,
) {
    for at in 0..elements {
        // SAFETY: the caller of `convert` guarantees that `from` is aligned and readable for `elements` elements, and `at` is
        // less than `elements`.
        let element = unsafe { from.cast::<From>().wrapping_add(at).read_volatile() };
        // SAFETY: the caller of `convert` guarantees that `to` is aligned and writable for `elements` elements, and `at` is less
        // than `elements`.
        unsafe { to.cast::<To>().wrapping_add(at).write_volatile(To::narrow(element.widen())) };
    }
}

/// Converts the elements of a row and adds them atomically to the elements of another row.
///
/// # Safety
/// As [`convert`].
unsafe fn add_row<From: ArithmeticElement, To: AtomicElement<Wide = From::Wide>>(
    from: *const u8,
    to: *mut u8,
    elements: usize,
) {
    for at in 0..elements {
        // SAFETY: the caller of `add_row` guarantees that `from` is aligned and readable for `elements` elements, and `at` is
        // less than `elements`.
        let element = unsafe { from.cast::<From>().wrapping_add(at).read_volatile() };
        // SAFETY: the caller of `add_row` guarantees that `to` is aligned and writable for `elements` elements, and `at` is less
        // than `elements`.
        unsafe { To::add_at(to.cast::<To>().wrapping_add(at), To::narrow(element.widen())) };
    }
}

/// An element type with atomic addition, for memory to which other threads and processes add concurrently.
trait AtomicElement: ArithmeticElement {
    /// Adds `value` atomically to the element at `at`.
    ///
    /// # Safety
    /// `at` is aligned and writable.
    unsafe fn add_at(at: *mut Self, value: Self);
}

macro_rules! atomic {
    ($($type:ident as $bits:ident in $atomic:ident: $from:expr, $to:expr;)*) => {$(
        impl AtomicElement for $type {
            unsafe fn add_at(at: *mut Self, value: Self) {
                // SAFETY: the caller of `add_at` guarantees that `at` is aligned and writable. Other ranks add with atomics too;
                // an access of another kind would be a race that the caller of the scatter must exclude.
                let word = unsafe { $atomic::from_ptr(at.cast::<$bits>()) };
                let sum = |bits: $bits| Some($to($from(bits).plus(value)));
                // The closure of `fetch_update` always returns `Some`, so the update cannot fail.
                let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, sum);
            }
        }
    )*};
}

atomic! {
    u8 as u8 in AtomicU8: identity, identity;
    i8 as u8 in AtomicU8: u8::cast_signed, i8::cast_unsigned;
    u16 as u16 in AtomicU16: identity, identity;
    i16 as u16 in AtomicU16: u16::cast_signed, i16::cast_unsigned;
    u32 as u32 in AtomicU32: identity, identity;
    i32 as u32 in AtomicU32: u32::cast_signed, i32::cast_unsigned;
    u64 as u64 in AtomicU64: identity, identity;
    i64 as u64 in AtomicU64: u64::cast_signed, i64::cast_unsigned;
    f16 as u16 in AtomicU16: f16::from_bits, f16::to_bits;
    bf16 as u16 in AtomicU16: bf16::from_bits, bf16::to_bits;
    f32 as u32 in AtomicU32: f32::from_bits, f32::to_bits;
    f64 as u64 in AtomicU64: f64::from_bits, f64::to_bits;
}
