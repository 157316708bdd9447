//! Tests of every operation of a communicator, with ranks that are threads of this process.

use std::os::fd::AsFd;
use std::time::Duration;

use proptest::prelude::*;
use wholemem_comm::{Bootstrap, Error, Rank, UniqueId, VoteResult};
use wholemem_os::interrupt::interruptible;
use wholemem_os::{Deadline, Memfd};

const SIZES: [u32; 6] = [1, 2, 3, 5, 7, 22];

/// Runs `body` in a thread for each rank of a new group.
fn each(size: u32, body: impl Fn(&Bootstrap) + Sync) {
    let ranks = Bootstrap::local(size).expect("a group");
    std::thread::scope(|scope| {
        for comm in &ranks {
            scope.spawn(|| body(comm));
        }
    });
}

fn bytes(from: Rank, to: u32, len: usize) -> Vec<u8> {
    (0..len).map(|n| (from.0 as usize * 31 + to as usize * 7 + n).to_le_bytes()[0]).collect()
}

#[test]
fn a_barrier_returns_after_every_rank_has_called_it() {
    use std::sync::atomic::{AtomicU32, Ordering};
    for size in SIZES {
        let here = AtomicU32::new(0);
        each(size, |comm| {
            for round in 1..=20 {
                here.fetch_add(1, Ordering::SeqCst);
                comm.barrier().expect("a barrier");
                assert!(here.load(Ordering::SeqCst) >= round * size);
            }
        });
    }
}

#[test]
fn broadcast_returns_the_bytes_of_the_root_on_all_ranks() {
    for size in SIZES {
        each(size, |comm| {
            for root in (0..comm.size()).map(Rank) {
                let got = comm.broadcast(root, &bytes(comm.rank(), 0, 1000)).expect("a broadcast");
                assert_eq!(got, bytes(root, 0, 1000));
            }
            assert_eq!(comm.broadcast(Rank(0), &[]).expect("a broadcast"), [0; 0]);
        });
    }
}

#[test]
fn all_gather_returns_the_bytes_of_all_ranks_also_long_and_empty_ones() {
    for size in SIZES {
        each(size, |comm| {
            for len in [0, 1, 4096, 300_000] {
                // Ranks pass different numbers of bytes, because `all_gather` does not require equal ones.
                let len_of = |rank: Rank| len + rank.index() % 3 * usize::from(len > 0);
                let got = comm.all_gather(&bytes(comm.rank(), 0, len_of(comm.rank()))).expect("all_gather");
                let expected: Vec<_> =
                    (0..comm.size()).map(|rank| bytes(Rank(rank), 0, len_of(Rank(rank)))).collect();
                assert_eq!(got, expected);
            }
        });
    }
}

#[test]
fn all_to_all_transposes() {
    for size in SIZES {
        each(size, |comm| {
            let me = comm.rank();
            for len in [0, 3, 100_000] {
                let parts: Vec<_> = (0..comm.size()).map(|to| bytes(me, to, len + to as usize % 2)).collect();
                let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
                let got = comm.all_to_allv(&parts).expect("all_to_allv");
                let expected: Vec<_> =
                    (0..comm.size()).map(|from| bytes(Rank(from), me.0, len + me.index() % 2)).collect();
                assert_eq!(got, expected);
            }
            let sent: Vec<_> = (0..comm.size()).flat_map(|to| bytes(me, to, 8)).collect();
            let expected: Vec<_> = (0..comm.size()).flat_map(|from| bytes(Rank(from), me.0, 8)).collect();
            assert_eq!(comm.all_to_all(&sent), Ok(expected));
        });
    }
}

#[test]
fn a_rank_that_leaves_after_all_to_all_has_forwarded_all_messages() {
    for _ in 0..50 {
        let ranks = Bootstrap::local(22).expect("a group");
        std::thread::scope(|scope| {
            for comm in ranks {
                scope.spawn(move || assert_eq!(comm.all_to_all(&[7; 220]), Ok(vec![7; 220])));
            }
        });
    }
}

#[test]
fn all_gather_fds_returns_the_memory_of_all_ranks() {
    for size in [1, 2, 3, 7] {
        each(size, |comm| {
            // Rank `n` passes `n` descriptors, but rank 1 passes 150, more than fit into two batches.
            let count = |rank: u32| if rank == 1 { 150 } else { rank as usize };
            let own: Vec<_> = (0..count(comm.rank().0))
                .map(|n| Memfd::create("test", 4096 * (n + 1)).expect("memory"))
                .collect();
            let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
            for _ in 0..2 {
                let got = comm.all_gather_fds(&fds).expect("all_gather_fds");
                assert_eq!(got.len(), size as usize);
                for (rank, fds) in (0..size).zip(got) {
                    assert_eq!(fds.len(), count(rank));
                    for (n, fd) in fds.into_iter().enumerate() {
                        Memfd::import(fd, 4096 * (n + 1)).expect("the nth memory of that rank");
                    }
                }
            }
        });
    }
}

#[test]
fn the_lowest_rank_that_votes_against_is_reported_to_all() {
    each(7, |comm| {
        assert_eq!(comm.agree(Ok(())), Ok(VoteResult::Agreed));
        let vote = if comm.rank().0 >= 3 { Err("no memory left") } else { Ok(()) };
        let reason = "no memory left".to_owned();
        assert_eq!(comm.agree(vote), Ok(VoteResult::Refused { rank: Rank(3), reason }));
        assert_eq!(comm.barrier(), Ok(()), "the group is still usable");
    });
}

#[test]
fn split_orders_by_key_and_omits_ranks_without_a_color() {
    each(9, |comm| {
        let rank = comm.rank().0;
        let color = (rank != 4).then_some(rank % 2);
        let part = comm.split(color, 100 - rank).expect("split");
        let Some(part) = part else { return assert_eq!(rank, 4) };
        let members: Vec<u32> = (0..9).rev().filter(|other| *other != 4 && other % 2 == rank % 2).collect();
        assert_eq!(part.size() as usize, members.len());
        assert_eq!(members[part.rank().index()], rank);
        let names = part.all_gather(&rank.to_le_bytes()).expect("all_gather");
        let expected: Vec<_> = members.iter().map(|member| member.to_le_bytes().to_vec()).collect();
        assert_eq!(names, expected);
        // Splits the split group again, while the original group exists.
        let alone = part.split(Some(part.rank().0), 0).expect("split").expect("a part");
        assert_eq!((alone.rank(), alone.size()), (Rank(0), 1));
        part.barrier().expect("the split group is usable");
    });
}

#[test]
fn two_nodes_of_two_ranks_are_split_into_two_groups() {
    each(4, |comm| {
        let name = ["a", "b", "a", "b"][comm.rank().index()];
        let node = comm.split_by_node_named(name).expect("a node");
        assert_eq!((node.rank().0, node.size()), (comm.rank().0 / 2, 2));
    });
}

#[test]
fn abort_ends_the_operations_of_the_other_ranks() {
    let ranks = Bootstrap::local(3).expect("a group");
    let aborted = Err(Error::Aborted { by: Rank(2) });
    std::thread::scope(|scope| {
        let waiting: Vec<_> = ranks[..2].iter().map(|comm| scope.spawn(|| comm.barrier())).collect();
        ranks[2].abort();
        for waiting in waiting {
            assert_eq!(waiting.join().expect("no panic"), aborted);
        }
    });
    for comm in &ranks {
        assert_eq!((comm.check(), comm.barrier()), (aborted.clone(), aborted.clone()));
    }
}

#[test]
fn a_rank_that_never_calls_is_reported_and_the_group_becomes_unusable() {
    let mut ranks = Bootstrap::local(3).expect("a group");
    // After its timeout has expired, rank 0 informs the other ranks which rank is missing, within a further quarter of the
    // timeout.
    let timeout = Duration::from_secs(3);
    ranks.iter_mut().for_each(|comm| comm.set_timeout(timeout));
    std::thread::scope(|scope| {
        for comm in [&ranks[0], &ranks[2]] {
            scope.spawn(|| {
                let missing = vec![Rank(1)];
                assert_eq!(
                    comm.barrier(),
                    Err(Error::Timeout { missing: missing.clone(), timeout, joining: false })
                );
                assert_eq!(comm.barrier(), Err(Error::Poisoned { missing }));
            });
        }
    });
    // Waits until rank 1 knows of the failure, which it may receive later than the other ranks.
    while ranks[1].check().is_ok() {
        std::thread::yield_now();
    }
    assert_eq!(ranks[1].barrier(), Err(Error::Poisoned { missing: vec![Rank(1)] }));
}

#[test]
fn operations_fail_after_a_rank_has_left_and_not_before() {
    let mut ranks = Bootstrap::local(3).expect("a group");
    let last = ranks.pop().expect("rank 2");
    std::thread::scope(|scope| {
        for comm in &ranks {
            scope.spawn(|| {
                assert_eq!(comm.barrier(), Ok(()));
                assert_eq!(comm.barrier(), Err(Error::PeerLeft { rank: Rank(2) }));
            });
        }
        scope.spawn(move || {
            assert_eq!(last.barrier(), Ok(()));
            assert_eq!(last.close(), Ok(()));
        });
    });
    assert_eq!(ranks.pop().expect("rank 1").close(), Ok(()));
}

#[test]
fn leave_ends_the_operations_of_other_threads() {
    for operation in [
        Bootstrap::barrier,
        |comm: &Bootstrap| comm.all_to_all(b"ab").map(drop),
        |comm: &Bootstrap| comm.split(Some(0), 0).map(drop),
    ] {
        let ranks = Bootstrap::local(2).expect("a group");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| operation(&ranks[0]));
            // The barrier, all_to_all or split ends with an error, whether or not it has begun when the rank leaves.
            ranks[0].leave();
            assert_eq!(waits.join().expect("no panic"), Err(Error::Closed));
            assert_eq!(ranks[1].barrier(), Err(Error::PeerLeft { rank: Rank(0) }));
        });
        assert_eq!(ranks[0].check(), Err(Error::Closed));
        ranks[0].leave();
    }
}

#[test]
fn invalid_arguments_are_refused_and_the_group_stays_usable() {
    each(2, |comm| {
        let size = 2;
        assert_eq!(comm.broadcast(Rank(2), b""), Err(Error::NoSuchRank { rank: Rank(2), size }));
        assert_eq!(comm.all_to_all(&[0; 3]), Err(Error::WrongCount { count: 3, size }));
        assert_eq!(comm.all_to_allv(&[]), Err(Error::WrongCount { count: 0, size }));
        if comm.rank().0 == 0 {
            // The memory of the too long payload is never accessed, so the kernel allocates no pages.
            let (len, limit) = ((1 << 30) + 1, 1 << 30);
            let long = vec![0; len];
            let refused = Error::TooLong { len, limit };
            assert_eq!(comm.all_gather(&long).as_ref(), Err(&refused));
            assert_eq!(comm.broadcast(Rank(0), &long).as_ref(), Err(&refused));
            assert_eq!(comm.all_to_allv(&[&[], &long]).as_ref(), Err(&refused));
        }
        assert_eq!(comm.barrier(), Ok(()));
    });
}

#[test]
fn an_operation_whose_caller_is_interrupted_ends_the_group() {
    type Operation = fn(&Bootstrap) -> Result<(), Error>;
    let memory = |comm: &Bootstrap| {
        let memory = Memfd::create("test", 4096).expect("memory");
        comm.all_gather_fds(&[memory.as_fd()]).map(drop)
    };
    let operations: [Operation; 3] = [Bootstrap::barrier, |comm| comm.all_to_all(&[0; 2]).map(drop), memory];
    for operation in operations {
        let ranks = Bootstrap::local(2).expect("a group");
        // Rank 1 does not call the operation until rank 0 was interrupted, so rank 0 has to wait.
        let interrupted = interruptible(|| true, || operation(&ranks[0]));
        assert_eq!(interrupted, Err(Error::Aborted { by: Rank(0) }));
        assert_eq!(operation(&ranks[1]), Err(Error::Aborted { by: Rank(0) }));
    }
}

#[test]
fn an_operation_that_need_not_wait_is_not_interrupted() {
    let alone = Bootstrap::local(1).expect("a group");
    assert_eq!(interruptible(|| true, || alone[0].barrier()), Ok(()));
}

#[test]
fn joining_can_be_interrupted() {
    let id = UniqueId::create().expect("an id");
    let join = || Bootstrap::create(&id, Rank(0), 2, Deadline::NEVER).map(drop);
    assert_eq!(interruptible(|| true, join), Err(Error::Aborted { by: Rank(0) }));
}

#[test]
fn a_group_above_the_maximum_size_is_refused_at_once() {
    let id = UniqueId::create().expect("an id");
    let size = 3_000_000;
    let refused = Bootstrap::create(&id, Rank(0), size, Deadline::NEVER).map(drop);
    assert_eq!(refused, Err(Error::TooManyRanks { size, limit: 65_536 }));
}

#[test]
fn a_rank_opens_further_connections_only_for_long_messages() {
    each(100, |comm| assert!(comm.connections() <= 5, "{}", comm.connections()));
    each(12, |comm| {
        let first = comm.connections();
        let exchange = |len: usize| {
            let parts: Vec<_> = (0..12).map(|to| bytes(comm.rank(), to, len)).collect();
            let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
            let expected: Vec<_> = (0..12).map(|from| bytes(Rank(from), comm.rank().0, len)).collect();
            assert_eq!(comm.all_to_allv(&parts).expect("all_to_allv"), expected);
        };
        exchange(1000);
        assert_eq!(comm.connections(), first, "short messages need no link");
        exchange(1 << 20);
        assert_eq!(comm.connections(), 11, "one link to each of the other ranks");
        exchange(1 << 20);
        assert_eq!(comm.connections(), 11, "links are reused");
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Compares the results of random sequences of collective operations with the results computed from the inputs of
    /// all ranks.
    #[test]
    fn any_sequence_of_operations_equals_the_naive_result(
        size in 1u32..9,
        operations in prop::collection::vec((0u8..4, 0usize..5000), 1..12),
    ) {
        each(size, |comm| {
            let me = comm.rank();
            for (operation, len) in &operations {
                match operation {
                    0 => comm.barrier().expect("barrier"),
                    1 => {
                        let root = Rank(u32::try_from(*len).expect("small") % size);
                        assert_eq!(comm.broadcast(root, &bytes(me, 1, *len)).expect("broadcast"), bytes(root, 1, *len));
                    }
                    2 => {
                        let expected: Vec<_> = (0..size).map(|rank| bytes(Rank(rank), 2, *len)).collect();
                        assert_eq!(comm.all_gather(&bytes(me, 2, *len)).expect("all_gather"), expected);
                    }
                    _ => {
                        let sent: Vec<_> = (0..size).flat_map(|to| bytes(me, to, *len)).collect();
                        let expected: Vec<_> = (0..size).flat_map(|from| bytes(Rank(from), me.0, *len)).collect();
                        assert_eq!(comm.all_to_all(&sent).expect("all_to_all"), expected);
                    }
                }
            }
        });
    }
}
