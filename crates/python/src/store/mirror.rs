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

#[derive(Debug)]
struct Reflected {
    /// What it shows, kept by the mirror below.
    view: View,
    /// What it mirrors: a draft is not sealed while it has a mirror.
    _source: View,
}

impl Reflected {
    /// The mirror, which arrays that were made of it keep too.
    fn mirror(self) -> Option<Arc<wholemem_store::Mirror>> {
        self.view.owner.downcast().ok()
    }
}

/// A copy in host memory of a draft, or of an array that was got by its name, wherever that is.
///
/// That of a draft is written back by :meth:`write_back`, or at the end of the context, and given up there if something
/// was raised; until then the draft is not sealed. Without ``copy_in``, it begins with any bytes. A draft of less than
/// 1 MiB in host memory is written by ``draft.array`` anyway, and has no mirror: :class:`wholemem.errors.Unsupported`.
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
    open: Mutex<Option<Reflected>>,
}

fn closed() -> Raised {
    Raised::new("Closed", "the mirror was written back, or given up")
}

impl Mirror {
    fn take(&self) -> Option<Reflected> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The end of a block: written back where nothing was raised, and given up otherwise.
    fn leave(&self, py: Python<'_>, has_failed: bool) -> PyResult<()> {
        if has_failed {
            if let Some(mirror) = self.take().and_then(Reflected::mirror) {
                mirror.abandon();
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

#[pymethods]
impl Mirror {
    #[new]
    #[pyo3(signature = (source, copy_in=true))]
    fn new(py: Python<'_>, source: &Bound<'_, PyAny>, copy_in: bool) -> PyResult<Self> {
        let is_draft = source.cast::<Draft>().is_ok();
        let (mirror, source) = match source.cast::<Draft>() {
            Ok(draft) => {
                let draft = draft.get();
                waiting(py, || draft.mirrored(copy_in))?
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
                (waiting(py, || wholemem_store::Mirror::of_object(&object))?, view)
            }
        };
        let address = mirror.bytes().raised()?.as_ptr().as_ptr().expose_provenance() as u64;
        let (layout, owner) = (source.layout.clone(), Arc::new(mirror));
        let view = View { address, layout, place: Place::CPU, readonly: !is_draft, owner };
        Ok(Self { open: Mutex::new(Some(Reflected { view, _source: source })) })
    }

    /// The copy, to be read, and that of a draft to be written.
    #[getter]
    fn array(&self) -> PyResult<Array> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.as_ref().map(|reflected| Array::new(reflected.view.clone())).ok_or_else(closed).raised()
    }

    /// Writes a draft's mirror back, of which no array may be left, and ends it.
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let reflected = open.take().ok_or_else(closed).raised()?;
        // What is only read is the same ever after.
        if !reflected.view.readonly && Arc::strong_count(&reflected.view.owner) > 1 {
            *open = Some(reflected);
            let raised = Raised::new("InUse", "arrays made of the mirror are still there");
            return Err(raised.hint("drop them first: `del array`").into());
        }
        drop(open);
        let mirror = reflected.mirror().and_then(Arc::into_inner);
        waiting(py, || mirror.map_or(Ok(()), wholemem_store::Mirror::write_back))
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
