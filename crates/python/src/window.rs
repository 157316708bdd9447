//! Implements `wholemem.Window`: memory of which every rank has a part, and which all ranks have mapped.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use wholemem::Rank;
use wholemem_comm::Error as CommError;

use crate::array::{Array, DlDevice, Element, Layout, View};
use crate::communicator::{CommState, Communicator};
use crate::error::{Exception, IntoPyResult};
use crate::number::{Shape, signed, unsigned};
use crate::stream::CallStream;
use crate::wait::run_blocking;

/// The windows (memory that all ranks map) of a communicator that are still in use.
///
/// An array whose address is in a window is part of the window, regardless of how the caller obtained it. So all ranks
/// decide alike.
#[derive(Debug, Default)]
pub(crate) struct WindowRegistry(Mutex<Vec<WindowEntry>>);

/// The addresses of this rank's part of a window, and a weak reference to the window.
#[derive(Debug)]
struct WindowEntry {
    address: u64,
    len: usize,
    shared: Weak<SharedWindow>,
}

/// A window that the Python object and all its arrays share.
#[derive(Debug)]
pub(crate) struct SharedWindow {
    pub(crate) window: wholemem::Window,
}

impl WindowRegistry {
    fn insert(&self, window: wholemem::Window) -> Arc<SharedWindow> {
        let len = window.len();
        let address = window.local().map_or(0, wholemem_hal::Span::address);
        let shared = Arc::new(SharedWindow { window });
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        windows.retain(|window| window.shared.strong_count() > 0);
        windows.push(WindowEntry { address, len, shared: Arc::downgrade(&shared) });
        shared
    }

    /// Returns the window in which this rank's part contains a range of bytes, and the offset of the range in the part.
    pub(crate) fn find(&self, address: u64, len: usize) -> Option<(Arc<SharedWindow>, usize)> {
        let windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        windows.iter().find_map(|window| {
            let offset = usize::try_from(address.checked_sub(window.address)?).ok()?;
            // The memory of a dropped window may have been reused by another window.
            if offset.checked_add(len)? <= window.len {
                Some((window.shared.upgrade()?, offset))
            } else {
                None
            }
        })
    }
}

/// A window: memory of which every rank has a part, and which all ranks have mapped. The memory is freed when the window
/// and its last array are dropped.
///
/// >>> import wholemem
/// >>> (comm,) = wholemem.Communicator.local(1, device="cpu")
/// >>> window = comm.mem_alloc(1 << 20)
/// >>> mine = window.local("float32", (4, 2))
/// >>> comm.all_reduce(mine, mine) is mine
/// True
#[pyclass(frozen, module = "wholemem")]
#[derive(Debug)]
pub(crate) struct Window {
    shared: Arc<SharedWindow>,
    /// The memory of the window, as DLPack describes it.
    dl_device: DlDevice,
    state: Arc<CommState>,
}

/// Adds a hint to the error for memory that cannot be registered as a window, because it was not allocated to be shared.
fn with_register_hint(error: wholemem::Error) -> Exception {
    let hint = "`mem_alloc` creates a window of new memory, also on the host; memory that is registered must be on a GPU, \
            allocated in `wholemem.torch.pool.mem_pool()` or in torch's expandable segments";
    Exception::from(error).hint_for("Unsupported", hint)
}

impl Window {
    /// Converts a number to a rank, or returns an error if the group has no such rank.
    fn rank(&self, rank: u32) -> Result<Rank, Exception> {
        let (rank, size) = (Rank(rank), self.state.comm.size());
        if rank.0 < size { Ok(rank) } else { Err(CommError::NoSuchRank { rank, size }.into()) }
    }

    /// Returns a range of a rank's part of the window as an array.
    fn array(
        &self,
        rank: u32,
        element: Element,
        shape: Option<Vec<i64>>,
        offset: usize,
    ) -> Result<Array, Exception> {
        let rank = self.rank(rank)?;
        let has = self.shared.window.len_of(rank).saturating_sub(offset);
        let all = || vec![signed(has / element.len())];
        let layout = Layout::contiguous(element, &shape.unwrap_or_else(all))?;
        let span = self.shared.window.part_of(rank, offset, layout.len())?;
        if !span.address().is_multiple_of(element.len() as u64) {
            let message = format!("an array of {} cannot begin at offset {offset}", element.name);
            return Err(
                Exception::new("WrongValue", message).hint(format!("use a multiple of {}", element.len()))
            );
        }
        let (owner, dl_device) = (Arc::clone(&self.shared), self.dl_device);
        Ok(Array::new(View { address: span.address(), layout, dl_device, readonly: false, owner }))
    }
}

#[pymethods]
impl Window {
    /// The size of this rank's part of the window in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.shared.window.len()
    }

    /// Returns the size of a rank's part of the window in bytes.
    ///
    /// Args:
    ///     rank: The rank.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The rank does not exist.
    fn nbytes_of(&self, #[pyo3(from_py_with = unsigned)] rank: u32) -> PyResult<usize> {
        Ok(self.shared.window.len_of(self.rank(rank).into_py()?))
    }

    /// Returns an array of this rank's part of the window.
    ///
    /// Args:
    ///     dtype: The element type. ``None`` is ``uint8``.
    ///     shape: The shape. ``None`` is one dimension, up to the end of the part.
    ///     offset: The first byte.
    ///
    /// Returns:
    ///     An array that shares the memory and keeps the window alive.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The array does not fit in the part, or ``offset`` is not aligned.
    #[pyo3(signature = (dtype=None, shape=None, *, offset=0))]
    fn local(
        &self,
        dtype: Option<Element>,
        shape: Option<Shape>,
        #[pyo3(from_py_with = unsigned)] offset: usize,
    ) -> PyResult<Array> {
        self.peer(self.state.comm.rank().0, dtype, shape, offset)
    }

    /// Returns an array of another rank's part of the window, which this rank accesses directly.
    ///
    /// Args:
    ///     rank: The rank.
    ///     dtype: The element type. ``None`` is ``uint8``.
    ///     shape: The shape. ``None`` is one dimension, up to the end of the part.
    ///     offset: The first byte.
    ///
    /// Returns:
    ///     An array that shares the memory and keeps the window alive.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The rank does not exist, the array does not fit in the part, or ``offset`` is not
    ///         aligned.
    #[pyo3(signature = (rank, dtype=None, shape=None, *, offset=0))]
    fn peer(
        &self,
        #[pyo3(from_py_with = unsigned)] rank: u32,
        dtype: Option<Element>,
        shape: Option<Shape>,
        #[pyo3(from_py_with = unsigned)] offset: usize,
    ) -> PyResult<Array> {
        let element = dtype.unwrap_or(Element::BYTE);
        self.array(rank, element, shape.map(|shape| shape.signed()), offset).into_py()
    }

    fn __repr__(&self) -> String {
        let (rank, size) = (self.state.comm.rank(), self.state.comm.size());
        format!("Window(nbytes={}, rank={rank}, size={size})", self.nbytes())
    }
}

#[pymethods]
impl Communicator {
    /// Allocates a window: zeroed memory of which every rank has a part, and which all ranks map. Every rank must call this
    /// method.
    ///
    /// Args:
    ///     nbytes: The size of this rank's part. It may be 0.
    ///
    /// Returns:
    ///     The window.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
    ///     wholemem.errors.PeerLost: A rank exited.
    fn mem_alloc(&self, py: Python<'_>, #[pyo3(from_py_with = unsigned)] nbytes: usize) -> PyResult<Window> {
        let state = self.state().into_py()?;
        let window = run_blocking(py, || state.symmetric()?.mem_alloc(nbytes).map_err(Exception::from))?;
        Ok(Window { shared: state.windows.insert(window), dl_device: state.dl_device, state })
    }

    /// Allocates a window of host memory, which CPUs and the GPUs of all ranks access. Every rank must call this method.
    ///
    /// The part of each rank is on the NUMA node of its GPU. GPUs access it over the bus. Without a GPU it is the same as
    /// :meth:`mem_alloc`.
    ///
    /// Args:
    ///     nbytes: The size of this rank's part. It may be 0.
    ///
    /// Returns:
    ///     The window. Its arrays are host memory, which numpy imports.
    ///
    /// Raises:
    ///     wholemem.errors.OutOfMemory: The memory cannot be allocated on a rank.
    ///     wholemem.errors.PeerLost: A rank exited.
    fn mem_alloc_on_host(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = unsigned)] nbytes: usize,
    ) -> PyResult<Window> {
        let state = self.state().into_py()?;
        let window =
            run_blocking(py, || state.symmetric()?.mem_alloc_on_host(nbytes).map_err(Exception::from))?;
        let dl_device = DlDevice::pinned_for(state.comm.device());
        Ok(Window { shared: state.windows.insert(window), dl_device, state })
    }

    /// Registers existing GPU memory as a window (memory that all ranks map), so that collectives read the memory in place.
    /// Every rank must call this method.
    ///
    /// Args:
    ///     array: A contiguous array on this rank's GPU, allocated in :func:`wholemem.torch.pool.mem_pool` or in torch's
    ///         expandable segments.
    ///     stream: The CUDA stream that used the array last. ``None`` is the default stream.
    ///
    /// Returns:
    ///     The window.
    ///
    /// Raises:
    ///     wholemem.errors.Unsupported: On some rank, the memory was not allocated to be shared.
    ///     wholemem.errors.WrongStride: The array is not contiguous.
    #[pyo3(signature = (array, *, stream=None))]
    fn window_register(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Window> {
        let state = self.state().into_py()?;
        let view = CallStream::of(&state, stream)?.import(array)?;
        view.check_contiguous("the array").into_py()?;
        let (address, len) = (view.address, view.layout.len());
        let window = run_blocking(py, || {
            state.symmetric()?.window_register_mapped(address, len).map_err(with_register_hint)
        })?;
        Ok(Window { shared: state.windows.insert(window), dl_device: state.dl_device, state })
    }
}
