//! Parses device names: `cpu`, `cuda`, `cuda:1`.

use pyo3::prelude::*;
use wholemem_comm::Bootstrap;
use wholemem_hal::{Backend, BackendKind, Device};

use crate::error::{Exception, IntoPyResult};

/// The device that a caller requested for a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DeviceName {
    /// If `None`, the best backend of this machine is used.
    backend: Option<BackendKind>,
    /// If `None`, [`wholemem::Communicator::choose_device`] chooses; ranks that are threads use the devices round-robin.
    id: Option<u32>,
}

impl DeviceName {
    fn parse(name: &str) -> Result<Self, Exception> {
        let (kind, id) = name.split_once(':').map_or((name, None), |(kind, id)| (kind, Some(id)));
        let backend = match kind {
            "cpu" | "host" => Some(BackendKind::Host),
            "cuda" => Some(BackendKind::Cuda),
            _ => None,
        };
        let number = id.map(str::parse::<u32>).transpose();
        match (backend, number) {
            (Some(_), Ok(id)) => Ok(Self { backend, id }),
            _ => Err(Exception::new("WrongDevice", format!("the device `{name}` does not exist"))
                .hint("use `cpu`, `cuda`, or a number such as `cuda:1`")),
        }
    }

    /// Opens the GPU, if the name is one of a GPU; other objects of a store are in host memory.
    pub(crate) fn gpu(requested: Option<Self>) -> Result<Option<Device>, Exception> {
        match requested {
            Some(name) if name.backend == Some(BackendKind::Cuda) => {
                name.device_of_thread(&name.open()?, 0).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Opens the backend.
    pub(crate) fn open(self) -> Result<Backend, Exception> {
        let opened = self.backend.map_or_else(Backend::auto, Backend::open);
        opened.map_err(Exception::from)
    }

    /// The device of a rank that is a process.
    pub(crate) fn device_of(self, backend: &Backend, ranks: &Bootstrap) -> Result<Device, Exception> {
        match self.id {
            Some(id) => Ok(backend.device(id)?),
            None => Ok(wholemem::Communicator::choose_device(backend, ranks)?),
        }
    }

    /// The device of a rank that is a thread of this process; ranks use the devices round-robin.
    pub(crate) fn device_of_thread(self, backend: &Backend, rank: u32) -> Result<Device, Exception> {
        let count = u32::try_from(backend.devices().len()).unwrap_or(1).max(1);
        backend.device(self.id.unwrap_or(rank % count)).map_err(Exception::from)
    }
}

/// A device by its name, or a torch device: `"cuda:1"`, `torch.device("cuda", 1)`.
impl<'py> FromPyObject<'_, 'py> for DeviceName {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::parse(&object.str()?.extract::<String>()?).into_py()
    }
}
