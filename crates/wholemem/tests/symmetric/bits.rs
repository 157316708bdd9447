//! The outcome of a reduction is the same to the bit on every rank, whatever the algorithm, and equal to the plainest loop.

use std::sync::Arc;

use wholemem::{Algorithm, Buffer, Dtype, Rank, ReduceOp, SymmetricMemory, Window, combine_naive};
use wholemem_hal::{Span, Stream};
use wholemem_testkit::{Ranks, cuda, exhaustive, seed, test_name};

use super::values::{Random, bytes, elements};
use super::world::{Guarded, STAGING, host, on_ranks, spec};

/// Elements of padding around buffers, so that each rank's can begin elsewhere.
const ROOM: usize = 16;

/// Where the buffers of a call are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Places {
    Own,
    OwnInPlace,
    InputWindow,
    Windows,
    WindowInPlace,
    OutputWindow,
}

const PLACES: [Places; 6] = [
    Places::Own,
    Places::OwnInPlace,
    Places::InputWindow,
    Places::Windows,
    Places::WindowInPlace,
    Places::OutputWindow,
];

/// One rank's memory for all cases.
struct Memory {
    own: [Span; 2],
    windows: [Window; 2],
}

impl Memory {
    fn new(symmetric: &SymmetricMemory, len: usize) -> Self {
        let own = [(); 2].map(|()| Guarded::buffer(symmetric, len));
        Self { own, windows: [(); 2].map(|()| symmetric.mem_alloc(len).unwrap()) }
    }
}

fn counts(dtype: Dtype) -> Vec<usize> {
    let piece = STAGING / dtype.len();
    let mut counts: Vec<_> = (0..=67).collect();
    counts.extend([
        piece - 1,
        piece,
        piece + 1,
        2 * piece,
        2 * piece + 3,
        8192 / dtype.len() + 1,
        5 * piece + 7,
    ]);
    counts
}

/// A reduction, and what must come of it.
struct Case {
    dtype: Dtype,
    op: ReduceOp,
    count: usize,
    seed: u64,
    /// What each rank brings along.
    inputs: Arc<Vec<Vec<u8>>>,
    expected: Vec<u8>,
}

/// Every type and operation, with some counts each, or all.
fn cases(ranks: usize, chance: u64, all: bool) -> Vec<Case> {
    let mut random = Random(chance);
    let mut cases = Vec::new();
    for dtype in Dtype::NUMBERS {
        let counts = counts(dtype);
        let seeds: Vec<_> = counts.iter().map(|_| random.next()).collect();
        let mut known = vec![None; counts.len()];
        for op in ReduceOp::ALL.into_iter().filter(|op| op.applies_to(dtype)) {
            for index in 0..if all { counts.len() } else { 3 } {
                let at = if all { index } else { random.below(counts.len()) };
                let (count, seed) = (counts[at], seeds[at]);
                // The same for all operations.
                let inputs = known[at].get_or_insert_with(|| {
                    Arc::new((0..ranks as u64).map(|rank| elements(dtype, count, seed ^ rank)).collect())
                });
                let inputs: Arc<Vec<Vec<u8>>> = Arc::clone(inputs);
                let sources: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
                let expected = combine_naive(&sources, dtype, op);
                cases.push(Case { dtype, op, count, seed: random.next(), inputs, expected });
            }
        }
    }
    cases
}

/// All cases as one rank plays them, each in another kind of place than the one before, and than with another algorithm.
fn reductions_agree(symmetric: &SymmetricMemory, cases: &[Case], algorithm: Algorithm) {
    let memory = Memory::new(symmetric, (6 * STAGING + 2 * ROOM * 8).max(1 << 10));
    let stream = symmetric.group().device().stream().unwrap();
    for (index, case) in cases.iter().enumerate() {
        let places = PLACES[(index + case.seed as usize % 2 + 2 * algorithm as usize) % PLACES.len()];
        reduce(symmetric, &stream, &memory, case, places);
    }
}

fn reduce(symmetric: &SymmetricMemory, stream: &Stream, memory: &Memory, case: &Case, places: Places) {
    let Case { dtype, op, count, seed, inputs, expected } = case;
    let (dtype, op, count, seed) = (*dtype, *op, *count, *seed);
    let what = || format!("{op} of {count} {dtype} {places:?}, seed {seed}");
    let own = symmetric.group().rank().index();
    let len = count * dtype.len();
    // A window's range is the same on all ranks; other memory begins elsewhere on each.
    let own_at = (seed as usize % ROOM + own * 3) % ROOM * dtype.len();
    let window_at = (seed >> 8) as usize % ROOM * dtype.len();
    let window_span = |index: usize| memory.windows[index].local().unwrap().clone();
    let (from, to) = match places {
        Places::Own => {
            (Guarded::new(stream, memory.own[0].clone(), own_at, len), Some(memory.own[1].clone()))
        }
        Places::OwnInPlace => (Guarded::new(stream, memory.own[0].clone(), own_at, len), None),
        Places::InputWindow => {
            (Guarded::new(stream, window_span(0), window_at, len), Some(memory.own[0].clone()))
        }
        Places::Windows => (Guarded::new(stream, window_span(0), window_at, len), Some(window_span(1))),
        Places::WindowInPlace => (Guarded::new(stream, window_span(0), window_at, len), None),
        Places::OutputWindow => {
            (Guarded::new(stream, memory.own[0].clone(), own_at, len), Some(window_span(1)))
        }
    };
    let to_at = if matches!(places, Places::Windows | Places::OutputWindow) { window_at } else { own_at };
    let to = to.map(|memory| Guarded::new(stream, memory, to_at, len));
    from.put(&inputs[own]);
    if let Some(to) = &to {
        to.put(&vec![0x5A; len]);
    }
    // Buffers in windows are written by the others: all have put theirs before anybody begins.
    symmetric.barrier(stream).unwrap();
    let (from_span, to_span) = (from.span(), to.as_ref().map(Guarded::span));
    let range = window_at..window_at + len;
    let input = match places {
        Places::InputWindow | Places::Windows | Places::WindowInPlace => {
            memory.windows[0].range(range.clone())
        }
        _ => Buffer::from(&from_span),
    };
    let output = match (places, &to_span) {
        (Places::WindowInPlace, _) => memory.windows[0].range(range),
        (Places::Windows | Places::OutputWindow, _) => memory.windows[1].range(range),
        (_, Some(span)) => Buffer::from(span),
        (_, None) => Buffer::from(&from_span),
    };
    symmetric.all_reduce(stream, input, output, dtype, op).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    symmetric.check().unwrap();
    // What this rank looks at, no other overwrites before it has.
    symmetric.barrier(stream).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    let seen = to.as_ref().unwrap_or(&from).take(what);
    assert!(
        seen == *expected,
        "{} on rank {own}: {seen:02x?} instead of {expected:02x?} of {inputs:02x?}",
        what()
    );
    if to.is_some() {
        assert_eq!(from.take(what), inputs[own], "{}: the input was written", what());
    }
    symmetric.barrier(stream).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
}

#[test]
fn reductions_agree_with_the_plainest_loop() {
    for ranks in 1..=9 {
        let cases = cases(ranks as usize, seed(), exhaustive());
        for algorithm in Algorithm::ALL {
            on_ranks(&host(), ranks, Some(algorithm), |symmetric| {
                reductions_agree(symmetric, &cases, algorithm);
            });
        }
    }
}

#[test]
fn gpu_reductions_of_processes_agree_with_the_plainest_loop() {
    for ranks in 1..=9 {
        of_processes(ranks, test_name!(), |symmetric, algorithm, chance| {
            let ranks = symmetric.group().size() as usize;
            reductions_agree(symmetric, &cases(ranks, chance, false), algorithm);
        });
    }
}

/// Ranks that are processes on one GPU, with every algorithm.
fn of_processes(ranks: usize, test: &str, work: impl Fn(&SymmetricMemory, Algorithm, u64)) {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(ranks).parameter(seed().to_string()).run(test, |rank| {
        let backend = cuda::backend().unwrap();
        let members: Vec<_> = (0..rank.count()).collect();
        let group = super::deaths::join(rank, &members, &backend);
        for algorithm in Algorithm::ALL {
            let symmetric =
                SymmetricMemory::create(&group, &spec(&backend, group.size(), Some(algorithm))).unwrap();
            work(&symmetric, algorithm, rank.parameter().parse().unwrap());
            group.bootstrap().barrier().unwrap();
        }
    });
}

/// Gathers and broadcasts of bytes, long and short, aligned and not, staged and from windows.
fn copies_agree(symmetric: &SymmetricMemory, chance: u64) {
    let group = symmetric.group();
    let (own, stream) = (group.rank().index(), &group.device().stream().unwrap());
    let mut random = Random(chance);
    let most = 3 * STAGING;
    let count = group.size() as usize;
    let from = symmetric.mem_alloc(most + 64).unwrap();
    let output = Guarded::buffer(symmetric, count * most + 64);
    let own_input = Guarded::buffer(symmetric, most + 64);
    for round in 0..if exhaustive() { 300 } else { 60 } {
        let len = [0, 1, 7, 16, 100, 4096, 4097, 8192, most][random.below(9)];
        let (from_at, to_at, seed) = (random.below(64), random.below(64), random.next());
        let root = Rank(random.below(count) as u32);
        let inputs: Vec<_> = (0..count as u64).map(|rank| bytes(len, seed ^ rank)).collect();
        let in_window = round % 2 == 0;
        let memory = if in_window { from.local().unwrap().clone() } else { own_input.clone() };
        let input = Guarded::new(stream, memory, from_at, len);
        input.put(&inputs[own]);
        symmetric.barrier(stream).unwrap();
        let span = input.span();
        let buffer = || if in_window { from.range(from_at..from_at + len) } else { Buffer::from(&span) };
        let gathered = Guarded::new(stream, output.clone(), to_at, count * len);
        gathered.put(&vec![0x5A; count * len]);
        symmetric.all_gather(stream, buffer(), &gathered.span()).unwrap();
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
        symmetric.check().unwrap();
        let what = || format!("round {round}, seed {seed}");
        assert!(gathered.take(what) == inputs.concat(), "{}: gathered on rank {own}", what());
        let copied = Guarded::new(stream, output.clone(), to_at, len);
        copied.put(&vec![0x5A; len]);
        symmetric.broadcast(stream, root, buffer(), &copied.span()).unwrap();
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
        symmetric.check().unwrap();
        assert!(copied.take(what) == inputs[root.index()], "{}: from rank {root} on rank {own}", what());
        assert_eq!(input.take(what), inputs[own], "{}: the input was written", what());
        symmetric.barrier(stream).unwrap();
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    }
}

#[test]
fn gathers_and_broadcasts_give_every_byte_to_all() {
    let some = [1, 2, 3, 8];
    let every = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    for &ranks in if exhaustive() { &every[..] } else { &some } {
        let chance = seed();
        for algorithm in [Algorithm::Packets, Algorithm::OneShot] {
            on_ranks(&host(), ranks, Some(algorithm), |symmetric| copies_agree(symmetric, chance));
        }
    }
}

#[test]
fn gpu_gathers_and_broadcasts_of_processes_give_every_byte_to_all() {
    for ranks in [1, 2, 3, 8] {
        of_processes(ranks, test_name!(), |symmetric, _, chance| copies_agree(symmetric, chance));
    }
}
