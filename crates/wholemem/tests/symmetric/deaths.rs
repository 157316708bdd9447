//! Ranks that die, stop or never come while the others wait for them in a call: an error that names them, on every one.

use std::time::Duration;

use wholemem::{
    Algorithm, Bootstrap, CallFaults, Communicator, Dtype, Error, Rank, ReduceOp, SymmetricMemory,
};
use wholemem_comm::{Error as CommError, UniqueId};
use wholemem_hal::Backend;
use wholemem_os::Deadline;
use wholemem_os::interrupt::interruptible;
use wholemem_testkit::{Ranks, cuda, exhaustive, seed, test_name};

use super::values::Random;
use super::world::{Guarded, fragile, host, spec};

const PATIENCE: Duration = Duration::from_secs(120);

/// The group of those processes of a test that are in `members`.
pub(crate) fn join(rank: &wholemem_testkit::Rank, members: &[usize], backend: &Backend) -> Communicator {
    let own = members.iter().position(|member| *member == rank.id()).unwrap();
    let id = if own == 0 {
        let id = UniqueId::create().unwrap();
        members[1..].iter().for_each(|peer| rank.send(*peer, id.to_string().as_bytes(), &[]));
        id
    } else {
        String::from_utf8(rank.recv(members[0]).0).unwrap().parse().unwrap()
    };
    let comm =
        Bootstrap::create(&id, Rank(own as u32), members.len() as u32, Deadline::after(PATIENCE)).unwrap();
    Communicator::create(comm, &backend.device(0).unwrap()).unwrap()
}

fn sum(symmetric: &SymmetricMemory, value: u32) -> Result<u32, Error> {
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
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
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
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    assert_eq!(sum(&symmetric, 5 + group.rank().0).unwrap(), 11);
    group.bootstrap().barrier().unwrap();
}

#[test]
fn a_rank_whose_caller_is_interrupted_gives_up_and_so_do_the_others() {
    let backend = host();
    let device = backend.device(0).unwrap();
    let groups = Communicator::local(&[device.clone(), device]).unwrap();
    let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..spec(&backend, 2, None) };
    let symmetric = Communicator::on_each(&groups, |group| SymmetricMemory::create(group, &spec)).unwrap();
    let aborted = || Err(Error::Comm(CommError::Aborted { by: Rank(1) }));
    assert_eq!(interruptible(|| true, || sum(&symmetric[1], 1)), aborted(), "nobody else comes meanwhile");
    assert_eq!(groups[0].bootstrap().barrier().map_err(Error::from), aborted().map(drop), "nor will anybody");
    let outcomes = [sum(&symmetric[0], 1), sum(&symmetric[0], 1)];
    assert!([Ok(2), aborted()].contains(&outcomes[0]), "what the other gave may be there: {outcomes:?}");
    assert_eq!(outcomes[1], aborted());
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

/// Where in a call a rank dies, and of which kind the call is.
#[derive(Debug, Clone, Copy)]
struct Death {
    algorithm: Algorithm,
    window: bool,
    point: usize,
}

impl Death {
    /// Every point of every kind of call: those that a call does not come to are its end.
    fn all() -> impl Iterator<Item = Self> {
        let kinds = Algorithm::ALL.into_iter().flat_map(|algorithm| [(algorithm, false), (algorithm, true)]);
        kinds.flat_map(|(algorithm, window)| (0..8).map(move |point| Self { algorithm, window, point }))
    }

    fn to_words(self) -> String {
        format!("{} {} {}", self.algorithm, self.window, self.point)
    }

    fn from_words(words: &str) -> Self {
        let mut words = words.split(' ');
        let mut word = || words.next().unwrap();
        let algorithm = word().parse().unwrap();
        Self { algorithm, window: word().parse().unwrap(), point: word().parse().unwrap() }
    }
}

/// Whether a thread of a process is in the sleep that a test wished for.
fn sleeps(process: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.filter_map(Result::ok).any(|task| {
        let call = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        call.split(' ').next() == Some(&libc::SYS_clock_nanosleep.to_string())
    })
}

/// A rank that dies at a point of a call, or after its end: the others have the sum or say who died, and go on.
fn survive_at(rank: &wholemem_testkit::Rank, death: Death) {
    const VICTIM: usize = 1;
    // Three pieces of staging, or as few elements as fit in packets.
    let count = if death.algorithm == Algorithm::Packets { 1000 } else { 3000 };
    let (group, len) = (join(rank, &[0, 1, 2], &host()), count * 4);
    let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..spec(&host(), 3, Some(death.algorithm)) };
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    let (stream, own) = (group.device().stream().unwrap(), group.rank().0);
    let windows = [(); 2].map(|()| symmetric.mem_alloc(len).unwrap());
    let spans = [(); 2].map(|()| Guarded::buffer(&symmetric, len));
    let sum = || {
        let [input, output] = if death.window {
            windows.each_ref().map(|at| at.local().unwrap().clone())
        } else {
            spans.clone()
        };
        stream.write(&input, &(1_u32 << own).to_ne_bytes().repeat(count))?;
        if death.window {
            symmetric.all_reduce(&stream, &windows[0], &windows[1], Dtype::U32, ReduceOp::Sum)?;
        } else {
            symmetric.all_reduce(&stream, &input, &output, Dtype::U32, ReduceOp::Sum)?;
        }
        let mut seen = vec![0; len];
        stream.read(&output, &mut seen)?;
        Ok::<_, Error>(seen == 7_u32.to_ne_bytes().repeat(count))
    };
    assert_eq!(sum(), Ok(true));
    group.bootstrap().barrier().unwrap();
    if rank.id() == VICTIM {
        let delays = vec![(death.point, 0, 3_600_000_000_000)];
        symmetric.inject_faults(&CallFaults { delays, ..CallFaults::default() }).unwrap();
        rank.barrier();
        assert_eq!(sum(), Ok(true));
        std::thread::sleep(PATIENCE);
    }
    rank.barrier();
    let [first, second] = std::thread::scope(|scope| {
        let calls = scope.spawn(|| [sum(), sum()]);
        if rank.id() == 0 {
            while !sleeps(rank.pid(VICTIM)) {
                std::thread::yield_now();
            }
            rank.kill(VICTIM);
        }
        calls.join().unwrap()
    });
    let lost = Err(Error::Comm(CommError::PeerLost { rank: Rank(VICTIM as u32) }));
    assert!(first == Ok(true) || first == lost, "{death:?}: {first:?}");
    assert_eq!(second, lost, "{death:?}");
    assert_eq!(sum(), lost, "{death:?}: and so says every later call");
    rank.barrier_with(&[2 - rank.id()]);
    let group = join(rank, &[0, 2], &host());
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    assert_eq!(self::sum(&symmetric, 5).unwrap(), 10);
    group.bootstrap().barrier().unwrap();
}

#[test]
fn who_dies_at_any_point_of_a_call_is_named_and_the_others_go_on() {
    let mut chance = Random(seed());
    let deaths = Death::all().filter(|_| Ranks::is_rank() || exhaustive() || chance.below(6) == 0);
    for death in deaths {
        Ranks::of(3).killed(1).parameter(death.to_words()).run(test_name!(), |rank| {
            survive_at(rank, Death::from_words(&rank.parameter()));
        });
    }
}

/// Two groups whose ranks call in opposite orders wait for each other until their time is over, and no longer.
#[test]
fn groups_called_in_opposite_orders_end_in_time() {
    let backend = host();
    let timeout = Duration::from_millis(300);
    let spec = wholemem::SymmetricSpec { timeout, ..spec(&backend, 2, None) };
    let [first, second] = [(); 2].map(|()| super::world::groups(&backend, 2));
    let outcomes = std::thread::scope(|scope| {
        let rank = |own: usize| {
            let groups = [first[own].clone(), second[own].clone()];
            let spec = spec.clone();
            scope.spawn(move || {
                let both = groups.each_ref().map(|group| SymmetricMemory::create(group, &spec).unwrap());
                let outcome = sum(&both[own], 1);
                // Until both have given up, or the memory that the other sleeps on goes.
                groups.iter().for_each(|group| group.bootstrap().barrier().unwrap());
                outcome
            })
        };
        [rank(0), rank(1)].map(|rank| rank.join().unwrap())
    });
    let late =
        |rank| Err(Error::Comm(CommError::Timeout { missing: vec![Rank(rank)], timeout, joining: false }));
    assert_eq!(outcomes, [late(1), late(0)]);
}

/// A rank that is there, but does not call.
fn miss(backend: &Backend) {
    for algorithm in Algorithm::ALL {
        let spec = wholemem::SymmetricSpec {
            timeout: Duration::from_millis(300),
            ..spec(backend, 3, Some(algorithm))
        };
        let groups = super::world::groups(backend, 3);
        let outcomes = Communicator::on_each(&groups, |group| {
            let symmetric = SymmetricMemory::create(group, &spec)?;
            assert_eq!(sum(&symmetric, 1)?, 3);
            let outcome = if group.rank() == Rank(2) { Ok(0) } else { sum(&symmetric, 1) };
            group.bootstrap().barrier()?;
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
fn who_has_no_patience_does_not_wait_for_ever() {
    let backend = host();
    let spec = wholemem::SymmetricSpec { timeout: Duration::ZERO, ..spec(&backend, 2, None) };
    let outcomes = Communicator::on_each(&super::world::groups(&backend, 2), |group| {
        let symmetric = SymmetricMemory::create(group, &spec)?;
        let outcome = (group.rank() == Rank(0)).then(|| sum(&symmetric, 1));
        group.bootstrap().barrier()?;
        Ok(outcome)
    });
    let (missing, timeout) = (vec![Rank(1)], Duration::ZERO);
    let late = Err(Error::Comm(CommError::Timeout { missing, timeout, joining: false }));
    assert_eq!(outcomes.unwrap(), [Some(late), None]);
}

#[test]
fn who_waits_is_woken_when_another_aborts() {
    let backend = host();
    let groups = super::world::groups(&backend, 2);
    let spec = spec(&backend, 2, None);
    let outcomes = Communicator::on_each(&groups, |group| {
        let symmetric = SymmetricMemory::create(group, &spec)?;
        if group.rank() == Rank(1) {
            group.bootstrap().abort();
            return Ok(None);
        }
        Ok(Some(sum(&symmetric, 1)))
    });
    let aborted = Error::Comm(CommError::Aborted { by: Rank(1) });
    assert_eq!(outcomes.unwrap(), [Some(Err(aborted)), None]);
}

/// Ranks on hosts that leave while the others wait for them, or before.
#[test]
fn who_leaves_is_named_at_once_by_those_who_wait_for_it() {
    for algorithm in Algorithm::ALL {
        let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..spec(&host(), 3, Some(algorithm)) };
        let outcomes = Communicator::on_each(&super::world::groups(&host(), 3), |group| {
            let symmetric = SymmetricMemory::create(group, &spec)?;
            assert_eq!(sum(&symmetric, 1)?, 3);
            if group.rank() == Rank(1) {
                group.bootstrap().leave();
                return Ok(None);
            }
            Ok(Some([sum(&symmetric, 1), sum(&symmetric, 1)]))
        });
        let left = Err(Error::Comm(CommError::PeerLeft { rank: Rank(1) }));
        let both = || Some([left.clone(), left.clone()]);
        assert_eq!(outcomes, Ok(vec![both(), None, both()]), "{algorithm}");
    }
}

#[test]
fn who_leaves_ends_what_its_own_threads_wait_for() {
    let groups = super::world::groups(&host(), 2);
    let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..spec(&host(), 2, None) };
    let symmetric = Communicator::on_each(&groups, |group| SymmetricMemory::create(group, &spec)).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sum(&symmetric[0], 1));
        groups[0].bootstrap().leave();
        assert_eq!(waiting.join().unwrap(), Err(Error::Comm(CommError::Closed)));
    });
    let outcome = [sum(&symmetric[1], 1), sum(&symmetric[1], 1)];
    let left = Err(Error::Comm(CommError::PeerLeft { rank: Rank(0) }));
    assert_eq!(outcome[1], left, "what the other had brought along is there for one call at most");
}

/// However late the others are: what a rank has finished before it left, they finish too.
#[test]
fn who_leaves_behind_its_last_call_fails_nobody() {
    let mut chance = Random(seed());
    for round in 0..if exhaustive() { 400 } else { 40 } {
        let algorithm = Algorithm::ALL[round % Algorithm::ALL.len()];
        let spec = wholemem::SymmetricSpec { timeout: PATIENCE, ..fragile(&host(), 3, Some(algorithm)) };
        let seed = chance.next();
        let outcomes = Communicator::on_each(&super::world::groups(&host(), 3), |group| {
            let symmetric = SymmetricMemory::create(group, &spec)?;
            let chaos = CallFaults {
                seed: seed ^ u64::from(group.rank().0),
                random: 2_000_000,
                ..CallFaults::default()
            };
            symmetric.inject_faults(&chaos)?;
            group.bootstrap().barrier()?;
            let sums = [sum(&symmetric, 1)?, sum(&symmetric, 2)?];
            group.bootstrap().leave();
            Ok(sums)
        });
        assert_eq!(outcomes, Ok(vec![[3, 6]; 3]), "{algorithm}, seed {seed}");
    }
}
