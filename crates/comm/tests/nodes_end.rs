//! Tests of how a group on several nodes ends: ranks leave it, abort it, or make different calls. The ranks are threads,
//! and those of different nodes use different directories for their sockets.

use std::net::TcpListener;
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error, Network, Rank, UniqueId};
use wholemem_os::Deadline;

/// Runs `body` in a thread for each rank of a new group of three nodes with two ranks each.
fn each(body: impl Fn(Bootstrap) + Sync) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let network = Network::new(listener.local_addr().expect("an address")).with_listener(listener);
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let id = UniqueId::create().expect("an id");
    std::thread::scope(|scope| {
        for rank in 0..6 {
            let network = network.clone().with_socket_dir(&folder.path().join((rank / 2).to_string()));
            let (id, body) = (&id, &body);
            scope.spawn(move || {
                let deadline = Deadline::after(Duration::from_secs(60));
                body(Bootstrap::create_over(&network, id, Rank(rank), 6, deadline).expect("a group"));
            });
        }
    });
}

#[test]
fn a_rank_that_leaves_is_named_on_all_nodes_after_the_operations_that_it_has_finished() {
    // A rank of each kind leaves: rank 0, a rank of its node, and ranks of other nodes, of which one is the leader.
    for leaver in [0, 1, 2, 3].map(Rank) {
        each(|comm| {
            comm.barrier().expect("all ranks take part");
            if comm.rank() == leaver {
                return comm.close().expect("the group is usable");
            }
            // Other ranks may leave when they have got the error, before this rank is notified of the first.
            let error = comm.barrier().expect_err("a rank has left");
            assert!(matches!(error, Error::PeerLeft { .. }), "{error}");
        });
    }
}

#[test]
fn an_abort_ends_the_group_on_all_nodes() {
    for aborting in [0, 3, 5].map(Rank) {
        each(|comm| {
            if comm.rank() == aborting {
                comm.abort();
            }
            let aborted = Error::Aborted { by: aborting };
            assert_eq!(comm.barrier(), Err(aborted.clone()));
            assert_eq!(comm.check(), Err(aborted));
        });
    }
}

#[test]
fn ranks_of_different_nodes_that_make_different_calls_are_told() {
    each(|comm| {
        let outcome = if comm.rank().0 < 4 { comm.barrier() } else { comm.agree(Ok(())).map(drop) };
        let Err(Error::RanksDisagree { here, there, .. }) = outcome else { panic!("{outcome:?}") };
        let own = if comm.rank().0 < 4 { "barrier" } else { "agree" };
        assert_eq!(here, own);
        assert_ne!(there, own);
    });
}

#[test]
fn a_missing_rank_of_an_operation_is_named_on_all_nodes() {
    let timeout = Duration::from_secs(1);
    // If rank 0 were missing, ranks that give up at the same time could name the leaders of their nodes, which wait too.
    for missing in [1, 2, 3, 4].map(Rank) {
        each(|mut comm| {
            comm.set_timeout(timeout);
            if comm.rank() == missing {
                let error = std::iter::repeat_with(|| comm.check()).find_map(Result::err).expect("a failure");
                assert_eq!(error, Error::Poisoned { missing: vec![missing] });
                return;
            }
            let timed_out = Error::Timeout { missing: vec![missing], timeout, joining: false };
            assert_eq!(comm.barrier(), Err(timed_out));
        });
    }
}
