//! Memory with a shape and an owner: what an array is, wherever it came from.

use std::alloc::{self, handle_alloc_error};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use wholemem_hal::{Backend, BackendKind, CudaMallocBuffer, Device, Rights, Span};
use wholemem_os::SharedSlice;

use super::element::Element;
use super::layout::Layout;
use super::turn::Turn;
use crate::error::Raised;

/// Whatever keeps memory: a span of ours, or somebody else's array. Dropping it lets the memory go, in any thread, with the
/// interpreter's lock or without.
pub(crate) type Owner = Arc<dyn Any + Send + Sync>;

/// Where memory is, as DLPack says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) kind: i32,
    pub(crate) id: i32,
}

impl Place {
    pub(crate) const CPU: Self = Self { kind: 1, id: 0 };
    const CUDA: i32 = 2;
    /// Host memory that GPUs reach, and memory that moves between them.
    const CUDA_HOST: i32 = 3;
    const CUDA_MANAGED: i32 = 13;

    pub(crate) fn cuda(id: i32) -> Self {
        Self { kind: Self::CUDA, id }
    }

    /// Where memory of a device is.
    pub(crate) fn of(device: &Device) -> Self {
        match device.backend().kind() {
            BackendKind::Host => Self::CPU,
            _ => Self::cuda(i32::try_from(device.id().0).expect("the driver numbers devices by an `int`")),
        }
    }

    /// The GPU that it is on.
    pub(crate) fn device(self) -> Result<Device, Raised> {
        // A negative number is none of a device, and neither is this one.
        let id = u32::try_from(self.id).unwrap_or(u32::MAX);
        Ok(Backend::open(BackendKind::Cuda)?.device(id)?)
    }

    /// The GPU whose memory lies at an address, as the driver says.
    pub(crate) fn at(address: u64) -> Result<Self, Raised> {
        // What has no elements may be nowhere, and where there is no driver, nobody can use it.
        let (Ok(backend), 1..) = (Backend::open(BackendKind::Cuda), address) else {
            return Ok(Self::cuda(0));
        };
        let found = backend.device_at(address)?;
        found.map(|device| Self::of(&device)).ok_or_else(|| {
            let message = format!("the array points to {address:#x}, which is no memory of a GPU");
            Raised::new("WrongDevice", message).hint("only what GPUs reach has `__cuda_array_interface__`")
        })
    }

    /// Where memory of the machine is that a device reaches too.
    pub(crate) fn beside(device: &Device) -> Self {
        match device.backend().kind() {
            BackendKind::Host => Self::CPU,
            _ => Self { kind: Self::CUDA_HOST, id: 0 },
        }
    }

    /// How others are told of it: frameworks that do not know memory of the machine which GPUs reach know the machine's.
    pub(crate) fn told(self) -> Self {
        if self.kind == Self::CUDA_HOST { Self::CPU } else { self }
    }

    /// Whether the processor reads and writes it.
    pub(crate) fn is_host(self) -> bool {
        matches!(self.kind, 1 | Self::CUDA_HOST)
    }

    /// Whether GPUs read and write it.
    pub(crate) fn is_cuda(self) -> bool {
        matches!(self.kind, Self::CUDA | Self::CUDA_MANAGED)
    }

    /// Whether work of `device` reaches it.
    pub(crate) fn is_reached_by(self, device: &Device) -> bool {
        match device.backend().kind() {
            BackendKind::Host => self.is_host(),
            _ => self == Self::of(device) || matches!(self.kind, Self::CUDA_HOST | Self::CUDA_MANAGED),
        }
    }
}

impl fmt::Display for Place {
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
    /// Where the first element begins.
    pub(crate) address: u64,
    pub(crate) layout: Layout,
    pub(crate) place: Place,
    pub(crate) readonly: bool,
    pub(crate) owner: Owner,
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { layout, place, readonly, .. } = self;
        f.debug_struct("View")
            .field("layout", layout)
            .field("place", place)
            .field("readonly", readonly)
            .finish_non_exhaustive()
    }
}

impl View {
    /// A view of a span, which has at least as many bytes as the layout takes.
    pub(crate) fn of_span(span: Span, place: Place, layout: Layout) -> Result<Self, Raised> {
        let (before, len) = layout.extent()?;
        if before != 0 || len > span.len() {
            let (shape, has) = (&layout.shape, span.len());
            let message = format!("an array of shape {shape:?} takes {len} bytes, and there are {has}");
            return Err(Raised::new("WrongValue", message));
        }
        Ok(Self { address: span.address(), layout, place, readonly: false, owner: Arc::new(span) })
    }

    /// New memory of this process, zero.
    pub(crate) fn zeroed(layout: Layout) -> Result<Self, Raised> {
        let memory = Zeroed::new(layout.len())?;
        let address = memory.at.as_ptr().expose_provenance() as u64;
        Ok(Self { address, layout, place: Place::CPU, readonly: false, owner: Arc::new(memory) })
    }

    /// The bytes of an array in host memory, without gaps, to be read.
    pub(crate) fn bytes(&self, what: &str) -> Result<SharedSlice<'_>, Raised> {
        if !self.place.is_host() {
            let message = format!("{what} is on {}, where the processor does not read it", self.place);
            return Err(Raised::new("WrongDevice", message).hint("copy it to the host first"));
        }
        self.check_contiguous(what)?;
        self.host_bytes()
    }

    /// Writes the bytes of a contiguous array in host memory.
    pub(crate) fn write_bytes(&self, what: &str, bytes: &[u8]) -> Result<(), Raised> {
        self.check_writable(what)?;
        Ok(self.host_slice(true)?.write_at(0, bytes)?)
    }

    /// Indices in memory of this process.
    pub(crate) fn of_indices(shape: &[i64]) -> Result<Self, Raised> {
        Self::zeroed(Layout::contiguous(Element::INDEX, shape)?)
    }

    /// Writes one of the indices of a new array of them.
    pub(crate) fn write_index(&self, at: usize, index: i64) -> Result<(), Raised> {
        Ok(self.host_slice(true)?.write_at(size_of::<i64>() * at, &index.to_ne_bytes())?)
    }

    /// The bytes of an array in host memory from the first to the last, gaps included, to be read.
    fn host_bytes(&self) -> Result<SharedSlice<'_>, Raised> {
        self.host_slice(false)
    }

    fn host_slice(&self, writable: bool) -> Result<SharedSlice<'_>, Raised> {
        let (before, behind) = self.layout.extent()?;
        let first = self.address.saturating_sub(before as u64);
        let at = std::ptr::with_exposed_provenance_mut(usize::try_from(first).unwrap_or_default());
        // What has no elements may have no address.
        let (at, len) = NonNull::new(at).map_or((NonNull::dangling(), 0), |at| (at, before + behind));
        // SAFETY: whoever made the view says that the memory is there while its owner lives, which outlives the borrow.
        // Python's arrays are pointers, to which nobody has a reference.
        Ok(unsafe { SharedSlice::new(at, len, writable) })
    }

    /// The same elements in memory of their own, which lie as these do; on a GPU, copied on a stream, or on the default one.
    pub(crate) fn copied(&self, stream: Option<u64>) -> Result<Self, Raised> {
        let (before, behind) = self.layout.extent()?;
        let len = before + behind;
        let (address, owner): (u64, Owner) = if self.place.is_host() || len == 0 {
            let memory = Zeroed::new(len)?;
            // SAFETY: just made, of so many bytes, and nobody else's yet.
            unsafe { SharedSlice::new(memory.at, len, true) }.copy_from(0, &self.host_bytes()?)?;
            (memory.at.as_ptr().expose_provenance() as u64, Arc::new(memory))
        } else {
            let device = self.place.device()?;
            let copy = CudaMallocBuffer::create(&device, len)?.all();
            // SAFETY: by DLPack's protocol the consumer names a stream of the array's device on which it will use the copy.
            let stream = unsafe { Turn::new(&device, stream.unwrap_or(0), None) }.stream();
            stream.copy(&copy, &self.span("the array", &device, Rights::Read)?)?;
            (copy.address(), Arc::new(copy))
        };
        let address = address + before as u64;
        Ok(Self { address, layout: self.layout.clone(), place: self.place, readonly: false, owner })
    }
}

/// Bytes of this process, on the cache lines that vector instructions like best.
///
/// Allocators give long memory that is zero at once, without touching it, but only where nothing more than their own
/// alignment is asked for; so a little more is asked for instead.
#[derive(Debug)]
struct Zeroed {
    at: NonNull<u8>,
    begins: NonNull<u8>,
    layout: alloc::Layout,
}

// SAFETY: plain memory, reached through views only.
unsafe impl Send for Zeroed {}
// SAFETY: a shared reference gives the address only; the bytes are reached through views.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    const ALIGN: usize = 64;

    fn new(len: usize) -> Result<Self, Raised> {
        let too_long = |_| Raised::new("OutOfMemory", format!("{len} bytes are more than any memory has"));
        // Never of no bytes: what has no elements has an address all the same.
        let layout = alloc::Layout::from_size_align(len.saturating_add(Self::ALIGN), 1).map_err(too_long)?;
        // SAFETY: the size is not zero.
        let begins = NonNull::new(unsafe { alloc::alloc_zeroed(layout) });
        match begins {
            Some(begins) => {
                let before = begins.as_ptr().align_offset(Self::ALIGN);
                // SAFETY: less than the alignment, by which there are more bytes than are needed.
                Ok(Self { at: unsafe { begins.add(before) }, begins, layout })
            }
            None if len > 1 << 20 => {
                Err(Raised::new("OutOfMemory", format!("{len} bytes are not to be had")))
            }
            None => handle_alloc_error(layout),
        }
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        // SAFETY: allocated above with this layout, and nobody has a view any more.
        unsafe { alloc::dealloc(self.begins.as_ptr(), self.layout) }
    }
}
