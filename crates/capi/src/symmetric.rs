//! Symmetric memory and windows: memory of which every rank has a part, and which every rank has mapped.

use std::ffi::c_void;
use std::sync::Arc;

use wholemem::{LaneRef, SymmetricMemory, SymmetricSpec, Window, WindowRef};

use crate::argument::{self, Output, Plain, duration, flag};
use crate::call::call;
use crate::communicator::{CommState, wm_communicator_t};
use crate::failure::Result;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// The windows of a communicator, and the collective calls over them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_symmetric_memory_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// Memory of which every rank has a part, and which every rank has mapped.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_window_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A symmetric memory, and what it shares with its communicator.
#[derive(Debug)]
pub(crate) struct SymmetricObject {
    pub(crate) symmetric: SymmetricMemory,
    pub(crate) state: Arc<CommState>,
}

/// A window, and what it shares with its communicator.
#[derive(Debug)]
pub(crate) struct WindowObject {
    window: Window,
    state: Arc<CommState>,
}

handle_type!(wm_symmetric_memory_t, SymmetricObject, SymmetricMemory);
handle_type!(wm_window_t, WindowObject, Window);

/// Options of symmetric memory, equal on all ranks. The environment variables `WHOLEMEM_ALGO`, `WHOLEMEM_WINDOW_SPACE` and
/// `WHOLEMEM_VMM` override them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_symmetric_options_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The number of sequences of collective calls that can be in flight at once; 0 is one.
    pub lanes: u32,
    /// 1 if new windows on GPUs have memory of `cudaMalloc`, or 0 if they have memory of `cuMemCreate`.
    pub use_cuda_malloc: u32,
    /// The number of bytes of addresses to reserve for windows, for all ranks together; 0 is the default.
    pub window_space: u64,
    /// The length of a staging buffer, through which calls copy memory that is not in a window; 0 is the default.
    pub staging_len: u64,
    /// The maximum number of bytes that a rank sends in packets in one call; 0 is the default.
    pub packets_len: u64,
    /// The time for which a collective call waits for other ranks; 0 is the timeout of the communicator.
    pub timeout_ns: u64,
}

// SAFETY: all fields are integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_symmetric_options_t {
    const FIRST_LEN: usize = 48;
}

/// The addresses of every rank's part of a window on this rank, for kernels: `wholemem::WindowRef` in `wholemem/abi.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_window_ref_t {
    /// The address of rank 0's part. If there is a table, the offset that is added to each address in the table.
    pub base: u64,
    /// The number of bytes from one rank's part to the next rank's part.
    pub stride: u64,
    /// The address of a table with the address of each rank's part; 0 if the parts are `stride` bytes apart.
    pub table: u64,
}

/// A lane as kernels see it: `wholemem::LaneRef` in `wholemem/abi.cuh`, from which a kernel creates a `Call`. Its content is for those
/// headers only.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_lane_ref_t {
    /// The content.
    pub words: [u64; 14],
}

const _: () = assert!(size_of::<wm_window_ref_t>() == size_of::<WindowRef>());
const _: () = assert!(size_of::<wm_lane_ref_t>() == size_of::<LaneRef>());

/// Creates the symmetric memory of a communicator. Collective, with equal options on all ranks. `options` may be null.
///
/// A communicator needs one, which its threads share. The caller frees it with `wm_symmetric_memory_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_symmetric_memory_create(
    communicator: wm_communicator_t,
    options: *const wm_symmetric_options_t,
    symmetric: *mut wm_symmetric_memory_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(symmetric, "symmetric") }?;
        let state = Arc::clone(&*communicator.get()?);
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let spec = match unsafe { argument::options(options, "options") }? {
            Some(options) => spec_of(&options)?,
            None => SymmetricSpec::default(),
        };
        let symmetric = SymmetricMemory::create(&state.comm, &spec)?;
        output.write(wm_symmetric_memory_t::create(SymmetricObject { symmetric, state })?);
        Ok(())
    })
}

fn spec_of(options: &wm_symmetric_options_t) -> Result<SymmetricSpec> {
    let mut spec = SymmetricSpec {
        vmm: !flag(options.use_cuda_malloc, "use_cuda_malloc")?,
        staging_len: argument::size(options.staging_len, "staging_len")?,
        packets_len: argument::size(options.packets_len, "packets_len")?,
        ..SymmetricSpec::default()
    };
    if options.lanes > 0 {
        spec.lanes = options.lanes;
    }
    if options.window_space > 0 {
        spec.window_space = argument::size(options.window_space, "window_space")?;
    }
    if options.timeout_ns > 0 {
        spec.timeout = duration(options.timeout_ns);
    }
    Ok(spec)
}

/// Frees the handle of a symmetric memory. Its windows stay valid. Does not wait for other ranks.
#[unsafe(no_mangle)]
pub extern "C" fn wm_symmetric_memory_destroy(symmetric: wm_symmetric_memory_t) -> wm_status_t {
    call(|| Ok(symmetric.free()?))
}

/// Returns the error of a collective call of a lane that has failed, if any, without waiting. Wait for the stream first to include all
/// enqueued calls.
///
/// After an error, later calls of the lane and graphs that use it do nothing: create a new communicator to continue.
#[unsafe(no_mangle)]
pub extern "C" fn wm_symmetric_memory_check(symmetric: wm_symmetric_memory_t, lane: u32) -> wm_status_t {
    call(|| Ok(symmetric.get()?.symmetric.lane(lane as usize)?.check()?))
}

/// Returns the number of calls of a lane whose data were copied through a staging buffer, because their memory is in no window.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_symmetric_memory_staged_calls(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    count: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(count, "count") }?;
        output.write(symmetric.get()?.symmetric.lane(lane as usize)?.staged_calls());
        Ok(())
    })
}

/// Returns the description of a lane for kernels. It is valid while the symmetric memory exists.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_symmetric_memory_lane_ref(
    symmetric: wm_symmetric_memory_t,
    lane: u32,
    reference: *mut wm_lane_ref_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(reference, "reference") }?;
        let reference = symmetric.get()?.symmetric.lane(lane as usize)?.lane_ref();
        output.write(wm_lane_ref_t { words: zerocopy::transmute!(reference) });
        Ok(())
    })
}

/// Creates a window and writes its handle.
///
/// # Safety
/// As the header requires: `to` is null or valid.
unsafe fn create_window(
    symmetric: wm_symmetric_memory_t,
    to: *mut wm_window_t,
    work: impl FnOnce(&SymmetricObject) -> Result<Window>,
) -> wm_status_t {
    call(|| {
        // SAFETY: the caller of `create_window` guarantees that the pointer is null or valid.
        let output = unsafe { Output::new(to, "window") }?;
        let object = symmetric.get()?;
        let (window, state) = (work(&object)?, Arc::clone(&object.state));
        output.write(wm_window_t::create(WindowObject { window, state })?);
        Ok(())
    })
}

/// Creates a window of new, zeroed memory of the ranks' devices, with `len` bytes on this rank. Collective; the lengths of ranks may
/// differ, and may be 0.
///
/// If a rank fails, all ranks fail with the same error. The caller frees the window with `wm_window_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_window_create(
    symmetric: wm_symmetric_memory_t,
    len: u64,
    window: *mut wm_window_t,
) -> wm_status_t {
    let work = |object: &SymmetricObject| Ok(object.symmetric.mem_alloc(argument::size(len, "len")?)?);
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { create_window(symmetric, window, work) }
}

/// Creates a window of new, zeroed host memory, which the ranks' devices can access, with `len` bytes on this rank. Otherwise it is
/// `wm_window_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_window_create_on_host(
    symmetric: wm_symmetric_memory_t,
    len: u64,
    window: *mut wm_window_t,
) -> wm_status_t {
    let work =
        |object: &SymmetricObject| Ok(object.symmetric.mem_alloc_on_host(argument::size(len, "len")?)?);
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { create_window(symmetric, window, work) }
}

/// Registers `len` bytes of existing memory of this rank as a window, so that calls can access it directly, without a staging copy.
/// Collective; the lengths of ranks may differ, and may be 0.
///
/// The memory stays where it is. It is from `cudaMalloc`, virtual memory that can be shared as file descriptors, or, on the host, memory
/// of a table or of a window. It must stay valid until every rank has freed its window and its work has run: call
/// `wm_window_deregister`. The caller frees the window with one of the two functions.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_window_register(
    symmetric: wm_symmetric_memory_t,
    address: *mut c_void,
    len: u64,
    window: *mut wm_window_t,
) -> wm_status_t {
    let work = |object: &SymmetricObject| {
        // SAFETY: the memory stays valid until every rank has freed its window, as the header requires.
        let span = unsafe { object.state.span(address, argument::size(len, "len")?, "address") }?;
        Ok(object.symmetric.window_register_span(&span)?)
    };
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { create_window(symmetric, window, work) }
}

/// Creates a window of `len` bytes that other code of this process has mapped at `address`, for example a framework that allocates in
/// segments. Collective. The window keeps the memory alive, even if the other code frees it. The caller frees the window with
/// `wm_window_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_window_adopt(
    symmetric: wm_symmetric_memory_t,
    address: *mut c_void,
    len: u64,
    window: *mut wm_window_t,
) -> wm_status_t {
    let work = |object: &SymmetricObject| {
        let (address, len) = (address.expose_provenance() as u64, argument::size(len, "len")?);
        Ok(object.symmetric.window_register_mapped(address, len)?)
    };
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { create_window(symmetric, window, work) }
}

/// Frees a window on all ranks, and waits until all ranks have freed it. Collective. Afterwards registered memory of this rank may be
/// freed. If the wait fails, the handle is freed nevertheless.
#[unsafe(no_mangle)]
pub extern "C" fn wm_window_deregister(window: wm_window_t) -> wm_status_t {
    call(|| {
        let state = Arc::clone(&window.get()?.state);
        window.free()?;
        Ok(state.comm.barrier()?)
    })
}

/// Frees the handle of a window. This rank's mappings are removed when no work uses them. Does not wait for other ranks. After all ranks
/// have freed the window, its addresses are used again, so wait for the work that uses it first.
#[unsafe(no_mangle)]
pub extern "C" fn wm_window_destroy(window: wm_window_t) -> wm_status_t {
    call(|| Ok(window.free()?))
}

/// Returns the address at which this rank has mapped a rank's part of a window, and the length of the part in bytes. The address is null
/// if the part is empty. It is valid until the window is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_window_address_of(
    window: wm_window_t,
    rank: u32,
    address: *mut *mut c_void,
    len: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let address = unsafe { Output::new(address, "address") }?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let len = unsafe { Output::new(len, "len") }?;
        let object = window.get()?;
        let rank = object.state.rank(rank)?;
        let all = object.window.len_of(rank);
        let start = if all == 0 { 0 } else { object.window.part_of(rank, 0, all)?.address() };
        address.write(argument::pointer(start));
        len.write(all as u64);
        Ok(())
    })
}

/// Returns the addresses of all parts of a window on this rank, for kernels. They are valid until the window is freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_window_ref(window: wm_window_t, reference: *mut wm_window_ref_t) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(reference, "reference") }?;
        let WindowRef { base, stride, table } = window.get()?.window.window_ref();
        output.write(wm_window_ref_t { base, stride, table });
        Ok(())
    })
}
