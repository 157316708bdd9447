//! Tests of ranks with a full descriptor table: an operation reports the rank or works without descriptors, and the
//! group stays usable.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::{Deadline, Memfd};
use wholemem_testkit::{Census, Ranks, test_name};

#[test]
fn a_rank_with_a_full_descriptor_table_is_reported_and_the_group_stays_usable() {
    let id = UniqueId::create().expect("an id").to_string();
    Ranks::of(7).parameter(id).run(test_name!(), |rank| {
        let me = Rank(u32::try_from(rank.id()).expect("small"));
        let id = rank.parameter().parse().expect("an id");
        let deadline = Deadline::after(Duration::from_secs(60));
        let comm = Bootstrap::create(&id, me, 7, deadline).expect("a group");
        let own: Vec<_> = (0..100).map(|_| Memfd::create("test", 4096).expect("memory")).collect();
        let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        let before = Census::take();
        let limit = getrlimit(Resource::Nofile);
        // Rank 1 has a parent and two children, ranks 5 and 6.
        for full in [1, 0, 6] {
            if me.0 == full {
                let low = Rlimit { current: Some(before.fds.len() as u64 + 150), ..limit };
                setrlimit(Resource::Nofile, low).expect("a lower limit");
            }
            let error = comm.all_gather_fds(&fds).expect_err("a table is full");
            assert!(matches!(&error, Error::Descriptors { rank, .. } if rank.0 == full), "{error}");
            setrlimit(Resource::Nofile, limit).expect("the previous limit");
            comm.barrier().expect("the group is usable");
            let all = comm.all_gather_fds(&fds).expect("the limit is high enough again");
            assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [100; 7]);
            drop(all);
            comm.barrier().expect("all ranks have closed their descriptors");
            // Queued packets still hold duplicates of the descriptors, which are closed when the neighbour acknowledges
            // the batch.
            let settled = (0..500).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                Census::take() == before
            });
            assert!(settled, "descriptors are left");
            // A barrier of the test harness keeps all ranks in the group until every rank has taken its census: if
            // another rank left, the census would change.
            rank.barrier();
        }
    });
}

#[test]
fn a_rank_that_leaves_at_once_has_reported_the_rank_with_the_full_descriptor_table() {
    let id = UniqueId::create().expect("an id").to_string();
    Ranks::of(2).parameter(id).run(test_name!(), |rank| {
        let me = Rank(u32::try_from(rank.id()).expect("small"));
        let deadline = Deadline::after(Duration::from_secs(60));
        let id = rank.parameter().parse().expect("an id");
        let comm = Bootstrap::create(&id, me, 2, deadline).expect("a group");
        // Rank 0 has many batches of descriptors to send, and rank 1 cannot receive the first batch. The vote is queued
        // after the other batches.
        let count = if rank.id() == 0 { 1500 } else { 0 };
        let own: Vec<_> = (0..count).map(|_| Memfd::create("test", 4096).expect("memory")).collect();
        let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        if rank.id() == 1 {
            let low = Rlimit { current: Some(8), ..getrlimit(Resource::Nofile) };
            setrlimit(Resource::Nofile, low).expect("a lower limit");
        }
        let error = comm.all_gather_fds(&fds).expect_err("a table is full");
        drop(comm);
        assert!(matches!(&error, Error::Descriptors { rank: Rank(1), .. }), "{error}");
    });
}

/// Returns the byte of which the part from rank `from` to rank `to` consists.
fn part(from: u32, to: u32, round: u32) -> u8 {
    u8::try_from(from * 16 + to + round).expect("small")
}

#[test]
fn ranks_without_free_descriptors_send_long_messages_along_the_tree() {
    let id = UniqueId::create().expect("an id").to_string();
    // In the tree, rank 1 is between rank 5 and the other ranks, and rank 0 is between all. So the rank with the full
    // descriptor table offers direct links, is offered links, and forwards offers.
    for full in [0, 1, 5] {
        let parameter = format!("{id} {full}");
        Ranks::of(7).parameter(parameter).run(test_name!(), |rank| {
            let parameter = rank.parameter();
            let (id, full) = parameter.split_once(' ').expect("two words");
            let me = Rank(u32::try_from(rank.id()).expect("small"));
            let deadline = Deadline::after(Duration::from_secs(60));
            let comm = Bootstrap::create(&id.parse().expect("an id"), me, 7, deadline).expect("a group");
            let limit = getrlimit(Resource::Nofile);
            let is_full = me.0.to_string() == full;
            if is_full {
                // The new limit equals the lowest free descriptor, so no further descriptor can be opened.
                let next = std::fs::File::open("/dev/null").expect("one is free");
                let low = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&next)).expect("a number");
                drop(next);
                setrlimit(Resource::Nofile, Rlimit { current: Some(low), ..limit }).expect("a lower limit");
            }
            // No rank passes this barrier before rank `full` has filled its descriptor table, so no rank offers a direct link to
            // it earlier.
            rank.barrier();
            for round in 0..3 {
                let parts: Vec<Vec<u8>> = (0..7).map(|to| vec![part(me.0, to, round); 200_000]).collect();
                let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
                let got = comm.all_to_allv(&parts).expect("all to all");
                for (from, got) in (0..7).zip(&got) {
                    assert_eq!((got.len(), got[0]), (200_000, part(from, me.0, round)));
                }
            }
            setrlimit(Resource::Nofile, limit).expect("the previous limit");
            let neighbours = [4, 3, 1, 1, 1, 1, 1][me.index()];
            let more = comm.connections() - neighbours;
            assert!(!is_full || more == 0, "{more} direct links with a full descriptor table");
            // If rank 0 has the full descriptor table, all offers of direct links that it forwards are lost. Rank 5
            // forwards none, so the other ranks have direct links.
            assert!(full != "5" || is_full || more > 0, "no direct links with free descriptors");
            comm.barrier().expect("the group is usable");
            rank.barrier();
        });
    }
}
