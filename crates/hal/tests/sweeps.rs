//! Fault sweeps of the host backend: every path (sequence of calls) runs once per call with that call failing; it
//! returns the exact error and leaks nothing.

use wholemem_hal::host::{HostMemory, HostQueue};
use wholemem_hal::{AllocationSpec, Backend, Granule, HostConfig, Rights};
use wholemem_testkit::conformance::paths;
use wholemem_testkit::{Deferred, Fault, Ranks, seed, sweep, test_name};

fn config() -> HostConfig {
    HostConfig::virtual_devices(2).granule(Granule::new(64 << 10).expect("a power of two"))
}

/// Runs `body` in a separate process, so that no other test opens files or maps memory meanwhile.
fn in_own_process(test: &str, body: impl FnOnce()) {
    Ranks::of(1).run(test, |_| body());
}

#[test]
fn failing_raw_calls_leak_nothing() {
    in_own_process(test_name!(), || {
        let (backend, fault) = Fault::over(HostMemory::open(config()).unwrap(), HostQueue::inline()).unwrap();
        for (name, path) in paths::ALL {
            let calls = sweep::raw_calls(&backend, &fault, true, path);
            assert!(calls > 10, "the path `{name}` makes {calls} calls");
            // A census counts kernel resources, which streams, events, graphs and modules do not hold, so their
            // tables are checked.
            assert_eq!(format!("{backend:?}").matches("HandleTable(0 live)").count(), 4, "{backend:?}");
        }
    });
}

#[test]
fn failing_raw_calls_of_deferred_streams_leak_nothing() {
    in_own_process(test_name!(), || {
        let queue = HostQueue::new(Box::new(Deferred::new(seed())));
        let (backend, fault) = Fault::over(HostMemory::open(config()).unwrap(), queue).unwrap();
        for (name, path) in paths::ALL {
            let calls = sweep::raw_calls(&backend, &fault, false, path);
            assert!(calls > 10, "the path `{name}` makes {calls} calls");
        }
    });
}

#[test]
fn failing_system_calls_leak_nothing() {
    in_own_process(test_name!(), || {
        for (name, path) in paths::ALL {
            let calls = sweep::system_calls(|| Backend::host(config()), path);
            assert!(calls > 5, "the path `{name}` makes {calls} system calls");
        }
    });
}

#[test]
fn failing_system_calls_of_numa_bound_and_long_memory_leak_nothing() {
    in_own_process(test_name!(), || {
        let calls = sweep::system_calls(
            || Backend::host(config()),
            |backend| {
                // The memory is long enough that the available memory is checked first, and it is bound to a NUMA
                // node.
                let device = backend.device(0)?;
                let spec = AllocationSpec { node: Some(0), ..AllocationSpec::new(&device, 64 << 20) };
                let map = wholemem_hal::Allocation::create(backend, &spec)?.map(Rights::ReadWrite)?;
                map.unmap()
            },
        );
        assert!(calls > 8, "{calls} system calls");
    });
}
