//! The interface that a backend implements: two traits whose methods make no checks.
//!
//! A backend translates each method to calls of its driver and returns the driver's error; it does not repeat the checks of the
//! safe types. [`RawMemory`] has the seven operations on shareable memory and queries about memory, [`RawQueue`] has streams,
//! events, copies, graphs and launches.
//!
//! Every `# Safety` section of the traits refers to this contract:
//!
//! 1. Handles (`RawAllocation`, `RawStream`, ...) come from the same backend in this process and are live. Each is released
//!    once.
//! 2. Lengths are nonzero multiples of the granule; an address range is inside one live reservation; a mapping covers one whole
//!    allocation, a range is mapped at most once, and `unmap` gets the range of one `map` call.
//! 3. Nothing is unmapped, freed or released while enqueued work may still use it.
//! 4. No call is made in a forked child.
//!
//! The traits are hidden from the documentation and may change: code outside this repository should not need them.

mod memory;
mod queue;

pub use memory::{Address, AllocationProperties, BackendFact, ImportedAllocation, RawAllocation, RawMemory};
pub use queue::{
    EventHandle, EventKind, RawCapture, RawEvent, RawFunction, RawGraph, RawModule, RawQueue, RawStream,
    UserObject,
};
