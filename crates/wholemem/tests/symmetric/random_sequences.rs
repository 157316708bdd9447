//! Random sequences of collective calls with random delays, compared with a plain model. Some sequences end with a call that differs
//! on one rank, which must be an error on every rank.

use std::time::Duration;

use wholemem::{
    Buffer, CallFaults, Dtype, Error, Lane, Rank, ReduceOp, SymmetricMemory, SymmetricSpec, Window,
    combine_naive,
};
use wholemem_comm::Error as CommError;
use wholemem_hal::{Backend, BackendKind, Span, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{cuda, exhaustive, seed};

use super::harness::{Guarded, STAGING, host, on_ranks_with_spec, spec_with_faults};
use super::random_elements::{TestRandom, bytes};

/// The length of each buffer and of each rank's part of each window.
const MEMORY: usize = 8 * (3 * STAGING + 64);

/// The number of sequences that run with one symmetric memory, each on a lane of its own: as many lanes as five ranks can have on
/// one GPU.
const LANES: u32 = 12;

/// Integer types, whose results have one bit pattern.
const TYPES: [Dtype; 5] = [Dtype::U8, Dtype::I16, Dtype::U32, Dtype::I64, Dtype::U64];

/// The kind of collective that a call of a sequence performs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce(Dtype, ReduceOp),
    AllGather,
    Broadcast(Rank),
    Barrier,
}

/// One collective call of a random sequence, with its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    kind: Kind,
    /// The length of each rank's input in bytes.
    len: usize,
    /// The numbers of the input's and the output's memory: two buffers of the rank, then two windows.
    places: [usize; 2],
    in_place: bool,
}

impl Call {
    fn random(random: &mut TestRandom, ranks: u32) -> Self {
        let dtype = TYPES[random.below(TYPES.len())];
        let kind = match random.below(8) {
            0 => Kind::Barrier,
            1 | 2 => Kind::AllGather,
            3 | 4 => Kind::Broadcast(Rank(random.below(ranks as usize) as u32)),
            _ => Kind::AllReduce(dtype, ReduceOp::ALL[random.below(ReduceOp::ALL.len())]),
        };
        let most = [1, 9, 300, 3 * STAGING][random.below(4)];
        let len = (random.below(most + 1) / dtype.len() + random.below(2)) * dtype.len();
        let in_place = random.below(3) == 0;
        let input = random.below(4);
        let output = if in_place { input } else { (input + 1 + random.below(3)) % 4 };
        let (len, places) = if kind == Kind::Barrier { (0, [0, 1]) } else { (len, [input, output]) };
        Self { kind, len, places, in_place: in_place && kind != Kind::Barrier }
    }

    /// Returns a call that differs from this one.
    fn other(self, random: &mut TestRandom, ranks: u32) -> Self {
        loop {
            let mut other = match random.below(3) {
                0 => Self::random(random, ranks),
                1 => Self { len: self.len + 8 * (1 + random.below(4)), ..self },
                _ => Self { places: [random.below(4), self.places[1]], in_place: false, ..self },
            };
            if other.kind == Kind::Barrier {
                other = Self { len: 0, places: [0, 1], in_place: false, ..other };
            } else if other.places[0] == other.places[1] && !other.in_place {
                continue;
            }
            // Memory that is not in a window is not one of the terms, which must be equal on all ranks.
            let place = |place: usize| place.checked_sub(2);
            let terms = |call: &Self| {
                let in_window = call.places.map(place);
                let input = if call.in_place && call.kind == Kind::AllGather { None } else { in_window[0] };
                (call.kind, call.len, input, in_window[1])
            };
            if terms(&other) != terms(&self) {
                return other;
            }
        }
    }

    /// Returns the length of the call's output in bytes.
    fn output_len(&self, ranks: u32) -> usize {
        if self.kind == Kind::AllGather { self.len * ranks as usize } else { self.len }
    }

    /// Returns the offset of this rank's input in its output, if the call is in place.
    fn input_offset(&self, rank: Rank) -> usize {
        if self.kind == Kind::AllGather && self.in_place { self.len * rank.index() } else { 0 }
    }

    fn expected(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        match self.kind {
            Kind::AllReduce(dtype, op) => {
                let inputs: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
                combine_naive(&inputs, dtype, op)
            }
            Kind::AllGather => inputs.concat(),
            Kind::Broadcast(root) => inputs[root.index()].clone(),
            Kind::Barrier => Vec::new(),
        }
    }
}

/// The memory of one rank: two buffers and two windows.
struct RankMemory {
    own: [Span; 2],
    windows: [Window; 2],
    stream: Stream,
}

impl RankMemory {
    fn create(symmetric: &SymmetricMemory) -> Self {
        Self {
            own: [(); 2].map(|()| Guarded::buffer(symmetric, MEMORY)),
            windows: [(); 2].map(|()| symmetric.mem_alloc(MEMORY).unwrap()),
            stream: symmetric.group().device().stream().unwrap(),
        }
    }

    /// Returns this rank's bytes of a place.
    fn span(&self, place: usize, offset: usize, len: usize) -> Span {
        let all = if place < 2 { &self.own[place] } else { self.windows[place - 2].local().unwrap() };
        all.part(offset, len).unwrap()
    }

    /// Runs one collective call with the given input, waits until it has ended, and returns its output.
    fn make(&self, lane: &Lane, call: &Call, rank: Rank, ranks: u32, input: &[u8]) -> Result<Vec<u8>, Error> {
        let Call { len, places: [from, to], .. } = *call;
        let (at, out_len) = (call.input_offset(rank), call.output_len(ranks));
        let (source, target) = (self.span(from, at, len), self.span(to, 0, out_len));
        if out_len > 0 {
            self.stream.fill(&target, 0xEE).unwrap();
        }
        if len > 0 {
            self.stream.write(&source, input).unwrap();
        }
        let buffer = |place: usize, range: std::ops::Range<usize>, span| match place {
            0 | 1 => Buffer::Own(span),
            _ => self.windows[place - 2].range(range),
        };
        let input = buffer(from, at..at + len, &source);
        let output = buffer(to, 0..out_len, &target);
        let enqueued = match call.kind {
            Kind::AllReduce(dtype, op) => lane.all_reduce(&self.stream, input, output, dtype, op),
            Kind::AllGather => lane.all_gather(&self.stream, input, output),
            Kind::Broadcast(root) => lane.broadcast(&self.stream, root, input, output),
            Kind::Barrier => lane.barrier(&self.stream),
        };
        let ended = self.stream.synchronize(Deadline::NEVER);
        enqueued?;
        ended?;
        lane.check()?;
        let mut seen = vec![0; out_len];
        if out_len > 0 {
            self.stream.read(&target, &mut seen)?;
        }
        Ok(seen)
    }
}

/// Runs random sequences of calls, one on each lane.
fn check_sequences(backend: &Backend, ranks: u32, seed: u64) {
    let timeout = Duration::from_secs(100);
    let spec = SymmetricSpec { lanes: LANES, timeout, ..spec_with_faults(backend, ranks, None) };
    on_ranks_with_spec(backend, ranks, &spec, |symmetric| {
        let group = symmetric.group();
        let own = group.rank();
        let memory = RankMemory::create(symmetric);
        for index in 0..LANES {
            // The seed of the calls is equal on all ranks, so that all ranks draw the same calls.
            let mut random = TestRandom(seed ^ u64::from(index) << 40);
            let lane = symmetric.lane(index as usize).unwrap();
            let delay = [0, 2_000, 200_000][random.below(3)];
            let faults = CallFaults { seed: seed ^ u64::from(own.0), random: delay, ..CallFaults::default() };
            lane.inject_faults(&faults).unwrap();
            let count = 1 + random.below(12);
            let differs_at = if random.below(3) == 0 { random.below(count) } else { usize::MAX };
            group.bootstrap().barrier().unwrap();
            for step in 0..count {
                let context =
                    |text: &str| format!("{text}: step {step} of lane {index}, {ranks} ranks, seed {seed}");
                let call = Call::random(&mut random, ranks);
                let odd = Rank(random.below(ranks as usize) as u32);
                let other = call.other(&mut random, ranks);
                let input = |rank: u32, len| bytes(len, seed ^ u64::from(rank) << 20 ^ (step as u64) << 50);
                if step == differs_at {
                    let made = if own == odd { other } else { call };
                    let outcome = memory.make(lane, &made, own, ranks, &input(own.0, made.len));
                    let Err(Error::Comm(CommError::RanksDisagree { rank, .. })) = &outcome else {
                        panic!("{} {call:?} {other:?} {outcome:?}", context("no error"))
                    };
                    assert_eq!(*rank == odd, own != odd, "{}", context("another rank is named"));
                    break;
                }
                let inputs: Vec<_> = (0..ranks).map(|rank| input(rank, call.len)).collect();
                let seen = memory.make(lane, &call, own, ranks, &inputs[own.index()]);
                let expected = Ok(call.expected(&inputs));
                assert!(seen == expected, "{} {call:?}", context("wrong result"));
            }
            // The barrier keeps a rank from overwriting memory that other ranks still use in calls on another lane.
            group.bootstrap().barrier().unwrap();
        }
    });
}

fn check_random_sequences(backend: &Backend, ranks: u32) {
    let all = if exhaustive() && backend.kind() == BackendKind::Host { 2500 } else { 4 * LANES };
    let seed = seed();
    for batch in 0..u64::from(all.div_ceil(LANES)) {
        check_sequences(backend, ranks, seed.wrapping_add(batch));
    }
}

#[test]
fn random_sequences_of_two_ranks_match_the_model() {
    check_random_sequences(&host(), 2);
}

#[test]
fn random_sequences_of_three_ranks_match_the_model() {
    check_random_sequences(&host(), 3);
}

#[test]
fn random_sequences_of_five_ranks_match_the_model() {
    check_random_sequences(&host(), 5);
}

#[test]
fn random_sequences_of_eight_ranks_match_the_model() {
    check_random_sequences(&host(), 8);
}

#[test]
fn gpu_random_sequences_match_the_model() {
    if let Some(backend) = cuda::backend() {
        for ranks in [2, 3, 5] {
            check_random_sequences(&backend, ranks);
        }
    }
}
