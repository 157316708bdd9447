//! Test cases for memory, which every backend must pass.

use wholemem_hal::{Allocation, Attempt, Backend, Error, Grant, HandleKind, Mapping, Reservation, Rights};

use super::{first, granule, mapped, pattern, second, seen, stream};

pub fn new_memory_is_zeroed_and_stores_bytes(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 3);
    assert!(seen(&device, &map.all()).iter().all(|&byte| byte == 0));
    let written = pattern(1, map.len());
    stream(&device).write(&map.all(), &written).unwrap();
    assert!(seen(&device, &map.all()) == written);
}

pub fn two_mappings_of_one_allocation_share_bytes(backend: &Backend) {
    let device = first(backend);
    let memory = device.allocate(granule(&device)).unwrap();
    let [here, there] = [(); 2].map(|()| memory.map(Rights::ReadWrite).unwrap());
    assert_ne!(here.address(), there.address());
    let written = pattern(2, 100);
    stream(&device).write(&here.span(7, 100).unwrap(), &written).unwrap();
    assert_eq!(seen(&device, &there.span(7, 100).unwrap()), written);
}

pub fn an_imported_handle_refers_to_the_same_memory(backend: &Backend) {
    let (device, other) = (first(backend), second(backend));
    let created = device.allocate(2 * granule(&device)).unwrap();
    let handle = created.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
    assert_eq!(handle.kind(), HandleKind::Fd);
    let received = Allocation::import(&device, handle, created.len()).unwrap();
    assert_eq!((received.len(), received.rights()), (created.len(), Rights::ReadWrite));

    let written = pattern(3, 64);
    let last = created.len() - 64;
    stream(&device)
        .write(&created.map(Rights::ReadWrite).unwrap().span(last, 64).unwrap(), &written)
        .unwrap();
    // After the created allocation is dropped, the imported allocation keeps the memory alive.
    drop(created);
    let map = received.map(Rights::Read).unwrap();
    map.grant(&[Grant { device: other.id(), rights: Rights::Read }]).unwrap();
    assert_eq!(seen(&device, &map.span(last, 64).unwrap()), written);
    assert_eq!(seen(&other, &map.span(last, 64).unwrap()), written);
}

pub fn a_read_only_handle_allows_no_writable_mapping(backend: &Backend) {
    let device = first(backend);
    let created = device.allocate(granule(&device)).unwrap();
    // A read-write handle is exported first, because it must not affect the rights of a later read-only handle.
    drop(created.export(HandleKind::Fd, Rights::ReadWrite).unwrap());
    let handle = match created.export(HandleKind::Fd, Rights::Read) {
        Err(Error::Unsupported { .. }) => return crate::skipped("this device has no read-only handles"),
        handle => handle.unwrap(),
    };
    let received = Allocation::import(&device, handle, created.len()).unwrap();
    assert_eq!(received.rights(), Rights::Read);
    let attempt = Attempt::Grant { device: device.id(), rights: Rights::ReadWrite };
    let refused = Error::ReadOnlyHandle { attempt };
    assert_eq!(received.map(Rights::ReadWrite).unwrap_err(), refused);
    let map = received.map(Rights::Read).unwrap();
    assert_eq!(map.grant(&[Grant { device: device.id(), rights: Rights::ReadWrite }]).unwrap_err(), refused);

    let (kind, rights) = (HandleKind::Fd, Rights::ReadWrite);
    let attempt = Attempt::Export { kind, rights };
    assert_eq!(received.export(kind, rights).unwrap_err(), Error::ReadOnlyHandle { attempt });
    let again = received.export(HandleKind::Fd, Rights::Read).unwrap();
    assert_eq!(Allocation::import(&device, again, created.len()).unwrap().rights(), Rights::Read);
}

pub fn adjacent_mappings_are_contiguous(backend: &Backend) {
    let (device, other) = (first(backend), second(backend));
    let step = granule(&device);
    let whole = Reservation::create(backend, 4 * step).unwrap();
    let both = [&device, &other].map(|device| Grant { device: device.id(), rights: Rights::ReadWrite });
    let left = Mapping::create(&whole, step, &device.allocate(step).unwrap(), &both).unwrap();
    let right = Mapping::create(&whole, 2 * step, &other.allocate(2 * step).unwrap(), &both).unwrap();
    assert_eq!(left.address(), whole.address() + step as u64);
    assert_eq!(right.address(), left.address() + step as u64);

    let written = pattern(4, step);
    stream(&other).write(&left.all(), &written).unwrap();
    stream(&device).copy(&right.span(step, step).unwrap(), &left.all()).unwrap();
    // The copying stream is synchronized, because a stream of the other device reads the copied bytes next.
    let copier = stream(&device);
    copier.copy(&right.span(0, step).unwrap(), &left.all()).unwrap();
    copier.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    assert!(seen(&other, &right.span(0, step).unwrap()) == written);
}

pub fn handles_can_be_dropped_in_any_order(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let reservation = Reservation::create(backend, step).unwrap();
        let memory = device.allocate(step).unwrap();
        let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
        let map = Mapping::create(&reservation, 0, &memory, &rights).unwrap();
        let span = map.span(0, 8).unwrap();
        let (mut reservation, mut memory, mut map) = (Some(reservation), Some(memory), Some(map));
        for dropped in order {
            stream(&device).write(&span, &pattern(5, 8)).unwrap();
            match dropped {
                0 => drop(reservation.take()),
                1 => drop(memory.take()),
                _ => drop(map.take()),
            }
            assert_eq!(seen(&device, &span), pattern(5, 8), "a span keeps the memory mapped");
        }
    }
    assert_eq!(backend.collect(), 0);
}

pub fn an_unmapped_range_can_be_mapped_again(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let reservation = Reservation::create(backend, 2 * step).unwrap();
    let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    for round in 0..4 {
        let long = round % 2 == 0;
        let memory = device.allocate(if long { 2 * step } else { step }).unwrap();
        let map = Mapping::create(&reservation, if long { 0 } else { step }, &memory, &rights).unwrap();
        let last = map.span(map.len() - 8, 8).unwrap();
        assert_eq!(seen(&device, &last), [0; 8], "no bytes of the previous round");
        stream(&device).write(&last, &pattern(round, 8)).unwrap();
        drop(last);
        map.unmap().unwrap();
    }
}

pub fn rights_are_per_device_and_never_shrink(backend: &Backend) {
    let (device, other) = (first(backend), second(backend));
    if device.id() == other.id() {
        return crate::skipped("this backend has one device");
    }
    let map = device.allocate(granule(&device)).unwrap().map(Rights::ReadWrite).unwrap();
    let span = map.span(0, 16).unwrap();
    let attempt = || Attempt::Copy { len: 16 };
    let denied =
        |granted, needed| Error::Denied { attempt: attempt(), device: other.label(), granted, needed };
    let mut buffer = [0; 16];

    let stream = stream(&other);
    assert_eq!(stream.read(&span, &mut buffer).unwrap_err(), denied(Rights::None, Rights::Read));
    map.grant(&[Grant { device: other.id(), rights: Rights::Read }]).unwrap();
    stream.read(&span, &mut buffer).unwrap();
    assert_eq!(stream.write(&span, &buffer).unwrap_err(), denied(Rights::Read, Rights::ReadWrite));
    map.grant(&[Grant { device: other.id(), rights: Rights::ReadWrite }]).unwrap();
    stream.write(&span, &buffer).unwrap();
    // Granting fewer rights to a device does not reduce its rights.
    map.grant(&[Grant { device: other.id(), rights: Rights::None }]).unwrap();
    assert_eq!(map.rights_of(other.id()), Rights::ReadWrite);
}

pub fn reservations_honor_alignment_and_address(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let aligned = Reservation::create_aligned(backend, step, 8 << 20).unwrap();
    assert_eq!(aligned.address() % (8 << 20), 0);
    // The address range belongs to a live reservation, so reserving it again must fail.
    let occupied = Reservation::create_at(backend, step, aligned.address());
    assert!(matches!(occupied, Err(Error::Failed { attempt: Attempt::Reserve { .. }, .. })), "{occupied:?}");
}

pub fn explicit_release_reports_resources_in_use(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let reservation = Reservation::create(backend, step).unwrap();
    let memory = device.allocate(step).unwrap();
    let rights = [Grant { device: device.id(), rights: Rights::Read }];
    let map = Mapping::create(&reservation, 0, &memory, &rights).unwrap();

    assert_eq!(memory.clone().release(), Err(Error::InUse { attempt: Attempt::Release }));
    assert_eq!(reservation.clone().free(), Err(Error::InUse { attempt: Attempt::Free }));
    assert_eq!(map.clone().unmap(), Err(Error::InUse { attempt: Attempt::Unmap }));
    assert_eq!((map.unmap(), memory.release(), reservation.free()), (Ok(()), Ok(()), Ok(())));
}

pub fn the_backend_reports_allocation_properties(backend: &Backend) {
    let device = first(backend);
    let memory = device.allocate(granule(&device)).unwrap();
    let properties = memory.properties().unwrap();
    assert!(properties.len.is_none_or(|len| len == memory.len()), "{properties:?}");
    assert!(properties.handles.contains(&HandleKind::Fd), "{properties:?}");
    memory.map(Rights::ReadWrite).unwrap().populate().unwrap();
}
