//! Memory that every rank has, and what ranks do together through it: reduce, gather, broadcast, wait for each other.
//!
//! ```text
//!   Symmetric ── space: addresses of all windows ── book: which window is where (pure)
//!       └─ lanes: one sequence of calls each ── tuning: which algorithm (pure) ── kernel: the one launch
//!                    └─ report: how a call fails, and is told to
//! ```
//!
//! Why no call hangs, and none is wrong: every call is a meeting. Before it ends, every rank has heard from every rank in
//! that call; so who has heard from a rank in call k + 1 knows that it has finished call k. Buffers alternate between two,
//! and need no acknowledgement. Where ranks read each other's memory directly, a barrier at the end says that they have.
//! A kernel that waits in vain looks now and then whether it has been told to give up, or its time is over; then it says
//! who is missing, tells the others, and ends.

mod call;
mod debug;
#[allow(unsafe_code, reason = "a kernel launch is unsafe")]
mod kernel;
mod lane;
mod report;
mod space;
mod spec;
mod symmetric;
mod tuning;
mod window;
mod window_part;
mod window_table;

pub use debug::Chaos;
pub use lane::Lane;
pub use spec::SymmetricSpec;
pub use symmetric::Symmetric;
pub use tuning::{Algorithm, Tuning, UnknownAlgorithm};
pub use window::{Buffer, Window};
