//! The host backend: Linux shared memory as a device.
//!
//! It is how host tables and host objects work in production, the oracle that GPU results are compared with, and what
//! every test runs on. A device is a NUMA node, or one of as many virtual devices as were asked for; its granule can
//! be set, so that mistakes about large granules show here.
//!
//! Memory is a sealed memory file, and its raw handle is the number of the file descriptor: the backend keeps no
//! table. Streams run their work inline, through a [`Schedule`] that the test kit replaces by one that runs it late.

mod config;
mod event;
mod memory;
mod queue;
mod schedule;

pub use config::HostConfig;
pub use event::HostEvent;
pub use memory::HostMemory;
pub use queue::HostQueue;
pub use schedule::{Schedule, StreamId, Work};
