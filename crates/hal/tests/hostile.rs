//! Tests that invalid handles, and handles inherited through `fork`, are rejected with the exact error and without
//! side effects.

#![allow(unsafe_code, reason = "stores by address and kernel launches are unsafe")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};
use wholemem_hal::host::{HostMemory, HostQueue};
use wholemem_hal::{
    Allocation, AllocationSpec, Args, Attempt, Backend, BackendError, Capability, Device, Error, Event,
    EventHandle, EventKind, Grant, HandleKind, HostConfig, KernelImage, LaunchShape, Mapping, Module,
    PinnedBuffer, Reservation, Rights, ShareHandle,
};
use wholemem_os::{Deadline, FileKind, numa, vm};
use wholemem_testkit::{Census, Fault, Ranks, in_forked_child, test_name};

const LEN: usize = 128 << 10;

fn device() -> Device {
    Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
}

/// Creates a memory file with arbitrary seals, such as an untrusted process might send.
fn foreign(len: usize, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("foreign", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn import_rejects_anything_but_sealed_memory_of_the_exact_length() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = device();
        let seals = SealFlags::SHRINK | SealFlags::GROW;
        let pipe = || rustix::pipe::pipe().unwrap().0;
        let cases: [(&str, OwnedFd, wholemem_os::Error); 6] = [
            ("a pipe", pipe(), wholemem_os::Error::NotAMemfd { found: FileKind::Pipe }),
            (
                "a device",
                std::fs::File::open("/dev/null").unwrap().into(),
                wholemem_os::Error::NotAMemfd { found: FileKind::Device },
            ),
            (
                "unsealed memory",
                foreign(LEN, SealFlags::empty()),
                wholemem_os::Error::Unsealed { missing: "F_SEAL_SHRINK and F_SEAL_GROW" },
            ),
            (
                "memory that can still grow",
                foreign(LEN, SealFlags::SHRINK),
                wholemem_os::Error::Unsealed { missing: "F_SEAL_GROW" },
            ),
            (
                "memory that is too short",
                foreign(LEN / 2, seals),
                wholemem_os::Error::WrongLength { expected: LEN, actual: LEN / 2 },
            ),
            (
                "memory that is too long",
                foreign(2 * LEN, seals),
                wholemem_os::Error::WrongLength { expected: LEN, actual: 2 * LEN },
            ),
        ];
        let handles = cases.len();
        let before = Census::take();
        for (what, fd, cause) in cases {
            let attempt = Attempt::Import { len: LEN, device: device.label() };
            let refused = Error::Failed { attempt, cause: BackendError::Os(cause) };
            assert_eq!(Allocation::import(&device, fd.into(), LEN).unwrap_err(), refused, "{what}");
        }
        let after = Census::take();
        assert_eq!(before.fds.len() - handles, after.fds.len(), "each import closed its descriptor");
        assert_eq!(before.maps, after.maps);
        // A memory file that passes the checks is accepted, whichever process created it.
        Allocation::import(&device, foreign(LEN, seals).into(), LEN).unwrap();
    });
}

#[test]
fn import_rejects_handles_of_the_cuda_backend() {
    let device = device();
    for handle in [ShareHandle::Fabric([1; 64]), ShareHandle::CudaIpc { token: [2; 64], offset: 0 }] {
        let capability = match handle.kind() {
            HandleKind::Fabric => Capability::Fabric,
            _ => Capability::CudaIpc,
        };
        let reason = "host memory is shared as a file descriptor";
        let refused = Error::Unsupported { capability, device: device.label(), reason };
        assert_eq!(Allocation::import(&device, handle, LEN).unwrap_err(), refused);
    }
}

#[test]
fn allocating_more_than_the_available_memory_fails_before_pages_are_filled() {
    let device = device();
    let len = 1 << 50;
    let refused = device.allocate(len).unwrap_err();
    let Error::Failed { attempt, cause: BackendError::OutOfMemory { available } } = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(*attempt, Attempt::Create { len, device: device.label() });
    assert!(*available > 0 && *available < len);
    let refused = PinnedBuffer::create(&device, len).unwrap_err();
    let (attempt, oom) =
        (Attempt::Pin { len }, |cause: &BackendError| matches!(cause, BackendError::OutOfMemory { .. }));
    assert!(
        matches!(&refused, Error::Failed { attempt: a, cause } if *a == attempt && oom(cause)),
        "{refused:?}"
    );
}

#[test]
fn rejected_calls_have_no_side_effects() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = device();
        let step = device.granularity().unwrap().minimum.len();
        let reservation = Reservation::create(device.backend(), 2 * step).unwrap();
        let memory = device.allocate(step).unwrap();
        let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
        let map = Mapping::create(&reservation, 0, &memory, &rights).unwrap();
        map.bytes().unwrap().fill(9).unwrap();
        let before = Census::take();

        device.allocate(0).unwrap_err();
        device.allocate(step + 1).unwrap_err();
        Reservation::create(device.backend(), 1).unwrap_err();
        Reservation::create_at(device.backend(), step, reservation.address()).unwrap_err();
        Mapping::create(&reservation, 1, &memory, &rights).unwrap_err();
        Mapping::create(&reservation, 2 * step, &memory, &rights).unwrap_err();
        Mapping::create(&reservation, 0, &memory, &rights).unwrap_err();
        let missing = [Grant { device: 77.into(), rights: Rights::Read }];
        Mapping::create(&reservation, step, &memory, &missing).unwrap_err();
        let fabric = AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(&device, step) };
        Allocation::create(device.backend(), &fabric).unwrap_err();
        let far = AllocationSpec { node: Some(1000), ..AllocationSpec::new(&device, step) };
        Allocation::create(device.backend(), &far).unwrap_err();

        Census::take().assert_same_as(&before, "after rejected calls");
        let mut seen = vec![0; step];
        map.bytes().unwrap().read_at(0, &mut seen).unwrap();
        assert!(seen.iter().all(|&byte| byte == 9));
        Mapping::create(&reservation, step, &memory, &rights).unwrap();
    });
}

#[test]
fn the_cpu_gets_the_highest_rights_granted_to_any_device() {
    let memory = HostMemory::open(HostConfig::virtual_devices(2)).unwrap();
    let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
    let (device, other) = (backend.device(0).unwrap(), backend.device(1).unwrap());
    let map = device.allocate(LEN).unwrap().map(Rights::None).unwrap();
    let attempt = Attempt::Access { len: LEN };
    let (label, granted, needed) = (device.label(), Rights::None, Rights::Read);
    assert_eq!(map.bytes().unwrap_err(), Error::Denied { attempt, device: label, granted, needed });

    let grant = |rights| [Grant { device: other.id(), rights }];
    map.grant(&grant(Rights::Read)).unwrap();
    assert!(!map.bytes().unwrap().is_writable(), "the CPU has the rights of the other device");
    fault.arm(1);
    map.grant(&grant(Rights::ReadWrite)).unwrap_err();
    assert_eq!(fault.fired(), Some("set_access"));
    assert_eq!(map.rights_of(other.id()), Rights::Read, "a failed grant changes no rights");
    assert!(!map.bytes().unwrap().is_writable());
    map.grant(&grant(Rights::ReadWrite)).unwrap();
    map.bytes().unwrap().fill(1).unwrap();
}

#[test]
fn an_unmapped_range_is_inaccessible_but_still_reserved() {
    let device = device();
    let reservation = Reservation::create(device.backend(), LEN).unwrap();
    let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    let map = Mapping::create(&reservation, 0, &device.allocate(LEN).unwrap(), &rights).unwrap();
    let at = map.bytes().unwrap().as_ptr();
    // SAFETY: the memory was created for this test and contains no data.
    assert!(unsafe { vm::try_store(at) });
    drop(map);
    // SAFETY: nothing is mapped at this address: the range belongs to the reservation.
    assert!(!unsafe { vm::try_store(at) });
    let cause = BackendError::Os(wholemem_os::Error::Call { call: "mmap", errno: rustix::io::Errno::EXIST });
    let refused = Error::Failed { attempt: Attempt::Reserve { len: LEN }, cause };
    let again = Reservation::create_at(device.backend(), LEN, reservation.address());
    assert_eq!(again.unwrap_err(), refused);
}

#[test]
fn capability_probes_are_cached_unless_they_failed() {
    let memory = HostMemory::open(HostConfig::default()).unwrap();
    let (backend, fault) = Fault::over(memory, HostQueue::inline()).unwrap();
    let device = backend.device(0).unwrap();
    fault.arm(3);
    let failed = device.probe(Capability::Create).outcome;
    assert!(matches!(failed, Err(Error::Failed { .. })), "{failed:?}");
    let probe = device.probe(Capability::Create);
    assert_eq!(probe.outcome, Ok(()), "a temporary failure is not cached");
    fault.arm(1);
    assert_eq!((device.probe(Capability::Create), fault.fired()), (probe, None));
}

#[test]
fn populate_allocates_pages_that_were_never_accessed() {
    let map = device().allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
    let at = map.bytes().unwrap().as_ptr();
    assert_eq!(numa::node_of_page(at), Ok(None));
    map.populate().unwrap();
    assert!(matches!(numa::node_of_page(at), Ok(Some(_))));
}

#[test]
fn pinned_memory_is_freed_with_its_last_reference() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = device();
        let buffer = PinnedBuffer::create(&device, LEN).unwrap();
        let span = buffer.all();
        drop(buffer);
        let address = span.address();
        Reservation::create_at(device.backend(), LEN, address).unwrap_err();
        drop(span);
        Reservation::create_at(device.backend(), LEN, address).unwrap();
    });
}

unsafe fn empty_kernel(_: &LaunchShape, _: &Args) {}

const EMPTY: KernelImage = KernelImage { ptx: None, host: &[("empty", empty_kernel)] };

#[test]
fn a_forked_child_can_neither_use_nor_release_inherited_handles() {
    Ranks::of(1).run(test_name!(), |_| {
        let device = device();
        let memory = device.allocate(LEN).unwrap();
        let map = memory.map(Rights::ReadWrite).unwrap();
        let (stream, event) = (device.stream().unwrap(), Event::create(&device, EventKind::Shared).unwrap());
        let reservation = Reservation::create(device.backend(), LEN).unwrap();
        let pinned = PinnedBuffer::create(&device, 100).unwrap();
        let graph = stream.capture(|stream| stream.fill(&map.all(), 1)).unwrap();
        map.bytes().unwrap().fill(5).unwrap();
        // SAFETY: the kernel `empty` has no parameters and an empty body.
        let module = unsafe { Module::load(&device, &EMPTY) }.unwrap();
        let function = module.function("empty").unwrap();
        assert_eq!(device.probe(Capability::Create).outcome, Ok(()));
        let before = Census::take();

        let (inherited_memory, inherited_map) = (memory.clone(), map.clone());
        let inherited_reservation = reservation.clone();
        in_forked_child(|| {
            let forked = |attempt| Error::Forked { attempt };
            let label = device.label();
            let create = Attempt::Create { len: LEN, device: label };
            assert_eq!(device.allocate(LEN).unwrap_err(), forked(create));
            let reserve = Attempt::Reserve { len: LEN };
            assert_eq!(Reservation::create(device.backend(), LEN).unwrap_err(), forked(reserve));
            let map_all = Attempt::Map { len: LEN, offset: 0 };
            assert_eq!(Mapping::create(&reservation, 0, &memory, &[]).unwrap_err(), forked(map_all));
            let (kind, rights) = (HandleKind::Fd, Rights::Read);
            assert_eq!(memory.export(kind, rights).unwrap_err(), forked(Attempt::Export { kind, rights }));
            let import = Attempt::Import { len: LEN, device: label };
            let handle = foreign(LEN, SealFlags::SHRINK | SealFlags::GROW).into();
            assert_eq!(Allocation::import(&device, handle, LEN).unwrap_err(), forked(import));
            assert_eq!(memory.properties().unwrap_err(), forked(Attempt::Inspect));
            assert_eq!(map.bytes().unwrap_err(), forked(Attempt::Access { len: LEN }));
            assert_eq!(map.populate().unwrap_err(), forked(Attempt::Populate { len: LEN }));
            let grant = [Grant { device: device.id(), rights }];
            assert_eq!(
                map.grant(&grant).unwrap_err(),
                forked(Attempt::Grant { device: device.id(), rights })
            );
            assert_eq!(stream.fill(&map.all(), 2).unwrap_err(), forked(Attempt::Fill { len: LEN }));
            assert_eq!(stream.synchronize(Deadline::NOW).unwrap_err(), forked(Attempt::Synchronize));
            assert_eq!(stream.record(&event).unwrap_err(), forked(Attempt::Record));
            assert_eq!(stream.capture(|_| Ok(())).unwrap_err(), forked(Attempt::Capture));
            assert_eq!(graph.launch(&stream).unwrap_err(), forked(Attempt::LaunchGraph));
            assert_eq!(event.wait(Deadline::NOW).unwrap_err(), forked(Attempt::AwaitEvent));
            assert_eq!(event.export().unwrap_err(), forked(Attempt::ShareEvent));
            assert_eq!(pinned.bytes().unwrap_err(), forked(Attempt::Access { len: 100 }));
            assert_eq!(device.stream().unwrap_err(), forked(Attempt::CreateStream { device: label }));
            assert_eq!(PinnedBuffer::create(&device, 1).unwrap_err(), forked(Attempt::Pin { len: 1 }));
            assert_eq!(device.granularity().unwrap_err(), forked(Attempt::Inspect));
            let probe = device.probe(Capability::Create);
            assert_eq!(
                probe.outcome.unwrap_err(),
                forked(Attempt::Inspect),
                "the parent's cached result is not used"
            );
            assert_eq!(device.backend().collect(), 0);
            let address = map.address();
            assert_eq!(Allocation::retain(&device, address, LEN).unwrap_err(), forked(Attempt::Inspect));
            assert_eq!(map.dma_buf().unwrap_err(), forked(Attempt::Access { len: LEN }));
            assert_eq!(stream.await_event(&event).unwrap_err(), forked(Attempt::AwaitEvent));
            assert_eq!(event.is_done().unwrap_err(), forked(Attempt::AwaitEvent));
            assert_eq!(event.elapsed(&event).unwrap_err(), forked(Attempt::Measure));
            let create = Attempt::CreateEvent { device: label };
            assert_eq!(Event::create(&device, EventKind::Order).unwrap_err(), forked(create));
            let import = Attempt::ImportEvent { device: label };
            let handle = foreign(vm::page_size(), SealFlags::SHRINK | SealFlags::GROW);
            assert_eq!(Event::import(&device, EventHandle::Fd(handle)).unwrap_err(), forked(import));
            let launch = || Attempt::Launch { name: "empty" };
            assert_eq!(module.function("empty").unwrap_err(), forked(launch()));
            assert_eq!(function.occupancy(1, 0).unwrap_err(), forked(launch()));
            let (shape, none) = (LaunchShape::linear(1, 1), Args::new());
            // SAFETY: the kernel `empty` has no parameters and an empty body.
            let launched = unsafe { stream.launch(&function, &shape, &none, &[]) };
            assert_eq!(launched.unwrap_err(), forked(launch()));
            // SAFETY: the kernel `empty`, the only one of the image, has no parameters and an empty body.
            let loaded = unsafe { Module::load(&device, &EMPTY) };
            assert_eq!(loaded.unwrap_err(), forked(Attempt::LoadModule { device: label }));
            assert_eq!(inherited_reservation.free().unwrap_err(), forked(Attempt::Free));
            assert_eq!(inherited_map.unmap().unwrap_err(), forked(Attempt::Unmap));
            assert_eq!(inherited_memory.release().unwrap_err(), forked(Attempt::Release));

            // Dropping inherited handles in the child releases nothing, since the resources belong to the parent.
            let inherited = Census::take();
            drop((memory, map, stream, event, reservation, pinned, graph, module, function));
            Census::take().assert_same_as(&inherited, "after the child dropped the inherited handles");

            // Unlike the inherited handles, a backend that the child opens itself works.
            let own = self::device().allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
            own.bytes().unwrap().fill(1).unwrap();
        });
        // The closure has moved the parent's handles, and they were dropped with the closure.
        let after = Census::take();
        assert!(after.fds.len() < before.fds.len(), "{after:?}");
    });
}

#[test]
fn import_rejects_an_invalid_event_handle() {
    let device = device();
    let pipe = rustix::pipe::pipe().unwrap().0;
    let attempt = Attempt::ImportEvent { device: device.label() };
    let cause = BackendError::Os(wholemem_os::Error::NotAMemfd { found: FileKind::Pipe });
    assert_eq!(Event::import(&device, EventHandle::Fd(pipe)).unwrap_err(), Error::Failed { attempt, cause });
    let refused = Event::import(&device, EventHandle::CudaIpc([0; 64])).unwrap_err();
    let reason = "host events are shared as file descriptors";
    let capability = Capability::SharedEvent;
    assert_eq!(refused, Error::Unsupported { capability, device: device.label(), reason });
}
