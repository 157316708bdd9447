//! Tests in which ranks are killed while joining: all survivors get an error, and form a new group, long before the
//! deadline.

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::{Deadline, PacketSocket, PidFd};
use wholemem_testkit::forked::leave_forked_child;
use wholemem_testkit::{Census, Ranks, test_name};

/// The size of a group in which ranks 1 to 4 join rank 0, and ranks 5 and 6 join rank 1.
const SIZE: usize = 7;

/// A timeout longer than the harness waits for a test: if a rank waits for this timeout, the test fails.
const LONG_TIMEOUT: Duration = Duration::from_secs(3600);

fn join(id: &str, rank: usize, size: usize, timeout: Duration) -> Result<Bootstrap, Error> {
    let number = |number| u32::try_from(number).expect("small");
    Bootstrap::create(&id.parse()?, Rank(number(rank)), number(size), Deadline::after(timeout))
}

/// Waits until a process has mapped the liveness pages of `ranks` ranks: its own page, and those of the ranks that it
/// is connected to.
fn wait_until_connected(process: u32, ranks: usize) {
    let maps = || std::fs::read_to_string(format!("/proc/{process}/maps")).expect("the process lives");
    while maps().lines().filter(|line| line.contains("wholemem-liveness")).count() < ranks {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Kills a process, and waits until it has exited.
fn kill(process: u32) {
    let process = PidFd::open(process).expect("the process lives");
    process.kill().expect("kill");
    assert_eq!(process.wait_exit(Deadline::after(LONG_TIMEOUT)), Ok(true));
}

/// Kills rank `victim` when all ranks but `late` are joining and `connected` of them are connected to the victim. After
/// that, rank `late` joins.
fn kill_while_joining(rank: &wholemem_testkit::Rank, victim: usize, late: usize, connected: usize) {
    let parameter = rank.parameter();
    let (first, second) = parameter.split_once(' ').expect("two ids");
    if rank.id() == victim {
        let joining = std::thread::spawn({
            let (id, rank) = (first.to_owned(), rank.id());
            move || join(&id, rank, SIZE, LONG_TIMEOUT).map(drop)
        });
        wait_until_connected(std::process::id(), 1 + connected);
        keep_sockets_open(rank, late);
        joining.join().expect("no panic").expect_err("a rank is late");
        unreachable!("the rank is killed while it joins");
    }
    // Creates a first group before the census, because a process starts some threads and allocates some memory only
    // once.
    drop(Bootstrap::local(2).expect("a group"));
    let before = Census::take();
    let mut child_socket = Vec::new();
    if rank.id() == late {
        // A forked child of the victim holds the victim's sockets open until all ranks have learnt of its death.
        child_socket = rank.recv(victim).1;
        assert_eq!(rank.recv(victim).0, b"forked");
        kill(rank.pid(victim));
    }
    let lost = Error::PeerLost { rank: Rank(u32::try_from(victim).expect("small")) };
    assert_eq!(join(first, rank.id(), SIZE, LONG_TIMEOUT).map(drop), Err(lost));
    let new_rank = rank.id() - usize::from(rank.id() > victim);
    let again = join(second, new_rank, SIZE - 1, LONG_TIMEOUT).expect("a group of the survivors");
    assert_eq!(again.all_gather(&[9]).expect("it works").concat(), [9; SIZE - 1]);
    drop(again);
    drop(child_socket);
    Census::take().assert_same_as(&before, "after both groups");
}

/// Forks a child that holds the descriptors of this process open, including its sockets, until rank `late` closes its
/// end of a socket pair.
fn keep_sockets_open(rank: &wholemem_testkit::Rank, late: usize) {
    let (here, there) = PacketSocket::pair().expect("a socket pair");
    rank.send(late, b"child", &[there.as_fd()]);
    drop(there);
    leave_forked_child(move || {
        let _ = here.recv(&mut [0; 8], Deadline::after(LONG_TIMEOUT));
    });
    rank.send(late, b"forked", &[]);
}

fn two_ids(folder: Option<&Path>) -> String {
    let create = || match folder {
        Some(folder) => UniqueId::create_in(folder),
        None => UniqueId::create(),
    };
    format!("{} {}", create().expect("an id"), create().expect("an id"))
}

#[test]
fn all_survivors_learn_that_rank_0_was_killed_while_joining_and_form_a_new_group() {
    Ranks::of(SIZE).killed(0).parameter(two_ids(None)).run(test_name!(), |rank| {
        kill_while_joining(rank, 0, 2, 3);
    });
}

#[test]
fn all_survivors_learn_that_an_inner_rank_was_killed_while_joining_and_form_a_new_group() {
    Ranks::of(SIZE).killed(1).parameter(two_ids(None)).run(test_name!(), |rank| {
        kill_while_joining(rank, 1, 6, 2);
    });
}

#[test]
fn all_survivors_learn_that_a_rank_was_killed_before_its_parent_started() {
    Ranks::of(SIZE).killed(1).parameter(two_ids(None)).run(test_name!(), |rank| {
        kill_while_joining(rank, 1, 0, 2);
    });
}

#[test]
fn a_rank_killed_while_joining_leaves_no_socket_file() {
    for victim in [0, 1] {
        if Ranks::is_rank() {
            return Ranks::of(SIZE).run(test_name!(), kill_with_folder);
        }
        let folder = tempfile::tempdir_in("/tmp").expect("a directory");
        let folder = folder.path().join("s");
        let ids = two_ids(Some(&folder));
        let ranks = Ranks::of(SIZE).killed(victim).env("VICTIM", victim.to_string()).parameter(ids);
        ranks.run(test_name!(), kill_with_folder);
        let left: Vec<_> = std::fs::read_dir(&folder).expect("the directory").collect();
        assert!(left.is_empty(), "rank {victim} was killed, and left {left:?}");
    }
}

fn kill_with_folder(rank: &wholemem_testkit::Rank) {
    let victim: usize = std::env::var("VICTIM").expect("a variable").parse().expect("a rank");
    kill_while_joining(rank, victim, 6, if victim == 0 { 4 } else { 2 });
}

/// A step that the last of five ranks performs before it joins: it makes another rank join, or kills one.
#[derive(Clone, Copy)]
enum DriverStep {
    /// Makes this rank join. The next step begins when the rank is connected to another one; rank 0 only starts listening.
    Join(usize),
    Kill(usize),
}

use DriverStep::{Join, Kill};

/// The size of a group whose ranks 1 to 4 join rank 0. The last rank controls when the others join and are killed.
const FLAT: usize = 5;
const DRIVER: usize = FLAT - 1;

/// Rank 1, the only rank that can take the position of the killed rank 0, is killed after ranks 2 and 3 have joined it
/// there.
const SUCCESSOR: &[DriverStep] = &[Join(0), Join(1), Kill(0), Join(2), Join(3), Kill(1)];

/// Rank 2 takes the position of rank 0 after rank 1 was killed in it, and rank 3 takes it after rank 2 was killed.
const SUCCESSORS: &[DriverStep] = &[Join(0), Join(1), Kill(0), Join(2), Kill(1), Join(3), Kill(2)];

/// Rank 1 is killed before another rank has connected to it, whether or not it has taken the position of rank 0.
const UNSEEN: &[DriverStep] = &[Join(0), Join(1), Join(2), Join(3), Kill(0), Kill(1)];

fn kill_in_steps(rank: &wholemem_testkit::Rank, steps: &[DriverStep]) {
    let parameter = rank.parameter();
    let (first, second) = parameter.split_once(' ').expect("two ids");
    let is_killed = |rank: usize| steps.iter().any(|step| matches!(step, Kill(killed) if *killed == rank));
    // Creates a first group before the census, because a process starts some threads and allocates some memory only
    // once.
    drop(Bootstrap::local(2).expect("a group"));
    let before = Census::take();
    if rank.id() == DRIVER {
        for step in steps {
            match *step {
                Join(other) => {
                    // A rank sends "ready" after it has left the group that it created for itself.
                    assert_eq!(rank.recv(other).0, b"ready");
                    rank.send(other, b"join", &[]);
                    // Rank 0 is connected to no other rank yet, so only its own liveness page is mapped.
                    wait_until_connected(rank.pid(other), if other == 0 { 1 } else { 2 });
                }
                Kill(other) => kill(rank.pid(other)),
            }
        }
    } else {
        rank.send(DRIVER, b"ready", &[]);
        assert_eq!(rank.recv(DRIVER).0, b"join");
    }
    let outcome = join(first, rank.id(), FLAT, LONG_TIMEOUT).map(drop);
    assert!(!is_killed(rank.id()), "the rank was not killed while it joined: {outcome:?}");
    assert_eq!(outcome, Err(Error::PeerLost { rank: Rank(0) }));
    let survivors: Vec<_> = (0..FLAT).filter(|rank| !is_killed(*rank)).collect();
    let new_rank = survivors.iter().position(|survivor| *survivor == rank.id()).expect("a survivor");
    let again = join(second, new_rank, survivors.len(), LONG_TIMEOUT).expect("a group of the survivors");
    assert_eq!(again.all_gather(&[9]).expect("it works").len(), survivors.len());
    drop(again);
    Census::take().assert_same_as(&before, "after both groups");
}

#[test]
fn all_survivors_learn_that_the_successor_of_rank_0_was_killed_and_form_a_new_group() {
    let ranks = Ranks::of(FLAT).killed(0).killed(1).parameter(two_ids(None));
    ranks.run(test_name!(), |rank| kill_in_steps(rank, SUCCESSOR));
}

#[test]
fn all_survivors_learn_that_successors_of_successors_were_killed_and_form_a_new_group() {
    let ranks = Ranks::of(FLAT).killed(0).killed(1).killed(2).parameter(two_ids(None));
    ranks.run(test_name!(), |rank| kill_in_steps(rank, SUCCESSORS));
}

#[test]
fn all_survivors_learn_of_the_death_of_a_rank_that_was_connected_to_a_killed_rank_only() {
    let ranks = Ranks::of(FLAT).killed(0).killed(1).parameter(two_ids(None));
    ranks.run(test_name!(), |rank| kill_in_steps(rank, UNSEEN));
}

#[test]
fn successors_killed_while_joining_leave_no_socket_file() {
    let body = |rank: &wholemem_testkit::Rank| kill_in_steps(rank, SUCCESSORS);
    if Ranks::is_rank() {
        return Ranks::of(FLAT).run(test_name!(), body);
    }
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let folder = folder.path().join("s");
    let ranks = Ranks::of(FLAT).killed(0).killed(1).killed(2).parameter(two_ids(Some(&folder)));
    ranks.run(test_name!(), body);
    let left: Vec<_> = std::fs::read_dir(&folder).expect("the directory").collect();
    assert!(left.is_empty(), "the killed ranks left {left:?}");
}

#[test]
fn rank_0_killed_before_it_joins_is_reported_missing_at_the_deadline() {
    Ranks::of(3).killed(0).parameter(two_ids(None)).run(test_name!(), |rank| {
        if rank.id() == 0 {
            rank.wait_to_be_killed();
        }
        let parameter = rank.parameter();
        let (first, second) = parameter.split_once(' ').expect("two ids");
        if rank.id() == 1 {
            kill(rank.pid(0));
        }
        let timeout = Duration::from_secs(1);
        let missed = Error::Timeout { missing: vec![Rank(0)], timeout, joining: true };
        assert_eq!(join(first, rank.id(), 3, timeout).map(drop), Err(missed));
        let again = join(second, rank.id() - 1, 2, LONG_TIMEOUT).expect("a group of the survivors");
        assert_eq!(again.all_gather(&[9]).expect("it works"), [[9], [9]]);
    });
}
