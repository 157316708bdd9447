//! Tests of ranks in different Linux namespaces, with and without a common socket directory.

use std::os::fd::AsFd;
use std::time::Duration;

use wholemem_comm::discovery::DiscoveryError;
use wholemem_comm::{Bootstrap, Error, Rank, UniqueId};
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Memfd, SharedMap};
use wholemem_testkit::{Ranks, test_name};

fn join(id: &str, rank: usize, timeout: Duration) -> Result<Bootstrap, Error> {
    let rank = Rank(u32::try_from(rank).expect("small"));
    Bootstrap::create(&id.parse()?, rank, 2, Deadline::after(timeout))
}

#[test]
fn ranks_in_different_namespaces_share_memory_through_a_common_socket_directory() {
    if !Ranks::can_use_namespaces() {
        return wholemem_testkit::skipped("namespaces are not permitted here");
    }
    let folder = tempfile::tempdir_in("/tmp").expect("a directory");
    let id = UniqueId::create_in(&folder.path().join("s")).expect("an id");
    Ranks::of(2).in_own_namespaces(1).parameter(id.to_string()).run(test_name!(), |rank| {
        let comm = join(&rank.parameter(), rank.id(), Duration::from_secs(60)).expect("a group");
        let memory = Memfd::create("test", 4096).expect("memory");
        let here = SharedMap::create(&memory, Protection::ReadWrite).expect("a map");
        let fds = comm.all_gather_fds(&[memory.as_fd()]).expect("descriptors");
        let there = fds.into_iter().nth(1 - rank.id()).expect("two ranks").remove(0);
        let there = Memfd::import(there, 4096).expect("the other's memory");
        let there = SharedMap::create(&there, Protection::ReadWrite).expect("a map");
        there.bytes().write_at(0, &[u8::try_from(rank.id()).expect("small") + 1]).expect("a byte");
        comm.barrier().expect("both have written");
        let mut seen = [0];
        here.bytes().read_at(0, &mut seen).expect("a byte");
        assert_eq!(
            usize::from(seen[0]),
            2 - rank.id(),
            "the byte that the other rank wrote into this rank's memory"
        );
        comm.barrier().expect("both have read");
        // The death of a rank in another PID namespace is detected like any other death.
        if rank.id() == 1 {
            std::mem::forget(comm);
            return;
        }
        assert_eq!(comm.barrier(), Err(Error::PeerLost { rank: Rank(1) }));
    });
    let left = std::fs::read_dir(folder.path().join("s")).expect("the directory").count();
    assert_eq!(left, 0, "no socket file is left");
}

#[test]
fn without_a_common_socket_directory_the_error_names_the_variable() {
    if !Ranks::can_use_namespaces() {
        return wholemem_testkit::skipped("namespaces are not permitted here");
    }
    // The test needs an id without a socket directory, so it is skipped if the environment variable is set.
    let id = if std::env::var_os("WHOLEMEM_SOCKET_DIR").is_some() {
        return wholemem_testkit::skipped("`WHOLEMEM_SOCKET_DIR` is set");
    } else {
        UniqueId::create().expect("an id")
    };
    Ranks::of(2).in_own_namespaces(1).parameter(id.to_string()).run(test_name!(), |rank| {
        let error = join(&rank.parameter(), rank.id(), Duration::from_millis(800)).expect_err("unreachable");
        if rank.id() == 1 {
            assert_eq!(error, Error::OtherNamespace { rank: Rank(1) });
        } else {
            assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [Rank(1)]), "{error}");
        }
        assert!(error.to_string().contains("WHOLEMEM_SOCKET_DIR"), "{error}");
    });
}

#[test]
fn ranks_on_several_nodes_without_a_secret_are_refused_at_once() {
    // Only one of two ranks is started: if it were not refused, it would wait for the other rank, longer than the
    // harness waits.
    let two_nodes = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")];
    let others = [("MASTER_ADDR", "node-0"), ("MASTER_PORT", "29500"), ("WHOLEMEM_TIMEOUT", "3600")];
    let variables = two_nodes.into_iter().chain(others);
    let ranks = variables.fold(Ranks::of(1), |ranks, (name, value)| ranks.env(name, value));
    ranks.run(test_name!(), |_| {
        assert_eq!(Bootstrap::from_env().map(drop), Err(Error::Discovery(DiscoveryError::NoSecret)));
    });
}
