//! A host view of memory that may be on a device: copied in if asked for, and written back when it is done with.
//!
//! What may be half written is not: where a block raises, the mirror is given up, and the draft stays as it was.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::draft::Draft;
use super::lease;
use crate::array::{self, Array, Place, View};
use crate::error::{Raised, Raises};
use crate::wait::waiting;

/// A mirror, which arrays that were made of it keep.
#[derive(Debug)]
struct Reflected {
    /// Before what it mirrors: it may write that when it goes.
    mirror: wholemem_store::Mirror,
    /// The draft's array, until that is let go: a draft is not sealed while anybody has an array of its mirror.
    source: Mutex<Option<View>>,
}

impl Reflected {
    fn of(view: View) -> Option<Arc<Self>> {
        view.owner.downcast().ok()
    }

    fn abandon(&self) {
        self.mirror.abandon();
        drop(self.source.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A copy in host memory of a draft, or of an array that was got by its name, wherever that is.
///
/// That of a draft is written back by :meth:`write_back`, or at the end of the context, and given up there if something
/// was raised; until then the draft is not sealed. One that is simply dropped is written back as well, with the last of
/// its arrays, also where something was raised: what may be half written is mirrored in a context. Without ``copy_in``,
/// it begins with any bytes. A draft of less than 1 MiB in host memory is written by ``draft.array`` anyway, and has no
/// mirror: :class:`wholemem.errors.Unsupported`.
///
/// >>> import numpy
/// >>> from wholemem import store
/// >>> client = store.Client()
/// >>> with client.create("mirrored", (1 << 20,), "float32") as draft:
/// ...     with store.Mirror(draft, copy_in=False) as mirror:
/// ...         mirror.array.numpy()[:] = 3
/// >>> store.Mirror(client.get("mirrored")).array.numpy().max()
/// np.float32(3.0)
#[pyclass(frozen, module = "wholemem.store")]
#[derive(Debug)]
pub(crate) struct Mirror {
    /// What it shows, until it was written back, or given up.
    open: Mutex<Option<View>>,
}

fn closed() -> Raised {
    Raised::new("Closed", "the mirror was written back, or given up")
}

impl Mirror {
    fn take(&self) -> Option<View> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The end of a block: written back where nothing was raised, and given up otherwise.
    fn leave(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            if let Some(reflected) = self.take().and_then(Reflected::of) {
                reflected.abandon();
            }
            return Ok(());
        }
        // Written back within the block.
        if self.array().is_err() {
            return Ok(());
        }
        self.write_back(py)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        let Some(view) = self.take().filter(|view| !view.readonly) else { return };
        // Whoever drops it has the interpreter's lock, which others may want while it is written back.
        let mut view = Some(view);
        let _ = Python::try_attach(|py| py.detach(|| drop(view.take())));
    }
}

#[pymethods]
impl Mirror {
    #[new]
    #[pyo3(signature = (source, copy_in=true))]
    fn new(py: Python<'_>, source: &Bound<'_, PyAny>, copy_in: bool) -> PyResult<Self> {
        let is_draft = source.cast::<Draft>().is_ok();
        let (mirror, source, layout) = match source.cast::<Draft>() {
            Ok(draft) => {
                let draft = draft.get();
                let (mirror, view) = waiting(py, || draft.mirrored(copy_in))?;
                let layout = view.layout.clone();
                (mirror, Some(view), layout)
            }
            Err(_) => {
                let view = array::take(source, None)?;
                let object = lease::object_of(&view).ok_or_else(|| {
                    let raised = Raised::new(
                        "WrongType",
                        "only a draft, or an array that was got by its name, is mirrored",
                    );
                    PyErr::from(raised.hint("a member of a pack is got by its full name, `pack/member`"))
                })?;
                (waiting(py, || wholemem_store::Mirror::of_object(&object))?, None, view.layout)
            }
        };
        let address = mirror.bytes().raised()?.as_ptr().as_ptr().expose_provenance() as u64;
        let owner = Arc::new(Reflected { mirror, source: Mutex::new(source) });
        let view = View { address, layout, place: Place::CPU, readonly: !is_draft, owner };
        Ok(Self { open: Mutex::new(Some(view)) })
    }

    /// The copy, to be read, and that of a draft to be written.
    #[getter]
    fn array(&self) -> PyResult<Array> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map(|view| Array::new(view.clone())).ok_or_else(closed).raised()
    }

    /// Writes a draft's mirror back, of which no array may be left, and ends it.
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let view = open.take().ok_or_else(closed).raised()?;
        // What is only read is the same ever after.
        if !view.readonly && Arc::strong_count(&view.owner) > 1 {
            *open = Some(view);
            let raised = Raised::new("InUse", "arrays made of the mirror are still there");
            return Err(raised.hint("drop them first: `del array`").into());
        }
        drop(open);
        let reflected = Reflected::of(view).and_then(Arc::into_inner);
        waiting(py, || reflected.map_or(Ok(()), |Reflected { mirror, source: _held }| mirror.write_back()))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        match self.array() {
            Ok(array) => Ok(format!("Mirror({})", Bound::new(py, array)?.repr()?)),
            Err(_) => Ok("Mirror(closed)".to_owned()),
        }
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: Option<&Bound<'_, PyAny>>,
        _error: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        self.leave(py, kind.is_some())
    }
}
