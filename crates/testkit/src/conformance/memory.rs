//! What memory must do on every backend.

use wholemem_hal::{Allocation, Attempt, Backend, Error, Grant, HandleKind, Mapping, Reservation, Rights};

use super::{first, granule, mapped, pattern, second, seen, stream};

pub fn fresh_memory_is_zero_and_keeps_what_is_written(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 3);
    assert!(seen(&device, &map.all()).iter().all(|&byte| byte == 0));
    let written = pattern(1, map.len());
    stream(&device).write(&map.all(), &written).unwrap();
    assert!(seen(&device, &map.all()) == written);
}

pub fn two_maps_of_one_allocation_show_the_same_bytes(backend: &Backend) {
    let device = first(backend);
    let memory = device.allocate(granule(&device)).unwrap();
    let [here, there] = [(); 2].map(|()| memory.map(Rights::ReadWrite).unwrap());
    assert_ne!(here.address(), there.address());
    let written = pattern(2, 100);
    stream(&device).write(&here.span(7, 100).unwrap(), &written).unwrap();
    assert_eq!(seen(&device, &there.span(7, 100).unwrap()), written);
}

pub fn an_imported_handle_is_the_same_memory(backend: &Backend) {
    let (device, other) = (first(backend), second(backend));
    let made = device.allocate(2 * granule(&device)).unwrap();
    let handle = made.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
    assert_eq!(handle.kind(), HandleKind::Fd);
    let received = Allocation::import(&device, handle, made.len()).unwrap();
    assert_eq!((received.len(), received.rights()), (made.len(), Rights::ReadWrite));

    let written = pattern(3, 64);
    let last = made.len() - 64;
    stream(&device).write(&made.map(Rights::ReadWrite).unwrap().span(last, 64).unwrap(), &written).unwrap();
    // The maker lets go of it; what was received is enough.
    drop(made);
    let map = received.map(Rights::Read).unwrap();
    map.grant(&[Grant { device: other.id(), rights: Rights::Read }]).unwrap();
    assert_eq!(seen(&device, &map.span(last, 64).unwrap()), written);
    assert_eq!(seen(&other, &map.span(last, 64).unwrap()), written);
}

pub fn a_read_only_handle_gives_no_writable_map(backend: &Backend) {
    let device = first(backend);
    let made = device.allocate(granule(&device)).unwrap();
    // A wider handle made before does not widen this one.
    drop(made.export(HandleKind::Fd, Rights::ReadWrite).unwrap());
    let handle = match made.export(HandleKind::Fd, Rights::Read) {
        Err(Error::Unsupported { .. }) => return crate::skipped("this device has no read-only handles"),
        handle => handle.unwrap(),
    };
    let received = Allocation::import(&device, handle, made.len()).unwrap();
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
    assert_eq!(Allocation::import(&device, again, made.len()).unwrap().rights(), Rights::Read);
}

pub fn allocations_side_by_side_are_one_memory(backend: &Backend) {
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
    // A stream of the other device reads what this one copied only after this one was waited for.
    let copier = stream(&device);
    copier.copy(&right.span(0, step).unwrap(), &left.all()).unwrap();
    copier.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    assert!(seen(&other, &right.span(0, step).unwrap()) == written);
}

pub fn any_order_of_dropping_is_right(backend: &Backend) {
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
            assert_eq!(seen(&device, &span), pattern(5, 8), "a span keeps everything it needs");
        }
    }
    assert_eq!(backend.collect(), 0);
}

pub fn a_place_can_be_used_again(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let reservation = Reservation::create(backend, 2 * step).unwrap();
    let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
    for round in 0..4 {
        let long = round % 2 == 0;
        let memory = device.allocate(if long { 2 * step } else { step }).unwrap();
        let map = Mapping::create(&reservation, if long { 0 } else { step }, &memory, &rights).unwrap();
        let last = map.span(map.len() - 8, 8).unwrap();
        assert_eq!(seen(&device, &last), [0; 8], "no bytes of the round before");
        stream(&device).write(&last, &pattern(round, 8)).unwrap();
        drop(last);
        map.unmap().unwrap();
    }
}

pub fn rights_are_kept_for_each_device(backend: &Backend) {
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
    // Rights only grow.
    map.grant(&[Grant { device: other.id(), rights: Rights::None }]).unwrap();
    assert_eq!(map.rights_of(other.id()), Rights::ReadWrite);
}

pub fn addresses_can_be_chosen(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let aligned = Reservation::create_aligned(backend, step, 8 << 20).unwrap();
    assert_eq!(aligned.address() % (8 << 20), 0);
    // Inside our own larger reservation nobody else can have taken the place meanwhile: it is refused.
    let taken = Reservation::create_at(backend, step, aligned.address());
    assert!(matches!(taken, Err(Error::Failed { attempt: Attempt::Reserve { .. }, .. })), "{taken:?}");
}

pub fn giving_back_answers(backend: &Backend) {
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

pub fn the_backend_knows_its_own_memory(backend: &Backend) {
    let device = first(backend);
    let memory = device.allocate(granule(&device)).unwrap();
    let properties = memory.properties().unwrap();
    assert!(properties.len.is_none_or(|len| len == memory.len()), "{properties:?}");
    assert!(properties.handles.contains(&HandleKind::Fd), "{properties:?}");
    memory.map(Rights::ReadWrite).unwrap().populate().unwrap();
}
