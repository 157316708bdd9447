//! Functions with which a test controls the fake driver of its process: fail a call, and count resources.
//!
//! The functions are looked up as symbols of the loaded library; the copy that is linked into a test is a different
//! instance.

use std::ffi::c_char;

use crate::{calls, events, gpu, modules, ranges, streams, vmm};

/// The resources that the driver holds for this process. After a test releases everything, all counts except the
/// contexts have their old values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ResourceCounts {
    /// Bytes of memory on all GPUs.
    pub used: u64,
    /// Allocation handles; retained and imported handles count separately.
    pub handles: u64,
    /// Reserved address ranges.
    pub reservations: u64,
    /// Mapped allocations.
    pub maps: u64,
    /// Buffers from `cuMemAlloc`, and opened CUDA IPC buffers.
    pub buffers: u64,
    /// Pinned and registered host memory ranges.
    pub host_ranges: u64,
    /// Streams.
    pub streams: u64,
    /// Streams that are being captured.
    pub captures: u64,
    /// Events.
    pub events: u64,
    /// Graphs and instantiated graphs.
    pub graphs: u64,
    /// Modules.
    pub modules: u64,
    /// The depth of the calling thread's context stack.
    pub contexts: u64,
}

/// The symbol of [`wholemem_fake_cuda_arm`].
pub const ARM: &str = "wholemem_fake_cuda_arm";
/// The symbol of [`wholemem_fake_cuda_fired`].
pub const FIRED: &str = "wholemem_fake_cuda_fired";
/// The symbol of [`wholemem_fake_cuda_resources`].
pub const RESOURCES: &str = "wholemem_fake_cuda_resources";

/// Makes the `nth` call from now on, counted from 1, fail once with `code`; zero disarms.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_arm(nth: u64, code: u32) {
    *calls::plan() = calls::FailurePlan { left: nth, code, fired: None };
}

/// The name of the function that was made to fail since the last `arm`; null if there is none.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_fired() -> *const c_char {
    calls::plan().fired.map_or(std::ptr::null(), |name| name.as_ptr().cast())
}

/// The current resource counts.
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
