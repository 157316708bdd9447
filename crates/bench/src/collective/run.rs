//! One rank's part in a case: rounds that all ranks begin together, and whose outcome each of them checks.

use std::ops::Range;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use wholemem::{Buffer, Rank, SymmetricMemory, Window};
use wholemem_command::memory;
use wholemem_hal::{BackendKind, Event, EventKind, Graph, PinnedBuffer, Rights, Span, Stream};
use wholemem_os::Deadline;

use super::case::CollectiveCase;
use super::content::ElementPeriod;
use super::limit::{Limits, slowest};
use super::{CaseOutcome, CollectiveOp, RankMessage, Reporter};
use crate::args::{BufferKind, LaunchMode, OutputPlace};

/// CollectiveOp is in an output before anything is written to it.
const POISON: u8 = 0xEE;

/// Rounds before anything counts.
const WARM_UP: u32 = 2;

/// Runs a case as one rank, and tells of each round that counts.
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
    let mut rounds = Vec::new();
    for _ in 0..case.rounds {
        rounds.push(runner.round()?);
        report(RankMessage::Round(()))?;
    }
    let copy = runner.copy(limits)?;
    Ok(CaseOutcome { rounds, algorithm: runner.algorithm(), flag: limits.flag, copy })
}

/// A rank, and what its calls take.
struct CollectiveRunner<'a> {
    symmetric: &'a SymmetricMemory,
    case: &'a CollectiveCase,
    stream: Stream,
    events: [Event; 2],
    /// CollectiveOp the calls of a round take in turn.
    slots: Vec<BufferSlot>,
    /// A round, recorded.
    graph: Option<Graph>,
    /// Where a barrier leaves word that it has been reached.
    word: Window,
    rounds: u64,
}

/// An input, and an output that may be the same.
struct BufferSlot {
    input: CallMemory,
    output: Option<CallMemory>,
}

/// CallMemory that others reach, or only this rank.
enum CallMemory {
    Window(Window, Range<usize>),
    Own(Span),
}

impl CallMemory {
    fn buffer(&self) -> Buffer<'_> {
        match self {
            Self::Window(window, range) => window.range(range.clone()),
            Self::Own(span) => span.into(),
        }
    }

    /// This rank's bytes.
    fn local(&self) -> Result<Span> {
        Ok(match self {
            Self::Window(window, range) => local(window).part(range.start, range.len())?,
            Self::Own(span) => span.clone(),
        })
    }
}

/// This rank's part of a window. The benchmarks give every rank as many bytes.
fn local(window: &Window) -> &Span {
    window.local().expect("every rank has bytes of the window")
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

    /// Which algorithm the calls take, where there is a choice.
    fn algorithm(&self) -> Option<String> {
        let CollectiveCase { what, len, buffers, place, .. } = *self.case;
        let (window, in_place) = (buffers == BufferKind::Window, place == OutputPlace::In);
        let algorithm =
            || self.symmetric.algorithm_of(len, window, in_place, what == CollectiveOp::Allreduce);
        (what != CollectiveOp::Barrier).then(|| algorithm().to_string())
    }

    /// Prepares a round, has all ranks begin it together, and checks it. Says how long the slowest rank took for a call.
    fn round(&mut self) -> Result<Duration> {
        self.rounds += 1;
        self.prepare()?;
        let group = self.symmetric.group();
        group.barrier_on(&self.stream)?;
        let took = slowest(group, self.timed()?)?;
        self.symmetric.check()?;
        self.check().with_context(|| self.case.label())?;
        group.barrier_on(&self.stream)?;
        Ok(took / self.case.calls)
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

    fn timed(&self) -> Result<Duration> {
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
        if on_device {
            stream.record(end)?;
            stream.synchronize(Deadline::NEVER)?;
            return Ok(begin.elapsed(end)?);
        }
        Ok(start.elapsed())
    }

    /// One call, as whoever calls this library from Rust would make it.
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

    /// Looks at all that came of a round.
    fn check(&self) -> Result<()> {
        let case = self.case;
        let ranks = || (0..case.ranks).map(Rank);
        let brought: Vec<_> =
            ranks().map(|rank| ElementPeriod::of(case.dtype(), self.rounds, rank.0)).collect();
        for (number, slot) in (0..).zip(&self.slots) {
            let seen = slot.output().local()?;
            match case.what {
                CollectiveOp::Allreduce => {
                    // In place, what came of one call goes into the next.
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
                        period
                            .check(&self.stream, &part)
                            .with_context(|| format!("what rank {rank} gave"))?;
                    }
                }
                CollectiveOp::Broadcast => brought[ROOT.index()].check(&self.stream, &seen)?,
                CollectiveOp::Barrier => {}
            }
        }
        // Who has left the barriers of this round finds that every rank has come to it.
        for rank in ranks() {
            let mut word = [0; size_of::<u64>()];
            self.stream.read(&self.word.part_of(rank, 0, word.len())?, &mut word)?;
            let seen = u64::from_ne_bytes(word);
            ensure!(seen == self.rounds, "rank {rank} was in round {seen}, and not in {}", self.rounds);
        }
        Ok(())
    }

    /// How long a plain copy of as many bytes takes.
    fn copy(&self, limits: &Limits) -> Result<Duration> {
        let Some(slot) = self.slots.first() else { return Ok(Duration::ZERO) };
        let (group, from) = (self.symmetric.group(), slot.output().local()?);
        let to = own(self.symmetric, from.len())?;
        self.stream.fill(&to, POISON)?;
        limits.copy(group, &to, &from)
    }
}

/// Who has what is broadcast.
const ROOT: Rank = Rank(0);

/// CallMemory for `count` buffers of `len` bytes. Collective.
fn parts(
    symmetric: &SymmetricMemory,
    buffers: BufferKind,
    len: usize,
    count: usize,
) -> Result<Vec<CallMemory>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    // Each begins on a cache line, as buffers of their own would.
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
    })
}

/// CallMemory of this rank alone.
fn own(symmetric: &SymmetricMemory, len: usize) -> Result<Span> {
    let device = symmetric.group().device();
    if device.backend().kind() == BackendKind::Host {
        return Ok(PinnedBuffer::create(device, len)?.all());
    }
    let map = device.allocate(memory::whole_granules(device, len)?)?.map(Rights::ReadWrite)?;
    Ok(map.span(0, len)?)
}

/// Records what is enqueued, whatever errors it has.
pub(super) fn capture(stream: &Stream, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
    let mut outcome = Ok(());
    let graph = stream.capture(|stream| {
        outcome = work(stream);
        Ok(())
    });
    outcome.and(Ok(graph?))
}
