//! Collective calls over memory that every rank has: reduce, gather, broadcast, barrier.
//!
//! ```text
//!   SymmetricMemory ── space: the addresses of all windows ── window_table: the offset of each window (pure)
//!      └─ Lane ── one sequence of calls ── call ── tuning: the algorithm (pure) ── kernel: launches
//!            └─ report: how a call fails, and how the host aborts it
//! ```
//!
//! Guarantees: no call waits for ever, and no call reads data of another call. Before a call ends, every rank has a signal of
//! that call from every other rank. So a signal of call k + 1 from a rank proves that the rank has finished call k, and two
//! alternating buffers need no acknowledgement. If ranks read each other's windows directly, the call ends with a barrier. A
//! kernel that waits polls for an abort request and for its timeout; then it reports the missing ranks, notifies the other
//! ranks, and ends.

mod call;
mod hooks;
mod kernel;
mod lane;
mod report;
mod slices;
mod space;
mod spec;
mod symmetric_memory;
mod tuning;
mod window;
mod window_part;
mod window_table;

#[cfg(feature = "test-hooks")]
pub use hooks::Chaos;
pub use lane::Lane;
pub use spec::SymmetricSpec;
pub use symmetric_memory::SymmetricMemory;
pub use tuning::{Algorithm, Tuning, UnknownAlgorithm};
pub use window::{Buffer, Window};
