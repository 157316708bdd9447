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
    devices: HostDevices,
    granule: Granule,
}

/// The devices of a host backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostDevices {
    /// One device per NUMA node.
    Nodes,
    /// One device, whose memory is on the NUMA node with this number.
    Node(u32),
    /// This number of devices, which are bound to no NUMA node.
    Virtual(usize),
}

const DEFAULT_GRANULE: usize = 64 << 10;
const MAX_DEVICES: usize = 1024;

impl Default for HostConfig {
    fn default() -> Self {
        let granule = DEFAULT_GRANULE.max(vm::page_size());
        let granule = Granule::new(granule).expect("a page is a power of two");
        Self { devices: HostDevices::Nodes, granule }
    }
}

impl HostConfig {
    /// Configures `count` devices that all use the memory of the machine and are bound to no NUMA node.
    #[must_use]
    pub fn virtual_devices(count: usize) -> Self {
        Self { devices: HostDevices::Virtual(count), ..Self::default() }
    }

    /// Configures one device, whose memory is on the NUMA node with this number. If the kernel refuses to bind memory to the node,
    /// because it does not exist or the container forbids it, memory is allocated on any node.
    #[must_use]
    pub fn on_node(node: u32) -> Self {
        Self { devices: HostDevices::Node(node), ..Self::default() }
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
        let all_memory = nodes.iter().map(|node| node.memory_bytes).sum();
        let on_node = |index: usize, id: u32, memory_len: usize| {
            let name = format!("NUMA node {id}");
            DeviceInfo { numa_node: Some(id), ..info(index, name, memory_len) }
        };
        let count = match self.devices {
            HostDevices::Virtual(count) => count,
            HostDevices::Nodes => {
                // On a machine with one NUMA node, binding memory to it would only cost system calls.
                let several = nodes.len() > 1;
                let of_node = |(index, node): (usize, &numa::Node)| {
                    (on_node(index, node.id, node.memory_bytes), several.then_some(node.id))
                };
                return Ok(nodes.iter().enumerate().map(of_node).collect());
            }
            HostDevices::Node(id) => {
                let memory = nodes.iter().find(|node| node.id == id).map(|node| node.memory_bytes);
                return Ok(vec![(on_node(0, id, memory.unwrap_or(all_memory)), Some(id))]);
            }
        };
        if count == 0 || count > MAX_DEVICES {
            let rule = "it must be between 1 and 1024";
            return Err(Error::BadConfig { setting: "the number of virtual devices", value: count, rule });
        }
        let device = |index| (info(index, format!("virtual device {index}"), all_memory), None);
        Ok((0..count).map(device).collect())
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
    DeviceInfo { id: DeviceId(id), name, memory_len, uuid, compute: 0, numa_node: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_has_one_device_per_numa_node() {
        let devices = HostConfig::default().devices().unwrap();
        assert_eq!(devices.len(), numa::nodes().unwrap().len());
        assert!(devices.iter().all(|(info, _)| info.memory_len > 0 && info.numa_node.is_some()));
    }

    #[test]
    fn a_device_on_a_node_is_bound_to_it_even_if_it_is_the_only_one() {
        let devices = HostConfig::on_node(0).devices().unwrap();
        let [(info, bound)] = &devices[..] else { panic!("{devices:?}") };
        assert_eq!((info.id.0, &*info.name, info.numa_node, *bound), (0, "NUMA node 0", Some(0), Some(0)));
        assert!(info.memory_len > 0);
    }

    #[test]
    fn virtual_devices_have_distinct_numbers_and_uuids() {
        let devices = HostConfig::virtual_devices(3).devices().unwrap();
        assert!(devices.iter().all(|(info, bound)| info.numa_node.is_none() && bound.is_none()));
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
