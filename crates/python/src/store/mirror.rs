//! Mirrors: copies in host memory of drafts or objects that may be on a GPU. The mirror of a draft is written back to the draft.
//!
//! If a `with` block raises, its mirror is abandoned, so that incomplete data is not written to the draft.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

use super::draft::Draft;
use super::stored;
use crate::array::{self, Array, DlDevice, View};
use crate::error::{Exception, IntoPyResult};
use crate::wait::run_blocking;

/// The memory of a mirror, which its arrays share.
#[derive(Debug)]
struct MirrorMemory {
    /// The field `mirror` is declared first, so that it is dropped before `source`, to which the drop may write.
    mirror: wholemem_store::Mirror,
    /// The array of the mirrored draft. While the array is held, the draft cannot be sealed.
    source: Mutex<Option<View>>,
}

impl MirrorMemory {
    fn of(view: View) -> Option<Arc<Self>> {
        view.owner.downcast().ok()
    }

    fn abandon(&self) {
        self.mirror.abandon();
        drop(self.source.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A mirror: a copy in host memory of a draft, or of an array that was got by its name. The mirror of a draft is written
/// back to the draft.
///
/// The mirror of a draft is written back by :meth:`write_back`, or at the end of a ``with`` block; if the block raises, it is
/// abandoned. The draft cannot be sealed before. A mirror that is dropped outside of a ``with`` block is written back with its
/// last array, even after an exception, so use a ``with`` block if the data may be incomplete.
///
/// Args:
///     source: A :class:`Draft`, or an array that was got by its name.
///     copy_in: Whether to copy the content of the draft. If not, the initial bytes are undefined.
///
/// Raises:
///     wholemem.errors.Unsupported: The draft has less than 1 MiB in host memory; write to ``draft.array`` instead.
///     wholemem.errors.WrongType: The source is neither a draft nor an array that was got by its name.
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
    /// The memory of the mirror; `None` after the mirror was written back or abandoned.
    open: Mutex<Option<View>>,
}

fn closed() -> Exception {
    Exception::new("Closed", "the mirror was written back or abandoned")
}

impl Mirror {
    fn take(&self) -> Option<View> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Ends a `with` block of the mirror: writes the mirror back to its draft, or abandons it if the block raised.
    fn exit(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            if let Some(memory) = self.take().and_then(MirrorMemory::of) {
                memory.abandon();
            }
            return Ok(());
        }
        // Code in the `with` block has already written the mirror back.
        if self.array().is_err() {
            return Ok(());
        }
        self.write_back(py)
    }
}

impl Drop for Mirror {
    fn drop(&mut self) {
        let Some(view) = self.take().filter(|view| !view.readonly) else { return };
        // The caller holds the GIL, which is released while the mirror is written back.
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
                let (mirror, view) = run_blocking(py, || draft.mirror(copy_in))?;
                let layout = view.layout.clone();
                (mirror, Some(view), layout)
            }
            Err(_) => {
                let view = array::import(source, None)?;
                let object = stored::object_of(&view).ok_or_else(|| {
                    let raised = Exception::new(
                        "WrongType",
                        "only a draft, or an array that was got by its name, can be mirrored",
                    );
                    PyErr::from(raised.hint("get a member of a pack by its full name, `pack/member`"))
                })?;
                (run_blocking(py, || wholemem_store::Mirror::of_object(&object))?, None, view.layout)
            }
        };
        let address = mirror.bytes().into_py()?.as_ptr().as_ptr().expose_provenance() as u64;
        let owner = Arc::new(MirrorMemory { mirror, source: Mutex::new(source) });
        let view = View { address, layout, dl_device: DlDevice::CPU, readonly: !is_draft, owner };
        Ok(Self { open: Mutex::new(Some(view)) })
    }

    /// The mirror's copy in host memory as an array, which is writable if the mirror is that of a draft.
    #[getter]
    fn array(&self) -> PyResult<Array> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map(|view| Array::new(view.clone())).ok_or_else(closed).into_py()
    }

    /// Writes the mirror back to its draft and closes the mirror. No array of the mirror may still exist.
    ///
    /// Raises:
    ///     wholemem.errors.Closed: The mirror was written back or abandoned.
    ///     wholemem.errors.InUse: An array of the mirror still exists.
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let view = open.take().ok_or_else(closed).into_py()?;
        // The mirror of a sealed object is read-only, so its arrays may remain.
        if !view.readonly && Arc::strong_count(&view.owner) > 1 {
            *open = Some(view);
            let raised = Exception::new("InUse", "cannot write the mirror back: arrays of it still exist");
            return Err(raised.hint("drop them first: `del array`").into());
        }
        drop(open);
        let memory = MirrorMemory::of(view).and_then(Arc::into_inner);
        run_blocking(py, || {
            memory.map_or(Ok(()), |MirrorMemory { mirror, source: _source }| mirror.write_back())
        })
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
        self.exit(py, kind.is_some())
    }
}
