//! Collective calls over memory that all ranks of a group share: all-reduce, all-gather, broadcast and barrier.
//!
//! ```text
//!   SymmetricMemory ── address_space: the addresses of all windows ── window_table: the offset of each window (pure)
//!      │     ├─ registration: windows of existing memory ── shared_block: what ranks send ── peer_blocks: what they map
//!      │     └─ recorder: windows of captured calls
//!      └─ Lane ── one sequence of calls ── call ── tuning: the algorithm (pure) ── kernel: launches
//!            ├─ find_window: is the memory registered? ── address_index: by address ── memory_watch: was it freed?
//!            ├─ terms: what must be equal on all ranks (pure)
//!            └─ report: why a call was aborted, and the abort request of the host
//! ```
//!
//! Guarantees: every call ends, and no call reads data of another call. Before a call ends, every rank has a signal of
//! that call from every other rank. So a signal of call k + 1 from a rank proves that the rank has finished call k, and two
//! alternating buffers need no acknowledgement. If ranks read each other's windows directly, the call ends with a barrier. A
//! kernel that waits polls for an abort request and for its timeout; then it reports the missing ranks, notifies the other
//! ranks, and ends.

mod address_index;
mod address_space;
mod address_tables;
mod call;
mod call_log;
mod find_window;
mod hooks;
mod kernel;
mod lane;
mod malloc_windows;
mod memory_watch;
mod peer_blocks;
mod recorder;
mod registration;
mod report;
mod shared_block;
mod slices;
mod spec;
mod symmetric_memory;
mod terms;
mod tuning;
mod window;
mod window_part;
mod window_table;

#[cfg(feature = "test-hooks")]
pub use hooks::CallFaults;
pub use lane::Lane;
pub use recorder::{CaptureRecording, RecordedWindows};
pub use spec::SymmetricSpec;
pub use symmetric_memory::SymmetricMemory;
pub use tuning::{Algorithm, Tuning, UnknownAlgorithm};
pub use window::{Buffer, Window};
