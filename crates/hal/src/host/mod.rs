//! The host backend: Linux shared memory as a device.
//!
//! It serves host tables and host objects in production, is the reference that GPU results are compared with, and runs
//! every test without a GPU. A device is a NUMA node, or one of a configured number of virtual devices. The granule can
//! be configured, so that tests can use large granules.
//!
//! Memory is a sealed memory file, and the raw handle of an allocation is its file descriptor, so the backend needs no
//! handle table for memory. Streams run work inline, through a [`Schedule`]; the test kit has a schedule that runs it
//! later.

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
