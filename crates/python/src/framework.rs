//! Detects the framework of an argument, so that a call returns an array of the same framework.
//!
//! | argument | new output | default stream |
//! |---|---|---|
//! | `torch.Tensor` | `torch.Tensor`, from torch's allocator | torch's current stream |
//! | `numpy.ndarray` | `numpy.ndarray`; [`Array`] if numpy does not have the type | the device's default stream |
//! | any other array | [`Array`] | the device's default stream |
//!
//! No framework is imported: an object of torch or numpy exists only after its framework was imported.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::array::{Array, DlDevice, Layout};
use crate::communicator::CommState;
use crate::error::{Exception, IntoPyResult};

/// The framework of an array: torch, numpy, or any other.
#[derive(Debug)]
pub(crate) enum Framework<'py> {
    Torch(Bound<'py, PyAny>),
    Numpy(Bound<'py, PyAny>),
    Other,
}

impl<'py> Framework<'py> {
    pub(crate) fn of(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = object.py();
        if object.cast::<Array>().is_ok() {
            return Ok(Self::Other);
        }
        let modules =
            py.import(intern!(py, "sys"))?.getattr(intern!(py, "modules"))?.cast_into::<PyDict>()?;
        let is_instance = |module: &Bound<'py, PyAny>, class| {
            // A module that is still being imported may not have its array class yet.
            module.getattr(class).is_ok_and(|class| object.is_instance(&class).unwrap_or(false))
        };
        if let Some(numpy) = modules.get_item(intern!(py, "numpy"))?
            && is_instance(&numpy, intern!(py, "ndarray"))
        {
            return Ok(Self::Numpy(numpy));
        }
        match modules.get_item(intern!(py, "torch"))? {
            Some(torch) if is_instance(&torch, intern!(py, "Tensor")) => Ok(Self::Torch(torch)),
            _ => Ok(Self::Other),
        }
    }

    /// Allocates the output array of a call, uninitialised if the framework supports that.
    pub(crate) fn output(
        &self,
        py: Python<'py>,
        state: &CommState,
        layout: Layout,
    ) -> PyResult<Bound<'py, PyAny>> {
        let shape = PyTuple::new(py, &layout.shape)?;
        match self {
            Self::Torch(torch) => {
                let kwargs = PyDict::new(py);
                let dtype = torch.getattr(layout.element.name).map_err(|_| {
                    Exception::new(
                        "WrongType",
                        format!("this version of torch has no type {}", layout.element.name),
                    )
                })?;
                kwargs.set_item("dtype", dtype)?;
                kwargs.set_item("device", state.dl_device.to_string())?;
                torch.call_method("empty", (shape,), Some(&kwargs))
            }
            Self::Numpy(numpy) if layout.element.typestr.is_some() => {
                numpy.call_method1("empty", (shape, layout.element.typestr))
            }
            Self::Numpy(_) | Self::Other => {
                Ok(Bound::new(py, Array::new(state.allocate(layout).into_py()?))?.into_any())
            }
        }
    }

    /// Returns the framework's current stream on a GPU, if the framework has one.
    pub(crate) fn stream(&self, dl_device: DlDevice) -> PyResult<Option<Bound<'py, PyAny>>> {
        match self {
            Self::Torch(torch) if dl_device.is_cuda() => {
                let cuda = torch.getattr("cuda")?;
                cuda.call_method1("current_stream", (dl_device.id,)).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Returns true if host arrays of the framework are copied through device memory. torch tensors are not: a tensor on another
    /// device is an error.
    pub(crate) fn is_staged(&self) -> bool {
        !matches!(self, Self::Torch(_))
    }
}
