//! Diagnoses this machine: opens every backend and tests every capability of every device.
//!
//! ```
//! use wholemem_hal::{BackendKind, doctor};
//!
//! for backend in doctor::examine() {
//!     match backend.devices {
//!         Ok(devices) => println!("{}: {} devices", backend.kind, devices.len()),
//!         Err(reason) => println!("{}: not available: {reason}", backend.kind),
//!     }
//! }
//! ```

use std::error::Error as _;

use wholemem_os::probe;

use crate::{Backend, BackendKind, Capability, Device, DeviceInfo, Error};

/// The result of examining a backend on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendFindings {
    /// The kind of the examined backend.
    pub kind: BackendKind,
    /// The findings for each device of the backend, or the reason why the backend is not available.
    pub devices: Result<Vec<DeviceFindings>, String>,
}

/// The result of examining a device of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFindings {
    /// The properties of the examined device.
    pub info: DeviceInfo,
    /// The results of the tests of the device.
    pub findings: Vec<Finding>,
}

/// The result of one test of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// The name of the test of the device.
    pub name: String,
    /// True if the test of the device succeeded.
    pub works: bool,
    /// The reason why the test of the device failed, or details about its result.
    pub reason: Option<String>,
}

impl Finding {
    fn of(name: impl Into<String>, reason: Option<String>) -> Self {
        Self { name: name.into(), works: reason.is_none(), reason }
    }
}

/// Examines all backends, in the order in which [`Backend::auto`] tries them.
#[must_use]
pub fn examine() -> Vec<BackendFindings> {
    let findings = BackendKind::ALL.map(|kind| {
        let devices = match Backend::open(kind) {
            Ok(backend) => Ok(devices_of(&backend)),
            Err(error) => Err(reason(&error)),
        };
        BackendFindings { kind, devices }
    });
    findings.into()
}

/// Returns the reason of an error without the operation and the device, for output that has already named them.
#[must_use]
pub fn reason(error: &Error) -> String {
    match error {
        Error::Unavailable { reason, .. } => reason.clone(),
        Error::Unsupported { reason, .. } => (*reason).to_owned(),
        error => match error.source() {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        },
    }
}

fn devices_of(backend: &Backend) -> Vec<DeviceFindings> {
    // Facts about the kernel are listed for every device of the host backend.
    let mut facts = if backend.kind() == BackendKind::Host { kernel_findings() } else { Vec::new() };
    facts.extend(backend.facts().into_iter().map(|fact| Finding {
        name: fact.name.to_owned(),
        works: fact.holds,
        reason: Some(fact.detail),
    }));
    let devices = backend.devices().iter().filter_map(|info| backend.device(info.id).ok());
    devices
        .map(|device| {
            let tests = capabilities_of(&device).chain(peers_of(&device));
            DeviceFindings {
                info: device.info().clone(),
                findings: tests.chain(facts.iter().cloned()).collect(),
            }
        })
        .collect()
}

fn capabilities_of(device: &Device) -> impl Iterator<Item = Finding> {
    Capability::ALL.into_iter().map(|capability| {
        let outcome = device.probe(capability).outcome;
        Finding::of(capability.name(), outcome.err().map(|error| reason(&error)))
    })
}

/// Tests whether work of a device can access the memory of each other device of the backend.
fn peers_of(device: &Device) -> impl Iterator<Item = Finding> {
    let backend = device.backend();
    let peers = backend.devices().iter().filter(|info| info.id != device.id());
    peers.filter_map(|info| backend.device(info.id).ok()).map(|peer| {
        let outcome = device.check_peer_access(&peer);
        Finding::of(format!("reaches-{}", peer.label()), outcome.err().map(|error| reason(&error)))
    })
}

fn kernel_findings() -> Vec<Finding> {
    let probes = probe::all().into_iter();
    probes.map(|probe| Finding::of(probe.name, probe.outcome.err().map(|error| error.to_string()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostConfig;

    #[test]
    fn a_reason_does_not_repeat_the_operation() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let refused = device.probe(Capability::Fabric).outcome.unwrap_err();
        assert_eq!(reason(&refused), "host memory is shared as a file descriptor");
        let zero = device.allocate(0).unwrap_err();
        assert_eq!(reason(&zero), "cannot create 0 B on host:0: the length is zero");
    }

    #[test]
    fn capabilities_and_peer_access_of_devices_are_tested() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let devices = devices_of(&backend);
        let works = |device: usize, name: &str| {
            devices[device].findings.iter().find(|finding| finding.name == name).map(|finding| finding.works)
        };
        assert_eq!(works(0, "create"), Some(true));
        assert_eq!(works(1, "fabric"), Some(false));
        assert_eq!((works(0, "reaches-host:1"), works(0, "reaches-host:0")), (Some(true), None));
        assert!(
            devices[0].findings.len() > Capability::ALL.len(),
            "the findings include facts about the kernel"
        );
    }
}
