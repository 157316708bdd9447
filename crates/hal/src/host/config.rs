//! The configuration of the host backend's devices.

use wholemem_os::{numa, vm};

use crate::{Attempt, BackendKind, DeviceId, DeviceInfo, Error, Granule, Result};

/// The devices of a host backend, and the granule in which they allocate memory.
///
/// By default there is one device per NUMA node, and the granule is 64 KiB, the largest page size of the supported
/// CPUs, so that layouts are equal on all machines.
///
/// ```
/// use wholemem_hal::{Backend, Granule, HostConfig};
///
/// // Four devices that allocate memory in the granule of a GPU.
/// let config = HostConfig::virtual_devices(4).granule(Granule::new(2 << 20)?);
/// let backend = Backend::host(config)?;
/// assert_eq!(backend.devices().len(), 4);
/// assert_eq!(backend.device(0)?.granularity()?.minimum.len(), 2 << 20);
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostConfig {
    virtual_devices: Option<usize>,
    granule: Granule,
}

const DEFAULT_GRANULE: usize = 64 << 10;
const MAX_DEVICES: usize = 1024;

impl Default for HostConfig {
    fn default() -> Self {
        let granule = DEFAULT_GRANULE.max(vm::page_size());
        Self { virtual_devices: None, granule: Granule::new(granule).expect("a page is a power of two") }
    }
}

impl HostConfig {
    /// Configures `count` devices that all use the memory of the machine and are bound to no NUMA node.
    #[must_use]
    pub fn virtual_devices(count: usize) -> Self {
        Self { virtual_devices: Some(count), ..Self::default() }
    }

    /// Sets the granule in which the devices allocate memory, which must be at least a page.
    #[must_use]
    pub fn granule(self, granule: Granule) -> Self {
        Self { granule, ..self }
    }

    /// Returns the devices of this configuration on this machine, each with the NUMA node to which its memory is
    /// bound.
    pub(super) fn devices(&self) -> Result<Vec<(DeviceInfo, Option<u32>)>> {
        let nodes = numa::nodes().map_err(|cause| Error::Failed {
            attempt: Attempt::Open { backend: BackendKind::Host },
            cause: cause.into(),
        })?;
        let Some(count) = self.virtual_devices else {
            // On a machine with one NUMA node, binding memory to it would only cost system calls.
            let several = nodes.len() > 1;
            let of_node = |(index, node): (usize, &numa::Node)| {
                let name = format!("NUMA node {}", node.id);
                (info(index, name, node.memory_bytes), several.then_some(node.id))
            };
            return Ok(nodes.iter().enumerate().map(of_node).collect());
        };
        if count == 0 || count > MAX_DEVICES {
            let rule = "it must be between 1 and 1024";
            return Err(Error::BadConfig { setting: "the number of virtual devices", value: count, rule });
        }
        let memory = nodes.iter().map(|node| node.memory_bytes).sum();
        Ok((0..count).map(|index| (info(index, format!("virtual device {index}"), memory), None)).collect())
    }

    pub(super) fn checked_granule(&self) -> Result<Granule> {
        if self.granule.len() < vm::page_size() {
            let rule = "it must be at least a page";
            return Err(Error::BadConfig { setting: "the granule", value: self.granule.len(), rule });
        }
        Ok(self.granule)
    }
}

fn info(index: usize, name: String, memory_len: usize) -> DeviceInfo {
    let id = u32::try_from(index).expect("at most 1024 devices");
    let mut uuid = *b"wholemem-hos\0\0\0\0";
    uuid[12..].copy_from_slice(&id.to_be_bytes());
    DeviceInfo { id: DeviceId(id), name, memory_len, uuid, compute: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_has_one_device_per_numa_node() {
        let devices = HostConfig::default().devices().unwrap();
        assert_eq!(devices.len(), numa::nodes().unwrap().len());
        assert!(devices.iter().all(|(info, _)| info.memory_len > 0));
    }

    #[test]
    fn virtual_devices_have_distinct_numbers_and_uuids() {
        let devices = HostConfig::virtual_devices(3).devices().unwrap();
        assert_eq!(devices.iter().map(|(info, _)| info.id.0).collect::<Vec<_>>(), [0, 1, 2]);
        assert_ne!(devices[0].0.uuid, devices[1].0.uuid);
    }

    #[test]
    fn zero_and_too_many_virtual_devices_are_rejected() {
        for value in [0, 1025] {
            let rule = "it must be between 1 and 1024";
            let expected = Error::BadConfig { setting: "the number of virtual devices", value, rule };
            assert_eq!(HostConfig::virtual_devices(value).devices().unwrap_err(), expected);
        }
    }

    #[test]
    fn a_granule_below_a_page_is_rejected() {
        let config = HostConfig::default().granule(Granule::new(512).unwrap());
        let rule = "it must be at least a page";
        assert_eq!(
            config.checked_granule(),
            Err(Error::BadConfig { setting: "the granule", value: 512, rule })
        );
    }
}
