//! Tests of attacks by unauthenticated peers: the real ranks join nevertheless, and no connection of the attackers is
//! left.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::packet::{Address, PacketListener};
use wholemem_os::{Deadline, PacketSocket};
use wholemem_testkit::{Ranks, test_name};

const TIMEOUT: Duration = Duration::from_secs(60);

fn join(id: &UniqueId, rank: u32, size: u32) -> Result<Bootstrap, Error> {
    Bootstrap::create(id, Rank(rank), size, Deadline::after(TIMEOUT))
}

/// Waits for the first rank whose socket appears in a directory, and returns the path of the socket.
fn socket_path(folder: &Path) -> PathBuf {
    loop {
        let first = std::fs::read_dir(folder).ok().and_then(|mut entries| entries.next());
        if let Some(Ok(entry)) = first {
            return entry.path();
        }
        std::thread::yield_now();
    }
}

/// Encodes the first handshake message, a claim, as the documentation of the handshake defines it.
fn claim(rank: u32, size: u32, nonce: u8) -> Vec<u8> {
    [&b"wmh1\x01"[..], &rank.to_le_bytes(), &size.to_le_bytes(), &[nonce; 16]].concat()
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

fn try_connect(address: &Address) -> Option<PacketSocket> {
    PacketSocket::connect(address).ok()
}

/// Performs one random attack on the listening socket of a rank, without knowing the secret.
fn attack(address: &Address, random: &mut u64, half_open: &mut Vec<PacketSocket>) {
    let mut next = || {
        *random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *random >> 33
    };
    let Some(socket) = try_connect(address) else { return };
    let zero = std::fs::File::open("/dev/zero").expect("a descriptor");
    let fds = [zero.as_fd(); 3];
    match next() % 6 {
        // Sends random bytes: more or fewer than a handshake message has.
        0 => {
            let len = usize::try_from(next() % 400).expect("small") + 1;
            let bytes: Vec<u8> = (0..len).map(|_| next().to_le_bytes()[0]).collect();
            let _ = socket.send(&bytes, &[], Deadline::NOW);
        }
        // Sends a claim, the first handshake message, together with file descriptors.
        1 => drop(socket.send(&claim(1, 3, 7), &fds, Deadline::NOW)),
        // Sends a claim and a wrong proof of the secret, with or without file descriptors.
        2 => {
            let _ = socket.send(&claim(1, 3, 7), &[], Deadline::NOW);
            let response = [&b"wmh1\x03"[..], &[0x55; 32]].concat();
            let _ = socket.send(&response, &fds[..usize::from(next() % 2 == 1)], Deadline::NOW);
            // The connection is kept open: if the attacker were admitted, it would take the place of the real rank.
            half_open.push(socket);
        }
        // Sends the proof in the parent's challenge back as the response: a proof that is valid for the parent, but not
        // for a child.
        3 => {
            let _ = socket.send(&claim(2, 3, 9), &[], Deadline::NOW);
            let mut challenge = [0; 128];
            if let Ok(len) = socket.recv(&mut challenge, Deadline::after(Duration::from_millis(20)))
                && len == 61
            {
                let response = [&b"wmh1\x03"[..], &challenge[29..61]].concat();
                let _ = socket.send(&response, &[], Deadline::NOW);
            }
        }
        // Sends more bytes than a peer may send before it is authenticated.
        4 => {
            for _ in 0..20 {
                let _ = socket.send(&claim(1, 3, 1), &[], Deadline::NOW);
            }
        }
        // Sends a claim, the first handshake message, and never responds to the challenge.
        _ => {
            let _ = socket.send(&claim(1, 3, 2), &[], Deadline::NOW);
            half_open.push(socket);
        }
    }
}

#[test]
fn a_thousand_half_open_connections_and_attacks_keep_no_rank_out() {
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let id = UniqueId::create_in(&folder.path().join("s")).expect("an id");
    Ranks::of(4).parameter(format!("{} {id}", folder.path().join("s").display())).run(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (folder, id) = parameter.split_once(' ').expect("a directory and an id");
        let id: UniqueId = id.parse().expect("an id");
        match rank.id() {
            0 => {
                // A first group raises the limit on open files and starts threads before the descriptors are counted.
                drop(Bootstrap::local(2).expect("a group"));
                let before = open_fds();
                let (most, done) = (AtomicUsize::new(0), AtomicBool::new(false));
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        while !done.load(Ordering::Relaxed) {
                            most.fetch_max(open_fds(), Ordering::Relaxed);
                        }
                    });
                    let comm = join(&id, 0, 3);
                    done.store(true, Ordering::Relaxed);
                    comm.expect("a group").barrier().expect("all ranks take part");
                });
                let most = most.into_inner();
                eprintln!("{before} descriptors before, at most {most} during the attack");
                assert!(most <= before + 64 + 24, "{before} descriptors before, {most} during the attack");
                assert!(open_fds() <= before, "no descriptor of the attackers is left");
            }
            3 => {
                let address = Address::Path(socket_path(Path::new(folder)));
                let mut half_open = Vec::new();
                let mut connected = 0;
                while connected < 1000 {
                    if let Some(socket) = try_connect(&address) {
                        connected += 1;
                        half_open.push(socket);
                    }
                }
                let mut random = wholemem_testkit::seed();
                for _ in 0..500 {
                    attack(&address, &mut random, &mut half_open);
                }
                rank.send(1, b"attacked", &[]);
                rank.send(2, b"attacked", &[]);
                // The attacks continue until rank 0 closes its listening socket, after the real ranks have joined.
                while Path::new(folder).join(socket_name(&address)).exists() {
                    attack(&address, &mut random, &mut half_open);
                    half_open.truncate(2000);
                }
            }
            other => {
                assert_eq!(rank.recv(3).0, b"attacked");
                let comm = join(&id, u32::try_from(other).expect("small"), 3).expect("a group");
                comm.barrier().expect("all ranks take part");
            }
        }
    });
}

fn socket_name(address: &Address) -> PathBuf {
    let Address::Path(path) = address else { unreachable!("a file") };
    path.file_name().expect("a name").into()
}

/// Forwards packets between a child and its parent in both directions, and records every byte.
fn relay(child: &PacketSocket, parent: &PacketSocket, recorded: &Mutex<Vec<u8>>, done: &AtomicBool) {
    let mut buffer = vec![0; 65_536];
    while !done.load(Ordering::Relaxed) {
        for (from, to) in [(child, parent), (parent, child)] {
            let deadline = Deadline::after(Duration::from_millis(1));
            if let Ok((len, fds)) = from.recv_with_fds(&mut buffer, 64, deadline) {
                recorded.lock().expect("no thread panicked").extend(&buffer[..len]);
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                let _ = to.send(&buffer[..len], &fds, Deadline::after(TIMEOUT));
            }
        }
    }
}

#[test]
fn the_secret_is_never_sent_and_a_replayed_handshake_is_refused() {
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let folder = folder.path().join("s");
    let id = UniqueId::create_in(&folder).expect("an id");
    let text = id.to_string();
    let secret = text.split('-').nth(2).expect("a secret");
    let raw: Vec<u8> =
        (0..16).map(|n| u8::from_str_radix(&secret[2 * n..2 * n + 2], 16).expect("hexadecimal")).collect();
    let recorded = Arc::new(Mutex::new(Vec::new()));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| join(&id, 0, 2));
        // The test acts as a man in the middle: the real socket is moved, and a relay listens at its path.
        let real = socket_path(&folder);
        let moved = folder.join("moved");
        std::fs::rename(&real, &moved).expect("rename");
        let listener = PacketListener::bind(&Address::Path(real)).expect("a listener");
        let child = scope.spawn(|| join(&id, 1, 2));
        let accepted = loop {
            if let Ok(Some(socket)) = listener.accept() {
                break socket;
            }
            std::thread::yield_now();
        };
        let onward = PacketSocket::connect(&Address::Path(moved.clone())).expect("the real socket");
        let (recorded, done) = (&recorded, &done);
        scope.spawn(move || relay(&accepted, &onward, recorded, done));
        let root = root.join().expect("no panic").expect("a group");
        let child = child.join().expect("no panic").expect("a group");
        std::thread::scope(|scope| {
            for comm in [&root, &child] {
                scope.spawn(|| {
                    comm.all_gather(b"a recorded message").expect("all_gather");
                    let part = comm.split(Some(1), 0).expect("split");
                    drop(part);
                });
            }
        });
        done.store(true, Ordering::Relaxed);
    });
    std::fs::remove_file(folder.join("moved")).expect("the moved socket");
    let recorded = recorded.lock().expect("no thread panicked");
    let contains = |needle: &[u8]| recorded.windows(needle.len()).any(|window| window == needle);
    assert!(contains(b"a recorded message"), "messages are recorded");
    assert!(contains(b"wmh1\x03"), "the handshake is recorded");
    assert!(!contains(&raw), "the secret was sent");
    assert!(!contains(secret.as_bytes()), "the secret was sent as text");
    // An attacker replays the recorded claim and response of a handshake to a new socket of the same group, and is
    // refused, because the challenge differs.
    let packet = |len: usize, prefix: &[u8]| recorded.windows(len).find(|window| window.starts_with(prefix));
    let response = packet(37, b"wmh1\x03").expect("recorded").to_vec();
    let claimed = packet(29, b"wmh1\x01").expect("recorded").to_vec();
    std::thread::scope(|scope| {
        let root =
            scope.spawn(|| Bootstrap::create(&id, Rank(0), 2, Deadline::after(Duration::from_secs(2))));
        let address = Address::Path(socket_path(&folder));
        let attacker = loop {
            if let Some(socket) = try_connect(&address) {
                break socket;
            }
        };
        attacker.send(&claimed, &[], Deadline::NOW).expect("a claim");
        attacker.send(&response, &[], Deadline::NOW).expect("a response");
        let mut buffer = [0; 128];
        let first = attacker.recv(&mut buffer, Deadline::after(TIMEOUT)).expect("a challenge");
        assert_eq!(&buffer[..5], b"wmh1\x02", "{first} bytes");
        let end = attacker.recv(&mut buffer, Deadline::after(TIMEOUT));
        assert_eq!(end, Err(wholemem_os::Error::Closed), "the replay is not admitted");
        let error = root.join().expect("no panic").expect_err("no rank joins");
        assert!(matches!(error, Error::Timeout { missing, .. } if missing == [Rank(1)]));
    });
}

#[test]
fn a_rank_with_another_secret_cannot_join() {
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let folder = folder.path().join("s");
    let id = UniqueId::create_in(&folder).expect("an id");
    let text = id.to_string();
    let digit = if text.as_bytes()[25] == b'0' { "1" } else { "0" };
    let wrong: UniqueId = format!("{}{digit}{}", &text[..25], &text[26..]).parse().expect("an id");
    let create = |id: &UniqueId, rank, millis| {
        Bootstrap::create(id, Rank(rank), 2, Deadline::after(Duration::from_millis(millis)))
    };
    std::thread::scope(|scope| {
        // Another secret gives another socket address. A decoy with the wrong secret binds that address first, so that
        // the test learns it and can move the real socket there.
        let decoy = scope.spawn(|| create(&wrong, 0, 200));
        let elsewhere = socket_path(&folder);
        decoy.join().expect("no panic").expect_err("no rank joins");
        let root = scope.spawn(|| create(&id, 0, 1000));
        // The real socket is moved only once it accepts connections: before that, the listener still opens its file by
        // path.
        let listening = loop {
            let path = socket_path(&folder);
            if path != elsewhere && try_connect(&Address::Path(path.clone())).is_some() {
                break path;
            }
            std::thread::yield_now();
        };
        std::fs::rename(&listening, &elsewhere).expect("rename");
        let other = scope.spawn(|| create(&wrong, 1, 700));
        for (end, missing) in [(root, Rank(1)), (other, Rank(0))] {
            let error = end.join().expect("no panic").expect_err("no group");
            assert!(
                matches!(&error, Error::Timeout { missing: named, .. } if *named == [missing]),
                "{error}"
            );
        }
    });
}
