//! Descriptors that a rank cannot take: nobody gets any, all learn whose table was full, and the group still stands.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wholemem_comm::{Communicator, Error, Rank, UniqueId};
use wholemem_os::{Deadline, Memfd};
use wholemem_testkit::{Census, Ranks, test_name};

#[test]
fn a_rank_whose_table_is_full_is_named_and_nothing_is_lost_but_the_operation() {
    let id = UniqueId::create().expect("an id").to_string();
    Ranks::of(7).parameter(id).run(test_name!(), |rank| {
        let me = Rank(u32::try_from(rank.id()).expect("small"));
        let id = rank.parameter().parse().expect("an id");
        let deadline = Deadline::after(Duration::from_secs(60));
        let comm = Communicator::create(&id, me, 7, deadline).expect("a group");
        let own: Vec<_> = (0..100).map(|_| Memfd::create("test", 4096).expect("memory")).collect();
        let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
        let before = Census::take();
        let limit = getrlimit(Resource::Nofile);
        // Rank 1 has one below it and one above; rank 6 is the one below.
        for full in [1, 0, 6] {
            if me.0 == full {
                let low = Rlimit { current: Some(before.fds.len() as u64 + 150), ..limit };
                setrlimit(Resource::Nofile, low).expect("a lower limit");
            }
            let error = comm.all_gather_fds(&fds).expect_err("a table is full");
            assert!(matches!(&error, Error::Descriptors { rank, .. } if rank.0 == full), "{error}");
            setrlimit(Resource::Nofile, limit).expect("the limit as it was");
            comm.barrier().expect("the group stands");
            let all = comm.all_gather_fds(&fds).expect("now there is room");
            assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [100; 7]);
            drop(all);
            comm.barrier().expect("all have let go of them");
            // What waits in an outbox still holds copies; when the batch has been taken, they are gone.
            let settled = (0..500).any(|_| {
                std::thread::sleep(Duration::from_millis(10));
                Census::take() == before
            });
            assert!(settled, "descriptors are left");
            // Not by the group: who leaves it is seen in the census of the others.
            rank.barrier();
        }
    });
}
