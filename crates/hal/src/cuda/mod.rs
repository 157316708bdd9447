//! The CUDA backend: NVIDIA GPUs through the driver's virtual memory management.
//!
//! | module | contents |
//! |---|---|
//! | [`driver`] | the driver library, loaded at its first use, and its function table |
//! | [`code`] | conversion of the driver's result codes |
//! | [`gpus`] | the GPUs of this process, and their contexts |
//! | [`memory`], [`queue`] | the two raw traits |
//! | [`pinned_pool`] | a pool of pinned memory, because freeing it blocks |
//! | `limits` | with the feature `bench`: direct calls as a baseline for benchmarks |
//!
//! Guarantees: the driver is not called before a backend is opened. A missing library, a missing function or an unknown
//! result code is an error with a reason, never a panic. Every call restores the caller's current context. Creating,
//! exporting and importing memory need no context, so a process that only passes memory on never creates one.

mod code;
mod driver;
mod gpus;
#[cfg(feature = "bench")]
pub(crate) mod limits;
mod memory;
mod pinned_pool;
mod queue;

pub(crate) use gpus::Gpus;
use memory::CudaMemory;
use queue::CudaQueue;

use crate::{BackendKind, Error, Result, bindings};

/// Opens the CUDA backend with all GPUs that are visible to this process.
pub(crate) fn open() -> Result<(CudaMemory, CudaQueue)> {
    let unavailable = |reason| Error::Unavailable { backend: BackendKind::Cuda, reason };
    let gpus = Gpus::of_process().map_err(unavailable)?;
    Ok((CudaMemory::new(gpus), CudaQueue::new(gpus)))
}
