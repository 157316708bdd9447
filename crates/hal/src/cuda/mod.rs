//! The CUDA backend: NVIDIA GPUs through the driver's virtual memory management.
//!
//! | room | what it holds |
//! |---|---|
//! | [`driver`] | the library, loaded when it is first asked for, and its table of functions |
//! | [`code`] | what the driver answers, as an open set |
//! | [`gpus`] | the GPUs of this process, and their contexts |
//! | [`memory`], [`queue`] | the two raw traits |
//! | [`parked`] | pinned memory that is kept, since freeing it waits |
//! | [`limits`] | the same calls without anything around them, for benchmarks |
//!
//! What it keeps true: nothing calls the driver before a backend is opened; a missing library, a missing function or an
//! unknown answer is an error with a reason, never a panic; the caller's current context is what it was when a call
//! returns; creating, exporting and importing need no context, so a process that only holds memory and hands it on
//! never pays for one.

mod code;
mod driver;
mod gpus;
pub(crate) mod limits;
mod memory;
mod parked;
mod queue;

/// Types and versions of the driver's functions.
#[rustfmt::skip]
#[path = "generated/bindings.rs"]
#[allow(
    dead_code, missing_docs, non_camel_case_types, non_snake_case, unreachable_pub, unused_imports,
    unused_qualifications,
    clippy::all, clippy::pedantic, clippy::ptr_as_ptr, clippy::undocumented_unsafe_blocks,
    reason = "generated from NVIDIA's headers, with their names"
)]
mod bindings;

use std::sync::Arc;

pub use code::DriverCode;
pub(crate) use gpus::Gpus;

use crate::{Backend, BackendKind, Error, Result};

/// Opens the backend over all GPUs that this process may see.
pub(crate) fn open() -> Result<Backend> {
    let unavailable = |reason| Error::Unavailable { backend: BackendKind::Cuda, reason };
    let gpus = Gpus::of_process().map_err(unavailable)?;
    Backend::from_raw(Arc::new(memory::CudaMemory::new(gpus)), Arc::new(queue::CudaQueue::new(gpus)))
}
