//! Tests of ranks that make different calls: every rank gets an error that names both calls, and no rank gets a result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use wholemem::{
    Algorithm, Buffer, CallFaults, Communicator, Dtype, Error, Lane, Mutant, Rank, ReduceOp, SymmetricMemory,
    SymmetricSpec, Window,
};
use wholemem_comm::Error as CommError;
use wholemem_hal::{Backend, BackendKind, Span, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{cuda, exhaustive};

use super::harness::{Guarded, STAGING, groups, host, on_ranks_with_spec, spec_with_faults};

/// The memory that a rank passes to a call: memory of its own, or a window with an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    Own,
    Window(usize, usize),
}

/// A collective call with all arguments that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    AllReduce { count: usize, dtype: Dtype, op: ReduceOp, input: Memory, output: Memory },
    AllGather { len: usize, input: Memory, output: Memory },
    Broadcast { len: usize, root: u32, input: Memory, output: Memory },
    Barrier,
}

const COUNT: usize = 300;
const OFFSET: usize = 16 << 10;
const WINDOW: usize = 64 << 10;

const BASE: Call = Call::AllReduce {
    count: COUNT,
    dtype: Dtype::U32,
    op: ReduceOp::Sum,
    input: Memory::Own,
    output: Memory::Own,
};

/// Calls that differ from each other in at least one term.
fn calls() -> Vec<Call> {
    let all_reduce = |count, dtype, op, input, output| Call::AllReduce { count, dtype, op, input, output };
    let (own, first, second) = (Memory::Own, Memory::Window(0, 0), Memory::Window(1, 0));
    let shifted = Memory::Window(0, OFFSET);
    let (sum, u32) = (ReduceOp::Sum, Dtype::U32);
    vec![
        BASE,
        all_reduce(COUNT + 1, u32, sum, own, own),
        all_reduce(COUNT + 64, u32, sum, own, own),
        all_reduce(4 * STAGING, u32, sum, own, own),
        all_reduce(0, u32, sum, own, own),
        all_reduce(COUNT, Dtype::F32, sum, own, own),
        all_reduce(2 * COUNT, Dtype::U16, sum, own, own),
        all_reduce(COUNT, u32, ReduceOp::Prod, own, own),
        all_reduce(COUNT, u32, sum, first, own),
        all_reduce(COUNT, u32, sum, second, own),
        all_reduce(COUNT, u32, sum, shifted, own),
        all_reduce(COUNT, u32, sum, own, first),
        all_reduce(COUNT, u32, sum, first, second),
        all_reduce(COUNT, u32, sum, first, first),
        Call::AllGather { len: 4 * COUNT, input: own, output: own },
        Call::AllGather { len: 4 * COUNT, input: own, output: first },
        Call::AllGather { len: 4 * COUNT, input: first, output: first },
        Call::Broadcast { len: 4 * COUNT, root: 0, input: own, output: own },
        Call::Broadcast { len: 4 * COUNT, root: 1, input: own, output: own },
        Call::Broadcast { len: 4 * COUNT, root: 0, input: first, output: own },
        Call::Barrier,
    ]
}

impl Call {
    /// Returns the begin of the text with which an error describes the call.
    fn text(&self) -> String {
        match *self {
            Self::AllReduce { count, dtype, op, .. } => format!("all_reduce({op}) of {count} {dtype}"),
            Self::AllGather { len, .. } => format!("all_gather of {len} bytes"),
            Self::Broadcast { len, root, .. } => format!("broadcast of {len} bytes from rank {root}"),
            Self::Barrier => "barrier".to_owned(),
        }
    }

    /// Makes the call on a lane, and waits for it.
    fn make(&self, lane: &Lane, memory: &RankMemory) -> Result<(), Error> {
        let stream = &memory.stream;
        let (lens, places) = match *self {
            Self::AllReduce { count, dtype, input, output, .. } => {
                ([count * dtype.len(); 2], [input, output])
            }
            Self::AllGather { len, input, output } => ([len, len * memory.ranks], [input, output]),
            Self::Broadcast { len, input, output, .. } => ([len; 2], [input, output]),
            Self::Barrier => ([0; 2], [Memory::Own; 2]),
        };
        let own = [0, 1].map(|at| memory.own[at].part(0, lens[at]).unwrap());
        // An all-gather from and to the same memory is in place: its input is this rank's part of its output.
        let gathers_in_place = matches!(self, Self::AllGather { input, output, .. } if input == output);
        let first = if gathers_in_place && places[0] != Memory::Own { memory.rank * lens[0] } else { 0 };
        let buffer = |at: usize| match places[at] {
            Memory::Own => Buffer::from(&own[at]),
            Memory::Window(index, offset) => {
                let offset = offset + if at == 0 { first } else { 0 };
                memory.windows[index].range(offset..offset + lens[at])
            }
        };
        let enqueued = match *self {
            Self::AllReduce { dtype, op, .. } => lane.all_reduce(stream, buffer(0), buffer(1), dtype, op),
            Self::AllGather { .. } => lane.all_gather(stream, buffer(0), buffer(1)),
            Self::Broadcast { root, .. } => lane.broadcast(stream, Rank(root), buffer(0), buffer(1)),
            Self::Barrier => lane.barrier(stream),
        };
        let ended = stream.synchronize(Deadline::NEVER);
        enqueued?;
        ended?;
        lane.check()
    }
}

/// The memory that the calls of one rank use.
struct RankMemory {
    windows: [Window; 2],
    own: [Span; 2],
    stream: Stream,
    rank: usize,
    ranks: usize,
}

impl RankMemory {
    fn create(symmetric: &SymmetricMemory) -> Self {
        let group = symmetric.group();
        let windows = [(); 2].map(|()| symmetric.mem_alloc(WINDOW).unwrap());
        let own = [(); 2].map(|()| Guarded::buffer(symmetric, WINDOW));
        let stream = group.device().stream().unwrap();
        let (rank, ranks) = (group.rank().index(), group.size() as usize);
        Self { windows, own, stream, rank, ranks }
    }
}

/// The number of lanes of one symmetric memory: as many as three ranks can have on one GPU. Each pair of differing calls needs its own lane, because it makes the lane unusable.
const LANES: u32 = 20;

/// Makes two different calls, one on the odd rank and one on all other ranks, for each pair of calls and on a lane of their own.
/// Returns each rank's outcome for each pair.
fn make_differing_calls(
    backend: &Backend,
    ranks: u32,
    algorithm: Algorithm,
    pairs: &[(Call, Call)],
    mutant: Option<Mutant>,
) -> Vec<Vec<Result<(), Error>>> {
    assert!(pairs.len() <= LANES as usize);
    let timeout = Duration::from_secs(if mutant.is_none() { 100 } else { 2 });
    let spec = SymmetricSpec { lanes: LANES, timeout, ..spec_with_faults(backend, ranks, Some(algorithm)) };
    on_ranks_with_spec(backend, ranks, &spec, |symmetric| {
        let group = symmetric.group();
        let odd = group.rank().0 + 1 == ranks;
        let memory = RankMemory::create(symmetric);
        group.bootstrap().barrier().unwrap();
        let outcomes = pairs.iter().enumerate().map(|(at, (usual, other))| {
            let lane = symmetric.lane(at).unwrap();
            lane.inject_faults(&CallFaults { mutant, ..CallFaults::default() }).unwrap();
            // On every second lane a successful call comes first, so that the differing calls use both of the alternating
            // buffers.
            (0..at % 2).for_each(|_| lane.barrier(&memory.stream).unwrap());
            (if odd { other } else { usual }).make(lane, &memory)
        });
        let outcomes = outcomes.collect();
        group.bootstrap().barrier().unwrap();
        outcomes
    })
}

fn check_every_pair(backend: &Backend, ranks: u32) {
    let all = calls();
    let mut pairs: Vec<_> = all.iter().flat_map(|one| all.iter().map(|other| (*one, *other))).collect();
    pairs.retain(|(usual, other)| usual != other);
    if backend.kind() == BackendKind::Cuda || !exhaustive() {
        // Keeps only the pairs in which one call is the base, or both are neighbours in the list of calls.
        let place = |call: &Call| all.iter().position(|other| other == call).unwrap();
        pairs.retain(|(one, other)| *one == BASE || *other == BASE || place(one).abs_diff(place(other)) == 1);
    }
    for algorithm in Algorithm::ALL {
        for pairs in pairs.chunks(LANES as usize) {
            let outcomes = make_differing_calls(backend, ranks, algorithm, pairs, None);
            for (rank, outcomes) in (0..).zip(outcomes) {
                for ((usual, other), outcome) in pairs.iter().zip(outcomes) {
                    let odd = rank + 1 == ranks;
                    let context =
                        format!("{usual:?} and {other:?} by {algorithm} on rank {rank}: {outcome:?}");
                    let Err(Error::Comm(CommError::RanksDisagree { rank: named, here, there })) = outcome
                    else {
                        panic!("{context}")
                    };
                    let (own, peer) = if odd { (other, usual) } else { (usual, other) };
                    assert!(here.starts_with(&own.text()) && there.starts_with(&peer.text()), "{context}");
                    assert_ne!(here, there, "{context}");
                    assert_eq!(named.0 + 1 == ranks, !odd, "{context}");
                }
            }
        }
    }
}

#[test]
fn different_calls_are_an_error_on_every_rank() {
    for ranks in [2, 3] {
        check_every_pair(&host(), ranks);
    }
}

#[test]
fn gpu_different_calls_are_an_error_on_every_rank() {
    if let Some(backend) = cuda::backend() {
        for ranks in [2, 3] {
            check_every_pair(&backend, ranks);
        }
    }
}

#[test]
fn a_rank_that_leaves_after_a_disagreement_does_not_hide_it() {
    for round in 0..20 {
        let spec = spec_with_faults(&host(), 2, Some(Algorithm::ALL[round % 3]));
        let make = &|group: Communicator| {
            let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
            let memory = RankMemory::create(&symmetric);
            group.bootstrap().barrier().unwrap();
            // The rank leaves the group at the end of this function.
            if group.rank() == Rank(0) { BASE } else { Call::Barrier }.make(&symmetric, &memory)
        };
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                groups(&host(), 2).into_iter().map(|group| scope.spawn(move || make(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for outcome in outcomes {
            assert!(matches!(outcome, Err(Error::Comm(CommError::RanksDisagree { .. }))), "{outcome:?}");
        }
    }
}

/// Calls that differ, but move as many bytes in the same pattern, so that ranks that do not compare terms succeed.
fn similar_calls() -> [(Call, Call); 2] {
    let Call::AllReduce { count, dtype, input, output, .. } = BASE else { unreachable!() };
    let product = Call::AllReduce { count, dtype, op: ReduceOp::Prod, input, output };
    let float = Call::AllReduce { count, dtype: Dtype::F32, op: ReduceOp::Sum, input, output };
    [(BASE, product), (BASE, float)]
}

fn check_digests_are_necessary(backend: &Backend) {
    for algorithm in Algorithm::ALL {
        let outcomes = make_differing_calls(backend, 2, algorithm, &similar_calls(), Some(Mutant::AnyDigest));
        assert_eq!(outcomes, vec![vec![Ok(()); 2]; 2], "without digests the calls succeed, by {algorithm}");
    }
}

#[test]
fn without_digests_different_calls_succeed() {
    check_digests_are_necessary(&host());
}

#[test]
fn gpu_without_digests_different_calls_succeed() {
    if let Some(backend) = cuda::backend() {
        check_digests_are_necessary(&backend);
    }
}

/// Makes sequences of two equal calls on both ranks, in which rank 1 is so late that rank 0 publishes its terms of both calls. Returns
/// true if a rank reports a disagreement.
fn disagrees_about_equal_calls(backend: &Backend, mutant: Option<Mutant>, delay: u64) -> bool {
    let spec = spec_with_faults(backend, 2, Some(Algorithm::OneShot));
    let outcomes = on_ranks_with_spec(backend, 2, &spec, |symmetric| {
        let group = symmetric.group();
        let memory = RankMemory::create(symmetric);
        let outcomes = (0..6).map(|round| {
            // The ranks are late in turns, so both have published terms of earlier calls.
            let late = group.rank().0 == round % 2;
            let delays = if late { (0..4).map(|block| (0, block, delay)).collect() } else { Vec::new() };
            group.bootstrap().barrier().unwrap();
            symmetric.inject_faults(&CallFaults { mutant, delays, ..CallFaults::default() }).unwrap();
            group.bootstrap().barrier().unwrap();
            let call = if round % 3 == 0 { Call::Barrier } else { BASE };
            call.make(symmetric, &memory)
        });
        let outcomes: Vec<_> = outcomes.collect();
        group.bootstrap().barrier().unwrap();
        outcomes
    });
    let mut failed = outcomes.into_iter().flatten().filter_map(Result::err).peekable();
    let disagrees = failed.peek().is_some();
    assert!(failed.all(|error| matches!(error, Error::Comm(CommError::RanksDisagree { .. }))));
    disagrees
}

fn check_old_terms(backend: &Backend) {
    const DELAY: u64 = 20_000_000;
    assert!(!disagrees_about_equal_calls(backend, None, DELAY));
    // Each attempt doubles the delay, because the machine may be busy.
    let mutant = Some(Mutant::OldTerms);
    assert!((0..5).any(|attempt| disagrees_about_equal_calls(backend, mutant, DELAY << attempt)));
}

#[test]
fn terms_of_earlier_calls_are_not_compared() {
    check_old_terms(&host());
}

#[test]
fn gpu_terms_of_earlier_calls_are_not_compared() {
    if let Some(backend) = cuda::backend() {
        check_old_terms(&backend);
    }
}

#[test]
fn a_call_without_elements_waits_for_all_ranks() {
    for algorithm in Algorithm::ALL {
        let spec = spec_with_faults(&host(), 3, Some(algorithm));
        let late_rank_calls = AtomicBool::new(false);
        on_ranks_with_spec(&host(), 3, &spec, |symmetric| {
            let group = symmetric.group();
            let memory = RankMemory::create(symmetric);
            if group.rank() == Rank(1) {
                // The other ranks wait in their calls before this rank makes its own.
                (0..1000).for_each(|_| std::thread::yield_now());
                late_rank_calls.store(true, Ordering::SeqCst);
            }
            let Call::AllReduce { dtype, op, input, output, .. } = BASE else { unreachable!() };
            Call::AllReduce { count: 0, dtype, op, input, output }.make(symmetric, &memory).unwrap();
            assert!(late_rank_calls.load(Ordering::SeqCst), "rank {} did not wait", group.rank());
            Call::AllGather { len: 0, input, output }.make(symmetric, &memory).unwrap();
            Call::Broadcast { len: 0, root: 2, input, output }.make(symmetric, &memory).unwrap();
            group.bootstrap().barrier().unwrap();
        });
    }
}

fn check_in_place_gathers(backend: &Backend) {
    for ranks in [2, 3, 5] {
        for algorithm in Algorithm::ALL {
            let spec = spec_with_faults(backend, ranks, Some(algorithm));
            on_ranks_with_spec(backend, ranks, &spec, |symmetric| {
                let group = symmetric.group();
                let memory = RankMemory::create(symmetric);
                let stream = &memory.stream;
                for len in [1, 24, 1000, STAGING + 100] {
                    let window = &memory.windows[0];
                    let own = group.rank().index() * len..(group.rank().index() + 1) * len;
                    let all = len * ranks as usize;
                    stream.fill(&window.part_of(group.rank(), 0, all).unwrap(), 0xEE).unwrap();
                    let value = |rank: u32| 1 + (rank as usize + len) as u8;
                    let part = window.part_of(group.rank(), own.start, len).unwrap();
                    stream.write(&part, &vec![value(group.rank().0); len]).unwrap();
                    symmetric.all_gather(stream, window.range(own), window.range(0..all)).unwrap();
                    let mut seen = vec![0; all];
                    stream.read(&window.part_of(group.rank(), 0, all).unwrap(), &mut seen).unwrap();
                    symmetric.check().unwrap();
                    let expected: Vec<_> = (0..ranks).flat_map(|rank| vec![value(rank); len]).collect();
                    assert!(seen == expected, "{ranks} ranks, {len} bytes, {algorithm}");
                    group.bootstrap().barrier().unwrap();
                }
            });
        }
    }
}

#[test]
fn an_all_gather_in_place_in_a_window_has_the_parts_of_all_ranks() {
    check_in_place_gathers(&host());
}

#[test]
fn gpu_an_all_gather_in_place_in_a_window_has_the_parts_of_all_ranks() {
    if let Some(backend) = cuda::backend() {
        check_in_place_gathers(&backend);
    }
}

#[test]
fn windows_that_are_created_by_different_calls_are_an_error_on_every_rank() {
    let spec = spec_with_faults(&host(), 3, None);
    on_ranks_with_spec(&host(), 3, &spec, |symmetric| {
        let memory = Guarded::buffer(symmetric, WINDOW);
        let odd = symmetric.group().rank() == Rank(1);
        let created = if odd { symmetric.window_register_span(&memory) } else { symmetric.mem_alloc(WINDOW) };
        assert_eq!(created.unwrap_err(), Error::RanksDisagree { rank: Rank(1) });
        // The group remains usable.
        let window = symmetric.mem_alloc(WINDOW).unwrap();
        assert_eq!(window.len_of(Rank(2)), WINDOW);
    });
}

/// Reduces slices of host memory whose lengths differ between ranks.
fn check_slices_of_different_lengths(backend: &Backend) {
    // The last two lengths are staged in several pieces on a GPU.
    for (usual, other) in [(1000, 1001), (0, 4), (1 << 20, 1 << 21), ((1 << 21) + 5, 5)] {
        let spec = SymmetricSpec { timeout: Duration::from_secs(60), ..spec_with_faults(backend, 2, None) };
        on_ranks_with_spec(backend, 2, &spec, |symmetric| {
            let count = if symmetric.group().rank() == Rank(0) { usual } else { other };
            let mut values = vec![1_u32; count];
            let outcome = symmetric.all_reduce_slice(&mut values, ReduceOp::Sum);
            let disagrees = matches!(outcome, Err(Error::Comm(CommError::RanksDisagree { .. })));
            assert!(disagrees, "{usual} and {other} elements: {outcome:?}");
        });
    }
}

#[test]
fn slices_of_different_lengths_are_an_error_on_every_rank() {
    check_slices_of_different_lengths(&host());
}

#[test]
fn gpu_slices_of_different_lengths_are_an_error_on_every_rank() {
    if let Some(backend) = cuda::backend() {
        check_slices_of_different_lengths(&backend);
    }
}
