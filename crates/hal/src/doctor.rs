//! What this machine can do: every backend opened, every capability of every device tried, with the reason where not.
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

/// What was found out about a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendFindings {
    /// Which one.
    pub kind: BackendKind,
    /// Its devices, or why it is not available.
    pub devices: Result<Vec<DeviceFindings>, String>,
}

/// What was found out about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFindings {
    /// What was known before.
    pub info: DeviceInfo,
    /// What was tried.
    pub findings: Vec<Finding>,
}

/// One thing that was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What it is called.
    pub name: String,
    /// Whether it works.
    pub works: bool,
    /// Why not, or more about it.
    pub reason: Option<String>,
}

impl Finding {
    fn of(name: impl Into<String>, reason: Option<String>) -> Self {
        Self { name: name.into(), works: reason.is_none(), reason }
    }
}

/// Tries everything, best backend first.
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

/// Why something is not there, without repeating what it is: for places that have just named it.
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
    // What holds for the kernel holds for every device whose memory is the kernel's.
    let mut facts = if backend.kind() == BackendKind::Host { of_the_kernel() } else { Vec::new() };
    facts.extend(backend.facts().into_iter().map(|fact| Finding {
        name: fact.name.to_owned(),
        works: fact.holds,
        reason: Some(fact.detail),
    }));
    let devices = backend.devices().iter().filter_map(|info| backend.device(info.id).ok());
    devices
        .map(|device| {
            let tried = capabilities_of(&device).chain(peers_of(&device));
            DeviceFindings {
                info: device.info().clone(),
                findings: tried.chain(facts.iter().cloned()).collect(),
            }
        })
        .collect()
}

fn capabilities_of(device: &Device) -> impl Iterator<Item = Finding> {
    Capability::ALL.into_iter().map(|capability| {
        let outcome = device.prove(capability).outcome;
        Finding::of(capability.name(), outcome.err().map(|error| reason(&error)))
    })
}

/// Whether work of a device reaches the memory of each other one.
fn peers_of(device: &Device) -> impl Iterator<Item = Finding> {
    let backend = device.backend();
    let peers = backend.devices().iter().filter(|info| info.id != device.id());
    peers.filter_map(|info| backend.device(info.id).ok()).map(|peer| {
        let outcome = device.reaches(&peer);
        Finding::of(format!("reaches-{}", peer.label()), outcome.err().map(|error| reason(&error)))
    })
}

fn of_the_kernel() -> Vec<Finding> {
    let probes = probe::all().into_iter();
    probes.map(|probe| Finding::of(probe.name, probe.outcome.err().map(|error| error.to_string()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostConfig;

    #[test]
    fn a_reason_does_not_repeat_what_it_is_about() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let refused = device.prove(Capability::Fabric).outcome.unwrap_err();
        assert_eq!(reason(&refused), "host memory travels as a file descriptor");
        let zero = device.allocate(0).unwrap_err();
        assert_eq!(reason(&zero), "cannot create 0 B on host:0: the length is zero");
    }

    #[test]
    fn devices_are_tried_for_what_they_can_do_and_whom_they_reach() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let devices = devices_of(&backend);
        let works = |device: usize, name: &str| {
            devices[device].findings.iter().find(|finding| finding.name == name).map(|finding| finding.works)
        };
        assert_eq!(works(0, "create"), Some(true));
        assert_eq!(works(1, "fabric"), Some(false));
        assert_eq!((works(0, "reaches-host:1"), works(0, "reaches-host:0")), (Some(true), None));
        assert!(devices[0].findings.len() > Capability::ALL.len(), "and the kernel for what it does");
    }
}
