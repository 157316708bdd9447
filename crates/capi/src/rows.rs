//! Gathers and scatters, and reads and writes of contiguous rows.

use std::borrow::Cow;
use std::ffi::c_void;

use wholemem::{Indices, OnBadIndex, Order, RowBuffer};
use wholemem_hal::Stream;

use crate::argument::{self, Plain, flag, invalid};
use crate::call::call;
use crate::dtype::{dtype_of, with_storage, wm_dtype_t};
use crate::failure::Result;
use crate::status::wm_status_t;
use crate::tensor::{TensorObject, wm_tensor_t};

/// The type of indices: `WM_INDEX_I64` or `WM_INDEX_I32`.
pub type wm_index_type_t = u32;
/// Signed integers of eight bytes.
pub const WM_INDEX_I64: wm_index_type_t = 0;
/// Signed integers of four bytes.
pub const WM_INDEX_I32: wm_index_type_t = 1;

/// The order in which a scatter writes rows with equal indices: `WM_ORDER_ANY` or `WM_ORDER_FIXED`.
pub type wm_order_t = u32;
/// No defined order: if several rows have the same index, each of its elements comes from one of them.
pub const WM_ORDER_ANY: wm_order_t = 0;
/// The order as if the ranks ran one after the other, each in the order of its indices, so that results are the same in every run. The
/// call is collective and waits for the result.
pub const WM_ORDER_FIXED: wm_order_t = 1;

/// Row indices in memory that the device can access.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_indices_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The address of the first index.
    pub address: *const c_void,
    /// The number of indices.
    pub count: u64,
    /// `WM_INDEX_I64` or `WM_INDEX_I32`.
    pub index_type: wm_index_type_t,
    /// 1 to ignore indices that name no row, or 0 to report the first one by `wm_tensor_check` or the next call. In either case a
    /// gather zeroes their rows of the output, and a scatter skips them.
    pub skip_bad: u32,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_indices_t {
    const FIRST_LEN: usize = 32;
}

/// Rows in memory that the device can access, one for each index: the output of a gather, or the input of a scatter.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_row_buffer_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The address of the first row.
    pub address: *mut c_void,
    /// The number of bytes from one row to the next; 0 if the rows are contiguous.
    pub stride: u64,
    /// The element type.
    pub dtype: wm_dtype_t,
    /// 1 to convert elements if the table has another type: floats to floats, and integers to integers; otherwise 0.
    pub convert: u32,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_row_buffer_t {
    const FIRST_LEN: usize = 32;
}

fn order_of(number: wm_order_t) -> Result<Order> {
    match number {
        WM_ORDER_ANY => Ok(Order::Any),
        WM_ORDER_FIXED => Ok(Order::Fixed),
        _ => Err(invalid(format!("there is no order {number}"))),
    }
}

/// The operands of a gather or a scatter on a stream.
struct Operands<'a> {
    stream: Cow<'a, Stream>,
    indices: Indices,
    rows: RowBuffer,
}

impl TensorObject {
    /// Checks the operands of a gather or a scatter.
    ///
    /// # Safety
    /// As the header requires of the stream, the structures, and the memory that they describe.
    #[inline]
    unsafe fn operands(
        &self,
        stream: *mut c_void,
        indices: *const wm_indices_t,
        rows: *const wm_row_buffer_t,
    ) -> Result<Operands<'_>> {
        // SAFETY: the caller guarantees that the pointer is null or points to a structure with the size in its first field.
        let indices = unsafe { argument::required(indices, "indices") }?;
        // SAFETY: the caller guarantees that the pointer is null or points to a structure with the size in its first field.
        let rows = unsafe { argument::required(rows, "rows") }?;
        let len_of_index = match indices.index_type {
            WM_INDEX_I64 => 8,
            WM_INDEX_I32 => 4,
            number => return Err(invalid(format!("there is no index type {number}"))),
        };
        let count = argument::size(indices.count, "count")?;
        let len = count.checked_mul(len_of_index).ok_or_else(|| invalid("there are too many indices"))?;
        // SAFETY: the caller guarantees that the device can access the indices until the work has run.
        let span = unsafe { self.state.span(indices.address, len, "indices->address") }?;
        let checked = if len_of_index == 8 { Indices::i64(span) } else { Indices::i32(span) };
        let skips = flag(indices.skip_bad, "skip_bad")?;
        let checked = if skips { checked.on_bad(OnBadIndex::Skip) } else { checked };

        let dtype = dtype_of(rows.dtype)?;
        let row_len = match self.tensor.dtype() {
            same if same == dtype => self.tensor.row_len(),
            other => self.tensor.row_len() / other.len() * dtype.len(),
        };
        let stride = if rows.stride == 0 { row_len } else { argument::size(rows.stride, "stride")? };
        let len = match count {
            0 => Some(0),
            _ => (count - 1).checked_mul(stride).and_then(|before| before.checked_add(row_len)),
        };
        let len = len.ok_or_else(|| invalid("the rows exceed the address space"))?;
        // SAFETY: the caller guarantees that the device can access the rows until the work has run.
        let span = unsafe { self.state.span(rows.address, len, "rows->address") }?;
        let buffer = RowBuffer::new(span, dtype).stride(stride);
        let buffer = if flag(rows.convert, "convert")? { buffer.converted() } else { buffer };
        // SAFETY: the caller guarantees that the stream is null or one of the device that exists.
        Ok(Operands { stream: unsafe { self.state.stream(stream) }, indices: checked, rows: buffer })
    }
}

/// Enqueues a gather on a stream: row `indices[n]` of the tensor, of any rank, is copied to row `n` of the output. The call sees the rows
/// that other ranks have written before the last barrier. Not collective.
///
/// The indices and the output must stay valid until the work has run, and the output must not overlap the gathered rows. A bad index is
/// reported by `wm_tensor_check` or the next call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_gather_on(
    tensor: wm_tensor_t,
    stream: *mut c_void,
    indices: *const wm_indices_t,
    output: *const wm_row_buffer_t,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the arguments are as the header requires.
        let Operands { stream, indices, rows } = unsafe { object.operands(stream, indices, output) }?;
        Ok(object.tensor.gather_on(&stream, &indices, &rows)?)
    })
}

/// Enqueues a scatter on a stream: row `n` of the input replaces row `indices[n]` of the tensor, of any rank. Other ranks see the rows
/// after the next barrier. Not collective, except with `WM_ORDER_FIXED`.
///
/// The indices and the input must stay valid until the work has run. A bad index is reported by `wm_tensor_check` or the next call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_scatter_on(
    tensor: wm_tensor_t,
    stream: *mut c_void,
    indices: *const wm_indices_t,
    input: *const wm_row_buffer_t,
    order: wm_order_t,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the arguments are as the header requires.
        let Operands { stream, indices, rows } = unsafe { object.operands(stream, indices, input) }?;
        Ok(object.tensor.scatter_on(&stream, &indices, &rows, order_of(order)?)?)
    })
}

/// Enqueues a scatter-add on a stream: row `n` of the input is added to row `indices[n]` of the tensor, also if indices repeat. Other
/// ranks see the sums after the next barrier. Not collective, except with `WM_ORDER_FIXED` and for tensors in host memory.
///
/// The indices and the input must stay valid until the work has run. A bad index is reported by `wm_tensor_check` or the next call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_scatter_add_on(
    tensor: wm_tensor_t,
    stream: *mut c_void,
    indices: *const wm_indices_t,
    input: *const wm_row_buffer_t,
    order: wm_order_t,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the arguments are as the header requires.
        let Operands { stream, indices, rows } = unsafe { object.operands(stream, indices, input) }?;
        Ok(object.tensor.scatter_add_on(&stream, &indices, &rows, order_of(order)?)?)
    })
}

/// Returns `WM_ERROR_BAD_INDEX` if an enqueued gather or scatter whose work has run had an index that names no row, once, with the
/// smallest position of such an index in `wm_last_error_info`. Wait for the stream first to include all work.
#[unsafe(no_mangle)]
pub extern "C" fn wm_tensor_check(tensor: wm_tensor_t) -> wm_status_t {
    call(|| Ok(tensor.get()?.tensor.check()?))
}

/// Gathers `count` rows to host memory, and waits for the result: row `indices[n]` of the tensor is copied to row `n` of `rows`, whose
/// elements have the type of the tensor. `len` is the length of `rows` in bytes: `count` rows. Not collective.
///
/// Returns `WM_ERROR_BAD_INDEX` if an index names no row: its row is zero, and the others are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_gather(
    tensor: wm_tensor_t,
    indices: *const i64,
    count: usize,
    rows: *mut c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or points to `count` indices, as the header requires.
        let indices = unsafe { argument::slice(indices, count, "indices") }?;
        with_storage!(object.tensor.dtype(), T => {
            // SAFETY: the pointer is null or points to `len` bytes of the caller, as the header requires.
            let rows = unsafe { argument::slice_mut(rows.cast::<T>(), elements::<T>(len)?, "rows") }?;
            Ok(object.tensor.gather_into(indices, rows)?)
        })
    })
}

/// Scatters `count` rows from host memory, and waits until they are written: row `n` of `rows`, whose elements have the type of the
/// tensor, replaces row `indices[n]` of the tensor. `len` is the length of `rows` in bytes: `count` rows. Not collective. Other ranks
/// see the rows after the next `wm_communicator_barrier`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_scatter(
    tensor: wm_tensor_t,
    indices: *const i64,
    count: usize,
    rows: *const c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or points to `count` indices, as the header requires.
        let indices = unsafe { argument::slice(indices, count, "indices") }?;
        with_storage!(object.tensor.dtype(), T => {
            // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
            let rows = unsafe { argument::slice(rows.cast::<T>(), elements::<T>(len)?, "rows") }?;
            Ok(object.tensor.scatter(indices, rows)?)
        })
    })
}

/// Adds `count` rows from host memory to rows of the tensor, and waits until they are added: row `n` of `rows` is added to row
/// `indices[n]`, also if indices repeat. `len` is the length of `rows` in bytes: `count` rows. Not collective, except for tensors in
/// host memory, where all ranks make the call, also with no rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_scatter_add(
    tensor: wm_tensor_t,
    indices: *const i64,
    count: usize,
    rows: *const c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or points to `count` indices, as the header requires.
        let indices = unsafe { argument::slice(indices, count, "indices") }?;
        with_storage!(object.tensor.dtype(), T => {
            // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
            let rows = unsafe { argument::slice(rows.cast::<T>(), elements::<T>(len)?, "rows") }?;
            Ok(object.tensor.scatter_add(indices, rows)?)
        })
    })
}

/// Copies contiguous rows of any rank, from row `first_row` on, to host memory, and waits for the copy. `len` is the length of `rows` in
/// bytes: whole rows. Not collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_read_rows(
    tensor: wm_tensor_t,
    first_row: u64,
    rows: *mut c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or points to `len` bytes of the caller, as the header requires.
        let rows = unsafe { argument::slice_mut(rows.cast::<u8>(), len, "rows") }?;
        Ok(object.tensor.read_rows_on(object.state.own_stream(), first_row, rows)?)
    })
}

/// Copies contiguous rows from host memory to the tensor, from row `first_row` on, which may be of any rank, and waits for the copy.
/// `len` is the length of `rows` in bytes: whole rows. Not collective. Other ranks see the rows after the next
/// `wm_communicator_barrier`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_write_rows(
    tensor: wm_tensor_t,
    first_row: u64,
    rows: *const c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
        let rows = unsafe { argument::slice(rows.cast::<u8>(), len, "rows") }?;
        Ok(object.tensor.write_rows_on(object.state.own_stream(), first_row, rows)?)
    })
}

/// Returns the number of elements of a type in `len` bytes.
fn elements<T>(len: usize) -> Result<usize> {
    if len.is_multiple_of(size_of::<T>()) {
        return Ok(len / size_of::<T>());
    }
    Err(invalid(format!(
        "`len` is {len}, which is not a multiple of the {} bytes of an element",
        size_of::<T>()
    )))
}
