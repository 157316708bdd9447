//! `wholemem launch`: starts a command as several ranks and supervises them.
//!
//! ```text
//!   wholemem launch -n 4 -- ./my_program
//!     ├─ rank 0 ─┐  each rank has its own process group; the launcher prints its output
//!     ├─ rank 1  │  line by line with the rank as prefix
//!     ├─ rank 2  │
//!     └─ rank 3 ─┘  signals are forwarded to all ranks; the first failure ends all ranks
//! ```
//!
//! When the launcher exits, all ranks and all their descendants have ended, including those in another process group or
//! session. If the launcher is killed, the ranks are killed too. Rank 0 inherits stdin, unless it is a terminal: ranks are
//! background process groups, which must not read it. The unique id of the group contains its secret, so it is passed in the
//! environment and never on a command line.

mod orphans;
mod output;
mod output_queue;
mod rank;

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, kill_process_group, setrlimit};
use wholemem_comm::UniqueId;
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;

use self::output::RankOutput;
use self::output_queue::OutputQueue;
use crate::cli::LaunchArgs;

pub(crate) use self::rank::run_role;

/// The signals that the launcher forwards to all ranks.
const FORWARDED: [Signal; 6] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2];

/// After a rank has failed, the time between SIGTERM and SIGKILL for the other ranks.
const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// The rank processes of a launch, which are killed on drop.
#[derive(Debug)]
struct RankGroup(Vec<LaunchedRank>);

#[derive(Debug)]
struct LaunchedRank {
    rank: u32,
    child: Child,
    pidfd: PidFd,
    output: RankOutput,
    status: Option<ExitStatus>,
}

pub(crate) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    // Signals are blocked before another thread exists, because threads inherit the signal mask.
    let signals = Signals::block(&[&FORWARDED[..], &[Signal::CHILD]].concat())?;
    let id = UniqueId::create()?;
    if let Some(folder) = &args.log_dir {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let port = free_port();
    raise_file_limit(args.ranks);
    orphans::become_subreaper();
    let mut group = RankGroup(Vec::new());
    for rank in 0..args.ranks {
        group.0.push(
            LaunchedRank::start(rank, args, &id, port)
                .with_context(|| format!("cannot start rank {rank}"))?,
        );
    }
    let failure = group.supervise(&signals)?;
    Ok(match failure {
        None => ExitCode::SUCCESS,
        Some((rank, status)) => {
            let title = Colour::of_stderr().paint(TextStyle::Error, "error:");
            let others = if args.ranks > 1 { "; the other ranks were terminated" } else { "" };
            terminal::print_stderr(&format!("{title} rank {rank} failed: {status}{others}\n"));
            ExitCode::from(exit_code(status))
        }
    })
}

/// Returns the exit code of the launcher for the exit status of a rank: as in a shell, 128 plus the signal if a signal killed
/// the rank.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

/// Raises the soft limit on open files, whose default is 1024, to 64 and five for each rank: two pipes, two logs and a pidfd.
///
/// The limit is not raised further, because the ranks inherit it.
fn raise_file_limit(ranks: u32) {
    let limit = getrlimit(Resource::Nofile);
    let needed = 64 + 5 * u64::from(ranks);
    if limit.current.is_some_and(|current| current < needed) {
        let current = Some(limit.maximum.map_or(needed, |maximum| maximum.min(needed)));
        // If the limit on open files cannot be raised, starting a rank fails with the error of `pipe` or `open`.
        let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
    }
}

/// Returns an unused TCP port, for programs that read torchrun's `MASTER_PORT`.
fn free_port() -> u16 {
    let probe = std::net::TcpListener::bind(("127.0.0.1", 0)).and_then(|socket| socket.local_addr());
    probe.map_or(29500, |address| address.port())
}

impl LaunchedRank {
    fn start(rank: u32, args: &LaunchArgs, id: &UniqueId, port: u16) -> Result<Self> {
        let (rank_text, size) = (rank.to_string(), args.ranks.to_string());
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0("wholemem")
            .args(["rank", "run", "--parent", &std::process::id().to_string(), "--"])
            .args(&args.command)
            .env("WHOLEMEM_ID", id.to_string())
            .envs([("RANK", &rank_text), ("LOCAL_RANK", &rank_text), ("GROUP_RANK", &"0".to_owned())])
            .envs([("WORLD_SIZE", &size), ("LOCAL_WORLD_SIZE", &size)])
            .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port.to_string())])
            .env("TORCHELASTIC_RUN_ID", format!("wholemem-{}", std::process::id()))
            .stdin(if rank == 0 && !std::io::stdin().is_terminal() {
                Stdio::inherit()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn()?;
        let output = RankOutput::of(rank, args.ranks, &mut child, args.log_dir.as_deref())?;
        let pidfd = PidFd::open(child.id())?;
        Ok(Self { rank, child, pidfd, output, status: None })
    }

    /// Returns the process id of the rank, which is also its process group id, or `None` if the rank has been reaped: the
    /// kernel may then reuse the id.
    fn pid(&self) -> Option<Pid> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        pid.filter(|_| self.status.is_none())
    }

    /// Sends a signal to the process group of the rank, unless the rank has been reaped.
    fn signal(&self, signal: Signal) {
        if let Some(group) = self.pid() {
            let _ = kill_process_group(group, signal);
            // A stopped process handles SIGTERM only after SIGCONT.
            if signal == Signal::TERM {
                let _ = kill_process_group(group, Signal::CONT);
            }
        }
    }

    /// Kills what is left of an exited rank's process group, and reaps the rank.
    fn reap(&mut self) -> Result<ExitStatus> {
        self.signal(Signal::KILL);
        let status = self.child.wait()?;
        self.status = Some(status);
        Ok(status)
    }
}

impl RankGroup {
    /// Waits until all ranks have exited, and returns the first rank that failed, if any, with its exit status.
    fn supervise(&mut self, signals: &Signals) -> Result<Option<(u32, ExitStatus)>> {
        let mut failure = None;
        let mut kill_at: Option<Instant> = None;
        let mut queues = OutputQueue::both();
        while self.0.iter().any(|rank| rank.status.is_none()) {
            self.poll(signals, &queues, kill_at);
            queues.iter_mut().try_for_each(OutputQueue::flush)?;
            while let Some(signal) = signals.next()? {
                if signal == Signal::CHILD {
                    orphans::reap(|child| self.0.iter().any(|rank| rank.pid() == Some(child)));
                } else {
                    self.0.iter().for_each(|rank| rank.signal(signal));
                }
            }
            for rank in &mut self.0 {
                rank.output.forward(&mut queues)?;
                if rank.status.is_none() && rank.pidfd.has_exited()? {
                    let status = rank.reap()?;
                    rank.output.forward(&mut queues)?;
                    if !status.success() && failure.is_none() {
                        failure = Some((rank.rank, status));
                    }
                }
            }
            if failure.is_some() && kill_at.is_none() {
                self.0.iter().for_each(|rank| rank.signal(Signal::TERM));
                kill_at = Some(Instant::now() + GRACE_PERIOD);
            }
            if kill_at.is_some_and(|at| at <= Instant::now()) {
                self.0.iter().for_each(|rank| rank.signal(Signal::KILL));
            }
        }
        self.finish(signals, &mut queues)?;
        Ok(failure)
    }

    /// Forwards the output that exited ranks left in their pipes. If the reader of the launcher's output does not read, a
    /// signal ends the wait.
    fn finish(&mut self, signals: &Signals, queues: &mut [OutputQueue; 2]) -> Result<()> {
        // Orphans are killed first: they hold the pipes of the ranks open, and must not run or remain zombies while a reader of
        // stdout is blocked.
        orphans::kill_all();
        let mut is_finished = false;
        loop {
            let mut any = false;
            for rank in &mut self.0 {
                any |= rank.output.forward(queues)?;
            }
            // After all other output, adds the missing line breaks to the ranks' last lines. This is done once.
            if !any && !is_finished && !queues.iter().any(OutputQueue::is_full) {
                self.0.iter_mut().for_each(|rank| rank.output.finish(queues));
                is_finished = true;
            }
            queues.iter_mut().try_for_each(OutputQueue::flush)?;
            if !any && is_finished && queues.iter().all(OutputQueue::is_empty) {
                return Ok(());
            }
            if !any {
                self.poll(signals, queues, None);
            }
            while let Some(signal) = signals.next()? {
                if signal != Signal::CHILD {
                    return Ok(());
                }
            }
        }
    }

    /// Waits until a signal arrives, a rank writes output or exits, queued output can be written, or `kill_at` has passed.
    fn poll(&self, signals: &Signals, queues: &[OutputQueue; 2], kill_at: Option<Instant>) {
        let living = self.0.iter().filter(|rank| rank.status.is_none());
        let mut polls = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        polls.extend(living.map(|rank| PollFd::from_borrowed_fd(rank.pidfd.as_fd(), PollFlags::IN)));
        polls.extend(queues.iter().filter_map(OutputQueue::poll));
        let outputs = self.0.iter().flat_map(|rank| rank.output.fds(queues));
        polls.extend(outputs.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let left = kill_at.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        let _ = poll(&mut polls, left.as_ref());
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.reap();
        }
        orphans::kill_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_killed_by_a_signal_has_the_exit_code_of_a_shell() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
    }
}
