//! `wholemem bench death`: how soon every survivor knows that a rank was killed.
//!
//! Each kill is of a new group of processes. The time is from the kill to the moment when the last survivor's barrier
//! has answered with the right rank. The limit is how soon the kernel says that a process without memory has exited.

use std::io::{BufRead, BufReader, Read};
use std::process::ChildStdout;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::ranks::{RankProcesses, RankRole};
use wholemem_os::{Deadline, PidFd};

use super::case_report::{CaseResult, print_cases};
use crate::args::DeathArgs;

pub(super) fn run(args: &DeathArgs) -> Result<()> {
    let resident = args.resident.map_or(0, |size| size.0);
    let progress = ProgressDisplay::rounds("killing", args.kills as usize);
    let (mut times, mut limits) = (Vec::new(), Vec::new());
    for kill in 0..args.kills {
        limits.push(bare()?);
        times.push(once(args.ranks, kill % args.ranks, resident)?);
        progress.advance(1);
    }
    drop(progress);
    let case = CaseResult {
        bytes: Some(resident),
        ..CaseResult::of_times(args.ranks, "kill", "ms", &times, &limits)
    };
    print_cases("death", "from SIGKILL to the last survivor that knows", "bare exit", args.json, &[case])
}

/// Now, on the clock that all processes of a machine share.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

fn once(ranks: u32, victim: u32, resident: usize) -> Result<Duration> {
    VictimGroup::start(ranks, victim, resident)?.kill()
}

/// A group of processes that have met, one of which is to be killed.
#[derive(Debug)]
pub struct VictimGroup {
    group: RankProcesses,
    outputs: Vec<BufReader<ChildStdout>>,
    victim: u32,
}

impl VictimGroup {
    /// Starts the ranks, and waits until they have passed bytes to each other.
    ///
    /// # Errors
    /// That a rank does not start, or ends too early.
    pub fn start(ranks: u32, victim: u32, resident: usize) -> Result<Self> {
        let role = |rank| if rank == victim { (RankRole::Victim, resident) } else { (RankRole::Survivor, 0) };
        let mut group = RankProcesses::start(ranks, role, true)?;
        let mut outputs = Vec::new();
        for (rank, child) in group.ranks.iter_mut().enumerate() {
            let mut output = BufReader::new(child.stdout.take().context("a rank has an output")?);
            let mut ready = [0];
            output
                .read_exact(&mut ready)
                .with_context(|| format!("rank {rank} ended before it was ready"))?;
            outputs.push(output);
        }
        Ok(Self { group, outputs, victim })
    }

    /// Kills the one, and says after which time the last of the others knew that it was that one.
    ///
    /// # Errors
    /// That a rank does not see the death, or takes another rank for dead.
    pub fn kill(mut self) -> Result<Duration> {
        let killed = now();
        self.group.ranks[self.victim as usize].kill().context("cannot kill a rank")?;
        let mut last = Duration::ZERO;
        for (rank, output) in (0..).zip(&mut self.outputs).filter(|(rank, _)| *rank != self.victim) {
            let mut line = String::new();
            output.read_line(&mut line)?;
            let words = line.trim().split_once(' ');
            let (lost, when) = words.with_context(|| format!("rank {rank} saw nothing"))?;
            ensure!(
                lost == self.victim.to_string(),
                "rank {rank} says that {lost} died, not {}",
                self.victim
            );
            last = last.max(Duration::from_nanos(when.parse().context("a time")?));
        }
        Ok(last.saturating_sub(killed))
    }
}

/// How soon the exit of a process that does nothing is known.
fn bare() -> Result<Duration> {
    let mut group = RankProcesses::start(1, |_| (RankRole::Idle, 0), false)?;
    group.read_bytes()?;
    let watch = PidFd::open(group.ranks[0].id())?;
    let killed = now();
    watch.kill()?;
    ensure!(watch.wait_exit(Deadline::after(Duration::from_secs(60)))?, "a process did not die");
    Ok(now().saturating_sub(killed))
}
