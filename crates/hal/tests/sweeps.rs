//! Every path, failing at each of its calls in turn: the exact error comes out, and nothing is left behind.

use wholemem_hal::host::{HostMemory, HostQueue};
use wholemem_hal::{AllocationSpec, Backend, Granule, HostConfig, Rights};
use wholemem_testkit::conformance::paths;
use wholemem_testkit::{Deferred, Fault, Ranks, seed, sweep, test_name};

fn config() -> HostConfig {
    HostConfig::virtual_devices(2).granule(Granule::new(64 << 10).expect("a power of two"))
}

/// In a process of its own, so that nobody else opens or maps anything meanwhile.
fn alone(test: &str, body: impl FnOnce()) {
    Ranks::of(1).run(test, |_| body());
}

#[test]
fn failing_raw_calls_leave_nothing_behind() {
    alone(test_name!(), || {
        let (backend, fault) = Fault::over(HostMemory::open(config()).unwrap(), HostQueue::inline()).unwrap();
        for (name, path) in paths::ALL {
            let calls = sweep::raw_calls(&backend, &fault, true, path);
            assert!(calls > 10, "the path `{name}` makes {calls} calls");
            // Streams, events, graphs and modules hold nothing of the kernel that a census would see.
            assert_eq!(format!("{backend:?}").matches("Table(0 live)").count(), 4, "{backend:?}");
        }
    });
}

#[test]
fn failing_raw_calls_of_late_streams_leave_nothing_behind() {
    alone(test_name!(), || {
        let queue = HostQueue::new(Box::new(Deferred::new(seed())));
        let (backend, fault) = Fault::over(HostMemory::open(config()).unwrap(), queue).unwrap();
        for (name, path) in paths::ALL {
            let calls = sweep::raw_calls(&backend, &fault, false, path);
            assert!(calls > 10, "the path `{name}` makes {calls} calls");
        }
    });
}

#[test]
fn failing_system_calls_leave_nothing_behind() {
    alone(test_name!(), || {
        for (name, path) in paths::ALL {
            let calls = sweep::system_calls(|| Backend::host(config()), path);
            assert!(calls > 5, "the path `{name}` makes {calls} system calls");
        }
    });
}

#[test]
fn failing_system_calls_of_placed_and_long_memory_leave_nothing_behind() {
    alone(test_name!(), || {
        let calls = sweep::system_calls(
            || Backend::host(config()),
            |backend| {
                // Long enough that what is available is looked at first, and tied to a node.
                let device = backend.device(0)?;
                let spec = AllocationSpec { node: Some(0), ..AllocationSpec::new(&device, 64 << 20) };
                let map = wholemem_hal::Allocation::create(backend, &spec)?.map(Rights::ReadWrite)?;
                map.unmap()
            },
        );
        assert!(calls > 8, "{calls} system calls");
    });
}
