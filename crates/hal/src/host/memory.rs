//! The raw memory operations on Linux, each of which makes one or two system calls.

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use wholemem_os::vm::{self, Protection};
use wholemem_os::{Errno, Memfd, PrivateMap, memfd, meminfo};

use super::HostConfig;
use crate::raw::{Address, AllocationProperties, ImportedAllocation, RawAllocation, RawMemory};
use crate::{
    AllocationSpec, BackendError, BackendKind, Capability, DeviceId, DeviceInfo, Grant, Granularity, Granule,
    HandleKind, Result, Rights, ShareHandle,
};

/// The minimum length of new memory for which the available memory is checked: filling memory that is not available does not fail
/// but triggers the OOM killer. For shorter memory, the check would cost more than the allocation.
const CHECK_AVAILABLE_LEN: usize = 64 << 20;

/// Linux shared memory as an implementation of `RawMemory`.
#[derive(Debug)]
pub struct HostMemory {
    devices: Vec<DeviceInfo>,
    /// The NUMA node to which the memory of each device is bound, if any.
    nodes: Vec<Option<u32>>,
    granule: Granule,
    maps: Mutex<HostMaps>,
}

/// The mappings of a host backend by address, so that the memory behind an address can be found.
#[derive(Debug, Default)]
struct HostMaps {
    maps: BTreeMap<u64, HostMap>,
    /// The number of mappings that were created so far.
    created: u64,
}

#[derive(Debug, Clone, Copy)]
struct HostMap {
    len: usize,
    /// The mapped allocation. It is live, because a mapping holds its allocation.
    allocation: RawAllocation,
    /// The number of this mapping, which no other mapping gets.
    id: u64,
}

impl HostMaps {
    /// Returns the address and the description of the mapping that contains an address.
    fn containing(&self, at: Address) -> Option<(Address, HostMap)> {
        let (start, map) = self.maps.range(..=at.0).next_back()?;
        (at.0 - start < map.len as u64).then_some((Address(*start), *map))
    }
}

impl HostMemory {
    /// Creates the devices of the host backend that `config` describes. Their memory is host memory.
    ///
    /// # Errors
    /// [`Error::BadConfig`](crate::Error::BadConfig); [`Error::Failed`](crate::Error::Failed) if the kernel's memory information
    /// cannot be read.
    pub fn open(config: HostConfig) -> Result<Self> {
        let granule = config.checked_granule()?;
        let (devices, nodes) = config.devices()?.into_iter().unzip();
        Ok(Self { devices, nodes, granule, maps: Mutex::default() })
    }

    fn maps(&self) -> MutexGuard<'_, HostMaps> {
        // Each change under this lock is one insert or one remove, so the map is consistent after a panic.
        self.maps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn unknown_address() -> BackendError {
    let reason = "the memory at this address is not a mapping of this backend";
    BackendError::Unsupported { capability: Capability::ShareFd, reason }
}

/// Returns an error if `len` bytes of memory are not available on the machine. Short lengths are not checked.
fn check_available(len: usize) -> Result<(), BackendError> {
    if len >= CHECK_AVAILABLE_LEN {
        let available = meminfo::available()?;
        if len > available {
            return Err(BackendError::OutOfMemory { available });
        }
    }
    Ok(())
}

/// Returns true if the kernel refused to bind memory to a NUMA node.
fn is_binding_refused(error: &wholemem_os::Error) -> bool {
    matches!(
        error,
        wholemem_os::Error::Call { call: "mbind", errno: Errno::PERM | Errno::INVAL | Errno::NOSYS }
    )
}

fn protection(rights: Rights) -> Protection {
    match rights {
        Rights::None => Protection::None,
        Rights::Read => Protection::Read,
        Rights::ReadWrite => Protection::ReadWrite,
    }
}

fn pointer(at: Address) -> Result<NonNull<u8>, BackendError> {
    // A caller may pass any address, so null is an error; addresses of this backend are never null.
    at.to_host().ok_or(BackendError::Os(wholemem_os::Error::Call { call: "mmap", errno: Errno::INVAL }))
}

fn raw_fd(allocation: RawAllocation) -> RawFd {
    RawFd::try_from(allocation.0).expect("a host allocation is a file descriptor")
}

/// Borrows the file descriptor of an allocation.
///
/// # Safety
/// The allocation is live for `'a`.
unsafe fn file<'a>(allocation: RawAllocation) -> BorrowedFd<'a> {
    // SAFETY: an allocation of this backend is an open file descriptor until it is released, and the caller guarantees that it is
    // live for `'a`.
    unsafe { BorrowedFd::borrow_raw(raw_fd(allocation)) }
}

fn own(memory: Memfd) -> RawAllocation {
    RawAllocation(u64::from(memory.into_fd().into_raw_fd().unsigned_abs()))
}

fn kind_unsupported(kind: HandleKind) -> BackendError {
    let capability = match kind {
        HandleKind::Fd => Capability::ShareFd,
        HandleKind::Fabric => Capability::Fabric,
        HandleKind::CudaIpc => Capability::CudaIpc,
    };
    BackendError::Unsupported { capability, reason: "host memory is shared as a file descriptor" }
}

// SAFETY: `map` maps a sealed memory file of the given length; `import` refuses files that are not sealed; the CPU can address
// all host memory, so `host_pointer` is the address itself.
unsafe impl RawMemory for HostMemory {
    fn kind(&self) -> BackendKind {
        BackendKind::Host
    }

    fn devices(&self) -> &[DeviceInfo] {
        &self.devices
    }

    fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity, BackendError> {
        if spec.handle != HandleKind::Fd {
            return Err(kind_unsupported(spec.handle));
        }
        if spec.rdma {
            let reason = "network cards can register any host memory directly";
            return Err(BackendError::Unsupported { capability: Capability::Rdma, reason });
        }
        // The recommended granule is at least a huge page, since memory that begins at a multiple of the huge-page size can have
        // huge pages.
        let recommended = Granule::new(self.granule.len().max(vm::LARGE_PAGE));
        let recommended = recommended.expect("both are powers of two");
        Ok(Granularity { minimum: self.granule, recommended })
    }

    unsafe fn available(&self, _device: DeviceId) -> Result<usize, BackendError> {
        Ok(meminfo::available()?)
    }

    unsafe fn create(&self, spec: &AllocationSpec) -> Result<RawAllocation, BackendError> {
        check_available(spec.len)?;
        let own_node = self.nodes[spec.device.0 as usize];
        match Memfd::create_near("wholemem", spec.len, spec.node.or(own_node)) {
            // Containers forbid `mbind` without CAP_SYS_NICE (EPERM) or exclude nodes (EINVAL). The node of a device is a matter of
            // speed. Only a node that the caller requests for this memory is an error.
            Err(error) if spec.node.is_none() && is_binding_refused(&error) => {
                tracing::debug!(%error, node = own_node, "memory cannot be bound to a NUMA node, and may be on any node");
                Ok(own(Memfd::create("wholemem", spec.len)?))
            }
            memory => Ok(own(memory?)),
        }
    }

    unsafe fn release(&self, allocation: RawAllocation) -> Result<(), BackendError> {
        // SAFETY: the allocation owns the descriptor, and this is its only release.
        drop(unsafe { OwnedFd::from_raw_fd(raw_fd(allocation)) });
        Ok(())
    }

    unsafe fn reserve(
        &self,
        len: usize,
        align: Option<usize>,
        wanted: Option<Address>,
    ) -> Result<Address, BackendError> {
        let align = align.unwrap_or_else(vm::page_size);
        let wanted = wanted.map(pointer).transpose()?;
        Ok(Address::of_host(vm::reserve(len, align, wanted)?.as_ptr()))
    }

    unsafe fn free(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // SAFETY: the caller of `free` guarantees the contract of the module `raw`: the range is one reservation in
        // which nothing is mapped, and this is its only release.
        Ok(unsafe { vm::release(pointer(at)?, len) }?)
    }

    unsafe fn map(&self, at: Address, len: usize, allocation: RawAllocation) -> Result<(), BackendError> {
        // SAFETY: the caller of `map` guarantees the contract of the module `raw`: the allocation is live until this
        // function returns.
        let file = unsafe { file(allocation) };
        // SAFETY: the caller of `map` guarantees the contract of the module `raw`: the range is an unmapped part of
        // one reservation; the files of this backend are sealed against shrinking.
        unsafe { vm::map_at(pointer(at)?, len, file, Protection::None) }?;
        let mut maps = self.maps();
        maps.created += 1;
        let id = maps.created;
        maps.maps.insert(at.0, HostMap { len, allocation, id });
        Ok(())
    }

    unsafe fn set_access(&self, at: Address, len: usize, grants: &[Grant]) -> Result<(), BackendError> {
        // The CPU gets the highest rights of all devices, since a process has one page table; the safe types restrict each device
        // to its own rights.
        let highest = grants.iter().map(|grant| grant.rights).max().unwrap_or(Rights::None);
        // SAFETY: the caller of `set_access` guarantees the contract of the module `raw`: the range is mapped, and
        // no right that is in use is revoked.
        Ok(unsafe { vm::protect(pointer(at)?, len, protection(highest)) }?)
    }

    unsafe fn unmap(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // The lock is held during the call, so that `retain` finds no mapping whose allocation may be released.
        let mut maps = self.maps();
        // SAFETY: the caller of `unmap` guarantees the contract of the module `raw`: the range was mapped by one
        // call and is no longer used.
        unsafe { vm::unmap_at(pointer(at)?, len) }?;
        maps.maps.remove(&at.0);
        Ok(())
    }

    unsafe fn export(
        &self,
        allocation: RawAllocation,
        kind: HandleKind,
        rights: Rights,
    ) -> Result<ShareHandle, BackendError> {
        if kind != HandleKind::Fd {
            return Err(kind_unsupported(kind));
        }
        // SAFETY: the caller of `export` guarantees the contract of the module `raw`: the allocation is live until
        // this function returns.
        let file = unsafe { file(allocation) };
        Ok(ShareHandle::Fd(match rights {
            Rights::ReadWrite => memfd::share_fd(file)?,
            Rights::Read | Rights::None => memfd::read_only_fd(file)?,
        }))
    }

    unsafe fn import(
        &self,
        _device: DeviceId,
        handle: ShareHandle,
        len: usize,
    ) -> Result<ImportedAllocation, BackendError> {
        let kind = handle.kind();
        let fd = handle.into_fd().ok_or_else(|| kind_unsupported(kind))?;
        let memory = Memfd::import(fd, len)?;
        let rights = if memory.is_writable() { Rights::ReadWrite } else { Rights::Read };
        Ok(ImportedAllocation { raw: own(memory), rights })
    }

    unsafe fn retain(&self, at: Address) -> Result<RawAllocation, BackendError> {
        let maps = self.maps();
        let (_, map) = maps.containing(at).ok_or_else(unknown_address)?;
        // SAFETY: the allocation of a mapping is live until the mapping is removed, which needs the lock.
        let file = unsafe { file(map.allocation) };
        let fd = memfd::share_fd(file)?;
        Ok(RawAllocation(u64::from(fd.into_raw_fd().unsigned_abs())))
    }

    unsafe fn address_range(&self, at: Address) -> Result<(Address, usize), BackendError> {
        self.maps().containing(at).map(|(start, map)| (start, map.len)).ok_or_else(unknown_address)
    }

    unsafe fn memory_id(&self, at: Address) -> Result<Option<u64>, BackendError> {
        Ok(self.maps().containing(at).map(|(_, map)| map.id))
    }

    unsafe fn properties(&self, allocation: RawAllocation) -> Result<AllocationProperties, BackendError> {
        // SAFETY: the caller of `properties` guarantees the contract of the module `raw`: the allocation is live
        // until this function returns.
        let file = unsafe { file(allocation) };
        Ok(AllocationProperties {
            len: Some(memfd::len_of(file)?),
            device: None,
            handles: vec![HandleKind::Fd],
        })
    }

    unsafe fn populate(&self, at: Address, len: usize, _rights: Rights) -> Result<(), BackendError> {
        // SAFETY: the caller of `populate` has mapped the range with at least read access.
        Ok(unsafe { vm::populate(pointer(at)?, len) }?)
    }

    unsafe fn enlarge_pages(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // SAFETY: the caller of `enlarge_pages` guarantees the contract of the module `raw`: the range is mapped.
        Ok(unsafe { vm::enlarge_pages(pointer(at)?, len) }?)
    }

    unsafe fn set_inherited(&self, at: Address, len: usize, is_inherited: bool) -> Result<(), BackendError> {
        // SAFETY: the caller of `set_inherited` guarantees the contract of the module `raw`: the range is mapped; in
        // a forked child, the safe types refuse inherited handles.
        Ok(unsafe { vm::set_inherited(pointer(at)?, len, is_inherited) }?)
    }

    unsafe fn pin(&self, _device: DeviceId, len: usize) -> Result<Address, BackendError> {
        check_available(len)?;
        let at = vm::reserve(len, vm::page_size(), None)?;
        // SAFETY: the range was reserved above, and no other code uses it.
        if let Err(error) = unsafe { vm::protect(at, len, Protection::ReadWrite) } {
            // SAFETY: the range was reserved above, and no other code uses it.
            let _ = unsafe { vm::release(at, len) };
            return Err(error.into());
        }
        Ok(Address::of_host(at.as_ptr()))
    }

    unsafe fn unpin(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // SAFETY: the range is from `pin`, and this is its only release.
        Ok(unsafe { vm::release(pointer(at)?, len) }?)
    }

    unsafe fn map_private(
        &self,
        allocation: RawAllocation,
        offset: usize,
        len: usize,
    ) -> Result<Option<PrivateMap>, BackendError> {
        // SAFETY: the caller of `map_private` guarantees the contract of the module `raw`: the allocation is live
        // until this function returns.
        let file = unsafe { file(allocation) };
        // SAFETY: the file is sealed against shrinking, as are all memory files of this backend.
        Ok(Some(unsafe { PrivateMap::of_file(file, offset, len) }?))
    }

    unsafe fn revoke(&self, at: Address, len: usize) -> Result<(), BackendError> {
        // SAFETY: the caller of `revoke` guarantees that the range is mapped, and intends a fault on a later access.
        Ok(unsafe { vm::revoke(pointer(at)?, len) }?)
    }

    fn host_pointer(&self, at: Address) -> Result<Option<NonNull<u8>>, BackendError> {
        Ok(at.to_host())
    }
}
