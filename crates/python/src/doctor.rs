//! Tests the capabilities of this machine for `wholemem.doctor`, which returns the results that `wholemem doctor` prints.

use pyo3::prelude::*;
use wholemem_hal::doctor::examine;
use wholemem_os::Error;

use crate::wait::run_blocking;

/// The test result of a capability of a device: its name, whether it works, and the reason if it does not.
type CapabilityRow = (String, bool, Option<String>);

/// The test result of a device: its number, name, bytes of memory, and capabilities.
type DeviceRow = (u32, String, usize, Vec<CapabilityRow>);

/// The test result of a backend (host or CUDA): its name, the reason if it is not available, and its devices.
type BackendRow = (String, Option<String>, Vec<DeviceRow>);

/// Tests the capabilities (optional features) of this machine's devices, for :func:`wholemem.doctor`.
///
/// Returns:
///     One tuple for each backend: name, the reason if it is not available, and its devices. A device is a tuple of number,
///     name, bytes of memory and capabilities; a capability is a tuple of name, whether it works, and the reason if not.
#[pyfunction]
pub(crate) fn findings(py: Python<'_>) -> PyResult<Vec<BackendRow>> {
    let backends = run_blocking(py, || Ok::<_, Error>(examine()))?;
    let rows = backends.into_iter().map(|backend| {
        let (reason, devices) = match backend.devices {
            Ok(devices) => (None, devices),
            Err(reason) => (Some(reason), Vec::new()),
        };
        let devices = devices.into_iter().map(|device| {
            let capabilities =
                device.findings.into_iter().map(|finding| (finding.name, finding.works, finding.reason));
            (device.info.id.0, device.info.name, device.info.memory_len, capabilities.collect())
        });
        (backend.kind.to_string(), reason, devices.collect())
    });
    Ok(rows.collect())
}
