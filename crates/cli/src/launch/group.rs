//! [`RankGroup`]: the rank processes of a node, and the loop that supervises them.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, kill_process_group};
use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;

use super::orphans;
use super::output::RankOutput;
use super::output_queue::OutputQueue;
use super::plan::NodePlan;
use super::protocol::{AgentMessage, ControlInput, LauncherMessage};

/// After a rank has failed, the time between SIGTERM and SIGKILL for the other ranks.
pub(super) const GRACE_PERIOD: Duration = Duration::from_secs(5);

/// The interval at which an agent writes to its launcher: only unacknowledged data lets the kernel detect a broken connection.
const ALIVE_INTERVAL: Duration = Duration::from_secs(10);

/// The rank processes of a launch, which are killed on drop.
#[derive(Debug)]
pub(super) struct RankGroup {
    ranks: Vec<LaunchedRank>,
    /// The connection to the launcher, if these are the ranks of an agent.
    control: Option<ControlInput>,
}

#[derive(Debug)]
struct LaunchedRank {
    rank: u32,
    child: Child,
    pidfd: PidFd,
    output: RankOutput,
    status: Option<ExitStatus>,
}

impl LaunchedRank {
    fn start(local_rank: u32, plan: &NodePlan, removed: &[&str]) -> Result<Self> {
        let rank = plan.rank(local_rank);
        // The ranks of an agent have no stdin: that of the agent is its connection to the launcher.
        let is_stdin_inherited = rank == 0 && plan.host.is_none() && !std::io::stdin().is_terminal();
        let mut command = this_program();
        command.args(plan.command.iter().map(|argument| argument.to_os_string()));
        for name in removed {
            command.env_remove(name);
        }
        command
            .envs(plan.variables.iter().map(|(name, value)| (name, value)))
            .envs(plan.rank_variables(local_rank))
            .stdin(if is_stdin_inherited { Stdio::inherit() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = command.spawn()?;
        let output = RankOutput::of(rank, plan, &mut child)?;
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

/// Returns a command that runs another command, which is killed when this process exits. The arguments are still to be added.
pub(super) fn this_program() -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("wholemem").args(["rank", "run", "--parent", &std::process::id().to_string(), "--"]);
    command
}

impl RankGroup {
    /// Starts the ranks of a node. They do not inherit the variables `removed`. `control` is the connection of an agent to its
    /// launcher.
    pub(super) fn start(plan: &NodePlan, removed: &[&str], control: Option<ControlInput>) -> Result<Self> {
        if let Some(folder) = &plan.log_dir {
            let folder = folder.to_path();
            std::fs::create_dir_all(&folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        let mut group = Self { ranks: Vec::new(), control };
        for local_rank in 0..plan.ranks {
            let rank = LaunchedRank::start(local_rank, plan, removed);
            let rank = rank.with_context(|| format!("cannot start rank {}", plan.rank(local_rank)))?;
            group.ranks.push(rank);
        }
        Ok(group)
    }

    /// Waits until all ranks have exited, and returns the first rank that failed, if any, with its exit status.
    pub(super) fn supervise(&mut self, signals: &Signals) -> Result<Option<(u32, ExitStatus)>> {
        let mut failure = None;
        let mut kill_at: Option<Instant> = None;
        let mut queues = OutputQueue::both();
        let mut alive_at = Instant::now() + ALIVE_INTERVAL;
        while self.ranks.iter().any(|rank| rank.status.is_none()) {
            let wake_at = self.control.as_ref().map(|_| alive_at).into_iter().chain(kill_at).min();
            self.poll(signals, &queues, wake_at);
            if self.control.is_some() && alive_at <= Instant::now() {
                queues[0].push(&AgentMessage::Alive.to_line());
                alive_at = Instant::now() + ALIVE_INTERVAL;
            }
            queues.iter_mut().try_for_each(OutputQueue::flush)?;
            while let Some(signal) = signals.next()? {
                if signal == Signal::CHILD {
                    orphans::reap(|child| self.ranks.iter().any(|rank| rank.pid() == Some(child)));
                } else {
                    self.ranks.iter().for_each(|rank| rank.signal(signal));
                }
            }
            let is_abandoned = self.handle_control();
            for rank in &mut self.ranks {
                rank.output.forward(&mut queues)?;
                if rank.status.is_none() && rank.pidfd.has_exited()? {
                    let status = rank.reap()?;
                    rank.output.forward(&mut queues)?;
                    if !status.success() && failure.is_none() {
                        failure = Some((rank.rank, status));
                        if self.control.is_some() {
                            let failed = AgentMessage::Failed { rank: rank.rank, status: status.into_raw() };
                            queues[0].push(&failed.to_line());
                        }
                    }
                }
            }
            if (failure.is_some() || is_abandoned) && kill_at.is_none() {
                self.ranks.iter().for_each(|rank| rank.signal(Signal::TERM));
                kill_at = Some(Instant::now() + GRACE_PERIOD);
            }
            if kill_at.is_some_and(|at| at <= Instant::now()) {
                self.ranks.iter().for_each(|rank| rank.signal(Signal::KILL));
            }
        }
        self.finish(signals, &mut queues)?;
        Ok(failure)
    }

    /// Handles the messages of the launcher. Returns true if it has closed the connection, so that the ranks must end.
    fn handle_control(&mut self) -> bool {
        let Some(control) = &mut self.control else { return false };
        control.read_available();
        while let Some(message) = control.next() {
            match message {
                LauncherMessage::Signal(number) => {
                    let signal = Signal::from_named_raw(number);
                    signal
                        .into_iter()
                        .for_each(|signal| self.ranks.iter().for_each(|rank| rank.signal(signal)));
                }
                // The ranks have been started before.
                LauncherMessage::Start(_) => {}
            }
        }
        control.has_ended()
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
            for rank in &mut self.ranks {
                any |= rank.output.forward(queues)?;
            }
            // After all other output, terminates the last lines of the ranks, which may have no line break. This is done once.
            if !any && !is_finished && !queues.iter().any(OutputQueue::is_full) {
                self.ranks.iter_mut().for_each(|rank| rank.output.finish(queues));
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
            if self.handle_control() {
                return Ok(());
            }
        }
    }

    /// Waits until a signal arrives, a rank writes output or exits, queued output can be
    /// written, the launcher sends a message, or `wake_at` has passed.
    fn poll(&self, signals: &Signals, queues: &[OutputQueue; 2], wake_at: Option<Instant>) {
        let living = self.ranks.iter().filter(|rank| rank.status.is_none());
        let mut polls = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        polls.extend(living.map(|rank| PollFd::from_borrowed_fd(rank.pidfd.as_fd(), PollFlags::IN)));
        polls.extend(queues.iter().filter_map(OutputQueue::poll));
        let control = self.control.as_ref().and_then(ControlInput::fd);
        polls.extend(control.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let outputs = self.ranks.iter().flat_map(|rank| rank.output.fds(queues));
        polls.extend(outputs.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let left = wake_at.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        let _ = poll(&mut polls, left.as_ref());
    }
}

impl Drop for RankGroup {
    fn drop(&mut self) {
        for rank in self.ranks.iter_mut().filter(|rank| rank.status.is_none()) {
            let _ = rank.reap();
        }
        orphans::kill_all();
    }
}
