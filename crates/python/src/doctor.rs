//! What this machine can do, as Python's `doctor` hears it: the same findings as the program's.

use pyo3::prelude::*;
use wholemem_hal::doctor::examine;
use wholemem_os::Error;

use crate::wait::waiting;

/// Name, whether it works, and why not.
type Found = (String, bool, Option<String>);

/// Number, name, bytes of memory, and what was tried.
type OnDevice = (u32, String, usize, Vec<Found>);

/// Name, why it is not available, and its devices.
type OnBackend = (String, Option<String>, Vec<OnDevice>);

/// What :func:`wholemem.doctor` makes its report of.
#[pyfunction]
pub(crate) fn findings(py: Python<'_>) -> PyResult<Vec<OnBackend>> {
    let backends = waiting(py, || Ok::<_, Error>(examine()))?;
    let described = backends.into_iter().map(|backend| {
        let (reason, devices) = match backend.devices {
            Ok(devices) => (None, devices),
            Err(reason) => (Some(reason), Vec::new()),
        };
        let devices = devices.into_iter().map(|device| {
            let found = device.findings.into_iter().map(|found| (found.name, found.works, found.reason));
            (device.info.id.0, device.info.name, device.info.memory_len, found.collect())
        });
        (backend.kind.to_string(), reason, devices.collect())
    });
    Ok(described.collect())
}
