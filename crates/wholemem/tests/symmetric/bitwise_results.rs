//! Tests that the results of collectives are bitwise the same on every rank and for every algorithm, and equal to those of a
//! naive loop.

use std::sync::Arc;

use wholemem::{Algorithm, Buffer, Dtype, Rank, ReduceOp, SymmetricMemory, Window, combine_naive};
use wholemem_hal::{Span, Stream};
use wholemem_testkit::{Ranks, cuda, exhaustive, seed, test_name};

use super::harness::{Guarded, STAGING, host, on_ranks, spec};
use super::random_elements::{TestRandom, bytes, elements};

/// The number of padding elements around buffers, so that the buffers of ranks can have different alignments.
const PADDING: usize = 16;

/// Determines whether the input and the output of a call are memory of the rank itself or windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BufferPlaces {
    Own,
    OwnInPlace,
    InputWindow,
    Windows,
    WindowInPlace,
    OutputWindow,
}

const BUFFER_PLACES: [BufferPlaces; 6] = [
    BufferPlaces::Own,
    BufferPlaces::OwnInPlace,
    BufferPlaces::InputWindow,
    BufferPlaces::Windows,
    BufferPlaces::WindowInPlace,
    BufferPlaces::OutputWindow,
];

/// One rank's memory for inputs and outputs, used by all test cases.
struct RankMemory {
    own: [Span; 2],
    windows: [Window; 2],
}

impl RankMemory {
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

/// A reduction with the inputs of all ranks and the expected result.
struct ReduceCase {
    dtype: Dtype,
    op: ReduceOp,
    count: usize,
    seed: u64,
    /// The input of each rank, as bytes.
    inputs: Arc<Vec<Vec<u8>>>,
    expected: Vec<u8>,
}

/// Returns test cases for every element type and operation: with all element counts if `all` is true, otherwise with three
/// random counts each.
fn cases(ranks: usize, seed_value: u64, all: bool) -> Vec<ReduceCase> {
    let mut random = TestRandom(seed_value);
    let mut cases = Vec::new();
    for dtype in Dtype::NUMBERS {
        let counts = counts(dtype);
        let seeds: Vec<_> = counts.iter().map(|_| random.next()).collect();
        let mut known = vec![None; counts.len()];
        for op in ReduceOp::ALL.into_iter().filter(|op| op.applies_to(dtype)) {
            for index in 0..if all { counts.len() } else { 3 } {
                let at = if all { index } else { random.below(counts.len()) };
                let (count, seed) = (counts[at], seeds[at]);
                // All operations on the same type and count use the same inputs.
                let inputs = known[at].get_or_insert_with(|| {
                    Arc::new((0..ranks as u64).map(|rank| elements(dtype, count, seed ^ rank)).collect())
                });
                let inputs: Arc<Vec<Vec<u8>>> = Arc::clone(inputs);
                let sources: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
                let expected = combine_naive(&sources, dtype, op);
                cases.push(ReduceCase { dtype, op, count, seed: random.next(), inputs, expected });
            }
        }
    }
    cases
}

/// Runs all test cases on one rank. The buffers alternate between the rank's own memory and windows.
fn run_cases(symmetric: &SymmetricMemory, cases: &[ReduceCase], algorithm: Algorithm) {
    let memory = RankMemory::new(symmetric, (6 * STAGING + 2 * PADDING * 8).max(1 << 10));
    let stream = symmetric.group().device().stream().unwrap();
    for (index, case) in cases.iter().enumerate() {
        let places =
            BUFFER_PLACES[(index + case.seed as usize % 2 + 2 * algorithm as usize) % BUFFER_PLACES.len()];
        reduce(symmetric, &stream, &memory, case, places);
    }
}

fn reduce(
    symmetric: &SymmetricMemory,
    stream: &Stream,
    memory: &RankMemory,
    case: &ReduceCase,
    places: BufferPlaces,
) {
    let ReduceCase { dtype, op, count, seed, inputs, expected } = case;
    let (dtype, op, count, seed) = (*dtype, *op, *count, *seed);
    let context = || format!("{op} of {count} {dtype} {places:?}, seed {seed}");
    let own = symmetric.group().rank().index();
    let len = count * dtype.len();
    // In a window the offset is equal on all ranks, because all ranks must pass the same range of a window. In a rank's
    // own memory the offset differs between ranks, so that the test covers different alignments.
    let own_at = (seed as usize % PADDING + own * 3) % PADDING * dtype.len();
    let window_at = (seed >> 8) as usize % PADDING * dtype.len();
    let window_span = |index: usize| memory.windows[index].local().unwrap().clone();
    let (from, to) = match places {
        BufferPlaces::Own => {
            (Guarded::new(stream, memory.own[0].clone(), own_at, len), Some(memory.own[1].clone()))
        }
        BufferPlaces::OwnInPlace => (Guarded::new(stream, memory.own[0].clone(), own_at, len), None),
        BufferPlaces::InputWindow => {
            (Guarded::new(stream, window_span(0), window_at, len), Some(memory.own[0].clone()))
        }
        BufferPlaces::Windows => (Guarded::new(stream, window_span(0), window_at, len), Some(window_span(1))),
        BufferPlaces::WindowInPlace => (Guarded::new(stream, window_span(0), window_at, len), None),
        BufferPlaces::OutputWindow => {
            (Guarded::new(stream, memory.own[0].clone(), own_at, len), Some(window_span(1)))
        }
    };
    let to_at =
        if matches!(places, BufferPlaces::Windows | BufferPlaces::OutputWindow) { window_at } else { own_at };
    let to = to.map(|memory| Guarded::new(stream, memory, to_at, len));
    from.write(&inputs[own]);
    if let Some(to) = &to {
        to.write(&vec![0x5A; len]);
    }
    // All ranks must have filled their buffers before the call, because in the call other ranks write to windows.
    symmetric.barrier(stream).unwrap();
    let (from_span, to_span) = (from.span(), to.as_ref().map(Guarded::span));
    let range = window_at..window_at + len;
    let input = match places {
        BufferPlaces::InputWindow | BufferPlaces::Windows | BufferPlaces::WindowInPlace => {
            memory.windows[0].range(range.clone())
        }
        _ => Buffer::from(&from_span),
    };
    let output = match (places, &to_span) {
        (BufferPlaces::WindowInPlace, _) => memory.windows[0].range(range),
        (BufferPlaces::Windows | BufferPlaces::OutputWindow, _) => memory.windows[1].range(range),
        (_, Some(span)) => Buffer::from(span),
        (_, None) => Buffer::from(&from_span),
    };
    symmetric.all_reduce(stream, input, output, dtype, op).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    symmetric.check().unwrap();
    // No rank may overwrite this rank's output before this rank has read it.
    symmetric.barrier(stream).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    let seen = to.as_ref().unwrap_or(&from).read(context);
    assert!(
        seen == *expected,
        "{} on rank {own}: {seen:02x?} instead of {expected:02x?} of {inputs:02x?}",
        context()
    );
    if to.is_some() {
        assert_eq!(from.read(context), inputs[own], "{}: the input was written", context());
    }
    symmetric.barrier(stream).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
}

#[test]
fn reductions_match_a_naive_loop() {
    for ranks in 1..=9 {
        let cases = cases(ranks as usize, seed(), exhaustive());
        for algorithm in Algorithm::ALL {
            on_ranks(&host(), ranks, Some(algorithm), |symmetric| {
                run_cases(symmetric, &cases, algorithm);
            });
        }
    }
}

#[test]
fn gpu_reductions_of_processes_match_a_naive_loop() {
    for ranks in 1..=9 {
        of_processes(ranks, test_name!(), |symmetric, algorithm, seed_value| {
            let ranks = symmetric.group().size() as usize;
            run_cases(symmetric, &cases(ranks, seed_value, false), algorithm);
        });
    }
}

/// Runs `work` in rank processes on one GPU, with every algorithm.
fn of_processes(ranks: usize, test: &str, work: impl Fn(&SymmetricMemory, Algorithm, u64)) {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(ranks).parameter(seed().to_string()).run(test, |rank| {
        let backend = cuda::backend().unwrap();
        let members: Vec<_> = (0..rank.count()).collect();
        let group = super::peer_failures::join(rank, &members, &backend);
        for algorithm in Algorithm::ALL {
            let symmetric =
                SymmetricMemory::create(&group, &spec(&backend, group.size(), Some(algorithm))).unwrap();
            work(&symmetric, algorithm, rank.parameter().parse().unwrap());
            group.bootstrap().barrier().unwrap();
        }
    });
}

/// Compares all-gathers and broadcasts of random lengths and alignments, staged and from windows, with the inputs.
fn check_copies(symmetric: &SymmetricMemory, seed_value: u64) {
    let group = symmetric.group();
    let (own, stream) = (group.rank().index(), &group.device().stream().unwrap());
    let mut random = TestRandom(seed_value);
    let max_len = 3 * STAGING;
    let count = group.size() as usize;
    let from = symmetric.mem_alloc(max_len + 64).unwrap();
    let output = Guarded::buffer(symmetric, count * max_len + 64);
    let own_input = Guarded::buffer(symmetric, max_len + 64);
    for round in 0..if exhaustive() { 300 } else { 60 } {
        let len = [0, 1, 7, 16, 100, 4096, 4097, 8192, max_len][random.below(9)];
        let (from_at, to_at, seed) = (random.below(64), random.below(64), random.next());
        let root = Rank(random.below(count) as u32);
        let inputs: Vec<_> = (0..count as u64).map(|rank| bytes(len, seed ^ rank)).collect();
        let in_window = round % 2 == 0;
        let memory = if in_window { from.local().unwrap().clone() } else { own_input.clone() };
        let input = Guarded::new(stream, memory, from_at, len);
        input.write(&inputs[own]);
        symmetric.barrier(stream).unwrap();
        let span = input.span();
        let buffer = || if in_window { from.range(from_at..from_at + len) } else { Buffer::from(&span) };
        let gathered = Guarded::new(stream, output.clone(), to_at, count * len);
        gathered.write(&vec![0x5A; count * len]);
        symmetric.all_gather(stream, buffer(), &gathered.span()).unwrap();
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
        symmetric.check().unwrap();
        let context = || format!("round {round}, seed {seed}");
        assert!(gathered.read(context) == inputs.concat(), "{}: gathered on rank {own}", context());
        let copied = Guarded::new(stream, output.clone(), to_at, len);
        copied.write(&vec![0x5A; len]);
        symmetric.broadcast(stream, root, buffer(), &copied.span()).unwrap();
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
        symmetric.check().unwrap();
        assert!(
            copied.read(context) == inputs[root.index()],
            "{}: from rank {root} on rank {own}",
            context()
        );
        assert_eq!(input.read(context), inputs[own], "{}: the input was written", context());
        symmetric.barrier(stream).unwrap();
        stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    }
}

#[test]
fn gathers_and_broadcasts_copy_every_byte_to_all_ranks() {
    let some = [1, 2, 3, 8];
    let every = [1, 2, 3, 4, 5, 6, 7, 8, 9];
    for &ranks in if exhaustive() { &every[..] } else { &some } {
        let seed_value = seed();
        for algorithm in [Algorithm::Packets, Algorithm::OneShot] {
            on_ranks(&host(), ranks, Some(algorithm), |symmetric| check_copies(symmetric, seed_value));
        }
    }
}

#[test]
fn gpu_gathers_and_broadcasts_of_processes_copy_every_byte_to_all_ranks() {
    for ranks in [1, 2, 3, 8] {
        of_processes(ranks, test_name!(), |symmetric, _, seed_value| check_copies(symmetric, seed_value));
    }
}
