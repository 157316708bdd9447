//! `wholemem bench bootstrap`: measures the time to start ranks and join them, as threads and as processes.
//!
//! The limit is the time to start the same threads or processes, each of which writes one byte and does not join.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use wholemem_comm::Bootstrap;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::ranks::{RankProcesses, RankRole};

use super::case_report::{CaseResult, print_cases};
use crate::args::BootstrapArgs;

/// The maximum number of connections of a rank that has not sent long messages.
const MAX_CONNECTIONS: u8 = 11;

pub(super) fn run(args: &BootstrapArgs) -> Result<()> {
    let mut cases = Vec::new();
    for &ranks in &args.ranks {
        ensure!(ranks > 0, "`--ranks 0` is invalid: a group has at least one rank");
        for (what, once) in [("threads", threads as StartRanks), ("processes", processes as StartRanks)] {
            let progress = ProgressDisplay::rounds(&format!("{ranks} {what}"), args.rounds as usize);
            let (mut times, mut limits) = (Vec::new(), Vec::new());
            for _ in 0..args.rounds {
                limits.push(once(ranks, false)?);
                times.push(once(ranks, true)?);
                progress.advance(1);
            }
            cases.push(CaseResult::of_times(ranks, what, "ms", &times, &limits));
        }
    }
    print_cases("bootstrap", "time to start and join ranks", "start only", args.json, &cases)
}

type StartRanks = fn(u32, bool) -> Result<Duration>;

fn threads(ranks: u32, join: bool) -> Result<Duration> {
    let start = Instant::now();
    if !join {
        std::thread::scope(|scope| {
            for _ in 0..ranks {
                scope.spawn(|| std::thread::sleep(Duration::ZERO));
            }
        });
        return Ok(start.elapsed());
    }
    let group = Bootstrap::local(ranks)?;
    let took = start.elapsed();
    for comm in &group {
        let connections = u8::try_from(comm.connections())?;
        ensure!(
            connections <= MAX_CONNECTIONS,
            "rank {rank} has {connections} connections, which exceeds the limit of {MAX_CONNECTIONS}",
            rank = comm.rank()
        );
    }
    Ok(took)
}

fn processes(ranks: u32, join: bool) -> Result<Duration> {
    let start = Instant::now();
    let role = if join { RankRole::Join } else { RankRole::Idle };
    let mut group = RankProcesses::start(ranks, |_| (role, 0), false)?;
    let connections = group.read_bytes()?;
    let took = start.elapsed();
    let most = connections.iter().max().copied().unwrap_or(0);
    ensure!(
        most <= MAX_CONNECTIONS,
        "a rank has {most} connections, which exceeds the limit of {MAX_CONNECTIONS}"
    );
    group.wait_for_exit()?;
    Ok(took)
}
