//! Runs the conformance suite for backends on the default host backend, on four virtual devices with large granules,
//! on deferred streams, and on the fault backend without faults.

use wholemem_hal::host::{HostMemory, HostQueue};
use wholemem_hal::{Backend, Granule, HostConfig};
use wholemem_testkit::{Deferred, Fault, conformance, seed};

fn gpu_like() -> HostConfig {
    HostConfig::virtual_devices(4).granule(Granule::new(2 << 20).expect("a power of two"))
}

conformance!(host, || Backend::host(HostConfig::default()).unwrap());
conformance!(host_with_four_devices, || Backend::host(gpu_like()).unwrap());
conformance!(deferred, || Deferred::backend(HostConfig::virtual_devices(2), seed()).unwrap());
conformance!(fault, || {
    let memory = HostMemory::open(HostConfig::virtual_devices(2)).unwrap();
    Fault::over(memory, HostQueue::inline()).unwrap().0
});
