//! The verbs of memory on Linux: each is one or two system calls.

use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use wholemem_os::vm::{self, Protection};
use wholemem_os::{Errno, Memfd, PrivateMap, memfd, meminfo};

use super::HostConfig;
use crate::raw::{Address, Imported, Properties, RawAllocation, RawMemory};
use crate::{
    AllocationSpec, BackendKind, Capability, Cause, DeviceId, DeviceInfo, Grant, Granularity, Granule,
    HandleKind, Result, Rights, ShareHandle,
};

/// From this length on, what the machine has left is looked at first: filling memory that is not there does not
/// fail, it has some process killed. Below, the look would cost more than the memory.
const LOOK_FIRST_LEN: usize = 64 << 20;

/// Linux shared memory under the raw trait.
#[derive(Debug)]
pub struct HostMemory {
    devices: Vec<DeviceInfo>,
    /// The node that a device's memory is tied to.
    nodes: Vec<Option<u32>>,
    granule: Granule,
}

impl HostMemory {
    /// Opens the devices of `config`.
    ///
    /// # Errors
    /// [`Error::BadConfig`](crate::Error::BadConfig); [`Error::Failed`](crate::Error::Failed) when the machine's memory cannot be
    /// read from the kernel.
    pub fn open(config: HostConfig) -> Result<Self> {
        let granule = config.checked_granule()?;
        let (devices, nodes) = config.devices()?.into_iter().unzip();
        Ok(Self { devices, nodes, granule })
    }
}

/// Refuses what is not there to be filled.
fn look_first(len: usize) -> Result<(), Cause> {
    if len >= LOOK_FIRST_LEN {
        let available = meminfo::available()?;
        if len > available {
            return Err(Cause::OutOfMemory { available });
        }
    }
    Ok(())
}

fn protection(rights: Rights) -> Protection {
    match rights {
        Rights::None => Protection::None,
        Rights::Read => Protection::Read,
        Rights::ReadWrite => Protection::ReadWrite,
    }
}

fn pointer(at: Address) -> Result<NonNull<u8>, Cause> {
    // An address from outside may be anything; one of ours is never null.
    at.to_host().ok_or(Cause::Os(wholemem_os::Error::Call { call: "mmap", errno: Errno::INVAL }))
}

fn raw_fd(allocation: RawAllocation) -> RawFd {
    RawFd::try_from(allocation.0).expect("a host allocation is a file descriptor")
}

/// # Safety
/// The allocation is live for `'a`.
unsafe fn file<'a>(allocation: RawAllocation) -> BorrowedFd<'a> {
    // SAFETY: an allocation of this backend is an open descriptor until it is released.
    unsafe { BorrowedFd::borrow_raw(raw_fd(allocation)) }
}

fn own(memory: Memfd) -> RawAllocation {
    RawAllocation(u64::from(memory.into_fd().into_raw_fd().unsigned_abs()))
}

fn refuse_kind(kind: HandleKind) -> Cause {
    let capability = match kind {
        HandleKind::Fd => Capability::ShareFd,
        HandleKind::Fabric => Capability::Fabric,
        HandleKind::CudaIpc => Capability::CudaIpc,
    };
    Cause::Unsupported { capability, reason: "host memory travels as a file descriptor" }
}

// SAFETY: `map` maps a sealed memory file of the given length; `import` refuses files that are not sealed; all memory
// is the processor's, so `host_pointer` is the address itself.
unsafe impl RawMemory for HostMemory {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity, Cause> {
        if spec.handle != HandleKind::Fd {
            return Err(refuse_kind(spec.handle));
        }
        if spec.rdma {
            let reason = "network cards register host memory directly, whatever it was created for";
            return Err(Cause::Unsupported { capability: Capability::Rdma, reason });
        }
        // What begins at a large page can have large pages.
        let recommended = Granule::new(self.granule.len().max(vm::LARGE_PAGE));
        let recommended = recommended.expect("both are powers of two");
        Ok(Granularity { minimum: self.granule, recommended })
    }

    unsafe fn available(&self, _device: DeviceId) -> Result<usize, Cause> {
        Ok(meminfo::available()?)
    }

    unsafe fn create(&self, spec: &AllocationSpec) -> Result<RawAllocation, Cause> {
        look_first(spec.len)?;
        let node = spec.node.or(self.nodes[spec.device.0 as usize]);
        Ok(own(Memfd::create_near("wholemem", spec.len, node)?))
    }

    unsafe fn release(&self, allocation: RawAllocation) -> Result<(), Cause> {
        // SAFETY: the descriptor is this allocation's own, and it is given up once.
        drop(unsafe { OwnedFd::from_raw_fd(raw_fd(allocation)) });
        Ok(())
    }

    unsafe fn reserve(
        &self,
        len: usize,
        align: Option<usize>,
        wanted: Option<Address>,
    ) -> Result<Address, Cause> {
        let align = align.unwrap_or_else(vm::page_size);
        let wanted = wanted.map(pointer).transpose()?;
        Ok(Address::of_host(vm::reserve(len, align, wanted)?.as_ptr()))
    }

    unsafe fn free(&self, at: Address, len: usize) -> Result<(), Cause> {
        // SAFETY: the range is one reservation, given up once, with nothing mapped in it.
        Ok(unsafe { vm::release(pointer(at)?, len) }?)
    }

    unsafe fn map(&self, at: Address, len: usize, allocation: RawAllocation) -> Result<(), Cause> {
        // SAFETY: the allocation is live for the call.
        let file = unsafe { file(allocation) };
        // SAFETY: the range is an empty place of one reservation, and our files are sealed against shrinking.
        Ok(unsafe { vm::map_at(pointer(at)?, len, file, Protection::None) }?)
    }

    unsafe fn set_access(&self, at: Address, len: usize, grants: &[Grant]) -> Result<(), Cause> {
        // One process has one page table: it gets what any of its devices may do, and the safe types above keep
        // each device to its own.
        let highest = grants.iter().map(|grant| grant.rights).max().unwrap_or(Rights::None);
        // SAFETY: the range is mapped, and no right that somebody uses goes.
        Ok(unsafe { vm::protect(pointer(at)?, len, protection(highest)) }?)
    }

    unsafe fn unmap(&self, at: Address, len: usize) -> Result<(), Cause> {
        // SAFETY: the range was mapped in one piece, and nobody uses it any more.
        Ok(unsafe { vm::unmap_at(pointer(at)?, len) }?)
    }

    unsafe fn export(
        &self,
        allocation: RawAllocation,
        kind: HandleKind,
        rights: Rights,
    ) -> Result<ShareHandle, Cause> {
        if kind != HandleKind::Fd {
            return Err(refuse_kind(kind));
        }
        // SAFETY: the allocation is live for the call.
        let file = unsafe { file(allocation) };
        Ok(ShareHandle::Fd(match rights {
            Rights::ReadWrite => memfd::share_fd(file)?,
            Rights::Read | Rights::None => memfd::read_only_fd(file)?,
        }))
    }

    unsafe fn import(&self, _device: DeviceId, handle: ShareHandle, len: usize) -> Result<Imported, Cause> {
        let kind = handle.kind();
        let fd = handle.into_fd().ok_or_else(|| refuse_kind(kind))?;
        let memory = Memfd::import(fd, len)?;
        let rights = if memory.is_writable() { Rights::ReadWrite } else { Rights::Read };
        Ok(Imported { raw: own(memory), rights })
    }

    unsafe fn properties(&self, allocation: RawAllocation) -> Result<Properties, Cause> {
        // SAFETY: the allocation is live for the call.
        let file = unsafe { file(allocation) };
        Ok(Properties { len: Some(memfd::len_of(file)?), device: None, handles: vec![HandleKind::Fd] })
    }

    unsafe fn populate(&self, at: Address, len: usize, _rights: Rights) -> Result<(), Cause> {
        // SAFETY: the range is mapped with some right.
        Ok(unsafe { vm::populate(pointer(at)?, len) }?)
    }

    unsafe fn enlarge_pages(&self, at: Address, len: usize) -> Result<(), Cause> {
        // SAFETY: the range is mapped.
        Ok(unsafe { vm::enlarge_pages(pointer(at)?, len) }?)
    }

    unsafe fn set_inherited(&self, at: Address, len: usize, is_inherited: bool) -> Result<(), Cause> {
        // SAFETY: the range is mapped, and a child is refused what it inherited.
        Ok(unsafe { vm::set_inherited(pointer(at)?, len, is_inherited) }?)
    }

    unsafe fn pin(&self, _device: DeviceId, len: usize) -> Result<Address, Cause> {
        look_first(len)?;
        let at = vm::reserve(len, vm::page_size(), None)?;
        // SAFETY: the range was made in the line above.
        if let Err(error) = unsafe { vm::protect(at, len, Protection::ReadWrite) } {
            // SAFETY: the range was reserved by this function, whose caller has not seen it.
            let _ = unsafe { vm::release(at, len) };
            return Err(error.into());
        }
        Ok(Address::of_host(at.as_ptr()))
    }

    unsafe fn unpin(&self, at: Address, len: usize) -> Result<(), Cause> {
        // SAFETY: the range was made by `pin`, and is given up once.
        Ok(unsafe { vm::release(pointer(at)?, len) }?)
    }

    unsafe fn map_private(
        &self,
        allocation: RawAllocation,
        offset: usize,
        len: usize,
    ) -> Result<Option<PrivateMap>, Cause> {
        // SAFETY: the allocation is live for the call.
        let file = unsafe { file(allocation) };
        // SAFETY: our files are sealed against shrinking.
        Ok(Some(unsafe { PrivateMap::of_file(file, offset, len) }?))
    }

    unsafe fn revoke(&self, at: Address, len: usize) -> Result<(), Cause> {
        // SAFETY: the range is mapped, and what uses it is meant to be stopped.
        Ok(unsafe { vm::revoke(pointer(at)?, len) }?)
    }

    fn host_pointer(&self, at: Address) -> Result<Option<NonNull<u8>>, Cause> {
        Ok(at.to_host())
    }
}
