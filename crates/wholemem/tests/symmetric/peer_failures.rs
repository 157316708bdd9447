//! Tests that, if a rank dies, leaves, aborts or does not make a collective call, every other rank gets an error with the number
//! of that rank.

use std::time::Duration;

use wholemem::{
    Algorithm, Bootstrap, CallFaults, Communicator, Dtype, Error, Rank, ReduceOp, SymmetricMemory,
};
use wholemem_comm::{Error as CommError, UniqueId};
use wholemem_hal::Backend;
use wholemem_os::Deadline;
use wholemem_os::interrupt::interruptible;
use wholemem_testkit::{Ranks, cuda, exhaustive, seed, test_name};

use super::harness::{Guarded, host, spec, spec_with_faults};
use super::random_elements::TestRandom;

const LONG_TIMEOUT: Duration = Duration::from_secs(120);

/// Joins a group of those processes of the test that are in `members`.
pub(crate) fn join(rank: &wholemem_testkit::Rank, members: &[usize], backend: &Backend) -> Communicator {
    let own = members.iter().position(|member| *member == rank.id()).unwrap();
    let id = if own == 0 {
        let id = UniqueId::create().unwrap();
        members[1..].iter().for_each(|peer| rank.send(*peer, id.to_string().as_bytes(), &[]));
        id
    } else {
        String::from_utf8(rank.recv(members[0]).0).unwrap().parse().unwrap()
    };
    let comm = Bootstrap::create(&id, Rank(own as u32), members.len() as u32, Deadline::after(LONG_TIMEOUT))
        .unwrap();
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

/// Checks that the survivors of a killed rank get an error that names this rank, and can form a new group on the same device.
fn check_killed_rank(rank: &wholemem_testkit::Rank, backend: &Backend, algorithm: Algorithm) {
    const VICTIM: usize = 1;
    let group = join(rank, &[0, 1, 2], backend);
    let spec = wholemem::SymmetricSpec { timeout: LONG_TIMEOUT, ..spec(backend, 3, Some(algorithm)) };
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    assert_eq!(sum(&symmetric, 1 << group.rank().0).unwrap(), 7);
    if rank.id() == VICTIM {
        rank.barrier();
        rank.wait_to_be_killed();
    }
    rank.barrier();
    // After this barrier, both survivors know that the other has passed the barrier with the victim, which can be killed now.
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
    assert_eq!(sum(&symmetric, 1), Err(lost), "later calls return the same error");
    rank.barrier_with(&[2 - rank.id()]);
    let group = join(rank, &survivors, backend);
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    assert_eq!(sum(&symmetric, 5 + group.rank().0).unwrap(), 11);
    group.bootstrap().barrier().unwrap();
}

#[test]
fn an_interrupted_caller_aborts_the_call_on_all_ranks() {
    let backend = host();
    let device = backend.device(0).unwrap();
    let groups = Communicator::local(&[device.clone(), device]).unwrap();
    let spec = wholemem::SymmetricSpec { timeout: LONG_TIMEOUT, ..spec(&backend, 2, None) };
    let symmetric = Communicator::on_each(&groups, |group| SymmetricMemory::create(group, &spec)).unwrap();
    let aborted = || Err(Error::Comm(CommError::Aborted { by: Rank(1) }));
    assert_eq!(
        interruptible(|| true, || sum(&symmetric[1], 1)),
        aborted(),
        "no other rank has entered the call"
    );
    assert_eq!(
        groups[0].bootstrap().barrier().map_err(Error::from),
        aborted().map(drop),
        "the group is aborted"
    );
    let outcomes = [sum(&symmetric[0], 1), sum(&symmetric[0], 1)];
    assert!(
        [Ok(2), aborted()].contains(&outcomes[0]),
        "the data of the aborted rank may have arrived: {outcomes:?}"
    );
    assert_eq!(outcomes[1], aborted());
}

#[test]
fn killed_rank_is_reported_to_all_survivors() {
    for algorithm in Algorithm::ALL {
        Ranks::of(3).killed(1).parameter(algorithm.to_string()).run(test_name!(), |rank| {
            check_killed_rank(rank, &host(), rank.parameter().parse().unwrap());
        });
    }
}

/// Tests a rank that is killed while it has no work in flight on the GPU.
#[test]
fn gpu_killed_rank_is_reported_to_all_survivors() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    for algorithm in Algorithm::ALL {
        Ranks::of(3).killed(1).parameter(algorithm.to_string()).run(test_name!(), |rank| {
            check_killed_rank(rank, &cuda::backend().unwrap(), rank.parameter().parse().unwrap());
        });
    }
}

/// The point of a collective call at which a rank is killed, and the kind of that call.
#[derive(Debug, Clone, Copy)]
struct KillPoint {
    algorithm: Algorithm,
    window: bool,
    point: usize,
}

impl KillPoint {
    /// Returns every point of every kind of call. If a call does not have a point, the rank is killed after the call.
    fn all() -> impl Iterator<Item = Self> {
        let kinds = Algorithm::ALL.into_iter().flat_map(|algorithm| [(algorithm, false), (algorithm, true)]);
        kinds.flat_map(|(algorithm, window)| (0..8).map(move |point| Self { algorithm, window, point }))
    }

    fn to_text(self) -> String {
        format!("{} {} {}", self.algorithm, self.window, self.point)
    }

    fn from_text(words: &str) -> Self {
        let mut words = words.split(' ');
        let mut word = || words.next().unwrap();
        let algorithm = word().parse().unwrap();
        Self { algorithm, window: word().parse().unwrap(), point: word().parse().unwrap() }
    }
}

/// Returns true if a thread of a process is in the delay that the test injected.
fn sleeps(process: u32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.filter_map(Result::ok).any(|task| {
        let call = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        call.split(' ').next() == Some(&libc::SYS_clock_nanosleep.to_string())
    })
}

/// Kills a rank at a point of a call, or after the call: the other ranks get the sum or an error that names the rank, and form
/// a new group.
fn check_killed_at(rank: &wholemem_testkit::Rank, kill_point: KillPoint) {
    const VICTIM: usize = 1;
    // The input fills three staging buffers, or is short enough for packets.
    let count = if kill_point.algorithm == Algorithm::Packets { 1000 } else { 3000 };
    let (group, len) = (join(rank, &[0, 1, 2], &host()), count * 4);
    let spec =
        wholemem::SymmetricSpec { timeout: LONG_TIMEOUT, ..spec(&host(), 3, Some(kill_point.algorithm)) };
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    let (stream, own) = (group.device().stream().unwrap(), group.rank().0);
    let windows = [(); 2].map(|()| symmetric.mem_alloc(len).unwrap());
    let spans = [(); 2].map(|()| Guarded::buffer(&symmetric, len));
    let sum = || {
        let [input, output] = if kill_point.window {
            windows.each_ref().map(|at| at.local().unwrap().clone())
        } else {
            spans.clone()
        };
        stream.write(&input, &(1_u32 << own).to_ne_bytes().repeat(count))?;
        if kill_point.window {
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
        let delays = vec![(kill_point.point, 0, 3_600_000_000_000)];
        symmetric.inject_faults(&CallFaults { delays, ..CallFaults::default() }).unwrap();
        rank.barrier();
        assert_eq!(sum(), Ok(true));
        std::thread::sleep(LONG_TIMEOUT);
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
    assert!(first == Ok(true) || first == lost, "{kill_point:?}: {first:?}");
    assert_eq!(second, lost, "{kill_point:?}");
    assert_eq!(sum(), lost, "{kill_point:?}: later calls return the same error");
    rank.barrier_with(&[2 - rank.id()]);
    let group = join(rank, &[0, 2], &host());
    let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
    assert_eq!(self::sum(&symmetric, 5).unwrap(), 10);
    group.bootstrap().barrier().unwrap();
}

#[test]
fn rank_killed_at_any_point_of_a_call_is_reported_to_all_survivors() {
    let mut seed_value = TestRandom(seed());
    let kill_points =
        KillPoint::all().filter(|_| Ranks::is_rank() || exhaustive() || seed_value.below(6) == 0);
    for kill_point in kill_points {
        Ranks::of(3).killed(1).parameter(kill_point.to_text()).run(test_name!(), |rank| {
            check_killed_at(rank, KillPoint::from_text(&rank.parameter()));
        });
    }
}

/// Tests two groups that ranks call in opposite orders: the ranks wait for each other until the timeout.
#[test]
fn groups_called_in_opposite_orders_time_out() {
    let backend = host();
    let timeout = Duration::from_millis(300);
    let spec = wholemem::SymmetricSpec { timeout, ..spec(&backend, 2, None) };
    let [first, second] = [(); 2].map(|()| super::harness::groups(&backend, 2));
    let outcomes = std::thread::scope(|scope| {
        let rank = |own: usize| {
            let groups = [first[own].clone(), second[own].clone()];
            let spec = spec.clone();
            scope.spawn(move || {
                let both = groups.each_ref().map(|group| SymmetricMemory::create(group, &spec).unwrap());
                let outcome = sum(&both[own], 1);
                // A rank's memory must stay mapped until both ranks have timed out.
                groups.iter().for_each(|group| group.bootstrap().barrier().unwrap());
                outcome
            })
        };
        [rank(0), rank(1)].map(|rank| rank.join().unwrap())
    });
    let timed_out =
        |rank| Err(Error::Comm(CommError::Timeout { missing: vec![Rank(rank)], timeout, joining: false }));
    assert_eq!(outcomes, [timed_out(1), timed_out(0)]);
}

/// Checks which errors the ranks get if one rank of the group does not make a call.
fn check_missing_rank(backend: &Backend) {
    for algorithm in Algorithm::ALL {
        let spec = wholemem::SymmetricSpec {
            timeout: Duration::from_millis(300),
            ..spec(backend, 3, Some(algorithm))
        };
        let groups = super::harness::groups(backend, 3);
        let outcomes = Communicator::on_each(&groups, |group| {
            let symmetric = SymmetricMemory::create(group, &spec)?;
            assert_eq!(sum(&symmetric, 1)?, 3);
            let outcome = if group.rank() == Rank(2) { Ok(0) } else { sum(&symmetric, 1) };
            group.bootstrap().barrier()?;
            // The first call of the late rank may still succeed with data that the other ranks sent, so only its second call
            // must fail.
            let timed_out = sum(&symmetric, 1);
            Ok((outcome, if group.rank() == Rank(2) { sum(&symmetric, 1) } else { timed_out }))
        });
        let (missing, timeout) = (vec![Rank(2)], spec.timeout);
        let timed_out = Err(Error::Comm(CommError::Timeout { missing, timeout, joining: false }));
        let outcomes = outcomes.unwrap();
        assert_eq!([&outcomes[0].0, &outcomes[1].0], [&timed_out; 2], "{algorithm}");
        assert_eq!(
            [&outcomes[0].1, &outcomes[1].1],
            [&timed_out; 2],
            "{algorithm}: later calls return the same error"
        );
        assert!(matches!(&outcomes[2].1, Err(Error::Comm(CommError::Timeout { .. }))), "{:?}", outcomes[2]);
    }
}

#[test]
fn a_rank_that_does_not_arrive_before_the_timeout_is_reported() {
    check_missing_rank(&host());
}

#[test]
fn gpu_a_rank_that_does_not_arrive_before_the_timeout_is_reported() {
    if let Some(backend) = cuda::backend() {
        check_missing_rank(&backend);
    }
}

#[test]
fn a_timeout_of_zero_expires() {
    let backend = host();
    let spec = wholemem::SymmetricSpec { timeout: Duration::ZERO, ..spec(&backend, 2, None) };
    let outcomes = Communicator::on_each(&super::harness::groups(&backend, 2), |group| {
        let symmetric = SymmetricMemory::create(group, &spec)?;
        let outcome = (group.rank() == Rank(0)).then(|| sum(&symmetric, 1));
        group.bootstrap().barrier()?;
        Ok(outcome)
    });
    let (missing, timeout) = (vec![Rank(1)], Duration::ZERO);
    let timed_out = Err(Error::Comm(CommError::Timeout { missing, timeout, joining: false }));
    assert_eq!(outcomes.unwrap(), [Some(timed_out), None]);
}

#[test]
fn a_waiting_rank_is_woken_by_an_abort_of_another_rank() {
    let backend = host();
    let groups = super::harness::groups(&backend, 2);
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

/// Tests ranks on CPUs that leave the group before or while other ranks wait for them.
#[test]
fn a_rank_that_leaves_is_reported_to_waiting_ranks_at_once() {
    for algorithm in Algorithm::ALL {
        let spec = wholemem::SymmetricSpec { timeout: LONG_TIMEOUT, ..spec(&host(), 3, Some(algorithm)) };
        let outcomes = Communicator::on_each(&super::harness::groups(&host(), 3), |group| {
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
fn leaving_ends_the_waits_of_the_ranks_own_threads() {
    let groups = super::harness::groups(&host(), 2);
    let spec = wholemem::SymmetricSpec { timeout: LONG_TIMEOUT, ..spec(&host(), 2, None) };
    let symmetric = Communicator::on_each(&groups, |group| SymmetricMemory::create(group, &spec)).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sum(&symmetric[0], 1));
        groups[0].bootstrap().leave();
        assert_eq!(waiting.join().unwrap(), Err(Error::Comm(CommError::Closed)));
    });
    let outcome = [sum(&symmetric[1], 1), sum(&symmetric[1], 1)];
    let left = Err(Error::Comm(CommError::PeerLeft { rank: Rank(0) }));
    assert_eq!(outcome[1], left, "the data of the rank that left serves at most one call");
}

/// Tests that calls which a rank completed before it left also complete on the other ranks, however late these are.
#[test]
fn leaving_after_the_last_call_does_not_fail_the_other_ranks() {
    let mut seed_value = TestRandom(seed());
    for round in 0..if exhaustive() { 400 } else { 40 } {
        let algorithm = Algorithm::ALL[round % Algorithm::ALL.len()];
        let spec = wholemem::SymmetricSpec {
            timeout: LONG_TIMEOUT,
            ..spec_with_faults(&host(), 3, Some(algorithm))
        };
        let seed = seed_value.next();
        let outcomes = Communicator::on_each(&super::harness::groups(&host(), 3), |group| {
            let symmetric = SymmetricMemory::create(group, &spec)?;
            let faults = CallFaults {
                seed: seed ^ u64::from(group.rank().0),
                random: 2_000_000,
                ..CallFaults::default()
            };
            symmetric.inject_faults(&faults)?;
            group.bootstrap().barrier()?;
            let sums = [sum(&symmetric, 1)?, sum(&symmetric, 2)?];
            group.bootstrap().leave();
            Ok(sums)
        });
        assert_eq!(outcomes, Ok(vec![[3, 6]; 3]), "{algorithm}, seed {seed}");
    }
}
