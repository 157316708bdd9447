//! Implements `wholemem.Window`: memory of which every rank has a part, and which all ranks have mapped.

use std::sync::Arc;

use pyo3::prelude::*;
use wholemem::Rank;
use wholemem_comm::Error as CommError;
use wholemem_hal::Rights;

use crate::array::{Array, DlDevice, Element, Layout, View};
use crate::communicator::{CommState, Communicator};
use crate::error::{Exception, IntoPyResult};
use crate::number::{Shape, signed, unsigned};
use crate::stream::CallStream;
use crate::wait::run_blocking;

/// A window: memory of which every rank has a part, and which all ranks have mapped. A rank's mappings are released when its
/// window and the last array of it are dropped; the memory is freed after all ranks have dropped theirs.
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
    window: Arc<wholemem::Window>,
    /// The memory of the window, as DLPack describes it.
    dl_device: DlDevice,
    state: Arc<CommState>,
}

/// Adds a hint to the error for memory that cannot be registered as a window, because it was not allocated to be shared.
pub(crate) fn with_register_hint(error: wholemem::Error) -> Exception {
    let hint = "`mem_alloc` creates a window of new memory; memory that is registered must be from `cudaMalloc`, from \
            `wholemem.torch.pool.mem_pool()` or in torch's expandable segments, or on the CPU an array of a window or table";
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
        let has = self.window.len_of(rank).saturating_sub(offset);
        let all = || vec![signed(has / element.len())];
        let layout = Layout::contiguous(element, &shape.unwrap_or_else(all))?;
        let span = self.window.part_of(rank, offset, layout.len())?;
        if !span.address().is_multiple_of(element.len() as u64) {
            let message = format!("an array of {} cannot begin at offset {offset}", element.name);
            return Err(
                Exception::new("WrongValue", message).hint(format!("use a multiple of {}", element.len()))
            );
        }
        let (owner, dl_device) = (Arc::clone(&self.window), self.dl_device);
        Ok(Array::new(View { address: span.address(), layout, dl_device, readonly: false, owner }))
    }
}

#[pymethods]
impl Window {
    /// The size of this rank's part of the window in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.window.len()
    }

    /// Returns the size of a rank's part of the window in bytes.
    ///
    /// Args:
    ///     rank: The rank.
    ///
    /// Raises:
    ///     wholemem.errors.WrongValue: The rank does not exist.
    fn nbytes_of(&self, #[pyo3(from_py_with = unsigned)] rank: u32) -> PyResult<usize> {
        Ok(self.window.len_of(self.rank(rank).into_py()?))
    }

    /// Returns an array that is a view of this rank's part of the window.
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

    /// Returns an array that is a view of another rank's part of the window, which this rank accesses directly.
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
        Ok(Window { window: Arc::new(window), dl_device: state.dl_device, state })
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
        Ok(Window { window: Arc::new(window), dl_device, state })
    }

    /// Registers the memory of an array as a window (memory that all ranks map), so that collectives can access the array and
    /// its parts directly, without a staging copy. The address of the array does not change. Every rank must call this method.
    ///
    /// The registration ends when the window and its arrays are dropped. The array's memory is kept until every rank has dropped its
    /// window, which the ranks tell each other in the next call that creates or registers a window.
    ///
    /// Args:
    ///     array: A contiguous, writable array on this rank's device. On a GPU: memory from ``cudaMalloc`` (torch's default
    ///         allocator, CuPy), of :func:`wholemem.torch.pool.mem_pool`, or in torch's expandable segments. On the CPU: an array of a
    ///         window or of a table.
    ///     stream: The CUDA stream that used the array last. ``None`` is the default stream.
    ///
    /// Returns:
    ///     The window.
    ///
    /// Raises:
    ///     wholemem.errors.ReadOnly: The array is read-only.
    ///     wholemem.errors.Unsupported: On some rank, the memory cannot be shared.
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
        view.check_writable("the array").into_py()?;
        let span = view.span("the array", state.comm.device(), Rights::ReadWrite).into_py()?;
        let window =
            run_blocking(py, || state.symmetric()?.window_register_span(&span).map_err(with_register_hint))?;
        Ok(Window { window: Arc::new(window), dl_device: state.dl_device, state })
    }
}
