//! The capabilities of this machine for `wholemem.doctor`; the same results as `wholemem doctor` prints.

use pyo3::prelude::*;
use wholemem_hal::doctor::examine;
use wholemem_os::Error;

use crate::wait::waiting;

/// A capability: name, whether it works, and the reason if not.
type Found = (String, bool, Option<String>);

/// A device: number, name, bytes of memory, and capabilities.
type OnDevice = (u32, String, usize, Vec<Found>);

/// A backend: name, the reason if it is not available, and its devices.
type OnBackend = (String, Option<String>, Vec<OnDevice>);

/// Tests the capabilities of this machine, for :func:`wholemem.doctor`.
///
/// Returns:
///     One tuple for each backend: name, the reason if it is not available, and its devices. A device is a tuple of number,
///     name, bytes of memory and capabilities; a capability is a tuple of name, whether it works, and the reason if not.
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
