//! `wholemem bench death`: measures the time until every survivor has detected that a rank was killed.
//!
//! Each kill uses a new group of processes. The time ends when the barrier of the last survivor has returned the killed rank.
//! The limit is the time in which the kernel reports the exit of a process without memory.

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
        limits.push(idle_exit()?);
        times.push(once(args.ranks, kill % args.ranks, resident)?);
        progress.advance(1);
    }
    drop(progress);
    let case = CaseResult {
        bytes: Some(resident),
        ..CaseResult::of_times(args.ranks, "kill", "ms", &times, &limits)
    };
    print_cases(
        "death",
        "time from SIGKILL until the last survivor has detected it",
        "idle exit",
        args.json,
        &[case],
    )
}

/// Returns the time of the monotonic clock, which is the same in all processes of a machine.
fn now() -> Duration {
    Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default()
}

fn once(ranks: u32, victim: u32, resident: usize) -> Result<Duration> {
    VictimGroup::start(ranks, victim, resident)?.kill()
}

/// A group of rank processes, one of which (the victim) will be killed.
#[derive(Debug)]
pub struct VictimGroup {
    group: RankProcesses,
    outputs: Vec<BufReader<ChildStdout>>,
    victim: u32,
}

impl VictimGroup {
    /// Starts a group of rank processes, and waits until they have joined and completed an all-gather.
    ///
    /// # Errors
    /// If a rank does not start, or exits early.
    pub fn start(ranks: u32, victim: u32, resident: usize) -> Result<Self> {
        let role = |rank| if rank == victim { (RankRole::Victim, resident) } else { (RankRole::Survivor, 0) };
        let mut group = RankProcesses::start(ranks, role, true)?;
        let mut outputs = Vec::new();
        for (rank, child) in group.ranks.iter_mut().enumerate() {
            let mut output = BufReader::new(child.stdout.take().context("a rank has no stdout")?);
            let mut ready = [0];
            output
                .read_exact(&mut ready)
                .with_context(|| format!("rank {rank} exited before it was ready"))?;
            outputs.push(output);
        }
        Ok(Self { group, outputs, victim })
    }

    /// Kills the victim, and returns the time until the last surviving rank has detected its death.
    ///
    /// # Errors
    /// If a survivor does not detect the death, or reports another rank.
    pub fn kill(mut self) -> Result<Duration> {
        let killed = now();
        self.group.ranks[self.victim as usize].kill().context("cannot kill a rank")?;
        let mut last = Duration::ZERO;
        for (rank, output) in (0..).zip(&mut self.outputs).filter(|(rank, _)| *rank != self.victim) {
            let mut line = String::new();
            output.read_line(&mut line)?;
            let words = line.trim().split_once(' ');
            let (lost, when) = words.with_context(|| format!("rank {rank} did not report the death"))?;
            ensure!(
                lost == self.victim.to_string(),
                "rank {rank} reported the death of rank {lost} instead of {victim}",
                victim = self.victim
            );
            last =
                last.max(Duration::from_nanos(when.parse().context("the time of a rank is not a number")?));
        }
        Ok(last.saturating_sub(killed))
    }
}

/// Kills an idle process, and returns the time until the kernel reports its exit.
fn idle_exit() -> Result<Duration> {
    let mut group = RankProcesses::start(1, |_| (RankRole::Idle, 0), false)?;
    group.read_bytes()?;
    let watch = PidFd::open(group.ranks[0].id())?;
    let killed = now();
    watch.kill()?;
    ensure!(
        watch.wait_exit(Deadline::after(Duration::from_secs(60)))?,
        "the killed process did not exit within 60 s"
    );
    Ok(now().saturating_sub(killed))
}
