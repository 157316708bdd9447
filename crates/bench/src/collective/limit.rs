//! Lower limits of the time of a collective call: the round trip of a flag between two ranks, and a plain copy of as many
//! bytes.

use std::hint::spin_loop;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use wholemem::{Communicator, Rank, SymmetricMemory};
use wholemem_command::memory;
use wholemem_hal::limits::RawDevice;
use wholemem_hal::{Allocation, BackendKind, Event, EventKind, HandleKind, Rights, Span};
use wholemem_os::Deadline;

use super::run::capture;
use crate::alloc::raw_error;

/// A flag makes `TRIPS` round trips in a run. The fastest of `RUNS` runs counts.
const TRIPS: u64 = 2000;
const RUNS: u32 = 7;

/// The number of polls of a flag after which a rank yields its core, for machines with one core.
const SPINS: u32 = 100_000;

/// The offsets of the two flags of a round trip, which are in different cache lines.
const THERE: usize = 0;
const BACK: usize = 256;

/// The number of barriers in the CUDA graph that is timed.
const CALLS: u32 = 100;

/// The length of the copy with which the copy speed of a GPU is measured.
const LARGE: usize = 256 << 20;

/// The number of plain copies that are timed on a host. The fastest one counts.
const COPIES: u32 = 30;

/// The measured lower limits of collective calls, equal on all ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) flag: FlagTime,
    /// On a GPU, where short copies cannot be timed: the seconds that a long copy takes for each byte.
    seconds_per_byte: Option<f64>,
}

/// The measured time of a flag's round trip between two ranks, and the method of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct FlagTime {
    pub(super) took: Duration,
    pub(super) by: FlagMethod,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum FlagMethod {
    /// Ranks 0 and 1 take turns in writing words in shared memory and polling for them.
    PingPong,
    /// All ranks launch a CUDA graph of barrier kernels. The time of one barrier is used.
    BarrierKernel,
}

impl Limits {
    /// Measures the lower limits of collective calls. Collective: all ranks must call it.
    pub(super) fn measure(symmetric: &SymmetricMemory) -> Result<Self> {
        let group = symmetric.group();
        if group.device().backend().kind() == BackendKind::Host {
            let took = ping_pong(group)?;
            return Ok(Self { flag: FlagTime { took, by: FlagMethod::PingPong }, seconds_per_byte: None });
        }
        let flag = FlagTime { took: barriers(symmetric)?, by: FlagMethod::BarrierKernel };
        Ok(Self { flag, seconds_per_byte: Some(large_copy(group)?) })
    }

    /// Returns the time of the slowest rank for a plain copy that all ranks make at the same time. Collective: all ranks must
    /// call it.
    pub(super) fn copy(&self, group: &Communicator, to: &Span, from: &Span) -> Result<Duration> {
        if let Some(second) = self.seconds_per_byte {
            return Ok(Duration::from_secs_f64(second * from.len() as f64));
        }
        let raw = RawDevice::of(group.device()).map_err(raw_error)?;
        group.bootstrap().barrier()?;
        slowest(group, raw.best_copy(to, from, COPIES).map_err(raw_error)?)
    }
}

/// Returns the longest of the times that the ranks pass as `own`. Collective: all ranks must call it.
pub(super) fn slowest(group: &Communicator, own: Duration) -> Result<Duration> {
    let own = u64::try_from(own.as_nanos()).expect("shorter than 584 years");
    let all = group.bootstrap().all_gather(&own.to_le_bytes())?;
    let times = all.iter().filter_map(|bytes| Some(u64::from_le_bytes(bytes[..].try_into().ok()?)));
    Ok(Duration::from_nanos(times.max().unwrap_or(0)))
}

/// Measures the round trip of a flag between ranks 0 and 1 in shared memory, while the other ranks wait in a barrier.
fn ping_pong(group: &Communicator) -> Result<Duration> {
    let (comm, device) = (group.bootstrap(), group.device());
    let len = memory::whole_granules(device, 2 * BACK)?;
    let own = device.allocate(len)?;
    let handle = own
        .export(HandleKind::Fd, Rights::ReadWrite)?
        .into_fd()
        .context("host memory was not exported as a descriptor")?;
    let first = comm.rank() == Rank(0);
    let given = comm.all_gather_fds(&first.then_some(handle.as_fd()).into_iter().collect::<Vec<_>>())?;
    let fd = given.into_iter().next().and_then(|mut fds| fds.pop()).context("rank 0 sent no descriptor")?;
    let map = Allocation::import(device, fd.into(), len)?.map(Rights::ReadWrite)?;
    let bytes = map.bytes()?;
    let (there, back) = (bytes.atomic_u64(THERE)?, bytes.atomic_u64(BACK)?);
    let mut best = Duration::MAX;
    for run in 0..u64::from(RUNS) {
        comm.barrier()?;
        let start = Instant::now();
        for trip in run * TRIPS + 1..=(run + 1) * TRIPS {
            match comm.rank() {
                _ if comm.size() == 1 => {}
                Rank(0) => {
                    there.store(trip, Ordering::Release);
                    wait_for_word(back, trip);
                }
                Rank(1) => {
                    wait_for_word(there, trip);
                    back.store(trip, Ordering::Release);
                }
                _ => break,
            }
        }
        best = best.min(start.elapsed());
    }
    comm.barrier()?;
    let own = best / u32::try_from(TRIPS)?;
    slowest(group, if comm.rank().0 < 2 { own } else { Duration::ZERO })
}

fn wait_for_word(word: &AtomicU64, wanted: u64) {
    let mut polls = 0_u32;
    while word.load(Ordering::Acquire) != wanted {
        polls = polls.wrapping_add(1);
        if polls.is_multiple_of(SPINS) {
            std::thread::yield_now();
        }
        spin_loop();
    }
}

/// Returns the average time of the barriers in a CUDA graph, which is used as the time of a flag's round trip on GPUs.
fn barriers(symmetric: &SymmetricMemory) -> Result<Duration> {
    let group = symmetric.group();
    let stream = group.device().stream()?;
    let graph = capture(&stream, |stream| (0..CALLS).try_for_each(|_| Ok(symmetric.barrier(stream)?)))?;
    let event = || Event::create(group.device(), EventKind::Timed);
    let (begin, end) = (event()?, event()?);
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        group.barrier_on(&stream)?;
        symmetric.barrier(&stream)?;
        stream.record(&begin)?;
        graph.launch(&stream)?;
        stream.record(&end)?;
        stream.synchronize(Deadline::NEVER)?;
        symmetric.check()?;
        best = best.min(begin.elapsed(&end)?);
    }
    slowest(group, best / CALLS)
}

/// Returns the seconds that a long copy takes for each byte when all ranks copy at the same time.
fn large_copy(group: &Communicator) -> Result<f64> {
    let device = group.device();
    let map = || -> Result<Span> { Ok(device.allocate(LARGE)?.map(Rights::ReadWrite)?.all()) };
    let (from, to) = (map()?, map()?);
    let raw = RawDevice::of(device).map_err(raw_error)?;
    group.bootstrap().barrier()?;
    let took = slowest(group, raw.best_copy(&to, &from, RUNS).map_err(raw_error)?)?;
    Ok(took.as_secs_f64() / LARGE as f64)
}
