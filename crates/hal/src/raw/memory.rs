//! The verbs of memory: create, reserve, map, grant, export and import, unmap, release.

use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use wholemem_os::PrivateMap;
use wholemem_os::width::{to_u64, to_usize};

use crate::{
    AllocationSpec, BackendKind, Capability, Cause, DeviceId, DeviceInfo, Grant, Granularity, HandleKind,
    Rights, ShareHandle,
};

const NO_PLAIN: Cause = Cause::Unsupported {
    capability: Capability::CudaIpc,
    reason: "this backend has one kind of memory, and shares it as allocations",
};

/// An address as the devices of a backend see it. On the host it is a pointer's number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(pub u64);

impl Address {
    /// The address of host memory, through which it can be reached again.
    #[must_use]
    pub fn of_host<T>(at: *const T) -> Self {
        Self(to_u64(at.expose_provenance()))
    }

    /// The processor's pointer for it, where the processor's addresses are meant; `None` for null.
    #[must_use]
    pub fn to_host(self) -> Option<NonNull<u8>> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(to_usize(self.0)))
    }

    /// The address `offset` bytes further on.
    #[must_use]
    pub fn after(self, offset: usize) -> Self {
        Self(self.0 + to_u64(offset))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// Physical memory, by the backend's own number for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RawAllocation(pub u64);

/// Memory that came through a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Imported {
    /// The memory.
    pub raw: RawAllocation,
    /// The most that may be done with it through this handle.
    pub rights: Rights,
}

/// What a backend says of an allocation it is shown.
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
pub struct Properties {
    /// Its length, where the backend can tell.
    pub len: Option<usize>,
    /// The device it lives on, where the backend can tell.
    pub device: Option<DeviceId>,
    /// The handles it can be exported as.
    pub handles: Vec<HandleKind>,
}

/// Something about a backend that is so or not, with what there is to say of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    /// What it is about.
    pub name: &'static str,
    /// Whether it is so.
    pub holds: bool,
    /// A version, or the like.
    pub detail: String,
}

/// The verbs of memory. See the [module](super) for the contract behind every `# Safety`.
///
/// # Safety
/// Implementations must do what each verb says, since safe code above relies on it: a successful `map` makes the
/// range valid memory until `unmap`, `import` never yields memory that can shrink, `host_pointer` is true.
pub unsafe trait RawMemory: fmt::Debug + Send + Sync {
    /// Which backend this is.
    fn kind(&self) -> BackendKind;

    /// Its devices; device `n` has the number `n`.
    fn devices(&self) -> &[DeviceInfo];

    /// What else is worth knowing of it.
    fn facts(&self) -> Vec<Fact> {
        Vec::new()
    }

    /// The granules of memory made to `spec`, whose length is not looked at.
    ///
    /// # Errors
    /// What the driver said.
    #[doc(alias = "cuMemGetAllocationGranularity")]
    fn granularity(&self, spec: &AllocationSpec) -> Result<Granularity, Cause>;

    /// How much of a device's memory nobody has taken.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemGetInfo")]
    unsafe fn available(&self, device: DeviceId) -> Result<usize, Cause>;

    /// Creates physical memory.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemCreate")]
    unsafe fn create(&self, spec: &AllocationSpec) -> Result<RawAllocation, Cause>;

    /// Gives up this process's hold of physical memory.
    ///
    /// # Errors
    /// What the driver said; the hold remains then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemRelease")]
    unsafe fn release(&self, allocation: RawAllocation) -> Result<(), Cause>;

    /// Reserves addresses: at a multiple of `align`, or of what the backend needs where that is `None`; at `wanted`
    /// exactly, where it is given.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemAddressReserve")]
    unsafe fn reserve(
        &self,
        len: usize,
        align: Option<usize>,
        wanted: Option<Address>,
    ) -> Result<Address, Cause>;

    /// Gives back reserved addresses, in which nothing is mapped.
    ///
    /// # Errors
    /// What the driver said; the addresses remain reserved then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemAddressFree")]
    unsafe fn free(&self, at: Address, len: usize) -> Result<(), Cause>;

    /// Maps a whole allocation, accessible to nobody yet.
    ///
    /// # Errors
    /// What the driver said; nothing is mapped then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemMap")]
    unsafe fn map(&self, at: Address, len: usize, allocation: RawAllocation) -> Result<(), Cause>;

    /// Sets who may do what with a mapped range.
    ///
    /// # Errors
    /// What the driver said; rights are as before then.
    ///
    /// # Safety
    /// The module's contract; no right that somebody uses goes.
    #[doc(alias = "cuMemSetAccess")]
    unsafe fn set_access(&self, at: Address, len: usize, grants: &[Grant]) -> Result<(), Cause>;

    /// Unmaps what was mapped there, leaving the addresses reserved.
    ///
    /// # Errors
    /// What the driver said; it remains mapped then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemUnmap")]
    unsafe fn unmap(&self, at: Address, len: usize) -> Result<(), Cause>;

    /// Makes a handle for another process.
    ///
    /// # Errors
    /// What the driver said; [`Cause::Unsupported`] for a kind or a right it has not.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemExportToShareableHandle")]
    unsafe fn export(
        &self,
        allocation: RawAllocation,
        kind: HandleKind,
        rights: Rights,
    ) -> Result<ShareHandle, Cause>;

    /// Whether the first file descriptor of an allocation takes so long to make that it is worth keeping for the next.
    fn keeps_exports(&self) -> bool {
        false
    }

    /// Takes memory over from a handle, which is used up.
    ///
    /// # Errors
    /// What is wrong with the handle, or what the driver said.
    ///
    /// # Safety
    /// The module's contract, but for the handle: it may be anything.
    #[doc(alias = "cuMemImportFromShareableHandle")]
    unsafe fn import(&self, device: DeviceId, handle: ShareHandle, len: usize) -> Result<Imported, Cause>;

    /// The allocation mapped at an address, held once more.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where the backend keeps no such record.
    ///
    /// # Safety
    /// The module's contract, but for the address: it may be anything.
    #[doc(alias = "cuMemRetainAllocationHandle")]
    unsafe fn retain(&self, _at: Address) -> Result<RawAllocation, Cause> {
        let reason = "this backend cannot find the allocation behind an address";
        Err(Cause::Unsupported { capability: Capability::Retain, reason })
    }

    /// The bounds of the memory around an address.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where the backend keeps no such record.
    ///
    /// # Safety
    /// The module's contract, but for the address: it may be anything.
    #[doc(alias = "cuMemGetAddressRange")]
    unsafe fn address_range(&self, _at: Address) -> Result<(Address, usize), Cause> {
        let reason = "this backend cannot find the bounds of memory it did not make";
        Err(Cause::Unsupported { capability: Capability::Retain, reason })
    }

    /// The device that the memory at an address belongs to, or is pinned for; `None` for memory that is not the backend's.
    ///
    /// # Errors
    /// [`Cause::Unsupported`] where the backend keeps no such record; what the driver said.
    ///
    /// # Safety
    /// The module's contract, but for the address: it may be anything.
    #[doc(alias = "cuPointerGetAttribute")]
    unsafe fn device_at(&self, _at: Address) -> Result<Option<DeviceId>, Cause> {
        let reason = "this backend keeps no record of what lies at an address";
        Err(Cause::Unsupported { capability: Capability::Retain, reason })
    }

    /// What the backend knows of an allocation.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemGetAllocationPropertiesFromHandle")]
    unsafe fn properties(&self, allocation: RawAllocation) -> Result<Properties, Cause>;

    /// A dma-buf for a mapped range, for network cards.
    ///
    /// # Errors
    /// What the driver said; [`Cause::Unsupported`] where there is no such thing.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemGetHandleForAddressRange")]
    unsafe fn dma_buf(&self, _at: Address, _len: usize) -> Result<OwnedFd, Cause> {
        let reason = "this backend's memory has no dma-buf; network cards register its pages directly";
        Err(Cause::Unsupported { capability: Capability::DmaBuf, reason })
    }

    /// Enters all pages of a mapped range at once. Nothing to do where memory needs no page faults.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    unsafe fn populate(&self, _at: Address, _len: usize, _rights: Rights) -> Result<(), Cause> {
        Ok(())
    }

    /// Puts the pages of a mapped range together to large ones. Nothing to do where pages are large.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    unsafe fn enlarge_pages(&self, _at: Address, _len: usize) -> Result<(), Cause> {
        Ok(())
    }

    /// Says whether forked children have a mapped range as well. Nothing to do where they never have.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    unsafe fn set_inherited(&self, _at: Address, _len: usize, _is_inherited: bool) -> Result<(), Cause> {
        Ok(())
    }

    /// Creates host memory that devices copy from and to at full speed.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the length need not be whole granules.
    #[doc(alias = "cuMemHostAlloc")]
    unsafe fn pin(&self, device: DeviceId, len: usize) -> Result<Address, Cause>;

    /// Gives it back.
    ///
    /// # Errors
    /// What the driver said; it remains then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemFreeHost")]
    unsafe fn unpin(&self, at: Address, len: usize) -> Result<(), Cause>;

    /// Makes memory that the processor has mapped already reachable for devices, and says where they see it.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the range stays mapped with these rights until it is unregistered.
    #[doc(alias = "cuMemHostRegister")]
    unsafe fn register(&self, at: NonNull<u8>, _len: usize, _rights: Rights) -> Result<Address, Cause> {
        Ok(Address::of_host(at.as_ptr()))
    }

    /// Ends that.
    ///
    /// # Errors
    /// What the driver said; the memory remains registered then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemHostUnregister")]
    unsafe fn unregister(&self, _at: NonNull<u8>, _len: usize) -> Result<(), Cause> {
        Ok(())
    }

    /// Creates memory of the driver's older kind: addressed at once, and shared mapped rather than as an allocation.
    ///
    /// # Errors
    /// What the driver said; [`Cause::Unsupported`] where there is no such thing.
    ///
    /// # Safety
    /// The module's contract; the length need not be whole granules.
    #[doc(alias = "cuMemAlloc")]
    unsafe fn create_plain(&self, _device: DeviceId, _len: usize) -> Result<Address, Cause> {
        Err(NO_PLAIN)
    }

    /// Gives it back. Some drivers wait here for kernels that run.
    ///
    /// # Errors
    /// What the driver said; it remains then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMemFree")]
    unsafe fn free_plain(&self, _device: DeviceId, _at: Address) -> Result<(), Cause> {
        Err(NO_PLAIN)
    }

    /// A handle of such memory for another process, from any address in it.
    ///
    /// # Errors
    /// What the driver said; [`Cause::Unsupported`] where there is no such thing.
    ///
    /// # Safety
    /// The module's contract, but for the address: it may be anything.
    #[doc(alias = "cuIpcGetMemHandle")]
    unsafe fn export_plain(&self, _device: DeviceId, _at: Address) -> Result<ShareHandle, Cause> {
        Err(NO_PLAIN)
    }

    /// Maps another process's memory of that kind, whole, and says where.
    ///
    /// # Errors
    /// What the driver said; [`Cause::Unsupported`] where there is no such thing.
    ///
    /// # Safety
    /// The module's contract, but for the handle: it may be anything.
    #[doc(alias = "cuIpcOpenMemHandle")]
    unsafe fn open_plain(&self, _device: DeviceId, _handle: &ShareHandle) -> Result<Address, Cause> {
        Err(NO_PLAIN)
    }

    /// Ends that.
    ///
    /// # Errors
    /// What the driver said; it remains mapped then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuIpcCloseMemHandle")]
    unsafe fn close_plain(&self, _device: DeviceId, _at: Address) -> Result<(), Cause> {
        Err(NO_PLAIN)
    }

    /// Creates what is mapped like an allocation and stands for one on each of several devices: a store into it is a
    /// store into all of them.
    ///
    /// # Errors
    /// What the driver said; [`Cause::Unsupported`] where there is no such thing.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuMulticastCreate")]
    #[doc(alias = "cuMulticastAddDevice")]
    unsafe fn create_multicast(&self, _devices: &[DeviceId], _len: usize) -> Result<RawAllocation, Cause> {
        let reason = "only GPUs joined by a switch have memory that all of them are written through";
        Err(Cause::Unsupported { capability: Capability::Multicast, reason })
    }

    /// Makes an allocation of one of its devices part of it.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; both are as long as `len`.
    #[doc(alias = "cuMulticastBindMem")]
    unsafe fn bind_multicast(
        &self,
        _multicast: RawAllocation,
        _allocation: RawAllocation,
        _len: usize,
    ) -> Result<(), Cause> {
        let reason = "only GPUs joined by a switch have memory that all of them are written through";
        Err(Cause::Unsupported { capability: Capability::Multicast, reason })
    }

    /// Maps part of an allocation copy-on-write for the processor; `None` where the processor does not reach such memory.
    ///
    /// # Errors
    /// What the kernel said; nothing is mapped then.
    ///
    /// # Safety
    /// The module's contract, but that a forked child may ask too.
    unsafe fn map_private(
        &self,
        _allocation: RawAllocation,
        _offset: usize,
        _len: usize,
    ) -> Result<Option<PrivateMap>, Cause> {
        Ok(None)
    }

    /// Takes the processor's access to a mapped range away in this process; nothing where the processor has none.
    ///
    /// # Errors
    /// What the kernel said.
    ///
    /// # Safety
    /// The range is mapped, and what still uses it is meant to be stopped. A forked child may ask too.
    unsafe fn revoke(&self, _at: Address, _len: usize) -> Result<(), Cause> {
        Ok(())
    }

    /// The processor's pointer for an address; `None` where the processor cannot reach it.
    ///
    /// # Errors
    /// What the driver said, when it could not tell.
    fn host_pointer(&self, at: Address) -> Result<Option<NonNull<u8>>, Cause>;
}
