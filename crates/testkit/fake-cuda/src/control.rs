//! What a test asks of the fake driver in its own process: to fail a call, and to say what it holds.
//!
//! The functions are found in the loaded library by their symbols; the copy that is linked into a test is not the one
//! that it uses.

use std::ffi::c_char;

use crate::{calls, events, gpu, modules, ranges, streams, vmm};

/// What the driver holds for this process. Everything but the contexts is back at its old number when all is given back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Holdings {
    /// Bytes of memory on all GPUs.
    pub used: u64,
    /// Handles of allocations, each retained and imported one counted.
    pub handles: u64,
    /// Reserved ranges of addresses.
    pub reservations: u64,
    /// Mapped allocations.
    pub maps: u64,
    /// Buffers of the older kind, made here or opened.
    pub buffers: u64,
    /// Pinned and registered ranges of the host.
    pub host_ranges: u64,
    /// Streams.
    pub streams: u64,
    /// Streams that are being captured.
    pub captures: u64,
    /// Events.
    pub events: u64,
    /// Graphs, recorded or ready.
    pub graphs: u64,
    /// Modules.
    pub modules: u64,
    /// Contexts on the stack of the calling thread.
    pub contexts: u64,
}

/// The symbol of [`wholemem_fake_cuda_arm`].
pub const ARM: &str = "wholemem_fake_cuda_arm";
/// The symbol of [`wholemem_fake_cuda_fired`].
pub const FIRED: &str = "wholemem_fake_cuda_fired";
/// The symbol of [`wholemem_fake_cuda_holdings`].
pub const HOLDINGS: &str = "wholemem_fake_cuda_holdings";

/// Makes the `nth` call from now on, counted from 1, fail with `code`, once; zero ends the plan.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_arm(nth: u64, code: u32) {
    *calls::plan() = calls::Plan { left: nth, code, fired: None };
}

/// The name of the function that was made to fail since then; null for none.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_fired() -> *const c_char {
    calls::plan().fired.map_or(std::ptr::null(), |name| name.as_ptr().cast())
}

/// What is held now.
#[unsafe(no_mangle)]
pub extern "C" fn wholemem_fake_cuda_holdings() -> Holdings {
    let ranges = ranges::count();
    Holdings {
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
