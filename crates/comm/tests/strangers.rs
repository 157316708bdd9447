//! What strangers do at the door: the real ranks join all the same, and nothing of the strangers stays.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::packet::{Address, PacketListener};
use wholemem_os::{Deadline, PacketSocket};
use wholemem_testkit::{Ranks, test_name};

const PATIENCE: Duration = Duration::from_secs(60);

fn join(id: &UniqueId, rank: u32, size: u32) -> Result<Bootstrap, Error> {
    Bootstrap::create(id, Rank(rank), size, Deadline::after(PATIENCE))
}

/// The socket of the first rank that listens in a folder.
fn door(folder: &Path) -> PathBuf {
    loop {
        let found = std::fs::read_dir(folder).ok().and_then(|mut entries| entries.next());
        if let Some(Ok(entry)) = found {
            return entry.path();
        }
        std::thread::yield_now();
    }
}

/// A claim, as it is written in the documentation of the handshake.
fn claim(rank: u32, size: u32, nonce: u8) -> Vec<u8> {
    [&b"wmh1\x01"[..], &rank.to_le_bytes(), &size.to_le_bytes(), &[nonce; 16]].concat()
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count()
}

fn knock(address: &Address) -> Option<PacketSocket> {
    PacketSocket::connect(address).ok()
}

/// Everything a stranger can think of, once.
fn pester(address: &Address, dice: &mut u64, half_open: &mut Vec<PacketSocket>) {
    let mut roll = || {
        *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *dice >> 33
    };
    let Some(socket) = knock(address) else { return };
    let zero = std::fs::File::open("/dev/zero").expect("a descriptor");
    let fds = [zero.as_fd(); 3];
    match roll() % 6 {
        // Random bytes, long and short.
        0 => {
            let len = usize::try_from(roll() % 400).expect("small") + 1;
            let bytes: Vec<u8> = (0..len).map(|_| roll().to_le_bytes()[0]).collect();
            let _ = socket.send(&bytes, &[], Deadline::NOW);
        }
        // A claim with descriptors.
        1 => drop(socket.send(&claim(1, 3, 7), &fds, Deadline::NOW)),
        // A claim, and a wrong proof, with a descriptor or without.
        2 => {
            let _ = socket.send(&claim(1, 3, 7), &[], Deadline::NOW);
            let answer = [&b"wmh1\x03"[..], &[0x55; 32]].concat();
            let _ = socket.send(&answer, &fds[..usize::from(roll() % 2 == 1)], Deadline::NOW);
            // Kept open: whoever were let in so would keep the real rank out.
            half_open.push(socket);
        }
        // The challenge sent back to its maker: a proof, but the parent's.
        3 => {
            let _ = socket.send(&claim(2, 3, 9), &[], Deadline::NOW);
            let mut challenge = [0; 128];
            if let Ok(len) = socket.recv(&mut challenge, Deadline::after(Duration::from_millis(20)))
                && len == 61
            {
                let answer = [&b"wmh1\x03"[..], &challenge[29..61]].concat();
                let _ = socket.send(&answer, &[], Deadline::NOW);
            }
        }
        // More words than a stranger has.
        4 => {
            for _ in 0..20 {
                let _ = socket.send(&claim(1, 3, 1), &[], Deadline::NOW);
            }
        }
        // Claims, and never answers.
        _ => {
            let _ = socket.send(&claim(1, 3, 2), &[], Deadline::NOW);
            half_open.push(socket);
        }
    }
}

#[test]
fn a_thousand_half_open_connections_and_worse_keep_nobody_out() {
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let id = UniqueId::create_in(&folder.path().join("s")).expect("an id");
    Ranks::of(4).parameter(format!("{} {id}", folder.path().join("s").display())).run(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (folder, id) = parameter.split_once(' ').expect("a folder and an id");
        let id: UniqueId = id.parse().expect("an id");
        match rank.id() {
            0 => {
                // Limits are raised and threads started before the count.
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
                    comm.expect("a group").barrier().expect("all are there");
                });
                let most = most.into_inner();
                eprintln!("{before} descriptors before, at most {most} during the siege");
                assert!(most <= before + 64 + 24, "{before} descriptors before, {most} during the siege");
                assert!(open_fds() <= before, "nothing of the strangers stays");
            }
            3 => {
                let address = Address::Path(door(Path::new(folder)));
                let mut half_open = Vec::new();
                let mut connected = 0;
                while connected < 1000 {
                    if let Some(socket) = knock(&address) {
                        connected += 1;
                        half_open.push(socket);
                    }
                }
                let mut dice = wholemem_testkit::seed();
                for _ in 0..500 {
                    pester(&address, &mut dice, &mut half_open);
                }
                rank.send(1, b"besieged", &[]);
                rank.send(2, b"besieged", &[]);
                // Until the door is closed, which it is when the real ranks have joined.
                while Path::new(folder).join(door_name(&address)).exists() {
                    pester(&address, &mut dice, &mut half_open);
                    half_open.truncate(2000);
                }
            }
            other => {
                assert_eq!(rank.recv(3).0, b"besieged");
                let comm = join(&id, u32::try_from(other).expect("small"), 3).expect("a group");
                comm.barrier().expect("all are there");
            }
        }
    });
}

fn door_name(address: &Address) -> PathBuf {
    let Address::Path(path) = address else { unreachable!("a file") };
    path.file_name().expect("a name").into()
}

/// Passes packets on in both directions, and keeps a copy of every byte.
fn relay(child: &PacketSocket, parent: &PacketSocket, heard: &Mutex<Vec<u8>>, done: &AtomicBool) {
    let mut buffer = vec![0; 65_536];
    while !done.load(Ordering::Relaxed) {
        for (from, to) in [(child, parent), (parent, child)] {
            let moment = Deadline::after(Duration::from_millis(1));
            if let Ok((len, fds)) = from.recv_with_fds(&mut buffer, 64, moment) {
                heard.lock().expect("nobody panicked").extend(&buffer[..len]);
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                let _ = to.send(&buffer[..len], &fds, Deadline::after(PATIENCE));
            }
        }
    }
}

#[test]
fn the_secret_is_in_no_byte_on_the_wire_and_a_recorded_handshake_opens_nothing() {
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let folder = folder.path().join("s");
    let id = UniqueId::create_in(&folder).expect("an id");
    let text = id.to_string();
    let secret = text.split('-').nth(2).expect("a secret");
    let raw: Vec<u8> =
        (0..16).map(|n| u8::from_str_radix(&secret[2 * n..2 * n + 2], 16).expect("hexadecimal")).collect();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let root = scope.spawn(|| join(&id, 0, 2));
        // Between the child and its parent: the real door is moved, and ours is put in its place.
        let real = door(&folder);
        let moved = folder.join("moved");
        std::fs::rename(&real, &moved).expect("the door can be moved");
        let listener = PacketListener::bind(&Address::Path(real)).expect("our door");
        let child = scope.spawn(|| join(&id, 1, 2));
        let caught = loop {
            if let Ok(Some(socket)) = listener.accept() {
                break socket;
            }
            std::thread::yield_now();
        };
        // First the handshake is recorded and played to the real door by a stranger, who does not get in.
        let through = PacketSocket::connect(&Address::Path(moved.clone())).expect("the real door");
        let (heard, done) = (&heard, &done);
        scope.spawn(move || relay(&caught, &through, heard, done));
        let root = root.join().expect("it ran").expect("a group");
        let child = child.join().expect("it ran").expect("a group");
        std::thread::scope(|scope| {
            for comm in [&root, &child] {
                scope.spawn(|| {
                    comm.all_gather(b"something to say").expect("all_gather");
                    let part = comm.split(Some(1), 0).expect("split");
                    drop(part);
                });
            }
        });
        done.store(true, Ordering::Relaxed);
    });
    std::fs::remove_file(folder.join("moved")).expect("the door that was moved");
    let heard = heard.lock().expect("nobody panicked");
    let contains = |needle: &[u8]| heard.windows(needle.len()).any(|window| window == needle);
    assert!(contains(b"something to say"), "everything was heard");
    assert!(contains(b"wmh1\x03"), "the handshake too");
    assert!(!contains(&raw), "the secret was said");
    assert!(!contains(secret.as_bytes()), "the secret was said as text");
    // What was recorded, played to another door of the same group.
    let answer = heard.windows(37).find(|window| window.starts_with(b"wmh1\x03")).expect("heard").to_vec();
    let claimed = heard.windows(29).find(|window| window.starts_with(b"wmh1\x01")).expect("heard").to_vec();
    std::thread::scope(|scope| {
        let root =
            scope.spawn(|| Bootstrap::create(&id, Rank(0), 2, Deadline::after(Duration::from_secs(2))));
        let address = Address::Path(door(&folder));
        let thief = loop {
            if let Some(socket) = knock(&address) {
                break socket;
            }
        };
        thief.send(&claimed, &[], Deadline::NOW).expect("a claim");
        thief.send(&answer, &[], Deadline::NOW).expect("an answer");
        let mut buffer = [0; 128];
        let first = thief.recv(&mut buffer, Deadline::after(PATIENCE)).expect("a challenge");
        assert_eq!(&buffer[..5], b"wmh1\x02", "{first} bytes");
        let end = thief.recv(&mut buffer, Deadline::after(PATIENCE));
        assert_eq!(end, Err(wholemem_os::Error::Closed), "no welcome");
        let error = root.join().expect("it ran").expect_err("nobody came");
        assert!(matches!(error, Error::Timeout { missing, .. } if missing == [Rank(1)]));
    });
}

#[test]
fn another_secret_joins_nothing() {
    let folder = tempfile::tempdir_in("/tmp").expect("a folder");
    let folder = folder.path().join("s");
    let id = UniqueId::create_in(&folder).expect("an id");
    let text = id.to_string();
    let digit = if text.as_bytes()[25] == b'0' { "1" } else { "0" };
    let wrong: UniqueId = format!("{}{digit}{}", &text[..25], &text[26..]).parse().expect("an id");
    let create = |id: &UniqueId, rank, millis| {
        Bootstrap::create(id, Rank(rank), 2, Deadline::after(Duration::from_millis(millis)))
    };
    std::thread::scope(|scope| {
        // Another secret is another address: it is learnt, so that the real door can be put there.
        let decoy = scope.spawn(|| create(&wrong, 0, 200));
        let elsewhere = door(&folder);
        decoy.join().expect("it ran").expect_err("nobody comes");
        let root = scope.spawn(|| create(&id, 0, 1000));
        // It is moved when connections are accepted there: before that, the listener still opens its file by path.
        let listening = loop {
            let path = door(&folder);
            if path != elsewhere && knock(&Address::Path(path.clone())).is_some() {
                break path;
            }
            std::thread::yield_now();
        };
        std::fs::rename(&listening, &elsewhere).expect("the door can be moved");
        let other = scope.spawn(|| create(&wrong, 1, 700));
        for (end, missing) in [(root, Rank(1)), (other, Rank(0))] {
            let error = end.join().expect("it ran").expect_err("no group");
            assert!(
                matches!(&error, Error::Timeout { missing: named, .. } if *named == [missing]),
                "{error}"
            );
        }
    });
}
