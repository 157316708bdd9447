//! Every rule of synchronization is needed: broken, its test fails. Kept, no delay and no overwritten input is ever seen.

use std::time::Duration;

use wholemem::{Algorithm, CallFaults, Dtype, Mutant, Rank, ReduceOp, SymmetricMemory, SymmetricSpec};
use wholemem_hal::Backend;
use wholemem_os::Deadline;
use wholemem_testkit::{cuda, exhaustive, seed};

use super::values::Random;
use super::world::{Guarded, STAGING, fragile, host, on_ranks_like, spec};

/// Long enough for the other rank to run ahead by several calls, as a rule.
const LONG: u64 = 20_000_000;

/// Either rank may be the late one: which of them reduces what is for the algorithm to say.
const RANKS: [Rank; 2] = [Rank(0), Rank(1)];

/// How often a mutant may go unnoticed, each time with a longer delay: the machine may have other things to do.
const TRIES: u32 = 5;

/// A course of calls in which one rank is late at one point.
#[derive(Debug, Clone, Copy)]
struct Course {
    algorithm: Algorithm,
    /// Whether inputs are read where they are.
    window: bool,
    /// Elements of each call.
    count: usize,
    /// Where the second rank is late.
    late_at: usize,
    /// The number that the first call has.
    counter: Option<u64>,
}

impl Course {
    const fn new(algorithm: Algorithm, window: bool, count: usize, late_at: usize) -> Self {
        Self { algorithm, window, count, late_at, counter: None }
    }
}

/// Whether any rank ever sees something else than the sum, when the ranks do not keep a rule and `late` is late.
fn goes_wrong(
    backend: &Backend,
    course: &Course,
    mutant: Option<Mutant>,
    (late, delay): (Rank, u64),
) -> bool {
    // Where a rule is broken, packets may be lost that are waited for.
    let timeout = Duration::from_secs(if mutant.is_none() { 60 } else { 2 });
    let spec = SymmetricSpec { timeout, ..fragile(backend, 2, Some(course.algorithm)) };
    let wrong = on_ranks_like(backend, 2, &spec, |symmetric| {
        let group = symmetric.group();
        let late = group.rank() == late;
        let delays =
            if late { (0..4).map(|block| (course.late_at, block, delay)).collect() } else { Vec::new() };
        let counter = course.counter;
        symmetric.inject_faults(&CallFaults { mutant, delays, counter, ..CallFaults::default() }).unwrap();
        group.bootstrap().barrier().unwrap();
        let wrong = (0..6).filter(|round| !is_right(symmetric, course, *round)).count();
        // Nobody leaves while another reads its memory.
        group.bootstrap().barrier().unwrap();
        wrong
    });
    wrong.iter().any(|count| *count > 0)
}

/// One call, whose input is overwritten as soon as the stream comes to it.
fn is_right(symmetric: &SymmetricMemory, course: &Course, round: u32) -> bool {
    let (group, len) = (symmetric.group(), course.count * 4);
    let stream = group.device().stream().unwrap();
    thread_local!(static WINDOW: std::cell::RefCell<Option<wholemem::Window>> = const { std::cell::RefCell::new(None) });
    let window = WINDOW.with_borrow_mut(|window| {
        if round == 0 {
            *window = Some(symmetric.mem_alloc(len).unwrap());
        }
        window.clone().unwrap()
    });
    let input = if course.window { window.local().unwrap().clone() } else { Guarded::buffer(symmetric, len) };
    let output = Guarded::buffer(symmetric, len);
    let value = |rank: u32| 1 + 100 * round + rank;
    let bytes = |value: u32| value.to_ne_bytes().repeat(course.count);
    stream.write(&input, &bytes(value(group.rank().0))).unwrap();
    stream.fill(&output, 0xEE).unwrap();
    let from = if course.window { window.range(0..len) } else { (&input).into() };
    let enqueued = symmetric.all_reduce(&stream, from, &output, Dtype::U32, ReduceOp::Sum);
    stream.fill(&input, 0xDD).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    if enqueued.and_then(|()| symmetric.check()).is_err() {
        return false;
    }
    let mut seen = vec![0; len];
    stream.read(&output, &mut seen).unwrap();
    seen == bytes(value(0) + value(1))
}

const SHORT: usize = 64;
const TWO_PIECES: usize = 2 * STAGING / 4;

/// Each rule, and a course in which it is needed.
const RULES: [(Mutant, Course); 8] = [
    (Mutant::OneBuffer, Course::new(Algorithm::OneShot, false, SHORT, 3)),
    (Mutant::OneBuffer, Course::new(Algorithm::Packets, false, SHORT, 1)),
    (Mutant::NoFirstBarrier, Course::new(Algorithm::OneShot, false, SHORT, 0)),
    (Mutant::NoFirstBarrier, Course::new(Algorithm::OneShot, true, SHORT, 0)),
    (Mutant::NoSecondBarrier, Course::new(Algorithm::OneShot, true, SHORT, 3)),
    (Mutant::NoSecondBarrier, Course::new(Algorithm::TwoShot, false, SHORT, 3)),
    (Mutant::NoLastBarrier, Course::new(Algorithm::OneShot, false, TWO_PIECES, 5)),
    (Mutant::AnyFlag, Course::new(Algorithm::Packets, false, SHORT, 0)),
];

fn every_rule_is_needed(backend: &Backend) {
    for (mutant, course) in &RULES {
        assert!(
            !RANKS.iter().any(|late| goes_wrong(backend, course, None, (*late, LONG))),
            "with all rules kept: {course:?}"
        );
        let noticed = (0..TRIES).any(|time| {
            RANKS.iter().any(|late| goes_wrong(backend, course, Some(*mutant), (*late, LONG << time)))
        });
        assert!(noticed, "{mutant:?} in {course:?}");
    }
}

#[test]
fn every_rule_of_synchronization_is_needed() {
    every_rule_is_needed(&host());
}

#[test]
fn gpu_every_rule_of_synchronization_is_needed() {
    if let Some(backend) = cuda::backend() {
        every_rule_is_needed(&backend);
    }
}

/// Calls recorded once and repeated, each input overwritten behind its call, with delays anywhere: never wrong.
fn repeats_are_never_wrong(backend: &Backend, ranks: u32, repeats: u32, most_delay: u64) {
    let chance = seed();
    for (algorithm, window) in [
        (Algorithm::Packets, false),
        (Algorithm::OneShot, false),
        (Algorithm::OneShot, true),
        (Algorithm::TwoShot, false),
        (Algorithm::TwoShot, true),
    ] {
        // Without delays, by the kernels that everybody gets.
        let spec = if most_delay == 0 { spec } else { fragile };
        on_ranks_like(backend, ranks, &spec(backend, ranks, Some(algorithm)), |symmetric| {
            const COUNT: usize = 300;
            let group = symmetric.group();
            let own = group.rank().0;
            let random =
                CallFaults { seed: chance ^ u64::from(own), random: most_delay, ..CallFaults::default() };
            symmetric.inject_faults(&random).unwrap();
            let stream = group.device().stream().unwrap();
            let from = symmetric.mem_alloc(COUNT * 4).unwrap();
            let plain = Guarded::buffer(symmetric, COUNT * 4);
            let input = if window { from.local().unwrap().clone() } else { plain };
            let [source, output] = [(); 2].map(|()| Guarded::buffer(symmetric, COUNT * 4));
            let graph = stream
                .capture(|stream| {
                    stream.copy(&input, &source)?;
                    let buffer = if window { from.range(0..COUNT * 4) } else { (&input).into() };
                    let call = symmetric.all_reduce(stream, buffer, &output, Dtype::U32, ReduceOp::Sum);
                    call.unwrap();
                    stream.fill(&input, 0xDD)
                })
                .unwrap();
            let mut values: Vec<_> = (0..ranks).map(|rank| Random(chance ^ u64::from(rank) << 32)).collect();
            for repeat in 0..repeats {
                let all: Vec<_> = values.iter_mut().map(|values| values.next() as u32).collect();
                let bytes = |value: u32| value.to_ne_bytes().repeat(COUNT);
                stream.write(&source, &bytes(all[own as usize])).unwrap();
                graph.launch(&stream).unwrap();
                let mut seen = vec![0; COUNT * 4];
                stream.read(&output, &mut seen).unwrap();
                let sum = all.iter().fold(0_u32, |sum, value| sum.wrapping_add(*value));
                assert!(seen == bytes(sum), "{algorithm} repeat {repeat}, seed {chance}");
            }
            symmetric.check().unwrap();
            group.bootstrap().barrier().unwrap();
        });
    }
}

#[test]
fn repeated_calls_are_never_wrong() {
    repeats_are_never_wrong(&host(), 3, if exhaustive() { 10_000 } else { 300 }, 2_000);
}

#[test]
fn gpu_repeated_calls_are_never_wrong() {
    if let Some(backend) = cuda::backend() {
        repeats_are_never_wrong(&backend, 2, 10_000, 3_000);
        repeats_are_never_wrong(&backend, 4, 2_000, 3_000);
        repeats_are_never_wrong(&backend, 2, 10_000, 0);
        repeats_are_never_wrong(&backend, 4, 2_000, 0);
    }
}

/// Numbers of calls near the ends of their halves, and of themselves.
fn counters_may_wrap(backend: &Backend) {
    for near in [u64::from(u32::MAX) - 2, (1 << 48) - 3, u64::MAX - 2] {
        for algorithm in Algorithm::ALL {
            let course = Course { counter: Some(near), ..Course::new(algorithm, false, SHORT, 0) };
            assert!(!goes_wrong(backend, &course, None, (Rank(1), LONG)), "from {near:#x} on: {algorithm}");
        }
    }
}

#[test]
fn counters_wrap_unnoticed() {
    counters_may_wrap(&host());
}

#[test]
fn gpu_counters_wrap_unnoticed() {
    if let Some(backend) = cuda::backend() {
        counters_may_wrap(&backend);
    }
}

/// Flags of packets begin again after 2^32 calls: what was left in the slots from the first time must be gone.
fn meets_old_packets(backend: &Backend, mutant: Option<Mutant>) -> bool {
    const MANY: usize = 1024;
    let wrong = on_ranks_like(backend, 2, &fragile(backend, 2, Some(Algorithm::Packets)), |symmetric| {
        let group = symmetric.group();
        let course = |count, counter| Course { counter, ..Course::new(Algorithm::Packets, false, count, 0) };
        let again = |counter: u64, delays: Vec<_>| {
            group.bootstrap().barrier().unwrap();
            symmetric
                .inject_faults(&CallFaults {
                    mutant,
                    delays,
                    counter: Some(counter),
                    ..CallFaults::default()
                })
                .unwrap();
            group.bootstrap().barrier().unwrap();
        };
        // The first call leaves its number, 1, in many packets.
        assert!(is_right(symmetric, &course(MANY, None), 0));
        again((1 << 32) - 2, Vec::new());
        let mut wrong = (0..3).filter(|round| !is_right(symmetric, &course(4, None), *round)).count();
        let late = group.rank() == Rank(1);
        let delays = if late { (0..4).map(|block| (0, block, LONG)).collect() } else { Vec::new() };
        again((1 << 32) + 1, delays);
        wrong += usize::from(!is_right(symmetric, &course(MANY, None), 7));
        group.bootstrap().barrier().unwrap();
        wrong
    });
    wrong.iter().any(|count| *count > 0)
}

#[test]
fn gpu_packets_of_long_ago_are_not_taken_for_new_ones() {
    if let Some(backend) = cuda::backend() {
        assert!(!meets_old_packets(&backend, None));
        assert!(meets_old_packets(&backend, Some(Mutant::NoClearing)));
    }
}

/// Broadcasts from one rank after the other, of which one is always late.
fn broadcasts_in_turn(backend: &Backend) {
    for algorithm in [Algorithm::Packets, Algorithm::OneShot] {
        on_ranks_like(backend, 3, &fragile(backend, 3, Some(algorithm)), |symmetric| {
            let group = symmetric.group();
            let late = group.rank() == Rank(2);
            let delays = if late { vec![(0, 0, 300_000), (3, 0, 300_000)] } else { Vec::new() };
            symmetric.inject_faults(&CallFaults { delays, ..CallFaults::default() }).unwrap();
            let stream = group.device().stream().unwrap();
            let buffers: Vec<_> = (0..60).map(|_| Guarded::buffer(symmetric, 400)).collect();
            for (round, buffer) in buffers.iter().enumerate() {
                let root = Rank((round % 3) as u32);
                let value = if group.rank() == root { round as u8 } else { 0xEE };
                stream.fill(buffer, value).unwrap();
                symmetric.broadcast(&stream, root, buffer, buffer).unwrap();
            }
            stream.synchronize(Deadline::NEVER).unwrap();
            for (round, buffer) in buffers.iter().enumerate() {
                let mut seen = vec![0; 400];
                stream.read(buffer, &mut seen).unwrap();
                assert_eq!(
                    seen,
                    vec![round as u8; 400],
                    "{algorithm} round {round} on rank {}",
                    group.rank()
                );
            }
            group.bootstrap().barrier().unwrap();
        });
    }
}

#[test]
fn broadcasts_from_changing_roots_wait_for_a_laggard() {
    broadcasts_in_turn(&host());
}

#[test]
fn gpu_broadcasts_from_changing_roots_wait_for_a_laggard() {
    if let Some(backend) = cuda::backend() {
        broadcasts_in_turn(&backend);
    }
}
