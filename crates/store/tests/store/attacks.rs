//! Tests in which another user attacks a store with every descriptor that the store sends, also as root of a user namespace: only
//! reading succeeds.

use std::io::{Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fchmod, ftruncate};
use rustix::io::Errno;
use wholemem_hal::{Backend, HostConfig};
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Memfd, PacketSocket, SharedMap};
use wholemem_store::{Client, Error, ObjectId, Refusal};
use wholemem_testkit::{Rank, Ranks, skipped, test_name};

use crate::raw_protocol::{connect, hello, request, request_kind, send_now};
use crate::test_store::TestStore;

/// The id of a user that owns no files.
pub(crate) const UNPRIVILEGED_ID: u32 = 65_534;

const NAMES: [(&str, usize); 2] = [("small", 1000), ("large", 2 << 20)];

/// Returns a connection and all descriptors that a client receives: the index, its pin page, and the memory of the given objects.
fn descriptors(socket: &std::path::Path, objects: &[ObjectId]) -> (PacketSocket, Vec<OwnedFd>) {
    let connection = connect(socket).unwrap();
    let mut packet = vec![0; 65_536];
    let mut all = Vec::new();
    let fetches =
        objects.iter().zip(2..).map(|(object, id)| request(id, request_kind::FETCH, &[object.as_u64()]));
    for request in [hello()].into_iter().chain(fetches) {
        connection.send(&request, &[], Deadline::NEVER).unwrap();
        let (_, fds) = connection.recv_with_fds(&mut packet, 2, Deadline::NEVER).unwrap();
        assert!(!fds.is_empty(), "the answer has descriptors");
        all.extend(fds);
    }
    (connection, all)
}

/// Sends valid and mutated requests in any order, with descriptors, without reading the answers, and with incomplete messages.
fn send_random_requests(socket: &std::path::Path, random: &mut u64, packets: usize) {
    let mut below = |limit: usize| {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(*random >> 33).unwrap() % limit
    };
    let corpus: Vec<Vec<u8>> = wholemem_store::fuzz::corpus().into_iter().map(|(_, bytes)| bytes).collect();
    let null = std::fs::File::open("/dev/null").unwrap();
    let mut connections: Vec<PacketSocket> = Vec::new();
    let mut buffer = vec![0; 65_536];
    for _ in 0..packets {
        if connections.len() < 4 {
            // Connecting fails if other clients have used up the server's limits.
            let Ok(connection) = connect(socket) else { continue };
            let _ = send_now(&connection, &hello());
            connections.push(connection);
        }
        let at = below(connections.len());
        // Sends the packets of a corpus file, each prefixed by its length; one byte is changed in some of them.
        let mut rest = &corpus[below(corpus.len())][..];
        while let Some(([low, high], after)) = rest.split_first_chunk::<2>() {
            let len = usize::from(u16::from_le_bytes([*low, *high])).min(after.len());
            let (packet, after) = after.split_at(len);
            rest = after;
            let mut packet = packet.to_vec();
            if below(2) == 0 && !packet.is_empty() {
                let place = below(packet.len());
                packet[place] = below(256).to_le_bytes()[0];
            }
            let fds = if below(50) == 0 { vec![null.as_fd()] } else { vec![] };
            let _ = connections[at].send(&packet, &fds, Deadline::NOW);
        }
        match below(8) {
            0 => drop(connections.remove(at)),
            1..=3 => while connections[at].recv_with_fds(&mut buffer, 2, Deadline::NOW).is_ok() {},
            _ => {}
        }
    }
}

#[test]
fn a_server_survives_arbitrary_requests_of_many_clients() {
    let store = TestStore::start();
    let client = store.client();
    client.put("kept", &vec![0x11; 2 << 20]).unwrap();
    // The attacking clients run as the server's user and may delete the object, so the test holds it.
    let held = client.get("kept").unwrap();
    let server = store.process("server");
    let seed = wholemem_testkit::seed();
    let packets = if wholemem_testkit::exhaustive() { 50_000 } else { 2000 };
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let socket = store.socket();
            scope.spawn(move || send_random_requests(&socket, &mut (seed ^ thread), packets));
        }
        for round in 0..packets / 10 {
            client.put(&format!("own {}", round % 7), &vec![7; 1000 * (round % 9)]).unwrap();
        }
    });
    assert_eq!(held.to_vec().unwrap(), vec![0x11; 2 << 20]);
    let status = client.status().unwrap();
    assert!(status.host.used <= status.host.quota, "{status:?}");
    assert_eq!(store.process("server"), server, "the server was not replaced");
}

fn reopen(fd: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::open(format!("/proc/self/fd/{}", fd.as_raw_fd()), flags, Mode::empty())
}

fn attack(fd: &OwnedFd) {
    assert_eq!(reopen(fd, OFlags::RDWR).map(drop), Err(Errno::ACCESS), "reopening for writing");
    assert_eq!(fchmod(fd, Mode::from_raw_mode(0o777)), Err(Errno::PERM), "fchmod");
    assert_eq!(rustix::io::pwrite(fd, b"x", 0), Err(Errno::BADF), "pwrite");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(fd, punch, 0, 4096), Err(Errno::BADF), "punching a hole");
    assert_eq!(ftruncate(fd, 0), Err(Errno::INVAL), "ftruncate");
    assert_eq!(rustix::fs::fcntl_add_seals(fd, rustix::fs::SealFlags::SEAL), Err(Errno::PERM), "sealing");
    let memory = Memfd::import(fd.try_clone().unwrap(), wholemem_os::memfd::len_of(fd.as_fd()).unwrap());
    let map = SharedMap::create(&memory.unwrap(), Protection::Read).unwrap();
    assert!(!map.could_be_written(), "mprotect");
}

/// Writes to this process's own memory through `/proc/self/mem`, which ignores page protection.
fn force(address: u64) -> bool {
    let Ok(mut memory) = std::fs::OpenOptions::new().write(true).open("/proc/self/mem") else { return false };
    memory.seek(SeekFrom::Start(address)).is_ok() && memory.write_all(b"x").is_ok()
}

fn intruder(rank: &Rank) {
    // The store sees this process's user outside of the user namespace; the permission checks of the kernel may see the user
    // inside.
    let inside = std::fs::read_to_string("/proc/self/uid_map").unwrap();
    let is_namespace_root = inside.split_whitespace().nth(1) == Some("65534");
    assert_eq!(rustix::process::geteuid().as_raw(), if is_namespace_root { 0 } else { UNPRIVILEGED_ID });
    let parameter = rank.parameter();
    let socket = std::path::Path::new(&parameter);
    let client = Client::connect(socket).unwrap();
    let mut ids = Vec::new();
    for (name, len) in NAMES {
        let object = client.get(name).unwrap();
        assert_eq!(object.to_vec().unwrap(), vec![0x11; len], "reading is allowed");
        assert!(!force(object.span().unwrap().address()), "a store through /proc/self/mem");
        let refused = client.delete(object.id()).unwrap_err();
        assert!(matches!(refused, Error::Refused(Refusal::NotYours { .. })), "{refused}");
        for refused in [client.put(name, &vec![0; len]), client.publish(name, object.id())] {
            assert_eq!(
                refused.unwrap_err().code(),
                "name-taken",
                "replacing an object requires the right to delete it"
            );
        }
        ids.push(object.id());
    }
    let memory = Backend::host(HostConfig::default()).unwrap().device(0).unwrap().allocate(1 << 20).unwrap();
    assert_eq!(client.adopt("given", b"", &memory, 0..1).unwrap_err().code(), "not-trusted");
    let (connection, fds) = descriptors(socket, &ids);
    let [index, pins, memory @ ..] = &fds[..] else { panic!("expected four descriptors") };
    for fd in [index].into_iter().chain(memory) {
        attack(fd);
    }
    // The pin page belongs to the client, but it cannot be truncated, and invalid pins only delay the release of objects.
    assert_eq!(ftruncate(pins, 0), Err(Errno::PERM));
    let lies: Vec<u8> = [u64::MAX.to_le_bytes()]
        .into_iter()
        .chain(ids.iter().cycle().take(8000).map(|id| id.as_u64().to_le_bytes()))
        .flatten()
        .collect();
    assert_eq!(rustix::io::pwrite(pins, &lies, 0), Ok(lies.len()));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // Sends invalid messages with unexpected descriptors to the server.
    for packet in [vec![], vec![9; 60_000], request(5, 99, &[]), request(6, request_kind::FETCH, &[u64::MAX])]
    {
        let other = connect(socket).unwrap();
        let _ = other.send(&packet, &[index.as_fd()], Deadline::NOW);
        let _ = send_now(&other, &packet);
    }
    rank.send(0, b"held back", &[]);
    assert_eq!(rank.recv(0).0, b"release pins");
    assert_eq!(fallocate(pins, punch, 0, 65_536), Ok(()));
    drop(connection);
}

#[test]
fn another_user_can_read_and_nothing_else() {
    if !Ranks::can_change_user() {
        return skipped("only root can start a process as another user");
    }
    run_attack(test_name!(), |ranks| ranks.as_user(1, UNPRIVILEGED_ID));
}

#[test]
fn root_of_a_user_namespace_can_read_and_nothing_else() {
    if !Ranks::can_change_user() {
        return skipped("only root can start a process as another user");
    }
    if !Ranks::can_be_user_namespace_root(UNPRIVILEGED_ID) {
        return skipped("another user cannot have a user namespace here");
    }
    run_attack(test_name!(), |ranks| ranks.as_user_namespace_root(1, UNPRIVILEGED_ID));
}

fn run_attack(test: &str, intrude: impl Fn(Ranks) -> Ranks) {
    if Ranks::is_rank() {
        return Ranks::of(2).run(test, body);
    }
    let store = TestStore::start();
    store.open_to_all();
    let client = store.client();
    for (name, len) in NAMES {
        client.put(name, &vec![0x11; len]).unwrap();
    }
    let parameter = store.socket().to_str().unwrap().to_owned();
    intrude(Ranks::of(2)).parameter(parameter).run(test, body);
    assert_eq!(client.status().unwrap().clients, 1, "the intruder has been removed");
    assert_eq!(client.status().unwrap().objects, 0, "the intruder holds no object");
}

fn body(rank: &Rank) {
    if rank.id() == 1 {
        return intruder(rank);
    }
    let parameter = rank.parameter();
    let client = Client::connect(&parameter).unwrap();
    assert_eq!(rank.recv(1).0, b"held back");
    for (name, len) in NAMES {
        let object = client.get(name).unwrap();
        assert_eq!(object.to_vec().unwrap(), vec![0x11; len], "no byte has changed");
        client.delete(object.id()).unwrap();
    }
    assert_eq!(client.status().unwrap().retired, 2, "retained by the intruder's pins");
    rank.send(1, b"release pins", &[]);
    // Waits until the server has freed the objects: it scans the pins of its clients every second.
    while client.status().unwrap().retired > 0 {
        std::thread::yield_now();
    }
}
