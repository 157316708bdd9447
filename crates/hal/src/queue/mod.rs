//! Streams run work in order, events mark points in a stream, graphs replay captured work, modules contain kernels.
//!
//! A stream keeps the operands of its work alive. Enqueuing moves a reference to every operand into the stream, which
//! holds it until an event after the work completes. So a mapping may be dropped right after a copy into it is
//! enqueued, and the drop does not block.

mod capture;
mod event;
mod foreign_streams;
mod graph;
mod launch_check;
mod module;
mod stream;

pub use event::Event;
pub use foreign_streams::ForeignStreams;
pub use graph::Graph;
pub use launch_check::LaunchCheck;
pub use module::{Function, Module};
pub use stream::Stream;
