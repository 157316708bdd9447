//! Tests that every synchronization rule of the collectives is necessary: if a rule is broken, its test detects wrong results.
//! With all rules, results are correct for any delays and overwritten inputs.

use std::time::Duration;

use wholemem::{Algorithm, CallFaults, Dtype, Mutant, Rank, ReduceOp, SymmetricMemory, SymmetricSpec};
use wholemem_hal::Backend;
use wholemem_os::Deadline;
use wholemem_testkit::{cuda, exhaustive, seed};

use super::harness::{Guarded, STAGING, host, on_ranks_with_spec, spec, spec_with_faults};
use super::random_elements::TestRandom;

/// A delay of a rank in nanoseconds. It is usually long enough for the other rank to run ahead by several calls.
const LONG: u64 = 20_000_000;

/// The ranks that are delayed, one after the other, because ranks have different roles in an algorithm.
const RANKS: [Rank; 2] = [Rank(0), Rank(1)];

/// The number of attempts to detect a mutant (a broken rule). Each attempt doubles the delay of a rank, because the machine may
/// be busy.
const MAX_ATTEMPTS: u32 = 5;

/// A sequence of collective calls in which one rank is delayed at one point.
#[derive(Debug, Clone, Copy)]
struct CallSequence {
    algorithm: Algorithm,
    /// True if the inputs of the calls are in a window, and not copied to staging buffers.
    window: bool,
    /// The number of elements of each call.
    count: usize,
    /// The point of a call at which the rank is delayed.
    delayed_at: usize,
    /// The number of the first call in the sequence, if it is not the next number of the lane.
    counter: Option<u64>,
}

impl CallSequence {
    const fn new(algorithm: Algorithm, window: bool, count: usize, delayed_at: usize) -> Self {
        Self { algorithm, window, count, delayed_at, counter: None }
    }
}

/// Returns true if a rank gets a wrong sum when all ranks break the rule `mutant` and rank `late` is delayed.
fn gives_wrong_results(
    backend: &Backend,
    sequence: &CallSequence,
    mutant: Option<Mutant>,
    (late, delay): (Rank, u64),
) -> bool {
    // The timeout is short if a rule is broken, because packets can then be lost, which makes the call time out.
    let timeout = Duration::from_secs(if mutant.is_none() { 60 } else { 2 });
    let spec = SymmetricSpec { timeout, ..spec_with_faults(backend, 2, Some(sequence.algorithm)) };
    let wrong = on_ranks_with_spec(backend, 2, &spec, |symmetric| {
        let group = symmetric.group();
        let late = group.rank() == late;
        let delays =
            if late { (0..4).map(|block| (sequence.delayed_at, block, delay)).collect() } else { Vec::new() };
        let counter = sequence.counter;
        symmetric.inject_faults(&CallFaults { mutant, delays, counter, ..CallFaults::default() }).unwrap();
        group.bootstrap().barrier().unwrap();
        let wrong = (0..6).filter(|round| !is_correct(symmetric, sequence, *round)).count();
        // No rank may drop its memory while another rank still reads it.
        group.bootstrap().barrier().unwrap();
        wrong
    });
    wrong.iter().any(|count| *count > 0)
}

/// Makes one all-reduce, overwrites its input directly after it in stream order, and returns true if the result is correct.
fn is_correct(symmetric: &SymmetricMemory, sequence: &CallSequence, round: u32) -> bool {
    let (group, len) = (symmetric.group(), sequence.count * 4);
    let stream = group.device().stream().unwrap();
    thread_local!(static WINDOW: std::cell::RefCell<Option<wholemem::Window>> = const { std::cell::RefCell::new(None) });
    let window = WINDOW.with_borrow_mut(|window| {
        if round == 0 {
            *window = Some(symmetric.mem_alloc(len).unwrap());
        }
        window.clone().unwrap()
    });
    let input =
        if sequence.window { window.local().unwrap().clone() } else { Guarded::buffer(symmetric, len) };
    let output = Guarded::buffer(symmetric, len);
    let value = |rank: u32| 1 + 100 * round + rank;
    let bytes = |value: u32| value.to_ne_bytes().repeat(sequence.count);
    stream.write(&input, &bytes(value(group.rank().0))).unwrap();
    stream.fill(&output, 0xEE).unwrap();
    let from = if sequence.window { window.range(0..len) } else { (&input).into() };
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

/// Each mutant, which breaks one synchronization rule, with a sequence of calls that detects it.
const RULES: [(Mutant, CallSequence); 8] = [
    (Mutant::OneBuffer, CallSequence::new(Algorithm::OneShot, false, SHORT, 3)),
    (Mutant::OneBuffer, CallSequence::new(Algorithm::Packets, false, SHORT, 1)),
    (Mutant::NoFirstBarrier, CallSequence::new(Algorithm::OneShot, false, SHORT, 0)),
    (Mutant::NoFirstBarrier, CallSequence::new(Algorithm::OneShot, true, SHORT, 0)),
    (Mutant::NoSecondBarrier, CallSequence::new(Algorithm::OneShot, true, SHORT, 3)),
    (Mutant::NoSecondBarrier, CallSequence::new(Algorithm::TwoShot, false, SHORT, 3)),
    (Mutant::NoLastBarrier, CallSequence::new(Algorithm::OneShot, false, TWO_PIECES, 5)),
    (Mutant::AnyFlag, CallSequence::new(Algorithm::Packets, false, SHORT, 0)),
];

fn check_every_rule(backend: &Backend) {
    for (mutant, sequence) in &RULES {
        assert!(
            !RANKS.iter().any(|late| gives_wrong_results(backend, sequence, None, (*late, LONG))),
            "wrong results with all rules: {sequence:?}"
        );
        let detected = (0..MAX_ATTEMPTS).any(|time| {
            RANKS
                .iter()
                .any(|late| gives_wrong_results(backend, sequence, Some(*mutant), (*late, LONG << time)))
        });
        assert!(detected, "{mutant:?} in {sequence:?}");
    }
}

#[test]
fn every_synchronization_rule_is_necessary() {
    check_every_rule(&host());
}

#[test]
fn gpu_every_synchronization_rule_is_necessary() {
    if let Some(backend) = cuda::backend() {
        check_every_rule(&backend);
    }
}

/// Replays a captured all-reduce many times with random delays, and checks every result. The graph overwrites the input
/// directly after the call.
fn check_replays(backend: &Backend, ranks: u32, repeats: u32, max_delay: u64) {
    let seed_value = seed();
    for (algorithm, window) in [
        (Algorithm::Packets, false),
        (Algorithm::OneShot, false),
        (Algorithm::OneShot, true),
        (Algorithm::TwoShot, false),
        (Algorithm::TwoShot, true),
    ] {
        // Without delays, the test uses the kernels that are shipped instead of those with fault injection.
        let spec = if max_delay == 0 { spec } else { spec_with_faults };
        on_ranks_with_spec(backend, ranks, &spec(backend, ranks, Some(algorithm)), |symmetric| {
            const COUNT: usize = 300;
            let group = symmetric.group();
            let own = group.rank().0;
            let random =
                CallFaults { seed: seed_value ^ u64::from(own), random: max_delay, ..CallFaults::default() };
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
            let mut values: Vec<_> =
                (0..ranks).map(|rank| TestRandom(seed_value ^ u64::from(rank) << 32)).collect();
            for repeat in 0..repeats {
                let all: Vec<_> = values.iter_mut().map(|values| values.next() as u32).collect();
                let bytes = |value: u32| value.to_ne_bytes().repeat(COUNT);
                stream.write(&source, &bytes(all[own as usize])).unwrap();
                graph.launch(&stream).unwrap();
                let mut seen = vec![0; COUNT * 4];
                stream.read(&output, &mut seen).unwrap();
                let sum = all.iter().fold(0_u32, |sum, value| sum.wrapping_add(*value));
                assert!(seen == bytes(sum), "{algorithm} repeat {repeat}, seed {seed_value}");
            }
            symmetric.check().unwrap();
            group.bootstrap().barrier().unwrap();
        });
    }
}

#[test]
fn replayed_calls_are_always_correct() {
    check_replays(&host(), 3, if exhaustive() { 10_000 } else { 300 }, 2_000);
}

#[test]
fn gpu_replayed_calls_are_always_correct() {
    if let Some(backend) = cuda::backend() {
        check_replays(&backend, 2, 10_000, 3_000);
        check_replays(&backend, 4, 2_000, 3_000);
        check_replays(&backend, 2, 10_000, 0);
        check_replays(&backend, 4, 2_000, 0);
    }
}

/// Checks collective calls whose call numbers are close to an overflow of 16, 32, 48 and 64 bits.
fn check_counter_overflow(backend: &Backend) {
    for near in [(1 << 16) - 3, u64::from(u32::MAX) - 2, (1 << 48) - 3, u64::MAX - 2] {
        for algorithm in Algorithm::ALL {
            let sequence =
                CallSequence { counter: Some(near), ..CallSequence::new(algorithm, false, SHORT, 0) };
            assert!(
                !gives_wrong_results(backend, &sequence, None, (Rank(1), LONG)),
                "from {near:#x} on: {algorithm}"
            );
        }
    }
}

#[test]
fn call_counters_may_overflow() {
    check_counter_overflow(&host());
}

#[test]
fn gpu_call_counters_may_overflow() {
    if let Some(backend) = cuda::backend() {
        check_counter_overflow(&backend);
    }
}

/// Returns true if ranks accept packets of old calls as new ones. Packet flags repeat after 2^32 calls, so old flags in the
/// packet slots must be cleared.
fn accepts_old_packets(backend: &Backend, mutant: Option<Mutant>) -> bool {
    const MANY: usize = 1024;
    let wrong = on_ranks_with_spec(
        backend,
        2,
        &spec_with_faults(backend, 2, Some(Algorithm::Packets)),
        |symmetric| {
            let group = symmetric.group();
            let sequence = |count, counter| CallSequence {
                counter,
                ..CallSequence::new(Algorithm::Packets, false, count, 0)
            };
            let restart_at = |counter: u64, delays: Vec<_>| {
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
            // The first call has number 1, and leaves packets with flag 1 in many slots.
            assert!(is_correct(symmetric, &sequence(MANY, None), 0));
            restart_at((1 << 32) - 2, Vec::new());
            let mut wrong = (0..3).filter(|round| !is_correct(symmetric, &sequence(4, None), *round)).count();
            let late = group.rank() == Rank(1);
            let delays = if late { (0..4).map(|block| (0, block, LONG)).collect() } else { Vec::new() };
            restart_at((1 << 32) + 1, delays);
            wrong += usize::from(!is_correct(symmetric, &sequence(MANY, None), 7));
            group.bootstrap().barrier().unwrap();
            wrong
        },
    );
    wrong.iter().any(|count| *count > 0)
}

#[test]
fn gpu_packets_of_earlier_flag_cycles_are_not_accepted() {
    if let Some(backend) = cuda::backend() {
        assert!(!accepts_old_packets(&backend, None));
        assert!(accepts_old_packets(&backend, Some(Mutant::NoClearing)));
    }
}

/// Checks broadcasts with alternating roots, in which rank 2 is always delayed.
fn check_broadcasts(backend: &Backend) {
    for algorithm in [Algorithm::Packets, Algorithm::OneShot] {
        on_ranks_with_spec(backend, 3, &spec_with_faults(backend, 3, Some(algorithm)), |symmetric| {
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
fn broadcasts_from_alternating_roots_wait_for_a_delayed_rank() {
    check_broadcasts(&host());
}

#[test]
fn gpu_broadcasts_from_alternating_roots_wait_for_a_delayed_rank() {
    if let Some(backend) = cuda::backend() {
        check_broadcasts(&backend);
    }
}
