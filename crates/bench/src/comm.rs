//! `wholemem bench comm`: measures barrier and all_gather by size and number of ranks, compared with a round trip over a
//! socket.
//!
//! Ranks are threads of this process. All threads, including those of the round trip, are pinned to one core: a wake-up across
//! cores takes many times longer, and its time varies.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use wholemem_comm::{Bootstrap, Rank};
use wholemem_command::progress::ProgressDisplay;
use wholemem_os::{Deadline, PacketSocket};

use super::case_report::{CaseResult, print_cases};
use crate::args::CommArgs;

const WARM_UP: u32 = 10;

pub(super) fn run(args: &CommArgs) -> Result<()> {
    let core = pin()?;
    let mut cases = Vec::new();
    for &ranks in &args.ranks {
        ensure!(ranks > 0, "`--ranks 0` is invalid: a group has at least one rank");
        let group = Bootstrap::local(ranks)?;
        let sizes = std::iter::once(None).chain(args.sizes.iter().map(|size| Some(size.0)));
        for bytes in sizes {
            let what = if bytes.is_some() { "all_gather" } else { "barrier" };
            let _progress = ProgressDisplay::step(&format!("{what} of {ranks}"));
            let rounds = args.rounds.min(affordable(ranks, bytes.unwrap_or(1)));
            let limits = round_trips(bytes.unwrap_or(1), rounds)?;
            let times = operations(&group, bytes, rounds)?;
            cases.push(CaseResult { bytes, ..CaseResult::of_times(ranks, what, "us", &times, &limits) });
        }
    }
    let title = format!("operations of ranks as threads, pinned to core {core}");
    print_cases("comm", &title, "round trip", args.json, &cases)
}

/// Returns the number of rounds of all_gather that move as many bytes as a core moves in a few seconds.
fn affordable(ranks: u32, bytes: usize) -> u32 {
    let moved = u64::from(ranks).pow(2) * (bytes as u64).max(1);
    u32::try_from((2 << 30) / moved).unwrap_or(u32::MAX).max(5)
}

/// Pins this thread, and the threads and processes that it starts later, to one core.
pub(super) fn pin() -> Result<usize> {
    let allowed = sched_getaffinity(None).context("cannot read the CPU affinity")?;
    let core =
        (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).context("the CPU affinity is empty")?;
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).context("cannot set the CPU affinity")?;
    Ok(core)
}

/// Returns the time that rank 0 takes for each barrier, or for each all_gather of `bytes` bytes.
fn operations(group: &[Bootstrap], bytes: Option<usize>, rounds: u32) -> Result<Vec<Duration>> {
    let byte = |rank: Rank, round: u32| rank.0.wrapping_mul(31).wrapping_add(round).to_le_bytes()[0];
    let measure = |comm: &Bootstrap| -> Result<Vec<Duration>> {
        let mut times = Vec::new();
        for round in 0..WARM_UP + rounds {
            let own = vec![byte(comm.rank(), round); bytes.unwrap_or(0)];
            let start = Instant::now();
            match bytes {
                None => comm.barrier()?,
                Some(len) => {
                    let all = comm.all_gather(&own)?;
                    let took = start.elapsed();
                    let right = (0..comm.size()).zip(&all).all(|(rank, got)| {
                        got.len() == len && got.iter().all(|got| *got == byte(Rank(rank), round))
                    });
                    ensure!(
                        right,
                        "all_gather of {len} bytes returned wrong bytes on rank {rank}",
                        rank = comm.rank()
                    );
                    if round >= WARM_UP {
                        times.push(took);
                    }
                    continue;
                }
            }
            if round >= WARM_UP {
                times.push(start.elapsed());
            }
        }
        Ok(times)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = group.iter().map(|comm| scope.spawn(|| measure(comm))).collect();
        let mut all = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("the thread of a rank panicked"))?);
        let first = all.next().context("there is no rank 0")??;
        all.try_for_each(|times| times.map(drop))?;
        Ok(first)
    })
}

/// Returns the times to send `len` bytes over a socket and back, in packets, between two threads of this process.
pub(super) fn round_trips(len: usize, rounds: u32) -> Result<Vec<Duration>> {
    const LONGEST: usize = 60_000;
    let (packets, len) = (len.div_ceil(LONGEST), len.min(LONGEST));
    let (here, there) = PacketSocket::pair()?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> Result<()> {
            let mut buffer = vec![0; 64 << 10];
            for _ in 0..(WARM_UP + rounds) as usize * packets {
                let len = there.recv(&mut buffer, Deadline::NEVER)?;
                there.send(&buffer[..len], &[], Deadline::NEVER)?;
            }
            Ok(())
        });
        let (packet, mut buffer) = (vec![7; len], vec![0; 64 << 10]);
        let mut times = Vec::new();
        for round in 0..WARM_UP + rounds {
            let start = Instant::now();
            for _ in 0..packets {
                here.send(&packet, &[], Deadline::NEVER)?;
                let got = here.recv(&mut buffer, Deadline::NEVER)?;
                ensure!(got == len, "the echo of a packet of {len} bytes has {got} bytes instead");
            }
            if round >= WARM_UP {
                times.push(start.elapsed());
            }
        }
        echo.join().map_err(|_| anyhow!("the echo thread panicked"))??;
        Ok(times)
    })
}
