//! `View`: memory with a layout, a device and an owner; the content of every array.

use std::alloc::{self, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use wholemem_hal::{Backend, BackendKind, CudaMallocBuffer, Device, Rights, Span};
use wholemem_os::SharedSlice;

use super::element::Element;
use super::layout::Layout;
use super::stream_order::FrameworkStream;
use crate::error::Exception;

/// The owner of an array's memory, which keeps the memory alive: a span of wholemem, or an imported array. It may be dropped on
/// any thread, with or without the GIL.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// The device of memory, as DLPack describes it (`DLDevice`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DlDevice {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

impl DlDevice {
    pub(crate) const CPU: Self = Self { kind: 1, id: 0 };
    const CUDA: i32 = 2;
    /// The device type of pinned host memory, which GPUs can access (`kDLCUDAHost`).
    const CUDA_HOST: i32 = 3;
    const CUDA_MANAGED: i32 = 13;

    pub(crate) fn cuda(id: i32) -> Self {
        Self { kind: Self::CUDA, id }
    }

    /// Returns DLPack's device type and number of a device.
    pub(crate) fn of(device: &Device) -> Self {
        match device.backend().kind() {
            BackendKind::Host => Self::CPU,
            _ => Self::cuda(i32::try_from(device.id().0).expect("the driver numbers devices by an `int`")),
        }
    }

    /// Opens the GPU with the number of this device.
    pub(crate) fn device(self) -> Result<Device, Exception> {
        // A negative device number becomes `u32::MAX`, a number that no device has.
        let id = u32::try_from(self.id).unwrap_or(u32::MAX);
        Ok(Backend::open(BackendKind::Cuda)?.device(id)?)
    }

    /// Returns the GPU that owns the memory at an address, as the CUDA driver reports.
    pub(crate) fn at(address: u64) -> Result<Self, Exception> {
        // An empty array may have a null address, and without a CUDA driver the number of the device does not matter: use device
        // 0.
        let (Ok(backend), 1..) = (Backend::open(BackendKind::Cuda), address) else {
            return Ok(Self::cuda(0));
        };
        let found = backend.device_at(address)?;
        found.map(|device| Self::of(&device)).ok_or_else(|| {
            let message = format!("the array has the address {address:#x}, which is not memory of a GPU");
            Exception::new("WrongDevice", message)
                .hint("`__cuda_array_interface__` is only for memory that GPUs can access")
        })
    }

    /// Returns the DLPack device of host memory that `device` can access.
    pub(crate) fn pinned_for(device: &Device) -> Self {
        match device.backend().kind() {
            BackendKind::Host => Self::CPU,
            _ => Self { kind: Self::CUDA_HOST, id: 0 },
        }
    }

    /// Returns the device that a DLPack export reports. Pinned host memory is reported as host memory, because some frameworks
    /// reject `kDLCUDAHost`.
    pub(crate) fn exported(self) -> Self {
        if self.kind == Self::CUDA_HOST { Self::CPU } else { self }
    }

    /// Returns true if the CPU can access memory of this device.
    pub(crate) fn is_host(self) -> bool {
        matches!(self.kind, 1 | Self::CUDA_HOST)
    }

    /// Returns true for memory of a GPU and for managed memory.
    pub(crate) fn is_cuda(self) -> bool {
        matches!(self.kind, Self::CUDA | Self::CUDA_MANAGED)
    }

    /// Returns true if work of `device` can access memory of this DLPack device.
    pub(crate) fn is_accessible_from(self, device: &Device) -> bool {
        match device.backend().kind() {
            BackendKind::Host => self.is_host(),
            _ => self == Self::of(device) || matches!(self.kind, Self::CUDA_HOST | Self::CUDA_MANAGED),
        }
    }
}

impl fmt::Display for DlDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            1 => f.write_str("cpu"),
            Self::CUDA => write!(f, "cuda:{}", self.id),
            Self::CUDA_HOST => f.write_str("cuda_host"),
            Self::CUDA_MANAGED => f.write_str("cuda_managed"),
            kind => write!(f, "dlpack:{kind}:{}", self.id),
        }
    }
}

/// Memory with a shape and an owner. Clones are views of the same memory.
#[derive(Clone)]
pub(crate) struct View {
    /// The address of the first element of the array.
    pub(crate) address: u64,
    pub(crate) layout: Layout,
    pub(crate) dl_device: DlDevice,
    pub(crate) readonly: bool,
    pub(crate) owner: Owner,
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layout, dl_device, readonly, .. } = self;
        f.debug_struct("View")
            .field("layout", layout)
            .field("dl_device", dl_device)
            .field("readonly", readonly)
            .finish_non_exhaustive()
    }
}

impl View {
    /// Creates a view of a span, which must have at least as many bytes as the layout needs.
    pub(crate) fn of_span(span: Span, dl_device: DlDevice, layout: Layout) -> Result<Self, Exception> {
        let (before, len) = layout.extent()?;
        if before != 0 || len > span.len() {
            let (shape, has) = (&layout.shape, span.len());
            let message = format!("an array of shape {shape:?} needs {len} bytes, but there are {has}");
            return Err(Exception::new("WrongValue", message));
        }
        Ok(Self { address: span.address(), layout, dl_device, readonly: false, owner: Arc::new(span) })
    }

    /// Allocates host memory of this process, filled with zeros.
    pub(crate) fn zeroed(layout: Layout) -> Result<Self, Exception> {
        let memory = ZeroedMemory::new(layout.len())?;
        let address = memory.address.as_ptr().expose_provenance() as u64;
        Ok(Self { address, layout, dl_device: DlDevice::CPU, readonly: false, owner: Arc::new(memory) })
    }

    /// Returns the bytes of a contiguous array in host memory, for reading.
    pub(crate) fn bytes(&self, argument: &str) -> Result<SharedSlice<'_>, Exception> {
        if !self.dl_device.is_host() {
            let message = format!("{argument} is on {}, which the CPU cannot read", self.dl_device);
            return Err(Exception::new("WrongDevice", message).hint("copy it to the host first"));
        }
        self.check_contiguous(argument)?;
        self.host_bytes()
    }

    /// Overwrites the bytes of a contiguous array in host memory.
    pub(crate) fn write_bytes(&self, argument: &str, bytes: &[u8]) -> Result<(), Exception> {
        self.check_writable(argument)?;
        Ok(self.host_slice(true)?.write_at(0, bytes)?)
    }

    /// Allocates host memory for an array of indices.
    pub(crate) fn of_indices(shape: &[i64]) -> Result<Self, Exception> {
        Self::zeroed(Layout::contiguous(Element::INDEX, shape)?)
    }

    /// Writes one index to an array of indices in host memory.
    pub(crate) fn write_index(&self, at: usize, index: i64) -> Result<(), Exception> {
        Ok(self.host_slice(true)?.write_at(size_of::<i64>() * at, &index.to_ne_bytes())?)
    }

    /// Returns the bytes of an array in host memory from the first to the last element, including gaps, for reading.
    pub(super) fn host_bytes(&self) -> Result<SharedSlice<'_>, Exception> {
        self.host_slice(false)
    }

    fn host_slice(&self, writable: bool) -> Result<SharedSlice<'_>, Exception> {
        let (before, behind) = self.layout.extent()?;
        let first = self.address.saturating_sub(before as u64);
        let at = std::ptr::with_exposed_provenance_mut(usize::try_from(first).unwrap_or_default());
        // An empty array may have a null address, which is replaced by a dangling pointer.
        let (at, len) = NonNull::new(at).map_or((NonNull::dangling(), 0), |at| (at, before + behind));
        // SAFETY: the creator of the view guarantees that the memory exists while its owner lives, and `self` holds the owner.
        // Python accesses arrays through pointers, so there are no references to the bytes.
        Ok(unsafe { SharedSlice::new(at, len, writable) })
    }

    /// Copies the elements of the array to new memory with the same layout. On a GPU, the copy runs on the given stream, or on
    /// the default stream.
    pub(crate) fn copied(&self, stream: Option<u64>) -> Result<Self, Exception> {
        let (before, behind) = self.layout.extent()?;
        let len = before + behind;
        let (address, owner): (u64, Owner) = if self.dl_device.is_host() || len == 0 {
            let memory = ZeroedMemory::new(len)?;
            // SAFETY: `memory` was just allocated with `len` bytes and is not shared yet.
            unsafe { SharedSlice::new(memory.address, len, true) }.copy_from(0, &self.host_bytes()?)?;
            (memory.address.as_ptr().expose_provenance() as u64, Arc::new(memory))
        } else {
            let device = self.dl_device.device()?;
            let copy = CudaMallocBuffer::create(&device, len)?.all();
            // SAFETY: by the DLPack protocol, the consumer passes as `stream` the handle of a live stream of the array's device.
            let stream = unsafe { FrameworkStream::new(&device, stream.unwrap_or(0), None) }.stream();
            stream.copy(&copy, &self.span("the array", &device, Rights::Read)?)?;
            (copy.address(), Arc::new(copy))
        };
        let address = address + before as u64;
        Ok(Self { address, layout: self.layout.clone(), dl_device: self.dl_device, readonly: false, owner })
    }
}

/// Zeroed host memory, aligned to cache lines for vector instructions.
///
/// `alloc_zeroed` returns fresh zero pages without touching them only at the allocator's own alignment, so this type
/// allocates a few more bytes and aligns the address itself.
#[derive(Debug)]
struct ZeroedMemory {
    address: NonNull<u8>,
    allocation: NonNull<u8>,
    layout: alloc::Layout,
}

// SAFETY: `ZeroedMemory` is plain memory, whose bytes are accessed only through views.
unsafe impl Send for ZeroedMemory {}
// SAFETY: a shared `ZeroedMemory` exposes only its address; the bytes are accessed through views.
unsafe impl Sync for ZeroedMemory {}

impl ZeroedMemory {
    const ALIGN: usize = 64;

    fn new(len: usize) -> Result<Self, Exception> {
        let too_long = |_| {
            Exception::new(
                "OutOfMemory",
                format!("cannot allocate {len} bytes: the address space is smaller"),
            )
        };
        // The size of the allocation is never zero, so that an empty array has a valid address.
        let layout = alloc::Layout::from_size_align(len.saturating_add(Self::ALIGN), 1).map_err(too_long)?;
        // SAFETY: the size of `layout` is at least `ALIGN`, and so not zero.
        let allocation = NonNull::new(unsafe { alloc::alloc_zeroed(layout) });
        match allocation {
            Some(allocation) => {
                let before = allocation.as_ptr().align_offset(Self::ALIGN);
                // SAFETY: `before` is less than `ALIGN`, and the allocation has `ALIGN` extra bytes.
                Ok(Self { address: unsafe { allocation.add(before) }, allocation, layout })
            }
            None if len > 1 << 20 => {
                Err(Exception::new("OutOfMemory", format!("cannot allocate {len} bytes")))
            }
            None => handle_alloc_error(layout),
        }
    }
}

impl Drop for ZeroedMemory {
    fn drop(&mut self) {
        // SAFETY: `allocation` was allocated with `layout`, and the last view of the memory was dropped.
        unsafe { alloc::dealloc(self.allocation.as_ptr(), self.layout) }
    }
}
