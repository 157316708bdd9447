//! Tests of ranks that make different calls: every rank gets an error that names both calls.
//!
//! The timeout is so long that a rank that waits for it makes the test hang visibly.

use std::os::fd::AsFd;
use std::time::Duration;

use proptest::prelude::*;
use wholemem_comm::{Bootstrap, Error, Rank, VoteResult};
use wholemem_os::Memfd;

const TIMEOUT: Duration = Duration::from_secs(3600);

/// A call with its text in errors, and a function that makes it.
type Call = (&'static str, fn(&Bootstrap) -> Result<(), Error>);

/// Calls that differ in the operation, or in an argument that must be equal on all ranks.
const CALLS: [Call; 12] = [
    ("barrier", Bootstrap::barrier),
    ("broadcast(root = 0)", |comm| comm.broadcast(Rank(0), b"bytes").map(drop)),
    ("broadcast(root = 1)", |comm| comm.broadcast(Rank(1), b"bytes").map(drop)),
    ("all_gather", |comm| comm.all_gather(b"bytes").map(drop)),
    ("all_to_all(part_len = 0)", |comm| comm.all_to_all(&[]).map(drop)),
    ("all_to_all(part_len = 8)", |comm| comm.all_to_all(&vec![7; 8 * comm.size() as usize]).map(drop)),
    // Parts of this length are so long that they are sent on direct links between ranks instead of along the tree.
    ("all_to_all(part_len = 100000)", |comm| {
        comm.all_to_all(&vec![7; 100_000 * comm.size() as usize]).map(drop)
    }),
    ("all_to_allv", |comm| comm.all_to_allv(&vec![&b"12345678"[..]; comm.size() as usize]).map(drop)),
    ("all_gather_fds", |comm| {
        let memory = Memfd::create("test", 4096).expect("memory");
        comm.all_gather_fds(&[memory.as_fd()]).map(drop)
    }),
    ("agree", |comm| comm.agree(Ok(())).map(drop)),
    ("split", |comm| comm.split(Some(0), 0).map(drop)),
    ("split_by_node", |comm| comm.split_by_node_named("node").map(drop)),
];

/// Runs `body` in a thread for each rank of a new group, and returns the results by rank.
fn each<T: Send>(size: u32, body: impl Fn(&Bootstrap) -> T + Sync) -> Vec<T> {
    let mut ranks = Bootstrap::local(size).expect("a group");
    ranks.iter_mut().for_each(|comm| comm.set_timeout(TIMEOUT));
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter().map(|comm| scope.spawn(move || body(comm))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn disagree(rank: Rank, here: &str, there: &str) -> Error {
    Error::RanksDisagree { rank, here: here.to_owned(), there: there.to_owned() }
}

/// Asserts that every rank gets the error if `differing` makes the call `other`, and all other ranks the call `common`.
fn check(size: u32, differing: Rank, other: Call, common: Call) {
    let results = each(size, |comm| {
        let (_, call) = if comm.rank() == differing { other } else { common };
        let first = call(comm).expect_err("the ranks disagree");
        assert!(first.poisons());
        // Every later call fails with the same error, whatever operation it is.
        assert_eq!((comm.check(), comm.barrier()), (Err(first.clone()), Err(first.clone())));
        first
    });
    for (rank, error) in (0..).map(Rank).zip(results) {
        let case =
            format!("`{}` on rank {differing} of {size}, otherwise `{}`: on rank {rank}", other.0, common.0);
        if rank != differing {
            assert_eq!(error, disagree(differing, common.0, other.0), "{case}");
            continue;
        }
        // On the rank that differs, the error contains one of the other ranks, all of which made the same call, so any of their
        // numbers is right.
        let Error::RanksDisagree { rank: named, .. } = error else { panic!("{error} {case}") };
        assert!(named != differing && named.0 < size, "{error} {case}");
        assert_eq!(error, disagree(named, other.0, common.0), "{case}");
    }
}

/// Tests every ordered pair of calls in groups of `size` ranks, with every rank in turn as the one that differs.
fn check_all_pairs(size: u32) {
    for differing in (0..size).map(Rank) {
        for (n, other) in CALLS.into_iter().enumerate() {
            for (m, common) in CALLS.into_iter().enumerate() {
                if n != m {
                    check(size, differing, other, common);
                }
            }
        }
    }
}

#[test]
fn two_ranks_with_any_two_different_calls_disagree() {
    check_all_pairs(2);
}

#[test]
fn three_ranks_with_any_two_different_calls_disagree() {
    check_all_pairs(3);
}

#[test]
fn five_ranks_with_any_two_different_calls_disagree() {
    check_all_pairs(5);
}

#[test]
fn ranks_that_are_no_neighbours_of_the_differing_rank_disagree_too() {
    // Ranks 5 and 21 have parents that are not rank 0, and rank 1 is between them and rank 0.
    for differing in [0, 1, 5, 21].map(Rank) {
        for (other, common) in [(0, 3), (0, 7), (7, 0), (6, 0), (0, 6), (8, 10), (4, 5)] {
            check(22, differing, CALLS[other], CALLS[common]);
        }
    }
}

#[test]
fn each_rank_is_told_a_call_that_differs_from_its_own() {
    for size in [2, 3, 5, 12] {
        let results = each(size, |comm| {
            let (_, call) = CALLS[comm.rank().index()];
            call(comm).expect_err("every rank makes another call")
        });
        for (rank, error) in results.into_iter().enumerate() {
            let Error::RanksDisagree { rank: named, .. } = error else { panic!("{error} on rank {rank}") };
            assert_ne!(named.index(), rank);
            assert_eq!(error, disagree(named, CALLS[rank].0, CALLS[named.index()].0));
        }
    }
}

#[test]
fn ranks_disagree_also_after_operations_in_which_they_agreed() {
    for (size, differing) in [(2, 1), (3, 0), (5, 4)] {
        let differing = Rank(differing);
        let results = each(size, |comm| {
            // All calls but `broadcast` with rank 1 as the root are made on all ranks first.
            for (name, call) in CALLS {
                assert_eq!(call(comm), Ok(()), "{name}");
            }
            assert_eq!(comm.agree(Ok(())), Ok(VoteResult::Agreed));
            if comm.rank() == differing { comm.barrier() } else { comm.all_to_all(&[]).map(drop) }
        });
        for (rank, result) in (0..).map(Rank).zip(results) {
            match result {
                Err(Error::RanksDisagree { rank: named, here, there }) if rank == differing => {
                    assert_ne!(named, differing);
                    assert_eq!((&here[..], &there[..]), ("barrier", "all_to_all(part_len = 0)"));
                }
                other => assert_eq!(other, Err(disagree(differing, "all_to_all(part_len = 0)", "barrier"))),
            }
        }
    }
}

#[test]
fn arguments_that_may_differ_are_no_disagreement() {
    for size in [2, 3, 5] {
        each(size, |comm| {
            let rank = comm.rank().0;
            let own = vec![rank.to_le_bytes()[0]; rank as usize];
            let all: Vec<_> = (0..size).map(|rank| vec![rank.to_le_bytes()[0]; rank as usize]).collect();
            assert_eq!(
                comm.broadcast(Rank(1), &own).expect("bytes"),
                all[1],
                "only the bytes of the root count"
            );
            assert_eq!(comm.all_gather(&own).expect("bytes"), all);
            assert_eq!(comm.all_to_allv(&vec![&own[..]; size as usize]).expect("parts"), all);
            let memory = Memfd::create("test", 4096).expect("memory");
            let fds = vec![memory.as_fd(); rank as usize];
            let gathered = comm.all_gather_fds(&fds).expect("descriptors");
            assert!(gathered.iter().enumerate().all(|(rank, fds)| fds.len() == rank));
            let vote = if rank == 0 { Ok(()) } else { Err("no") };
            let refused = VoteResult::Refused { rank: Rank(1), reason: "no".to_owned() };
            assert_eq!(comm.agree(vote), Ok(refused));
            let part = comm.split((rank != 0).then_some(rank), rank).expect("a group");
            assert_eq!(part.map(|part| part.size()), (rank != 0).then_some(1));
            assert_eq!(comm.split_by_node_named(&rank.to_string()).expect("a group").size(), 1);
        });
    }
}

#[test]
fn a_rank_that_makes_no_call_is_told_both_calls_and_its_first_call_is_in_later_errors() {
    let ranks = Bootstrap::local(3).expect("a group");
    let (sender, receiver) = std::sync::mpsc::channel();
    let _watch = ranks[2].watch(move |error| drop(sender.send(error.clone())));
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(ranks[0].barrier(), Err(disagree(Rank(1), "barrier", "agree"))));
        scope.spawn(|| assert_eq!(ranks[1].agree(Ok(())), Err(disagree(Rank(0), "agree", "barrier"))));
    });
    let both = disagree(Rank(0), "nothing (rank 1: agree)", "barrier");
    assert_eq!(receiver.recv().expect("the failure"), both);
    assert_eq!(ranks[2].check(), Err(both));
    let own = disagree(Rank(0), "agree", "barrier");
    // Rank 2 makes the call of rank 1, so it differs from rank 0 and not from rank 1.
    assert_eq!(ranks[2].agree(Ok(())), Err(own.clone()));
    assert_eq!((ranks[2].barrier(), ranks[2].check()), (Err(own.clone()), Err(own)));
}

#[test]
fn a_rank_that_makes_no_call_is_missing_if_no_two_ranks_disagree() {
    let mut ranks = Bootstrap::local(3).expect("a group");
    let timeout = Duration::from_millis(500);
    ranks.iter_mut().for_each(|comm| comm.set_timeout(timeout));
    std::thread::scope(|scope| {
        for comm in [&ranks[0], &ranks[2]] {
            let missing = vec![Rank(1)];
            let timed_out = Error::Timeout { missing, timeout, joining: false };
            scope.spawn(|| assert_eq!(comm.all_to_all(b"abc"), Err(timed_out)));
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// Assigns a call to each rank at random. Most cases have few different calls, so that ranks that agree are between
    /// ranks that do not.
    #[test]
    fn calls_either_agree_on_all_ranks_or_fail_on_all_ranks(
        choice in prop::collection::vec(0..CALLS.len(), 1..4),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 2..30),
    ) {
        let size = u32::try_from(picks.len()).expect("small");
        let calls: Vec<_> = picks.iter().map(|pick| CALLS[*pick.get(&choice)]).collect();
        let agree = calls.iter().all(|(name, _)| *name == calls[0].0);
        let results = each(size, |comm| calls[comm.rank().index()].1(comm));
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Ok(()) => prop_assert!(agree),
                Err(Error::RanksDisagree { rank: named, here, there }) => {
                    prop_assert_eq!((&here[..], &there[..]), (calls[rank].0, calls[named.index()].0));
                    prop_assert_ne!(here, there);
                }
                Err(error) => prop_assert!(false, "{} on rank {}", error, rank),
            }
        }
    }
}
