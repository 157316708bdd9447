//! What a backend has to do: two traits, thin and unchecked.
//!
//! Below them are plain values only. A backend turns each verb into the calls of its driver and hands back what the
//! driver said; it checks nothing that the safe types above have checked already. [`RawMemory`] has the seven verbs
//! of shareable memory and the queries around them, [`RawQueue`] has streams, events, copies, graphs and launches.
//!
//! The contract, which every method's `# Safety` refers to:
//!
//! 1. Handles (`RawAllocation`, `RawStream`, ...) came from the same backend in this process, and are live. Each is given
//!    back once.
//! 2. Lengths are whole granules and not zero; addresses lie in one live reservation; a map covers one whole
//!    allocation, a place is mapped once, and what is unmapped was mapped in one piece.
//! 3. Nothing is unmapped, freed or released while enqueued work may still use it.
//! 4. No call is made in a forked child.
//!
//! They are hidden from the documentation and may change: code outside this repository should not need them.

mod memory;
mod queue;

pub use memory::{Address, Fact, Imported, Properties, RawAllocation, RawMemory};
pub use queue::{
    EventHandle, EventKind, Kept, RawCapture, RawEvent, RawFunction, RawGraph, RawModule, RawQueue, RawStream,
};
