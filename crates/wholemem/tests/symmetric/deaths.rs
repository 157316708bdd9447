//! Ranks that die, stop or never come while the others wait for them in a call: an error that names them, on every one.

use std::time::Duration;

use wholemem::{Algorithm, Communicator, Dtype, Error, Group, Rank, ReduceOp, Symmetric};
use wholemem_comm::{Error as CommError, UniqueId};
use wholemem_hal::Backend;
use wholemem_os::Deadline;
use wholemem_os::interrupt::interruptible;
use wholemem_testkit::{Ranks, cuda, test_name};

use super::world::{Guarded, host, spec};

const PATIENCE: Duration = Duration::from_secs(120);

/// The group of those processes of a test that are in `members`.
pub(crate) fn join(rank: &wholemem_testkit::Rank, members: &[usize], backend: &Backend) -> Group {
    let own = members.iter().position(|member| *member == rank.id()).unwrap();
    let id = if own == 0 {
        let id = UniqueId::create().unwrap();
        members[1..].iter().for_each(|peer| rank.send(*peer, id.to_string().as_bytes(), &[]));
        id
    } else {
        String::from_utf8(rank.recv(members[0]).0).unwrap().parse().unwrap()
    };
    let comm =
        Communicator::create(&id, Rank(own as u32), members.len() as u32, Deadline::after(PATIENCE)).unwrap();
    Group::create(comm, &backend.device(0).unwrap()).unwrap()
}

fn sum(symmetric: &Symmetric, value: u32) -> Result<u32, Error> {
    const COUNT: usize = 1000;
    let stream = symmetric.group().device().stream()?;
    let buffer = Guarded::buffer(symmetric, COUNT * 4);
    stream.write(&buffer, &value.to_ne_bytes().repeat(COUNT))?;
    symmetric.all_reduce(&stream, &buffer, &buffer, Dtype::U32, ReduceOp::Sum)?;
    stream.synchronize(Deadline::NEVER)?;
    symmetric.check()?;
    let mut seen = vec![0; COUNT * 4];
    stream.read(&buffer, &mut seen)?;
    let first = [seen[0], seen[1], seen[2], seen[3]];
    assert_eq!(seen, first.repeat(COUNT));
    Ok(u32::from_ne_bytes(first))
}

/// The survivors of a death say who died, and go on in a new group on the same device.
fn survive(rank: &wholemem_testkit::Rank, backend: &Backend, algorithm: Algorithm) {
    const VICTIM: usize = 1;
    let group = join(rank, &[0, 1, 2], backend);
    let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..spec(backend, 3, Some(algorithm)) };
    let symmetric = Symmetric::create(&group, &spec).unwrap();
    assert_eq!(sum(&symmetric, 1 << group.rank().0).unwrap(), 7);
    if rank.id() == VICTIM {
        rank.barrier();
        rank.wait_to_be_killed();
    }
    rank.barrier();
    // Not before the victim has come to the barrier for both.
    rank.barrier_with(&[2 - rank.id()]);
    let survivors = [0, 2];
    let outcome = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sum(&symmetric, 1));
        if rank.id() == 0 {
            rank.kill(VICTIM);
        }
        waiting.join().unwrap()
    });
    let lost = Error::Comm(CommError::PeerLost { rank: Rank(VICTIM as u32) });
    assert_eq!(outcome, Err(lost.clone()));
    assert_eq!(sum(&symmetric, 1), Err(lost), "and so says every later call");
    rank.barrier_with(&[2 - rank.id()]);
    let group = join(rank, &survivors, backend);
    let symmetric = Symmetric::create(&group, &spec).unwrap();
    assert_eq!(sum(&symmetric, 5 + group.rank().0).unwrap(), 11);
    group.communicator().barrier().unwrap();
}

#[test]
fn a_rank_whose_caller_is_interrupted_gives_up_and_so_do_the_others() {
    let backend = host();
    let device = backend.device(0).unwrap();
    let groups = Group::local(&[device.clone(), device]).unwrap();
    let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..spec(&backend, 2, None) };
    let symmetric = Group::on_each(&groups, |group| Symmetric::create(group, &spec)).unwrap();
    let aborted = || Err(Error::Comm(CommError::Aborted { by: Rank(1) }));
    assert_eq!(interruptible(|| true, || sum(&symmetric[1], 1)), aborted(), "nobody else comes meanwhile");
    assert_eq!(sum(&symmetric[0], 1), Ok(2), "what the other gave before it gave up is there");
    assert_eq!(sum(&symmetric[0], 1), aborted());
}

#[test]
fn who_dies_while_the_others_wait_is_named_and_they_go_on() {
    for algorithm in Algorithm::ALL {
        Ranks::of(3).killed(1).parameter(algorithm.to_string()).run(test_name!(), |rank| {
            survive(rank, &host(), rank.parameter().parse().unwrap());
        });
    }
}

/// The rank that dies has nothing running on the GPU.
#[test]
fn gpu_who_dies_while_the_others_wait_is_named_and_they_go_on() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    for algorithm in Algorithm::ALL {
        Ranks::of(3).killed(1).parameter(algorithm.to_string()).run(test_name!(), |rank| {
            survive(rank, &cuda::backend().unwrap(), rank.parameter().parse().unwrap());
        });
    }
}

/// A rank that is there, but does not call.
fn miss(backend: &Backend) {
    for algorithm in Algorithm::ALL {
        let spec = wholemem::SymmetricSpec {
            timeout: Duration::from_millis(300),
            ..spec(backend, 3, Some(algorithm))
        };
        let groups = super::world::groups(backend, 3);
        let outcomes = Group::on_each(&groups, |group| {
            let symmetric = Symmetric::create(group, &spec)?;
            assert_eq!(sum(&symmetric, 1)?, 3);
            let outcome = if group.rank() == Rank(2) { Ok(0) } else { sum(&symmetric, 1) };
            group.communicator().barrier()?;
            // Who comes after all may still find what the others had brought along, once.
            let late = sum(&symmetric, 1);
            Ok((outcome, if group.rank() == Rank(2) { sum(&symmetric, 1) } else { late }))
        });
        let (missing, timeout) = (vec![Rank(2)], spec.timeout);
        let late = Err(Error::Comm(CommError::Timeout { missing, timeout, joining: false }));
        let outcomes = outcomes.unwrap();
        assert_eq!([&outcomes[0].0, &outcomes[1].0], [&late; 2], "{algorithm}");
        assert_eq!([&outcomes[0].1, &outcomes[1].1], [&late; 2], "{algorithm}: and so says every later call");
        assert!(matches!(&outcomes[2].1, Err(Error::Comm(CommError::Timeout { .. }))), "{:?}", outcomes[2]);
    }
}

#[test]
fn who_does_not_come_in_time_is_named() {
    miss(&host());
}

#[test]
fn gpu_who_does_not_come_in_time_is_named() {
    if let Some(backend) = cuda::backend() {
        miss(&backend);
    }
}

#[test]
fn who_waits_is_woken_when_another_aborts() {
    let backend = host();
    let groups = super::world::groups(&backend, 2);
    let spec = spec(&backend, 2, None);
    let outcomes = Group::on_each(&groups, |group| {
        let symmetric = Symmetric::create(group, &spec)?;
        if group.rank() == Rank(1) {
            group.communicator().abort();
            return Ok(None);
        }
        Ok(Some(sum(&symmetric, 1)))
    });
    let aborted = Error::Comm(CommError::Aborted { by: Rank(1) });
    assert_eq!(outcomes.unwrap(), [Some(Err(aborted)), None]);
}
