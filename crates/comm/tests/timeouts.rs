//! Tests of how long ranks wait for a missing rank: at least for the requested timeout, which the error contains.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::{Deadline, Memfd};

const TIMEOUT: Duration = Duration::from_millis(400);

/// Runs a call in which a rank waits for rank `missing`, and checks that the call fails with a timeout and not too
/// early.
fn assert_misses<T>(missing: Rank, joining: bool, wait: impl FnOnce() -> Result<T, Error>) {
    let began = Instant::now();
    let error = wait().err().expect("a rank is missing");
    let waited = began.elapsed();
    assert_eq!(error, Error::Timeout { missing: vec![missing], timeout: TIMEOUT, joining });
    assert!(waited >= TIMEOUT, "gave up after {waited:?}: {error}");
}

/// Calls `wait` with one rank of a group of two, and with the other rank's number; the other rank takes part in no
/// operation.
fn with_pair(rank: usize, wait: impl FnOnce(Rank, &Bootstrap)) {
    let mut pair = Bootstrap::local(2).expect("a group");
    pair.iter_mut().for_each(|comm| comm.set_timeout(TIMEOUT));
    wait(pair[1 - rank].rank(), &pair[rank]);
}

#[test]
fn every_operation_waits_for_the_requested_timeout() {
    for rank in 0..2 {
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.barrier()));
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.broadcast(other, b"x")));
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.all_gather(b"x")));
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.all_to_all(b"xy")));
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.agree(Ok(()))));
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.split(Some(0), 0)));
        let memory = Memfd::create("test", 4096).expect("memory");
        with_pair(rank, |other, comm| assert_misses(other, false, || comm.all_gather_fds(&[memory.as_fd()])));
    }
}

#[test]
fn joining_waits_for_the_requested_timeout() {
    let deadline = || Deadline::after(TIMEOUT);
    for rank in 0..2 {
        let id = UniqueId::create().expect("an id");
        assert_misses(Rank(1 - rank), true, || Bootstrap::create(&id, Rank(rank), 2, deadline()));
    }
    // Rank 1 has joined rank 0, and both miss rank 2.
    let id = UniqueId::create().expect("an id");
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let id = &id;
            scope.spawn(move || {
                assert_misses(Rank(2), true, || Bootstrap::create(id, Rank(rank), 3, deadline()));
            });
        }
    });
}

#[test]
fn a_rank_informed_early_of_a_timeout_reports_how_long_it_waited_itself() {
    let mut ranks = Bootstrap::local(3).expect("a group");
    let long = Duration::from_secs(60);
    ranks[0].set_timeout(TIMEOUT);
    ranks[1].set_timeout(long);
    let ranks = &ranks[..];
    std::thread::scope(|scope| {
        scope.spawn(|| assert_misses(Rank(2), false, || ranks[0].barrier()));
        scope.spawn(|| {
            let began = Instant::now();
            let error = ranks[1].barrier().expect_err("rank 2 does not call");
            let waited = began.elapsed();
            let Error::Timeout { missing, timeout, joining: false } = error else { panic!("{error}") };
            assert_eq!(missing, [Rank(2)]);
            assert!(timeout <= waited && timeout < long, "waited {waited:?}, reported {timeout:?}");
        });
    });
}
