//! Tests of adopting a client's memory as an object: without a copy, immutable from then on, and only if the memory matches the
//! request.

use std::os::fd::AsFd;

use wholemem_hal::{Allocation, Backend, Capability, Device, HandleKind, HostConfig, Rights};
use wholemem_os::packet::Address;
use wholemem_os::{Deadline, Memfd, PacketSocket, memfd};
use wholemem_store::{Client, Error, Refusal};
use wholemem_testkit::cuda;

use crate::test_store::TestStore;

const LEN: usize = 4 << 20;

fn host() -> Device {
    Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
}

/// Allocates memory that is filled with `value` and not mapped by any process.
fn filled(device: &Device, value: u8) -> Allocation {
    let memory = device.allocate(LEN).unwrap();
    let map = memory.map(Rights::ReadWrite).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(&map.all(), value).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    memory
}

#[test]
fn adopted_host_memory_is_not_copied_and_becomes_immutable() {
    let store = TestStore::start();
    let (creator, reader) = (store.client(), store.client());
    let memory = filled(&host(), 7);
    let sealed = creator.adopt("given", b"seven", &memory, 100..LEN - 100).unwrap();
    assert_eq!((sealed.version, creator.stat("given").unwrap().len), (1, LEN - 200));
    assert_eq!(creator.status().unwrap().host.used, LEN as u64);
    let object = reader.get("given").unwrap();
    assert_eq!(object.meta(), b"seven");
    assert!(object.to_vec().unwrap().iter().all(|byte| *byte == 7));
    assert!(
        memory.map(Rights::ReadWrite).is_err(),
        "the client that created the memory cannot write it either"
    );
    // The object uses the adopted memory itself, and survives the client that created it and the server.
    drop((memory, creator));
    store.kill("server");
    assert_eq!(store.client().get("given").unwrap().to_vec().unwrap()[5], 7);
    reader.delete(sealed.id).unwrap();
    assert!(!reader.is_freed(sealed.id), "the object is still held");
    drop(object);
    assert_eq!(reader.status().unwrap().host.used, 0);
    assert!(reader.is_freed(sealed.id));
}

#[test]
fn memory_that_is_still_writable_is_not_adopted() {
    let store = TestStore::start();
    let client = store.client();
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
fn named_ranges_of_adopted_memory_retain_all_of_it() {
    let store = TestStore::start();
    let client = store.client();
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
    // Ranges of memory that the store has allocated can be published too.
    client.put("small", b"0123456789").unwrap();
    let small = client.stat("small").unwrap();
    client.publish_range("digits", b"", small.id, 3..6).unwrap();
    assert_eq!(client.get("digits").unwrap().to_vec().unwrap(), b"345");
    assert_eq!(client.publish_range("x", b"", small.id, 3..11).unwrap_err().code(), "out-of-range");
}

#[test]
fn memory_that_exceeds_the_quota_is_not_adopted() {
    let store = TestStore::start();
    let client = store.client();
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

/// Sends a request to adopt a descriptor as `len` bytes at a place, encoded as docs/PROTOCOL.md describes. Returns the number of
/// the answer's kind; `None` if the server ended the connection.
fn offer_at(store: &TestStore, place: u64, fds: &[impl AsFd], len: u64) -> Option<u8> {
    let socket = PacketSocket::connect(&Address::Path(store.socket())).unwrap();
    let mut packet = vec![0; 65_536];
    socket.send(&[2, 1, 0, 0, 4], &[], Deadline::NEVER).unwrap();
    socket.recv_with_fds(&mut packet, 2, Deadline::NEVER).unwrap();
    // The operands are the name `x`, no metadata, the place, the length, and the range of the whole memory.
    let operands = [varint(1), b"x".to_vec(), varint(0), varint(place), varint(len), varint(0), varint(len)];
    let request: Vec<u8> = [2, 2, 0, 13].into_iter().chain(operands.concat()).collect();
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    socket.send(&request, &fds, Deadline::NEVER).unwrap();
    let (len, _) = socket.recv_with_fds(&mut packet, 2, Deadline::NEVER).ok()?;
    assert!(len > 3 && packet[1] == 2, "the packet answers the request");
    Some(packet[2])
}

/// Sends a request to adopt host memory, as `offer_at` does.
fn offer(store: &TestStore, fds: &[impl AsFd], len: u64) -> Option<u8> {
    offer_at(store, 0, fds, len)
}

#[test]
fn descriptors_that_are_not_valid_memory_are_refused() {
    let store = TestStore::start();
    let client = store.client();
    let memory = || Memfd::create("given", LEN).unwrap().into_fd();
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN as u64).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let unsealed = rustix::fs::memfd_create("unsealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, LEN as u64).unwrap();
    assert_eq!(offer(&store, &[memory()], LEN as u64), Some(SEALED));
    assert_eq!(offer(&store, &[memory()], 2 * LEN as u64), Some(REFUSED));
    assert_eq!(offer(&store, &[memory()], LEN as u64 / 2), Some(REFUSED));
    assert_eq!(offer(&store, &[file], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&store, &[null], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&store, &[unsealed], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&store, &[] as &[std::fs::File], LEN as u64), Some(REFUSED));
    assert_eq!(offer(&store, &[memory(), memory()], LEN as u64), None);
    // A read-only descriptor is refused: its memory cannot be sealed, and another process may still write it.
    let written = Memfd::create("given", LEN).unwrap();
    let only = memfd::read_only_fd(written.as_fd()).unwrap();
    assert_eq!(offer(&store, &[only], LEN as u64), Some(REFUSED));
    assert_eq!(client.status().unwrap().host.used, LEN as u64);
}

#[test]
fn an_unexpected_descriptor_ends_the_connection() {
    let store = TestStore::start();
    let socket = PacketSocket::connect(&Address::Path(store.socket())).unwrap();
    let mut packet = vec![0; 65_536];
    socket.send(&[2, 1, 0, 0, 4], &[], Deadline::NEVER).unwrap();
    socket.recv_with_fds(&mut packet, 2, Deadline::NEVER).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    socket.send(&[2, 2, 0, 10], &[null.as_fd()], Deadline::NEVER).unwrap();
    assert!(socket.recv(&mut packet, Deadline::NEVER).is_err());
    store.client().status().unwrap();
}

/// Tests that run on a GPU, and with the fake driver (a CUDA driver library for tests without a GPU).
pub(crate) mod suite {
    use super::*;

    fn connect(store: &TestStore, backend: &Backend) -> Client {
        Client::connect_with(store.socket(), Some(backend.clone())).unwrap()
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
    fn device_memory_is_adopted_while_its_creator_has_it_mapped() {
        let Some(backend) = cuda::backend() else { return };
        let store = TestStore::start_with("cuda");
        let device = backend.device(0).unwrap();
        let (creator, reader) = (connect(&store, &backend), connect(&store, &backend));
        let memory = filled(&device, 5);
        let map = memory.map(Rights::ReadWrite).unwrap();
        // Finds the allocation of the memory by an address in it, as frameworks do.
        let segments = Allocation::adopt(&device, map.address() + 4096, 4096).unwrap();
        assert_eq!((segments.len(), segments[0].address), (1, map.address()));
        let first = creator.adopt("first", b"", &segments[0].allocation, 0..1000).unwrap();
        creator.publish_range("second", b"", first.id, LEN - 10..LEN).unwrap();
        assert_eq!(first_and_last(&reader, &device, "first"), (5, 5));
        let stream = device.stream().unwrap();
        stream.fill(&map.span(LEN - 1, 1).unwrap(), 6).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        assert_eq!(first_and_last(&reader, &device, "second"), (5, 6), "the object is the same memory");
        drop((memory, map, segments, stream, creator));
        store.kill("server");
        assert_eq!(first_and_last(&connect(&store, &backend), &device, "second"), (5, 6));
        assert_eq!(reader.status().unwrap().device.used, LEN as u64);
        for name in ["first", "second"] {
            reader.delete(reader.stat(name).unwrap().id).unwrap();
        }
        assert_eq!(reader.status().unwrap().device.used, 0);
    }

    #[test]
    fn device_memory_with_a_wrong_length_is_refused() {
        let Some(backend) = cuda::backend() else { return };
        let store = TestStore::start_with("cuda");
        let device = backend.device(0).unwrap();
        let client = connect(&store, &backend);
        let memory = filled(&device, 5);
        let handle = || memory.export(HandleKind::Fd, Rights::ReadWrite).unwrap();
        // The server refuses wrong lengths, although the driver does not report the length of memory.
        for lie in [LEN / 2, 2 * LEN] {
            let fd = handle().into_fd().unwrap();
            assert_eq!(offer_at(&store, 1, &[fd], lie as u64), Some(REFUSED));
        }
        if let Ok(other) = backend.device(1) {
            let fd = handle().into_fd().unwrap();
            assert_eq!(offer_at(&store, u64::from(other.id().0) + 1, &[fd], LEN as u64), Some(REFUSED));
        }
        assert_eq!(client.status().unwrap().device.used, 0);
        let fd = handle().into_fd().unwrap();
        assert_eq!(offer_at(&store, 1, &[fd], LEN as u64), Some(SEALED), "the true length is accepted");
        client.delete(client.stat("x").unwrap().id).unwrap();
        // Imported memory cannot be exported again, so only its creator can share it.
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
