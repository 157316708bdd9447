//! A host view of memory that may be on a device: copied in if asked for, and written back when it is done with.

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

/// A copy in host memory of a draft, or of an array that was got by its name, wherever that is.
///
/// That of a draft is written back at the end of the context, or by :meth:`write_back`; until then the draft is not
/// sealed. Without ``copy_in``, it begins with any bytes. A draft of less than 1 MiB in host memory is written by
/// ``draft.array`` anyway, and has no mirror: :class:`wholemem.errors.Unsupported`.
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
    Raised::new("Closed", "the mirror was written back")
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

    /// Writes a draft's mirror back, and ends it.
    fn write_back(&self, py: Python<'_>) -> PyResult<()> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let reflected = open.take().ok_or_else(closed).raised()?;
        if Arc::strong_count(&reflected.view.owner) > 1 {
            *open = Some(reflected);
            let raised = Raised::new("InUse", "arrays made of the mirror are still there");
            return Err(raised.hint("drop them first: `del array`").into());
        }
        drop(open);
        let mirror = reflected.view.owner.downcast::<wholemem_store::Mirror>().ok().and_then(Arc::into_inner);
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

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.write_back(py)
    }
}
