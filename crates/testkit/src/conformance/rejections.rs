//! Test cases with invalid calls, which every backend must reject with an exact error.

use wholemem_hal::{
    Allocation, AllocationSpec, Attempt, Backend, Capability, DeviceId, Error, Event, EventKind, Grant,
    HandleKind, HostConfig, Mapping, PinnedBuffer, Reservation, Rights, ShareHandle,
};
use wholemem_os::Deadline;

use super::{first, granule, mapped, second, stream};

pub fn zero_lengths_are_rejected(backend: &Backend) {
    let device = first(backend);
    let attempt = Attempt::Create { len: 0, device: device.label() };
    assert_eq!(device.allocate(0).unwrap_err(), Error::ZeroLength { attempt });
    let attempt = Attempt::Reserve { len: 0 };
    assert_eq!(Reservation::create(backend, 0).unwrap_err(), Error::ZeroLength { attempt });
    let attempt = Attempt::Pin { len: 0 };
    assert_eq!(PinnedBuffer::create(&device, 0).unwrap_err(), Error::ZeroLength { attempt });
    let handle =
        device.allocate(granule(&device)).unwrap().export(HandleKind::Fd, Rights::ReadWrite).unwrap();
    let attempt = Attempt::Import { len: 0, device: device.label() };
    assert_eq!(Allocation::import(&device, handle, 0).unwrap_err(), Error::ZeroLength { attempt });

    let map = mapped(&device, 1);
    let nothing = map.span(0, 0).unwrap();
    let attempt = Attempt::Fill { len: 0 };
    assert_eq!(stream(&device).fill(&nothing, 1), Err(Error::ZeroLength { attempt }));
    let attempt = Attempt::Copy { len: 0 };
    assert_eq!(stream(&device).copy(&nothing, &nothing), Err(Error::ZeroLength { attempt }));
    assert_eq!(stream(&device).write(&nothing, &[]), Ok(()), "writing no bytes succeeds");
}

pub fn unaligned_lengths_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    for len in [1, step - 1, step + 1, 2 * step + step / 2] {
        let attempt = Attempt::Create { len, device: device.label() };
        assert_eq!(device.allocate(len).unwrap_err(), Error::UnalignedLength { attempt, granule: step });
        let attempt = Attempt::Reserve { len };
        let refused = Error::UnalignedLength { attempt, granule: step };
        assert_eq!(Reservation::create(backend, len).unwrap_err(), refused);
        let handle = device.allocate(step).unwrap().export(HandleKind::Fd, Rights::Read);
        if let Ok(handle) = handle {
            let attempt = Attempt::Import { len, device: device.label() };
            let refused = Error::UnalignedLength { attempt, granule: step };
            assert_eq!(Allocation::import(&device, handle, len).unwrap_err(), refused);
        }
    }
}

pub fn unaligned_offsets_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let reservation = Reservation::create(backend, 4 * step).unwrap();
    let memory = device.allocate(step).unwrap();
    for offset in [1, step / 2, step + 1] {
        let attempt = Attempt::Map { len: step, offset };
        let refused = Error::UnalignedOffset { attempt, granule: step };
        assert_eq!(Mapping::create(&reservation, offset, &memory, &[]).unwrap_err(), refused);
    }
}

pub fn ranges_out_of_bounds_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let reservation = Reservation::create(backend, 2 * step).unwrap();
    let memory = device.allocate(2 * step).unwrap();
    let far = usize::MAX - (usize::MAX % step);
    for offset in [step, 2 * step, 3 * step, far] {
        let attempt = Attempt::Map { len: 2 * step, offset };
        let refused = Error::BeyondReservation { attempt, reserved: 2 * step };
        assert_eq!(Mapping::create(&reservation, offset, &memory, &[]).unwrap_err(), refused);
    }
    let map = Mapping::create(&reservation, 0, &memory, &[]).unwrap();
    for (offset, len) in [(0, 2 * step + 1), (2 * step, 1), (usize::MAX, 2)] {
        let refused = Error::OutOfRange { offset, len, size: 2 * step };
        assert_eq!(map.span(offset, len).unwrap_err(), refused);
    }
}

pub fn overlapping_mappings_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let reservation = Reservation::create(backend, 6 * step).unwrap();
    let memory = device.allocate(2 * step).unwrap();
    let existing = Mapping::create(&reservation, 2 * step, &memory, &[]).unwrap();
    for offset in [step, 2 * step, 3 * step] {
        let attempt = Attempt::Map { len: 2 * step, offset };
        let refused = Error::Occupied { attempt, taken_offset: 2 * step, taken_len: 2 * step };
        assert_eq!(Mapping::create(&reservation, offset, &memory, &[]).unwrap_err(), refused);
    }
    let adjacent = [0, 4 * step].map(|offset| Mapping::create(&reservation, offset, &memory, &[]).unwrap());
    drop(existing);
    Mapping::create(&reservation, 2 * step, &memory, &[]).unwrap();
    drop(adjacent);
}

pub fn unknown_devices_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let count = backend.devices().len();
    let missing = DeviceId(u32::try_from(count).unwrap());
    let refused = Error::NoSuchDevice { backend: backend.kind(), device: missing, count };
    assert_eq!(backend.device(missing).unwrap_err(), refused);
    let spec = AllocationSpec { device: missing, ..AllocationSpec::new(&device, step) };
    assert_eq!(Allocation::create(backend, &spec).unwrap_err(), refused);

    let reservation = Reservation::create(backend, step).unwrap();
    let memory = device.allocate(step).unwrap();
    let grants = [Grant { device: missing, rights: Rights::Read }];
    assert_eq!(Mapping::create(&reservation, 0, &memory, &grants).unwrap_err(), refused);
    let map = Mapping::create(&reservation, 0, &memory, &[]).unwrap();
    assert_eq!(map.grant(&grants).unwrap_err(), refused);
}

pub fn operands_of_another_backend_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    let foreign = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
    let foreign_map = mapped(&foreign, step.div_ceil(granule(&foreign)));
    let reservation = Reservation::create(backend, step).unwrap();
    let memory = foreign.allocate(granule(&foreign)).unwrap();
    let attempt = Attempt::Map { len: memory.len(), offset: 0 };
    assert_eq!(Mapping::create(&reservation, 0, &memory, &[]).unwrap_err(), Error::WrongBackend { attempt });

    let map = mapped(&device, 1);
    let (ours, theirs) = (map.span(0, 8).unwrap(), foreign_map.span(0, 8).unwrap());
    let wrong = || Error::WrongBackend { attempt: Attempt::Copy { len: 8 } };
    assert_eq!(stream(&device).copy(&ours, &theirs), Err(wrong()));
    assert_eq!(stream(&device).copy(&theirs, &ours), Err(wrong()));
    assert_eq!(stream(&device).read(&theirs, &mut [0; 8]), Err(wrong()));
    let event = Event::create(&foreign, EventKind::Order).unwrap();
    assert_eq!(stream(&device).record(&event), Err(Error::WrongBackend { attempt: Attempt::Record }));
    assert_eq!(
        stream(&device).await_event(&event),
        Err(Error::WrongBackend { attempt: Attempt::AwaitEvent })
    );
    let graph = stream(&foreign).capture(|_| Ok(())).unwrap();
    let wrong = Error::WrongBackend { attempt: Attempt::LaunchGraph };
    assert_eq!(graph.launch(&stream(&device)), Err(wrong));
}

pub fn events_of_another_device_cannot_be_recorded(backend: &Backend) {
    let (device, other) = (first(backend), second(backend));
    if device.id() == other.id() {
        return crate::skipped("this backend has one device");
    }
    let event = Event::create(&other, EventKind::Order).unwrap();
    let (expected, found) = (device.label(), other.label());
    let refused = Error::WrongDevice { attempt: Attempt::Record, expected, found };
    assert_eq!(stream(&device).record(&event), Err(refused));
    // A stream may wait for an event of another device.
    stream(&other).record(&event).unwrap();
    stream(&device).await_event(&event).unwrap();
}

pub fn invalid_copies_are_rejected(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = |offset, len| map.span(offset, len).unwrap();
    let stream = stream(&device);
    assert_eq!(stream.copy(&span(0, 8), &span(8, 9)), Err(Error::LengthsDiffer { from: 9, to: 8 }));
    assert_eq!(stream.write(&span(0, 8), &[0; 7]), Err(Error::LengthsDiffer { from: 7, to: 8 }));
    assert_eq!(stream.read(&span(0, 8), &mut [0; 9]), Err(Error::LengthsDiffer { from: 8, to: 9 }));
    let overlap = || Err(Error::Overlap { attempt: Attempt::Copy { len: 8 } });
    for offset in [0, 1, 7] {
        assert_eq!(stream.copy(&span(offset, 8), &span(0, 8)), overlap());
        assert_eq!(stream.copy(&span(0, 8), &span(offset, 8)), overlap());
    }
    assert_eq!(stream.copy(&span(8, 8), &span(0, 8)), Ok(()));
}

pub fn access_without_rights_is_denied(backend: &Backend) {
    let device = first(backend);
    let map = device.allocate(granule(&device)).unwrap().map(Rights::Read).unwrap();
    let other = mapped(&device, 1);
    let (read_only, writable) = (map.span(0, 8).unwrap(), other.span(0, 8).unwrap());
    let denied =
        |attempt, granted, needed| Error::Denied { attempt, device: device.label(), granted, needed };
    let stream = stream(&device);
    let copy = Attempt::Copy { len: 8 };
    let refused = denied(copy.clone(), Rights::Read, Rights::ReadWrite);
    assert_eq!(stream.copy(&read_only, &writable), Err(refused.clone()));
    assert_eq!(stream.write(&read_only, &[0; 8]), Err(refused));
    let fill = Attempt::Fill { len: 8 };
    assert_eq!(stream.fill(&read_only, 1), Err(denied(fill, Rights::Read, Rights::ReadWrite)));

    let memory = device.allocate(granule(&device)).unwrap();
    let (kind, rights) = (HandleKind::Fd, Rights::None);
    let attempt = Attempt::Export { kind, rights };
    assert_eq!(memory.export(kind, rights).unwrap_err(), Error::NoRights { attempt });
    let hidden = memory.map(Rights::None).unwrap();
    let populate = Attempt::Populate { len: hidden.len() };
    assert_eq!(hidden.populate().unwrap_err(), denied(populate, Rights::None, Rights::Read));
    let refused = denied(copy, Rights::None, Rights::Read);
    assert_eq!(stream.copy(&writable, &hidden.span(0, 8).unwrap()), Err(refused));
    assert_eq!(
        second(backend).stream().unwrap().copy(&writable, &read_only).is_ok(),
        backend.devices().len() == 1
    );
}

pub fn some_operations_cannot_be_captured(backend: &Backend) {
    let device = first(backend);
    let map = mapped(&device, 1);
    let span = map.span(0, 8).unwrap();
    let pinned = PinnedBuffer::create(&device, 8).unwrap().all();
    let event = Event::create(&device, EventKind::Order).unwrap();
    let stream = stream(&device);
    let empty = stream.capture(|_| Ok(())).unwrap();
    let capturing = |attempt| Err::<(), _>(Error::Capturing { attempt });
    let graph = stream.capture(|stream| {
        assert_eq!(stream.record(&event), capturing(Attempt::Record));
        assert_eq!(stream.await_event(&event), capturing(Attempt::AwaitEvent));
        assert_eq!(stream.synchronize(Deadline::NOW), capturing(Attempt::Synchronize));
        assert_eq!(stream.write(&span, &[1; 8]), capturing(Attempt::Copy { len: 8 }));
        assert_eq!(stream.read(&span, &mut [1; 8]), capturing(Attempt::Copy { len: 8 }));
        assert_eq!(stream.write(&pinned, &[1; 8]), capturing(Attempt::Copy { len: 8 }));
        assert_eq!(stream.read(&pinned, &mut [1; 8]), capturing(Attempt::Copy { len: 8 }));
        stream.fill(&pinned, 4)?;
        assert_eq!(empty.launch(stream), capturing(Attempt::LaunchGraph));
        let nested = stream.capture(|_| Ok(())).map(drop);
        assert_eq!(nested, capturing(Attempt::Capture));
        stream.fill(&span, 3)
    });
    graph.unwrap().launch(&stream).unwrap();
    let mut seen = [0; 8];
    stream.read(&span, &mut seen).unwrap();
    assert_eq!(seen, [3; 8], "the fill was captured");
    stream.read(&pinned, &mut seen).unwrap();
    assert_eq!(seen, [4; 8], "a read of host memory waits for enqueued work");
}

pub fn invalid_alignments_and_sizes_are_rejected(backend: &Backend) {
    let step = granule(&first(backend));
    for align in [0, 3, step + 1] {
        let attempt = Attempt::Reserve { len: step };
        let refused = Error::BadAlignment { attempt, align };
        assert_eq!(Reservation::create_aligned(backend, step, align).unwrap_err(), refused);
    }
    let too_much = 1 << 62;
    let refused = Reservation::create(backend, too_much).unwrap_err();
    let expected = Attempt::Reserve { len: too_much };
    assert!(matches!(&refused, Error::Failed { attempt, .. } if *attempt == expected), "{refused:?}");
}

pub fn unsupported_handle_kinds_are_rejected(backend: &Backend) {
    let device = first(backend);
    let step = granule(&device);
    if device.probe(Capability::Fabric).outcome.is_ok() {
        return crate::skipped("this device has fabric handles");
    }
    let refused = Allocation::import(&device, ShareHandle::Fabric([7; 64]), step).unwrap_err();
    let fabric = matches!(refused, Error::Unsupported { capability: Capability::Fabric, .. });
    assert!(fabric || matches!(refused, Error::Failed { .. }), "{refused:?}");
    let fabric = AllocationSpec { handle: HandleKind::Fabric, ..AllocationSpec::new(&device, step) };
    assert!(Allocation::create(backend, &fabric).is_err());
}
