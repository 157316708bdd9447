//! Tests in which ranks, each a process, die, are stopped, fork and form new groups.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::{Deadline, PacketSocket, PidFd};
use wholemem_testkit::forked::leave_forked_child;
use wholemem_testkit::{Census, Ranks, in_forked_child, test_name};

fn join(id: &str, rank: usize, size: u32, timeout: Duration) -> Result<Bootstrap, Error> {
    let rank = Rank(u32::try_from(rank).expect("small"));
    let mut comm = Bootstrap::create(&id.parse()?, rank, size, Deadline::after(timeout))?;
    comm.set_timeout(timeout);
    Ok(comm)
}

fn id() -> String {
    UniqueId::create().expect("an id").to_string()
}

const TIMEOUT: Duration = Duration::from_secs(60);

fn available_gib() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").expect("/proc is mounted");
    let line = text.lines().find(|line| line.starts_with("MemAvailable:")).expect("a line");
    line.split_ascii_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number") >> 20
}

/// Allocates resident memory. When the process is killed, the kernel takes some time to free it.
fn resident(gib: usize) -> Vec<u8> {
    let mut memory = vec![0u8; gib << 30];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    memory
}

#[test]
fn a_killed_rank_with_much_memory_and_a_child_that_holds_its_sockets_is_reported_to_all() {
    let gib = if wholemem_testkit::exhaustive() { 4 } else { 1 };
    if available_gib() < gib + 2 {
        return wholemem_testkit::skipped("there is not enough memory");
    }
    Ranks::of(4).killed(2).parameter(id()).run(test_name!(), |rank| {
        let comm = join(&rank.parameter(), rank.id(), 4, TIMEOUT).expect("a group");
        if rank.id() == 2 {
            let memory = resident(usize::try_from(gib).expect("small"));
            leave_child_with_sockets(rank);
            rank.send(0, b"ready", &[]);
            assert_eq!(memory[4096], 1);
            rank.wait_to_be_killed();
        }
        if rank.id() == 3 {
            // Keeps the child process of the dead rank, and with it copies of the dead rank's sockets, alive until all
            // ranks have detected the death.
            let (_, child_socket) = rank.recv(2);
            assert_eq!(comm.barrier(), Err(Error::PeerLost { rank: Rank(2) }));
            rank.barrier_with(&[0, 1]);
            drop(child_socket);
            return;
        }
        if rank.id() == 0 {
            assert_eq!(rank.recv(2).0, b"ready");
            let process = PidFd::open(rank.pid(2)).expect("rank 2 lives");
            let killed = Instant::now();
            process.kill().expect("it can be killed");
            assert_eq!(comm.barrier(), Err(Error::PeerLost { rank: Rank(2) }));
            eprintln!("{gib} GiB resident: known after {:?}", killed.elapsed());
        } else {
            assert_eq!(comm.barrier(), Err(Error::PeerLost { rank: Rank(2) }));
        }
        let others: Vec<_> = [0, 1, 3].into_iter().filter(|other| *other != rank.id()).collect();
        rank.barrier_with(&others);
    });
}

/// Forks a child that holds the descriptors of this process open, including its sockets, until rank 3 closes its end of
/// a socket pair.
fn leave_child_with_sockets(rank: &wholemem_testkit::Rank) {
    let (here, there) = PacketSocket::pair().expect("a socket pair");
    rank.send(3, b"child", &[there.as_fd()]);
    drop(there);
    leave_forked_child(move || {
        let _ = here.recv(&mut [0; 8], Deadline::after(TIMEOUT));
    });
}

#[test]
fn a_stopped_rank_is_reported_and_the_others_form_a_new_group() {
    let ids = format!("{} {}", id(), id());
    Ranks::of(3).parameter(ids).run(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (first, second) = parameter.split_once(' ').expect("two ids");
        let before = (rank.id() != 1).then(|| {
            drop(Bootstrap::local(2).expect("a group"));
            Census::take()
        });
        let timeout = Duration::from_secs(3);
        let comm = join(first, rank.id(), 3, timeout).expect("a group");
        comm.barrier().expect("all ranks take part");
        if rank.id() == 1 {
            rank.send(0, b"stop me", &[]);
            assert_eq!(rank.recv(0).0, b"go on");
            let error = comm.barrier().expect_err("the others have given up");
            assert!(error.poisons(), "{error}");
            return;
        }
        let process = PidFd::open(rank.pid(1)).expect("rank 1 lives");
        if rank.id() == 0 {
            assert_eq!(rank.recv(1).0, b"stop me");
            process.signal(Signal::STOP).expect("it can be stopped");
            rank.send(2, b"stopped", &[]);
        } else {
            assert_eq!(rank.recv(0).0, b"stopped");
        }
        let missing = vec![Rank(1)];
        let stopped = Error::Timeout { missing: missing.clone(), timeout, joining: false };
        assert_eq!(comm.barrier(), Err(stopped));
        assert_eq!(comm.all_gather(b"x"), Err(Error::Poisoned { missing }));
        drop(comm);
        let again = join(second, rank.id() / 2, 2, TIMEOUT).expect("a group of the others");
        assert_eq!(again.all_gather(&[9]).expect("it works"), [[9], [9]]);
        drop(again);
        drop(process);
        Census::take().assert_same_as(&before.expect("taken"), "after both groups");
        rank.barrier_with(&[2 - rank.id()]);
        if rank.id() == 0 {
            let process = PidFd::open(rank.pid(1)).expect("rank 1 lives");
            process.signal(Signal::CONT).expect("it can be continued");
            rank.send(1, b"go on", &[]);
        }
    });
}

#[test]
fn a_rank_stopped_in_all_to_all_is_reported_without_the_ranks_behind_it() {
    Ranks::of(7).killed(1).parameter(id()).run(test_name!(), |rank| {
        let timeout = Duration::from_secs(3);
        let mut comm = join(&rank.parameter(), rank.id(), 7, TIMEOUT).expect("a group");
        comm.set_timeout(timeout);
        // Rank 1 is not stopped in the barrier, and has nothing to forward, because all ranks have passed the barrier
        // when it is stopped.
        rank.barrier();
        if rank.id() == 1 {
            rank.send(0, b"stop me", &[]);
            rank.wait_to_be_killed();
        }
        let process = PidFd::open(rank.pid(1)).expect("rank 1 lives");
        if rank.id() == 0 {
            assert_eq!(rank.recv(1).0, b"stop me");
            process.signal(Signal::STOP).expect("it can be stopped");
        }
        let others: Vec<_> = [0, 2, 3, 4, 5, 6].into_iter().filter(|other| *other != rank.id()).collect();
        rank.barrier_with(&others);
        // The parts are short, so rank 1 forwards those between ranks 5 and 6 and the other ranks.
        let stopped = Error::Timeout { missing: vec![Rank(1)], timeout, joining: false };
        assert_eq!(comm.all_to_all(&[7; 70]), Err(stopped));
        rank.barrier_with(&others);
        if rank.id() == 0 {
            process.kill().expect("it can be killed");
        }
    });
}

#[test]
fn a_rank_stopped_before_it_joins_is_reported_to_all_at_the_deadline() {
    Ranks::of(3).killed(2).parameter(id()).run(test_name!(), |rank| {
        if rank.id() == 2 {
            rank.wait_to_be_killed();
        }
        // Ranks 0 and 1 start to join at the same time: rank 0 gives up first, and informs rank 1 before the timeout of
        // rank 1 expires.
        rank.barrier_with(&[1 - rank.id()]);
        let timeout = Duration::from_secs(3);
        let error = join(&rank.parameter(), rank.id(), 3, timeout).expect_err("rank 2 does not join");
        assert!(
            matches!(&error, Error::Timeout { missing, joining: true, .. } if *missing == [Rank(2)]),
            "{error}"
        );
        rank.barrier_with(&[1 - rank.id()]);
        if rank.id() == 0 {
            rank.kill(2);
        }
    });
}

#[test]
fn the_survivors_of_a_death_form_a_new_group() {
    let ids = format!("{} {}", id(), id());
    Ranks::of(6).killed(1).parameter(ids).run(test_name!(), |rank| {
        let parameter = rank.parameter();
        let (first, second) = parameter.split_once(' ').expect("two ids");
        let comm = join(first, rank.id(), 6, TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        // Two barriers of the test harness: a rank that has passed the second knows that all ranks have left the first.
        // A barrier of the group is not enough, because a rank that leaves it and is killed may not have forwarded the
        // decision.
        rank.barrier();
        rank.barrier();
        // Rank 5 is below rank 1 in the tree, so no other rank can inform it of the death of rank 1.
        match rank.id() {
            1 => {
                rank.send(0, b"ready", &[]);
                rank.wait_to_be_killed()
            }
            0 => {
                assert_eq!(rank.recv(1).0, b"ready");
                rank.kill(1);
            }
            _ => {}
        }
        assert_eq!(comm.barrier(), Err(Error::PeerLost { rank: Rank(1) }));
        assert_eq!(comm.check(), Err(Error::PeerLost { rank: Rank(1) }));
        let mine = if rank.id() == 0 { 0 } else { rank.id() - 1 };
        let again = join(second, mine, 5, TIMEOUT).expect("a group of the survivors");
        assert_eq!(again.all_gather(&[1]).expect("it works").concat(), [1; 5]);
    });
}

#[test]
fn a_forked_child_cannot_use_the_group_and_does_not_affect_it() {
    Ranks::of(2).parameter(id()).run(test_name!(), |rank| {
        let comm = join(&rank.parameter(), rank.id(), 2, TIMEOUT).expect("a group");
        in_forked_child(|| {
            assert_eq!(comm.barrier(), Err(Error::Forked));
            assert_eq!(comm.check(), Err(Error::Forked));
            comm.abort();
        });
        comm.barrier().expect("the group is usable");
        let comm = std::cell::RefCell::new(Some(comm));
        in_forked_child(|| drop(comm.take()));
        comm.take()
            .expect("the parent still has it")
            .barrier()
            .expect("the group is usable, although the child dropped its copy");
    });
}

#[test]
fn sixteen_waiting_ranks_use_little_processor_time() {
    Ranks::of(16).parameter(id()).run(test_name!(), |rank| {
        let comm = join(&rank.parameter(), rank.id(), 16, TIMEOUT).expect("a group");
        comm.barrier().expect("all ranks take part");
        let cpu = || {
            let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
            Duration::try_from(time).expect("a duration")
        };
        let before = cpu();
        if rank.id() == 15 {
            // The sleep makes the other ranks wait. It is much longer than the CPU time that is allowed below, so that a rank
            // that polls without sleeping fails the test.
            std::thread::sleep(Duration::from_secs(1));
        }
        comm.barrier().expect("all ranks take part");
        let used = cpu() - before;
        eprintln!("rank {}: {used:?} of processor time in a second of waiting", rank.id());
        assert!(used < Duration::from_millis(50), "rank {} used {used:?}", rank.id());
    });
}

#[test]
fn a_second_process_with_the_same_rank_or_another_size_is_refused() {
    Ranks::of(4).parameter(id()).run(test_name!(), |rank| {
        let claim = |as_rank, size| join(&rank.parameter(), as_rank, size, TIMEOUT);
        let barrier = |comm: Bootstrap| comm.barrier().expect("all ranks take part");
        match rank.id() {
            0 => barrier(claim(0, 3).expect("a group")),
            // Rank 2 joins only after one of the two processes that claim rank 1 was refused, so the group is
            // incomplete until then.
            2 => {
                let is_refused = |from| {
                    let deadline = Deadline::after(Duration::from_millis(5));
                    rank.peer(from).recv(&mut [0; 8], deadline).is_ok()
                };
                while !is_refused(1) && !is_refused(3) {}
                barrier(claim(2, 3).expect("a group"));
            }
            contender => {
                if contender == 3 {
                    let sizes = Error::SizeDiffers { rank: Rank(2), parent: Rank(0), here: 4, there: 3 };
                    assert_eq!(claim(2, 4).expect_err("refused"), sizes);
                    // Rank 0 has refused the wrong group size, so it is listening, and a second process cannot become
                    // rank 0.
                    assert_eq!(claim(0, 3).expect_err("refused"), Error::RankTaken { rank: Rank(0) });
                }
                match claim(1, 3) {
                    Ok(comm) => barrier(comm),
                    Err(error) => {
                        assert_eq!(error, Error::RankTaken { rank: Rank(1) });
                        rank.send(2, b"taken", &[]);
                    }
                }
            }
        }
    });
}
