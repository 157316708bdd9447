//! Collective calls on memory of devices: all-reduce, all-gather, broadcast and barrier.

use std::borrow::Cow;
use std::ffi::c_void;

use wholemem::{Lane, Rank};
use wholemem_hal::{Span, Stream};

use crate::argument::{self, invalid};
use crate::call::call;
use crate::dtype::{dtype_of, reduce_op_of, with_storage, wm_dtype_t, wm_reduce_op_t};
use crate::failure::{Failure, Result};
use crate::status::wm_status_t;
use crate::symmetric::{SymmetricObject, wm_symmetric_memory_t};

/// The operands of a collective call.
struct Operands<'a> {
    lane: &'a Lane,
    stream: Cow<'a, Stream>,
    input: Span,
    output: Span,
}

impl SymmetricObject {
    fn lane(&self, lane: u32) -> Result<&Lane> {
        Ok(self.symmetric.lane(lane as usize)?)
    }

    /// Checks the operands of a collective call. The output is `times` as long as the input.
    ///
    /// # Safety
    /// As the header requires of the stream, and of the memory, which is accessed until the work has run.
    unsafe fn operands(
        &self,
        lane: u32,
        stream: *mut c_void,
        (input, output): (*const c_void, *mut c_void),
        len: usize,
        times: usize,
    ) -> Result<Operands<'_>> {
        let lane = self.lane(lane)?;
        // SAFETY: the caller guarantees that the device can access the input until the work has run.
        let input = unsafe { self.state.span(input, len, "input") }?;
        let all = len.checked_mul(times).ok_or_else(too_many)?;
        // SAFETY: the caller guarantees that the device can access the output until the work has run.
        let output = unsafe { self.state.span(output, all, "output") }?;
        // SAFETY: the caller guarantees that the stream is null or one of the device that exists.
        Ok(Operands { lane, stream: unsafe { self.state.stream(stream) }, input, output })
    }
}

fn too_many() -> Failure {
    invalid("`count` elements exceed the address space")
}

/// Returns the length in bytes of elements of a type.
fn len_of(count: u64, element_len: usize) -> Result<usize> {
    argument::size(count, "count")?.checked_mul(element_len).ok_or_else(too_many)
}

/// Enqueues an all-reduce on a stream: the elements at each position of all ranks' inputs are combined in the order of ranks, and the
/// result is written to the output of every rank. Collective: `count`, `dtype` and `op` are equal on all ranks.
///
/// The result is bitwise the same on every rank. `input` and `output` are the same address, or do not overlap; they must stay valid until
/// the work has run. Memory in a window at the same offset on all ranks is used directly; it must be so on all ranks or on none. Other
/// memory is staged. Errors of the work, such as `WM_ERROR_TIMEOUT`, are returned by `wm_symmetric_memory_check` or the next call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_all_reduce(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    stream: *mut c_void,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: wm_dtype_t,
    op: wm_reduce_op_t,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        let (dtype, op) = (dtype_of(dtype)?, reduce_op_of(op)?);
        let len = len_of(count, dtype.len())?;
        // SAFETY: the arguments are as the header requires.
        let on = unsafe { object.operands(lane, stream, (input, output), len, 1) }?;
        Ok(on.lane.all_reduce(&on.stream, &on.input, &on.output, dtype, op)?)
    })
}

/// Enqueues an all-gather on a stream: the inputs of all ranks are concatenated, in the order of ranks, in the output of every rank.
/// Collective: `count`, the number of elements of each input, and `dtype` are equal on all ranks.
///
/// `input` may be this rank's part of `output`; otherwise they do not overlap. Memory and errors are as for `wm_all_reduce`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_all_gather(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    stream: *mut c_void,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: wm_dtype_t,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        let dtype = dtype_of(dtype)?;
        let (len, ranks) = (len_of(count, dtype.len())?, object.state.comm.size() as usize);
        // SAFETY: the arguments are as the header requires.
        let on = unsafe { object.operands(lane, stream, (input, output), len, ranks) }?;
        Ok(on.lane.all_gather_elements(&on.stream, &on.input, &on.output, dtype)?)
    })
}

/// Enqueues a broadcast on a stream: the input of rank `root` is copied to the output of every rank. Collective: `root`, `count` and
/// `dtype` are equal on all ranks. The inputs of the other ranks are not read, but must be valid addresses.
///
/// `input` and `output` are the same address, or do not overlap. Memory and errors are as for `wm_all_reduce`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_broadcast(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    stream: *mut c_void,
    root: u32,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    dtype: wm_dtype_t,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        let dtype = dtype_of(dtype)?;
        let len = len_of(count, dtype.len())?;
        // SAFETY: the arguments are as the header requires.
        let on = unsafe { object.operands(lane, stream, (input, output), len, 1) }?;
        Ok(on.lane.broadcast_elements(&on.stream, Rank(root), &on.input, &on.output, dtype)?)
    })
}

/// Enqueues a barrier on a stream: work that any rank enqueues afterwards runs after the work that all ranks have enqueued before.
/// Collective. On GPUs only the streams wait; on the host backend the calling thread waits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_barrier(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    stream: *mut c_void,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        // SAFETY: `stream` is null or a stream of the communicator's device that exists, as the header requires.
        let stream = unsafe { object.state.stream(stream) };
        Ok(object.lane(lane)?.barrier(&stream)?)
    })
}

/// Reduces elements in host memory of all ranks in place, and waits for the result, as `wm_all_reduce` does on memory of devices.
/// Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_all_reduce_host(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    values: *mut c_void,
    count: usize,
    dtype: wm_dtype_t,
    op: wm_reduce_op_t,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        let (lane, dtype, op) = (object.lane(lane)?, dtype_of(dtype)?, reduce_op_of(op)?);
        if !op.applies_to(dtype) {
            return Err(wholemem::Error::OpNotForType { op, dtype }.into());
        }
        with_storage!(dtype, T => {
            // SAFETY: the pointer is null or points to `count` elements of the caller, as the header requires.
            let values = unsafe { argument::slice_mut(values.cast::<T>(), count, "values") }?;
            Ok(lane.all_reduce_slice(values, op)?)
        })
    })
}

/// Copies elements in host memory of rank `root` to those of all ranks, and waits for the result. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_broadcast_host(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    root: u32,
    values: *mut c_void,
    count: usize,
    dtype: wm_dtype_t,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        let (lane, dtype) = (object.lane(lane)?, dtype_of(dtype)?);
        with_storage!(dtype, T => {
            // SAFETY: the pointer is null or points to `count` elements of the caller, as the header requires.
            let values = unsafe { argument::slice_mut(values.cast::<T>(), count, "values") }?;
            Ok(lane.broadcast_slice(Rank(root), values)?)
        })
    })
}

/// Gathers `count` elements in host memory of every rank, and waits for the result: those of rank `n` are written to `all` from element
/// `n * count` on. Collective.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_all_gather_host(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    values: *const c_void,
    all: *mut c_void,
    count: usize,
    dtype: wm_dtype_t,
) -> wm_status_t {
    call(|| {
        let object = symmetric.get()?;
        let (lane, dtype) = (object.lane(lane)?, dtype_of(dtype)?);
        with_storage!(dtype, T => {
            // SAFETY: the pointer is null or points to `count` elements, as the header requires.
            let values = unsafe { argument::slice(values.cast::<T>(), count, "values") }?;
            if count > 0 {
                argument::checked(all.cast::<T>(), "all")?;
            }
            let gathered = lane.all_gather_slice(values)?;
            // SAFETY: `all` has space for `count` elements of every rank, as the header requires.
            unsafe { argument::copy_out(&gathered, all.cast::<T>(), gathered.len(), "all") }
        })
    })
}
