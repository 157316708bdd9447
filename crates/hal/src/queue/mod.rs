//! Work: streams run it in order, events mark points in it, graphs repeat it, modules hold its kernels.
//!
//! A stream keeps alive what its work touches. Enqueuing moves a hold of every operand into the stream, and it stays
//! there until an event after the work has passed: dropping a map right after enqueuing a copy into it is safe, and
//! waits for nothing.

mod capture;
mod event;
mod graph;
mod module;
mod stream;

pub use event::Event;
pub use graph::Graph;
pub use module::{Function, Module};
pub use stream::Stream;
