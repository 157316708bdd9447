//! Windows of `cudaMalloc` memory, for systems on which memory of `cuMemCreate` is not wanted (`SymmetricSpec::vmm`).
//!
//! A CUDA IPC handle does not keep memory alive, and memory must not be freed while another process has it open. So each rank keeps its
//! memory until all ranks have reported that they dropped the window, which they do when they create the next window.

use std::sync::{Mutex, PoisonError};

use wholemem_hal::{BackendKind, CudaMallocBuffer, Device};
use wholemem_os::Deadline;

use super::address_space::WindowAddressSpace;
use super::window::Window;
use super::window_table::WindowId;
use crate::communicator::agree;
use crate::{Communicator, Result};

/// This rank's memory of the windows of `cudaMalloc` memory.
#[derive(Debug, Default)]
pub(super) struct MallocWindows {
    buffers: Mutex<Vec<(WindowId, CudaMallocBuffer)>>,
}

impl MallocWindows {
    /// Creates a window of zeroed `cudaMalloc` memory with `len` bytes on this rank. Returns `None` on all ranks if the devices are
    /// not GPUs, or if the window has no bytes on some rank, because `cudaMalloc` has no memory of zero bytes. Collective.
    pub(super) fn allocate(
        &self,
        group: &Communicator,
        address_space: &WindowAddressSpace,
        len: usize,
    ) -> Result<Option<Window>> {
        if group.device().backend().kind() != BackendKind::Cuda {
            return Ok(None);
        }
        let lens = group.bootstrap().all_gather(&(len as u64).to_le_bytes())?;
        if lens.iter().any(|other| *other == 0_u64.to_le_bytes()) {
            return Ok(None);
        }
        let buffer = agree(group.bootstrap(), zeroed(group.device(), len))?;
        let window = address_space.register_cuda_malloc(&buffer)?;
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.retain(|(id, _)| address_space.has_window(*id));
        buffers.push((window.core().id, buffer));
        Ok(Some(window))
    }
}

/// Allocates zeroed memory of `cudaMalloc`.
fn zeroed(device: &Device, len: usize) -> Result<CudaMallocBuffer> {
    let buffer = CudaMallocBuffer::create(device, len)?;
    let stream = device.stream()?;
    stream.fill(&buffer.all(), 0)?;
    stream.synchronize(Deadline::NEVER)?;
    Ok(buffer)
}
