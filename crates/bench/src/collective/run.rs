//! Runs one case of a collective benchmark on one rank: rounds that all ranks start together, and whose results each rank
//! verifies.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use wholemem::{Buffer, Rank, SymmetricMemory, Window};
use wholemem_command::memory;
use wholemem_hal::{
    BackendKind, CudaMallocBuffer, Event, EventKind, Graph, PinnedBuffer, Rights, Span, Stream,
};
use wholemem_os::Deadline;

use super::case::CollectiveCase;
use super::content::ElementPeriod;
use super::limit::{Limits, slowest};
use super::{CaseOutcome, CollectiveOp, RankMessage, Reporter};
use crate::args::{BufferKind, LaunchMode, OutputPlace};

/// The value that output bytes have before a round, so that bytes that are not written are detected.
const POISON: u8 = 0xEE;

/// The number of warm-up rounds before the measured rounds.
const WARM_UP: u32 = 2;

/// Runs a benchmark case as one rank, and reports each measured round.
pub(super) fn run_case(
    symmetric: &SymmetricMemory,
    case: &CollectiveCase,
    limits: &Limits,
    report: Reporter<'_>,
) -> Result<CaseOutcome> {
    let mut runner = CollectiveRunner::new(symmetric, case)?;
    for _ in 0..WARM_UP {
        runner.round()?;
    }
    let (mut rounds, mut callers) = (Vec::new(), Vec::new());
    for _ in 0..case.rounds {
        let CallTime { took, caller } = runner.round()?;
        rounds.push(took);
        callers.push(caller);
        report(RankMessage::Round(()))?;
    }
    callers.sort_unstable();
    let caller = slowest(symmetric.group(), callers.get(callers.len() / 2).copied().unwrap_or_default())?;
    let copy = runner.copy(limits)?;
    Ok(CaseOutcome { rounds, caller, algorithm: runner.algorithm(), flag: limits.flag, copy })
}

/// The time of one collective call in a round.
struct CallTime {
    /// The time of the call until it has run; on a GPU, from the first to the last of the calls on the device.
    took: Duration,
    /// The time of the thread that makes the call: on a GPU, the time in which it is enqueued.
    caller: Duration,
}

/// The state of a rank while it runs a case of a collective benchmark.
struct CollectiveRunner<'a> {
    symmetric: &'a SymmetricMemory,
    case: &'a CollectiveCase,
    stream: Stream,
    events: [Event; 2],
    /// Buffers that the calls of a round use cyclically.
    slots: Vec<BufferSlot>,
    /// The captured calls of a round, if calls are enqueued as a CUDA graph.
    graph: Option<Graph>,
    /// A window in which each rank writes the number of its round before the barrier.
    word: Window,
    rounds: u64,
}

/// An input buffer of collective calls, and an output buffer unless the calls are in place.
struct BufferSlot {
    input: CallMemory,
    output: Option<CallMemory>,
}

/// The memory of an input or output of a collective call: a range of a window, or memory that only this rank has mapped.
enum CallMemory {
    Window(Window, Range<usize>),
    Own(Span),
    /// Registered memory, which stays registered as long as the window exists.
    Registered {
        span: Span,
        _window: Window,
    },
}

impl CallMemory {
    fn buffer(&self) -> Buffer<'_> {
        match self {
            Self::Window(window, range) => window.range(range.clone()),
            Self::Own(span) | Self::Registered { span, .. } => span.into(),
        }
    }

    /// Returns this rank's bytes of the buffer.
    fn local(&self) -> Result<Span> {
        Ok(match self {
            Self::Window(window, range) => local(window).part(range.start, range.len())?,
            Self::Own(span) | Self::Registered { span, .. } => span.clone(),
        })
    }
}

/// Returns this rank's part of a window. Every rank has one, because all windows of the benchmarks have the same length on
/// every rank.
fn local(window: &Window) -> &Span {
    window.local().expect("every rank has a part of the window")
}

impl BufferSlot {
    fn output(&self) -> &CallMemory {
        self.output.as_ref().unwrap_or(&self.input)
    }
}

impl<'a> CollectiveRunner<'a> {
    fn new(symmetric: &'a SymmetricMemory, case: &'a CollectiveCase) -> Result<Self> {
        let device = symmetric.group().device();
        let count = if case.what == CollectiveOp::Barrier { 0 } else { case.slots as usize };
        let inputs = parts(symmetric, case.buffers, case.len, count)?;
        let mut outputs = match case.place {
            OutputPlace::Out => parts(symmetric, case.buffers, case.output_len(), count)?,
            OutputPlace::In => Vec::new(),
        }
        .into_iter();
        let slots = inputs.into_iter().map(|input| BufferSlot { input, output: outputs.next() }).collect();
        let event = || Event::create(device, EventKind::Timed);
        let word = symmetric.mem_alloc(size_of::<u64>())?;
        let (stream, events) = (device.stream()?, [event()?, event()?]);
        let mut runner = Self { symmetric, case, stream, events, slots, graph: None, word, rounds: 0 };
        if case.mode == LaunchMode::Graph {
            let calls = |_: &Stream| (0..case.calls as usize).try_for_each(|call| runner.call(call));
            runner.graph = Some(capture(&runner.stream, calls)?);
        }
        Ok(runner)
    }

    /// Returns the name of the algorithm of the collective calls, or `None` for a barrier, which has only one.
    fn algorithm(&self) -> Option<String> {
        let CollectiveCase { what, len, buffers, place, .. } = *self.case;
        let (window, in_place) = (buffers != BufferKind::Staged, place == OutputPlace::In);
        let algorithm =
            || self.symmetric.algorithm_of(len, window, in_place, what == CollectiveOp::Allreduce);
        (what != CollectiveOp::Barrier).then(|| algorithm().to_string())
    }

    /// Runs and verifies a round that all ranks start together. Returns the time of one call on the slowest rank, and the time of
    /// this rank's thread.
    fn round(&mut self) -> Result<CallTime> {
        self.rounds += 1;
        self.prepare()?;
        let group = self.symmetric.group();
        group.barrier_on(&self.stream)?;
        let CallTime { took, caller } = self.timed()?;
        let took = slowest(group, took)?;
        self.symmetric.check()?;
        self.check().with_context(|| self.case.label())?;
        group.barrier_on(&self.stream)?;
        Ok(CallTime { took: took / self.case.calls, caller: caller / self.case.calls })
    }

    fn prepare(&self) -> Result<()> {
        let own = self.symmetric.group().rank().0;
        let period = ElementPeriod::of(self.case.dtype(), self.rounds, own);
        for slot in &self.slots {
            if let Some(output) = &slot.output {
                self.stream.fill(&output.local()?, POISON)?;
            }
            period.write(&self.stream, &slot.input.local()?)?;
        }
        Ok(self.stream.write(local(&self.word), &self.rounds.to_ne_bytes())?)
    }

    fn timed(&self) -> Result<CallTime> {
        let (stream, [begin, end]) = (&self.stream, &self.events);
        let on_device = stream.device().backend().kind() == BackendKind::Cuda;
        self.symmetric.barrier(stream)?;
        let start = Instant::now();
        if on_device {
            stream.record(begin)?;
        }
        match &self.graph {
            Some(graph) => graph.launch(stream)?,
            None => (0..self.case.calls as usize).try_for_each(|call| self.call(call))?,
        }
        let caller = start.elapsed();
        if on_device {
            stream.record(end)?;
            stream.synchronize(Deadline::NEVER)?;
            return Ok(CallTime { took: begin.elapsed(end)?, caller });
        }
        Ok(CallTime { took: caller, caller })
    }

    /// Makes one collective call through the public API.
    fn call(&self, number: usize) -> Result<()> {
        let (symmetric, stream, case) = (self.symmetric, &self.stream, self.case);
        let Some(slot) = self.slots.get(number % self.slots.len().max(1)) else {
            return Ok(symmetric.barrier(stream)?);
        };
        let (input, output) = (slot.input.buffer(), slot.output().buffer());
        let called = match case.what {
            CollectiveOp::Allreduce => symmetric.all_reduce(stream, input, output, case.dtype(), case.op()),
            CollectiveOp::Allgather => symmetric.all_gather(stream, input, output),
            CollectiveOp::Broadcast => symmetric.broadcast(stream, ROOT, input, output),
            CollectiveOp::Barrier => symmetric.barrier(stream),
        };
        Ok(called?)
    }

    /// Verifies the outputs of all collective calls of a round.
    fn check(&self) -> Result<()> {
        let case = self.case;
        let ranks = || (0..case.ranks).map(Rank);
        let brought: Vec<_> =
            ranks().map(|rank| ElementPeriod::of(case.dtype(), self.rounds, rank.0)).collect();
        for (number, slot) in (0..).zip(&self.slots) {
            let seen = slot.output().local()?;
            match case.what {
                CollectiveOp::Allreduce => {
                    // If calls are in place, the output of a call is the input of a later call, so elements were combined
                    // several times.
                    let times = match case.place {
                        OutputPlace::In => (case.calls - number).div_ceil(case.slots),
                        OutputPlace::Out => 1,
                    };
                    let combined = ElementPeriod::combined(&brought, case.dtype(), case.op(), times);
                    combined.check(&self.stream, &seen)?;
                }
                CollectiveOp::Allgather => {
                    for (period, rank) in brought.iter().zip(ranks()) {
                        let part = seen.part(rank.index() * case.len, case.len)?;
                        period.check(&self.stream, &part).with_context(|| format!("input of rank {rank}"))?;
                    }
                }
                CollectiveOp::Broadcast => brought[ROOT.index()].check(&self.stream, &seen)?,
                CollectiveOp::Barrier => {}
            }
        }
        // Checks the barriers: every rank has written the round number to its word before the barriers, so a rank that has passed
        // them sees it in all words.
        for rank in ranks() {
            let mut word = [0; size_of::<u64>()];
            self.stream.read(&self.word.part_of(rank, 0, word.len())?, &mut word)?;
            let seen = u64::from_ne_bytes(word);
            ensure!(
                seen == self.rounds,
                "rank {rank} was in benchmark round {seen} instead of {round}",
                round = self.rounds
            );
        }
        Ok(())
    }

    /// Returns the time of a plain copy of one output buffer.
    fn copy(&self, limits: &Limits) -> Result<Duration> {
        let Some(slot) = self.slots.first() else { return Ok(Duration::ZERO) };
        let (group, from) = (self.symmetric.group(), slot.output().local()?);
        let to = own(self.symmetric, from.len())?;
        self.stream.fill(&to, POISON)?;
        limits.copy(group, &to, &from)
    }
}

/// The source rank of broadcasts.
const ROOT: Rank = Rank(0);

/// Allocates `count` buffers of `len` bytes. Collective: all ranks must call it.
fn parts(
    symmetric: &SymmetricMemory,
    buffers: BufferKind,
    len: usize,
    count: usize,
) -> Result<Vec<CallMemory>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    // Each buffer begins on a cache line, as separate allocations would.
    let step = len.next_multiple_of(64);
    let total = step * count;
    Ok(match buffers {
        BufferKind::Window => {
            let window = symmetric.mem_alloc(total)?;
            let range = |at: usize| at * step..at * step + len;
            (0..count).map(|at| CallMemory::Window(window.clone(), range(at))).collect()
        }
        BufferKind::Staged => {
            let span = own(symmetric, total)?;
            let parts = (0..count).map(|at| Ok(CallMemory::Own(span.part(at * step, len)?)));
            parts.collect::<Result<_>>()?
        }
        BufferKind::Registered => {
            let span = foreign(symmetric, total)?;
            let window = symmetric.window_register_span(&span)?;
            let part =
                |at| Ok(CallMemory::Registered { span: span.part(at * step, len)?, _window: window.clone() });
            (0..count).map(part).collect::<Result<_>>()?
        }
    })
}

/// Allocates memory as the allocator of a framework does, so that it can be registered.
fn foreign(symmetric: &SymmetricMemory, len: usize) -> Result<Span> {
    let device = symmetric.group().device();
    if device.backend().kind() == BackendKind::Host {
        let map = device.allocate(memory::whole_granules(device, len)?)?.map(Rights::ReadWrite)?;
        return Ok(map.span(0, len)?);
    }
    Ok(CudaMallocBuffer::create(device, len)?.all())
}

/// Allocates memory that only this rank has mapped.
fn own(symmetric: &SymmetricMemory, len: usize) -> Result<Span> {
    let device = symmetric.group().device();
    if device.backend().kind() == BackendKind::Host {
        return Ok(PinnedBuffer::create(device, len)?.all());
    }
    let map = device.allocate(memory::whole_granules(device, len)?)?.map(Rights::ReadWrite)?;
    Ok(map.span(0, len)?)
}

/// Captures the work that `work` enqueues in a graph. Returns the error of `work` if it fails.
pub(super) fn capture(stream: &Stream, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
    let mut outcome = Ok(());
    let graph = stream.capture(|stream| {
        outcome = work(stream);
        Ok(())
    });
    outcome.and(Ok(graph?))
}
