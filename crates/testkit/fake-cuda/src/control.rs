//! Functions with which a test controls the fake CUDA driver in its process: they make a call fail, record calls, and count
//! resources.
//!
//! The functions are looked up as symbols of the loaded library; the copy that is linked into a test is a different
//! instance.

use std::ffi::c_char;

use crate::{calls, events, gpu, modules, ranges, streams, vmm};

/// The numbers of resources that the fake driver holds for this process. After a test has released everything, all
/// counts except `contexts` have their previous values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ResourceCounts {
    /// The number of allocated bytes on all GPUs.
    pub used: u64,
    /// The number of handles of allocations. Retained and imported handles count separately.
    pub handles: u64,
    /// The number of reserved address ranges.
    pub reservations: u64,
    /// The number of mapped allocations.
    pub maps: u64,
    /// The number of buffers from `cuMemAlloc`, and of times that CUDA IPC handles of buffers were opened.
    pub buffers: u64,
    /// The number of pinned and registered ranges of host memory.
    pub host_ranges: u64,
    /// The number of streams, without the default streams.
    pub streams: u64,
    /// The number of streams that are being captured.
    pub captures: u64,
    /// The number of CUDA events.
    pub events: u64,
    /// The number of graphs, instantiated graphs, and user objects that no graph owns.
    pub graphs: u64,
    /// The number of loaded modules.
    pub modules: u64,
    /// The number of contexts on the calling thread's context stack.
    pub contexts: u64,
}

/// The symbol name of the function [`wholemem_fake_cuda_arm`].
pub const ARM: &str = "wholemem_fake_cuda_arm";
/// The symbol name of the function [`wholemem_fake_cuda_fired`].
pub const FIRED: &str = "wholemem_fake_cuda_fired";
/// The symbol name of the function [`wholemem_fake_cuda_resources`].
pub const RESOURCES: &str = "wholemem_fake_cuda_resources";

/// The symbol name of the function [`wholemem_fake_cuda_record`].
pub const RECORD: &str = "wholemem_fake_cuda_record";
/// The symbol name of the function [`wholemem_fake_cuda_recorded`].
pub const RECORDED: &str = "wholemem_fake_cuda_recorded";

/// Makes the `nth` call of the fake driver from now on, counted from 1, fail once with result `code`. With zero, no
/// call fails.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_arm(nth: u64, code: u32) {
    *calls::plan() = calls::FailurePlan { left: nth, code, fired: None };
}

/// Returns the name of the driver function that was made to fail since the last call of `wholemem_fake_cuda_arm`, or
/// null if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_fired() -> *const c_char {
    calls::plan().fired.map_or(std::ptr::null(), |name| name.as_ptr().cast())
}

/// Begins a new recording of the driver functions that the calling thread calls, or ends the recording.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_record(is_active: bool) {
    calls::record(is_active);
}

/// Returns the name of the driver function that the calling thread called in the recorded call with this number, counted from 0, or
/// null if fewer calls were recorded.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_recorded(index: usize) -> *const c_char {
    calls::recorded(index).map_or(std::ptr::null(), |name| name.as_ptr().cast())
}

/// Returns the numbers of resources that the fake driver holds for this process.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_resources() -> ResourceCounts {
    let ranges = ranges::count();
    ResourceCounts {
        used: vmm::used_by_all(),
        handles: vmm::handle_count(),
        reservations: vmm::reservation_count(),
        maps: ranges.maps,
        buffers: ranges.buffers,
        host_ranges: ranges.host,
        streams: gpu::stream_count(),
        captures: gpu::capture_count(),
        events: events::count(),
        graphs: streams::graph_count(),
        modules: modules::count(),
        contexts: calls::depth() as u64,
    }
}
