//! Parses device names: `cpu`, `cuda`, `cuda:1`.

use pyo3::prelude::*;
use wholemem_comm::Bootstrap;
use wholemem_hal::{Backend, BackendKind, Device};

use crate::error::{Exception, IntoPyResult};

/// The device that a caller requested for a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DeviceName {
    /// The backend, host or CUDA. If `None`, the best backend of this machine is used.
    backend: Option<BackendKind>,
    /// The number of the device. If `None`, [`wholemem::Communicator::choose_device`] chooses; ranks that are threads use the
    /// devices round-robin.
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

    /// Opens the GPU that a store call requested by name. Returns `None` if the name is not one of a GPU: the object is then in
    /// host memory.
    pub(crate) fn gpu(requested: Option<Self>) -> Result<Option<Device>, Exception> {
        match requested {
            Some(name) if name.backend == Some(BackendKind::Cuda) => {
                name.device_of_thread(&name.open()?, 0).map(Some)
            }
            _ => Ok(None),
        }
    }

    /// Opens the requested backend (host or CUDA).
    pub(crate) fn open(self) -> Result<Backend, Exception> {
        let opened = self.backend.map_or_else(Backend::auto, Backend::open);
        opened.map_err(Exception::from)
    }

    /// Returns the device of a rank that is a process: the requested one, or one that the ranks choose.
    pub(crate) fn device_of(self, backend: &Backend, ranks: &Bootstrap) -> Result<Device, Exception> {
        match self.id {
            Some(id) => Ok(backend.device(id)?),
            None => Ok(wholemem::Communicator::choose_device(backend, ranks)?),
        }
    }

    /// Returns the device of a rank that is a thread of this process. Without a requested device number, ranks use the devices
    /// round-robin.
    pub(crate) fn device_of_thread(self, backend: &Backend, rank: u32) -> Result<Device, Exception> {
        let count = u32::try_from(backend.devices().len()).unwrap_or(1).max(1);
        backend.device(self.id.unwrap_or(rank % count)).map_err(Exception::from)
    }
}

/// Extracts a device from its name, or from a torch device: `"cuda:1"`, `torch.device("cuda", 1)`.
impl<'py> FromPyObject<'_, 'py> for DeviceName {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Self::parse(&object.str()?.extract::<String>()?).into_py()
    }
}
