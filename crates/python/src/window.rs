//! Memory that every rank has and every rank reaches: see `wholemem.Window` in Python.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use pyo3::prelude::*;
use wholemem::Rank;
use wholemem_comm::Error as CommError;

use crate::array::{Array, Element, Layout, Place, View};
use crate::communicator::{CommState, Communicator};
use crate::error::{Raised, Raises};
use crate::number::{Shape, natural, signed};
use crate::stream::CallStream;
use crate::wait::waiting;

/// The windows of a communicator that something still holds.
///
/// An array that lies in one is a part of it, whatever it went through on its way: so all ranks find the same.
#[derive(Debug, Default)]
pub(crate) struct Windows(Mutex<Vec<Known>>);

/// This rank's part of a window.
#[derive(Debug)]
struct Known {
    begins: u64,
    len: usize,
    kept: Weak<Kept>,
}

/// A window, held by Python's object and by every array that was made of it.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) window: wholemem::Window,
}

impl Windows {
    fn keep(&self, window: wholemem::Window) -> Arc<Kept> {
        let len = window.len();
        let begins = window.local().map_or(0, wholemem_hal::Span::address);
        let kept = Arc::new(Kept { window });
        let mut windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        windows.retain(|window| window.kept.strong_count() > 0);
        windows.push(Known { begins, len, kept: Arc::downgrade(&kept) });
        kept
    }

    /// The window in whose part of this rank some bytes lie, and where.
    pub(crate) fn find(&self, address: u64, len: usize) -> Option<(Arc<Kept>, usize)> {
        let windows = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        windows.iter().find_map(|window| {
            let offset = usize::try_from(address.checked_sub(window.begins)?).ok()?;
            // One that is gone may have lain where another is now.
            if offset.checked_add(len)? <= window.len { Some((window.kept.upgrade()?, offset)) } else { None }
        })
    }
}

/// Memory that every rank has, and that all of them reach. It stays while it, or an array made of it, lives.
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
    kept: Arc<Kept>,
    state: Arc<CommState>,
}

/// Why memory that is there does not become a window: on whichever rank, it was not made to be shared.
fn unregistered(error: wholemem::Error) -> Raised {
    let hint = "`mem_alloc` makes a window of new memory, also on the host; what is registered is memory of a GPU, made \
                under `wholemem.torch.pool.mem_pool()` or torch's expandable segments";
    Raised::from(error).hint_for("Unsupported", hint)
}

impl Window {
    /// A rank, if there is one.
    fn rank(&self, rank: u32) -> Result<Rank, Raised> {
        let (rank, size) = (Rank(rank), self.state.comm.size());
        if rank.0 < size { Ok(rank) } else { Err(CommError::NoSuchRank { rank, size }.into()) }
    }

    /// Some bytes of a rank's part, as an array.
    fn array(
        &self,
        rank: u32,
        element: Element,
        shape: Option<Vec<i64>>,
        offset: usize,
    ) -> Result<Array, Raised> {
        let rank = self.rank(rank)?;
        let has = self.kept.window.len_of(rank).saturating_sub(offset);
        let all = || vec![signed(has / element.len())];
        let layout = Layout::contiguous(element, &shape.unwrap_or_else(all))?;
        let span = self.kept.window.part_of(rank, offset, layout.len())?;
        if !span.address().is_multiple_of(element.len() as u64) {
            let message = format!("{} cannot begin at offset {offset}", element.name);
            return Err(
                Raised::new("WrongValue", message).hint(format!("take a multiple of {}", element.len()))
            );
        }
        let place = Place::of(self.state.comm.device());
        let owner = Arc::clone(&self.kept);
        Ok(Array::new(View { address: span.address(), layout, place, readonly: false, owner }))
    }
}

#[pymethods]
impl Window {
    /// How many bytes this rank has of it.
    #[getter]
    fn nbytes(&self) -> usize {
        self.kept.window.len()
    }

    /// How many bytes a rank has of it.
    fn nbytes_of(&self, #[pyo3(from_py_with = natural)] rank: u32) -> PyResult<usize> {
        Ok(self.kept.window.len_of(self.rank(rank).raised()?))
    }

    /// This rank's part from some byte on, as an array: of bytes, if nothing else is asked for.
    #[pyo3(signature = (dtype=None, shape=None, *, offset=0))]
    fn local(
        &self,
        dtype: Option<Element>,
        shape: Option<Shape>,
        #[pyo3(from_py_with = natural)] offset: usize,
    ) -> PyResult<Array> {
        self.peer(self.state.comm.rank().0, dtype, shape, offset)
    }

    /// A rank's part, as this rank reaches it.
    #[pyo3(signature = (rank, dtype=None, shape=None, *, offset=0))]
    fn peer(
        &self,
        #[pyo3(from_py_with = natural)] rank: u32,
        dtype: Option<Element>,
        shape: Option<Shape>,
        #[pyo3(from_py_with = natural)] offset: usize,
    ) -> PyResult<Array> {
        let element = dtype.unwrap_or(Element::BYTE);
        self.array(rank, element, shape.map(|shape| shape.signed()), offset).raised()
    }

    fn __repr__(&self) -> String {
        let (rank, size) = (self.state.comm.rank(), self.state.comm.size());
        format!("Window(nbytes={}, rank={rank}, size={size})", self.nbytes())
    }
}

#[pymethods]
impl Communicator {
    /// Makes a window of new memory, zero, with so many bytes on this rank. All ranks call it; a rank may have none.
    fn mem_alloc(&self, py: Python<'_>, #[pyo3(from_py_with = natural)] nbytes: usize) -> PyResult<Window> {
        let state = self.state().raised()?;
        let window = waiting(py, || state.symmetric()?.mem_alloc(nbytes).map_err(Raised::from))?;
        Ok(Window { kept: state.windows.keep(window), state })
    }

    /// Makes a window of memory that is there: of a GPU, mapped in segments. All ranks call it.
    #[pyo3(signature = (array, *, stream=None))]
    fn window_register(
        &self,
        py: Python<'_>,
        array: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Window> {
        let state = self.state().raised()?;
        let view = CallStream::of(&state, stream)?.take(array)?;
        view.check_contiguous("the array").raised()?;
        let (address, len) = (view.address, view.layout.len());
        let window =
            waiting(py, || state.symmetric()?.window_register_mapped(address, len).map_err(unregistered))?;
        Ok(Window { kept: state.windows.keep(window), state })
    }
}
