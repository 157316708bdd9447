//! Memory that a client has already: taken in as it is, for good, and only where it is what it is said to be.

use std::os::fd::AsFd;

use wholemem_hal::{Allocation, Backend, Capability, Device, HandleKind, HostConfig, Rights};
use wholemem_os::packet::Address;
use wholemem_os::{Deadline, Memfd, PacketSocket, memfd};
use wholemem_store::{Client, Error, Refusal};
use wholemem_testkit::cuda;

use crate::served::Served;

const LEN: usize = 4 << 20;

fn host() -> Device {
    Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
}

/// Memory whose every byte is `value`, which nobody has mapped.
fn filled(device: &Device, value: u8) -> Allocation {
    let memory = device.allocate(LEN).unwrap();
    let map = memory.map(Rights::ReadWrite).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&map.all(), value).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    memory
}

#[test]
fn host_memory_is_taken_in_without_a_copy_and_can_never_be_written_again() {
    let served = Served::start();
    let (maker, reader) = (served.client(), served.client());
    let memory = filled(&host(), 7);
    let sealed = maker.adopt("given", b"seven", &memory, 100..LEN - 100).unwrap();
    assert_eq!((sealed.version, maker.stat("given").unwrap().len), (1, LEN - 200));
    assert_eq!(maker.status().unwrap().host.used, LEN as u64);
    let object = reader.get("given").unwrap();
    assert_eq!(object.meta(), b"seven");
    assert!(object.to_vec().unwrap().iter().all(|byte| *byte == 7));
    assert!(memory.map(Rights::ReadWrite).is_err(), "its maker does not write it either");
    // It is the same memory, and stays when its maker and the server have gone.
    drop((memory, maker));
    served.kill("server");
    assert_eq!(served.client().get("given").unwrap().to_vec().unwrap()[5], 7);
    reader.delete(sealed.id).unwrap();
    assert!(!reader.is_freed(sealed.id), "somebody holds it");
    drop(object);
    assert_eq!(reader.status().unwrap().host.used, 0);
    assert!(reader.is_freed(sealed.id));
}

#[test]
fn memory_that_somebody_may_still_write_is_not_taken_in() {
    let served = Served::start();
    let client = served.client();
    let memory = filled(&host(), 7);
    let map = memory.map(Rights::ReadWrite).unwrap();
    let refused = client.adopt("given", b"", &memory, 0..LEN).unwrap_err();
    let Error::Refused(Refusal::CannotAdopt { len, reason }) = refused else { panic!("{refused:?}") };
    assert_eq!((len, reason.contains("still mapped")), (LEN as u64, true), "{reason}");
    let status = client.status().unwrap();
    assert_eq!((status.host.used, status.objects), (0, 0));
    drop(map);
    client.adopt("given", b"", &memory, 0..LEN).unwrap();
}

#[test]
fn parts_have_names_of_their_own_and_hold_the_whole() {
    let served = Served::start();
    let client = served.client();
    let memory = filled(&host(), 0);
    memory.map(Rights::ReadWrite).unwrap().bytes().unwrap().write_at(1000, b"hello").unwrap();
    let first = client.adopt("first", b"", &memory, 0..10).unwrap();
    client.publish_range("hello", b"word", first.id, 1000..1005).unwrap();
    client.delete(first.id).unwrap();
    assert_eq!(client.get("hello").unwrap().to_vec().unwrap(), b"hello");
    assert_eq!(client.status().unwrap().host.used, LEN as u64);
    let hello = client.stat("hello").unwrap();
    for range in [0..LEN + 1, LEN..LEN + 1, usize::MAX - 1..usize::MAX] {
        assert_eq!(client.publish_range("x", b"", hello.id, range).unwrap_err().code(), "out-of-range");
    }
    // So it is with what the store has made.
    client.put("small", b"0123456789").unwrap();
    let small = client.stat("small").unwrap();
    client.publish_range("digits", b"", small.id, 3..6).unwrap();
    assert_eq!(client.get("digits").unwrap().to_vec().unwrap(), b"345");
    assert_eq!(client.publish_range("x", b"", small.id, 3..11).unwrap_err().code(), "out-of-range");
}

#[test]
fn what_exceeds_the_quota_is_not_taken_in() {
    let served = Served::start();
    let client = served.client();
    client.put("large", &vec![1; 250 << 20]).unwrap();
    let memory = host().allocate(16 << 20).unwrap();
    assert_eq!(client.adopt("more", b"", &memory, 0..1).unwrap_err().code(), "over-quota");
    client.delete(client.stat("large").unwrap().id).unwrap();
    client.adopt("more", b"", &memory, 0..1).unwrap();
}

fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push((number & 0x7f).to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

const SEALED: u8 = 2;
const REFUSED: u8 = 7;

/// Says that a descriptor is so much memory at a place, as docs/PROTOCOL.md has it, and what is answered: the number of the
/// answer, or nothing where the connection was ended.
fn offer_at(served: &Served, place: u64, fds: &[impl AsFd], len: u64) -> Option<u8> {
    let wire = PacketSocket::connect(&Address::Path(served.socket())).unwrap();
    let mut packet = vec![0; 65_536];
    wire.send(&[2, 1, 0, 0, 4], &[], Deadline::NEVER).unwrap();
    wire.recv_with_fds(&mut packet, 2, Deadline::NEVER).unwrap();
    // Name `x`, no description, the place, its length, and all of it.
    let operands = [varint(1), b"x".to_vec(), varint(0), varint(place), varint(len), varint(0), varint(len)];
    let request: Vec<u8> = [2, 2, 0, 13].into_iter().chain(operands.concat()).collect();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    wire.send(&request, &fds, Deadline::NEVER).unwrap();
    let (len, _) = wire.recv_with_fds(&mut packet, 2, Deadline::NEVER).ok()?;
    assert!(len > 3 && packet[1] == 2, "an answer to the request");
    Some(packet[2])
}

/// The same of the host's memory.
fn offer(served: &Served, fds: &[impl AsFd], len: u64) -> Option<u8> {
    offer_at(served, 0, fds, len)
}

#[test]
fn what_is_no_memory_is_told_from_it() {
    let served = Served::start();
    let client = served.client();
    let memory = || Memfd::create("given", LEN).unwrap().into_fd();
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN as u64).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, LEN as u64).unwrap();
    assert_eq!(offer(&served, &[memory()], LEN as u64), Some(SEALED));
    assert_eq!(offer(&served, &[memory()], 2 * LEN as u64), Some(REFUSED));
    assert_eq!(offer(&served, &[memory()], LEN as u64 / 2), Some(REFUSED));
    assert_eq!(offer(&served, &[file], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&served, &[null], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&served, &[unsealed], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&served, &[] as &[std::fs::File], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&served, &[memory(), memory()], LEN as u64), None);
    // One read-only: it cannot be sealed, and may be written by whoever has it otherwise.
    let written = Memfd::create("given", LEN).unwrap();
    let only = memfd::read_only_fd(written.as_fd()).unwrap();
    assert_eq!(offer(&served, &[only], LEN as u64), Some(REFUSED));
    assert_eq!(client.status().unwrap().host.used, LEN as u64);
}

#[test]
fn a_descriptor_that_nobody_asked_for_ends_the_connection() {
    let served = Served::start();
    let wire = PacketSocket::connect(&Address::Path(served.socket())).unwrap();
    let mut packet = vec![0; 65_536];
    wire.send(&[2, 1, 0, 0, 4], &[], Deadline::NEVER).unwrap();
    wire.recv_with_fds(&mut packet, 2, Deadline::NEVER).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    wire.send(&[2, 2, 0, 10], &[null.as_fd()], Deadline::NEVER).unwrap();
    assert!(wire.recv(&mut packet, Deadline::NEVER).is_err());
    served.client().status().unwrap();
}

/// On a GPU, and over the driver without one.
pub(crate) mod suite {
    use super::*;

    fn connect(served: &Served, backend: &Backend) -> Client {
        Client::connect_with(served.socket(), Some(backend.clone())).unwrap()
    }

    fn first_and_last(client: &Client, device: &Device, name: &str) -> (u8, u8) {
        let object = client.get(name).unwrap();
        let (stream, span) = (device.stream().unwrap(), object.span().unwrap());
        let (mut first, mut last) = ([0], [0]);
        stream.read(&span.part(0, 1).unwrap(), &mut first).unwrap();
        stream.read(&span.part(span.len() - 1, 1).unwrap(), &mut last).unwrap();
        (first[0], last[0])
    }

    #[test]
    fn memory_of_a_device_is_taken_in_while_its_maker_has_it_mapped() {
        let Some(backend) = cuda::backend() else { return };
        let served = Served::start_with("cuda");
        let device = backend.device(0).unwrap();
        let (maker, reader) = (connect(&served, &backend), connect(&served, &backend));
        let memory = filled(&device, 5);
        let map = memory.map(Rights::ReadWrite).unwrap();
        // As a framework's memory is found again by its address.
        let segments = Allocation::adopt(&device, map.address() + 4096, 4096).unwrap();
        assert_eq!((segments.len(), segments[0].address), (1, map.address()));
        let first = maker.adopt("first", b"", &segments[0].allocation, 0..1000).unwrap();
        maker.publish_range("second", b"", first.id, LEN - 10..LEN).unwrap();
        assert_eq!(first_and_last(&reader, &device, "first"), (5, 5));
        let stream = device.stream().unwrap();
        stream.fill(&map.span(LEN - 1, 1).unwrap(), 6).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        assert_eq!(first_and_last(&reader, &device, "second"), (5, 6), "it is the same memory");
        drop((memory, map, segments, stream, maker));
        served.kill("server");
        assert_eq!(first_and_last(&connect(&served, &backend), &device, "second"), (5, 6));
        assert_eq!(reader.status().unwrap().device.used, LEN as u64);
        for name in ["first", "second"] {
            reader.delete(reader.stat(name).unwrap().id).unwrap();
        }
        assert_eq!(reader.status().unwrap().device.used, 0);
    }

    #[test]
    fn memory_of_a_device_is_as_long_as_it_is_said_to_be() {
        let Some(backend) = cuda::backend() else { return };
        let served = Served::start_with("cuda");
        let device = backend.device(0).unwrap();
        let client = connect(&served, &backend);
        let memory = filled(&device, 5);
        let handle = || memory.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
        // What a liar says of it; the driver does not tell how long it is.
        for lie in [LEN / 2, 2 * LEN] {
            let fd = handle().into_fd().unwrap();
            assert_eq!(offer_at(&served, 1, &[fd], lie as u64), Some(REFUSED));
        }
        if let Ok(other) = backend.device(1) {
            let fd = handle().into_fd().unwrap();
            assert_eq!(offer_at(&served, u64::from(other.id().0) + 1, &[fd], LEN as u64), Some(REFUSED));
        }
        assert_eq!(client.status().unwrap().device.used, 0);
        let fd = handle().into_fd().unwrap();
        assert_eq!(offer_at(&served, 1, &[fd], LEN as u64), Some(SEALED), "and what is true of it");
        client.delete(client.stat("x").unwrap().id).unwrap();
        // Nor is memory handed on that was handed to this process: whoever made it does that.
        let imported = Allocation::import(&device, handle(), LEN).unwrap();
        let refused = client.adopt("second hand", b"", &imported, 0..1).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Memory(wholemem_hal::Error::Unsupported { capability: Capability::ShareFd, .. })
            ),
            "{refused:?}"
        );
        assert_eq!(client.status().unwrap().device.used, 0);
        client.adopt("truth", b"", &memory, 0..1).unwrap();
    }
}
