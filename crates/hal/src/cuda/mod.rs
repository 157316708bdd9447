//! The CUDA backend: NVIDIA GPUs through the driver's virtual memory management.
//!
//! | module | what it holds |
//! |---|---|
//! | [`driver`] | the library, loaded when it is first asked for, and its table of functions |
//! | [`code`] | the driver's answers as results |
//! | [`gpus`] | the GPUs of this process, and their contexts |
//! | [`memory`], [`queue`] | the two raw traits |
//! | [`parked`] | pinned memory that is kept, since freeing it waits |
//! | `limits` | the same calls without anything around them, for benchmarks; with the feature `bench` |
//!
//! What it keeps true: nothing calls the driver before a backend is opened; a missing library, a missing function or an
//! unknown answer is an error with a reason, never a panic; the caller's current context is what it was when a call
//! returns; creating, exporting and importing need no context, so a process that only holds memory and hands it on
//! never pays for one.

mod code;
mod driver;
mod gpus;
#[cfg(feature = "bench")]
pub(crate) mod limits;
mod memory;
mod parked;
mod queue;

pub(crate) use gpus::Gpus;
use memory::CudaMemory;
use queue::CudaQueue;

use crate::{BackendKind, Error, Result, bindings};

/// Opens the backend over all GPUs that this process may see.
pub(crate) fn open() -> Result<(CudaMemory, CudaQueue)> {
    let unavailable = |reason| Error::Unavailable { backend: BackendKind::Cuda, reason };
    let gpus = Gpus::of_process().map_err(unavailable)?;
    Ok((CudaMemory::new(gpus), CudaQueue::new(gpus)))
}
