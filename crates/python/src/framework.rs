//! The framework of an argument, so that a call returns what it was given: torch in, torch out.
//!
//! | arguments | a new output | where the work goes if no stream is named |
//! |---|---|---|
//! | `torch.Tensor` | `torch.Tensor`, from torch's allocator | torch's current stream |
//! | `numpy.ndarray` | `numpy.ndarray`; [`Array`] if numpy has no such type | the default stream |
//! | anything else | [`Array`] | the default stream |
//!
//! Nothing is imported: an object of torch or numpy exists only after its framework was imported.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::array::{Array, Layout, Place};
use crate::communicator::CommState;
use crate::error::{Raised, Raises};

/// Whose arrays a call deals in.
#[derive(Debug)]
pub(crate) enum Framework<'py> {
    Torch(Bound<'py, PyAny>),
    Numpy(Bound<'py, PyAny>),
    Other,
}

impl<'py> Framework<'py> {
    pub(crate) fn of(given: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = given.py();
        if given.cast::<Array>().is_ok() {
            return Ok(Self::Other);
        }
        let modules =
            py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>()?;
        let found = |module: &Bound<'py, PyAny>, class| {
            // A module that is being imported may not have it yet.
            module.getattr(class).is_ok_and(|class| given.is_instance(&class).unwrap_or(false))
        };
        if let Some(numpy) = modules.get_item(intern!(py, "numpy"))?
            && found(&numpy, intern!(py, "ndarray"))
        {
            return Ok(Self::Numpy(numpy));
        }
        match modules.get_item(intern!(py, "torch"))? {
            Some(torch) if found(&torch, intern!(py, "Tensor")) => Ok(Self::Torch(torch)),
            _ => Ok(Self::Other),
        }
    }

    /// New memory for the output of a call, uninitialised where the framework has such.
    pub(crate) fn output(
        &self,
        py: Python<'py>,
        state: &CommState,
        layout: Layout,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = PyTuple::new(py, &layout.shape)?;
        match self {
            Self::Torch(torch) => {
                let named = PyDict::new(py);
                let dtype = torch.getattr(layout.element.name).map_err(|_| {
                    Raised::new("WrongType", format!("this torch has no type like {}", layout.element.name))
                })?;
                named.set_item("dtype", dtype)?;
                named.set_item("device", state.place.to_string())?;
                torch.call_method("empty", (shape,), Some(&named))
            }
            Self::Numpy(numpy) if layout.element.typestr.is_some() => {
                numpy.call_method1("empty", (shape, layout.element.typestr))
            }
            Self::Numpy(_) | Self::Other => {
                Ok(Bound::new(py, Array::new(state.make(layout).raised()?))?.into_any())
            }
        }
    }

    /// The framework's own stream on a GPU, where it has one.
    pub(crate) fn stream(&self, place: Place) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Torch(torch) if place.is_cuda() => {
                let cuda = torch.getattr("cuda")?;
                cuda.call_method1("current_stream", (place.id,)).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Whether host arrays of it are copied to a GPU and back: torch has tensors there, and says so itself.
    pub(crate) fn is_staged(&self) -> bool {
        !matches!(self, Self::Torch(_))
    }
}
