//! Windows of `cudaMalloc` memory, for systems on which memory of `cuMemCreate` is not wanted (`SymmetricSpec::vmm`).

use wholemem_hal::{BackendKind, CudaMallocBuffer, Device};
use wholemem_os::Deadline;

use super::address_space::{WindowAddressSpace, WindowCall};
use super::window::Window;
use crate::communicator::agree;
use crate::{Communicator, Result};

/// Creates a window of zeroed `cudaMalloc` memory with `len` bytes on this rank. Returns `None` on all ranks if the devices are not
/// GPUs, or if the window has no bytes on some rank, because `cudaMalloc` has no memory of zero bytes. Collective.
pub(super) fn allocate(
    group: &Communicator,
    address_space: &WindowAddressSpace,
    len: usize,
) -> Result<Option<Window>> {
    if group.device().backend().kind() != BackendKind::Cuda {
        return Ok(None);
    }
    let len_bytes = (len as u64).to_le_bytes().to_vec();
    let lens = address_space.exchange_messages(WindowCall::AllocateByMalloc, Ok(len_bytes))?;
    if lens.iter().any(|other| *other == 0_u64.to_le_bytes()) {
        return Ok(None);
    }
    let buffer = agree(group.bootstrap(), zeroed(group.device(), len))?;
    address_space.register_span(&buffer.all(), false).map(Some)
}

/// Allocates zeroed memory of `cudaMalloc`.
fn zeroed(device: &Device, len: usize) -> Result<CudaMallocBuffer> {
    let buffer = CudaMallocBuffer::create(device, len)?;
    let stream = device.stream()?;
    stream.fill(&buffer.all(), 0)?;
    stream.synchronize(Deadline::NEVER)?;
    Ok(buffer)
}
