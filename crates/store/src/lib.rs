//! Named objects in shared memory.

#![forbid(unsafe_code)]
#![expect(dead_code, unused_imports, reason = "the threads that use it come next")]

mod cells;
#[doc(hidden)]
pub mod fuzz;
mod id;
mod index;
mod pin;
mod protocol;
mod server;

pub use id::{AllocationId, ObjectId};
pub use index::IndexError;
pub use protocol::{Event, EventKind, Refusal, Status, Usage};
