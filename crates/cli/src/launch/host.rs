//! [`Host`]: the ssh process of a host, and the messages of the agent there.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ExitStatus, Stdio};

use anyhow::{Context, Result};
use rustix::event::PollFlags;
use rustix::process::{Pid, kill_process_group};
use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use super::group::this_program;
use super::host_list::HostRanks;
use super::lines::LineReader;
use super::output::{MAX_LINE, MAX_READS};
use super::output_queue::{OutputQueue, is_ready};
use super::protocol::{AgentMessage, LauncherMessage, VERSION};

/// The options of ssh: it asks no question, and detects a host that no longer answers.
const SSH_OPTIONS: [&str; 4] =
    ["BatchMode=yes", "ConnectTimeout=30", "ServerAliveInterval=5", "ServerAliveCountMax=3"];

/// The additional length of a line in the output of an agent: the prefix of its rank.
const MAX_PREFIX: usize = 1 << 10;

/// The ssh process of a host, which is killed on drop.
#[derive(Debug)]
pub(super) struct Host {
    name: String,
    program: String,
    child: Child,
    pidfd: PidFd,
    stdin: Option<ChildStdin>,
    streams: [LineReader; 2],
    /// The ports in the first message of the agent.
    ports: Option<[u16; 2]>,
    /// True after the last message of the agent.
    has_ended: bool,
    status: Option<ExitStatus>,
}

/// What the launcher has to handle.
#[derive(Debug)]
pub(super) enum HostEvent {
    /// A rank failed.
    RankFailed { rank: u32, status: i32 },
    /// The host cannot start its ranks, or is lost.
    Failed(String),
}

impl Host {
    /// Starts an agent over ssh. `ssh` is the program with its options, and `program` the path of `wholemem` on the host.
    pub(super) fn start(ssh: &[String], host: &HostRanks, program: &str) -> Result<Self> {
        let mut command = this_program();
        command.args(ssh).args(SSH_OPTIONS.iter().flat_map(|option| ["-o", option]));
        // ssh passes the command to a shell on the host.
        command.args(["--", &host.destination, &format!("{} agent", shell_quoted(program))]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // The signals of the terminal are for the launcher, which forwards them.
        let mut child = command.process_group(0).spawn().context("cannot start ssh")?;
        let pipes = [child.stdout.take().map(OwnedFd::from), child.stderr.take().map(OwnedFd::from)];
        let [Some(stdout), Some(stderr)] = pipes else { anyhow::bail!("ssh has no output") };
        let pidfd = PidFd::open(child.id())?;
        Ok(Self {
            name: host.host().to_owned(),
            program: program.to_owned(),
            stdin: child.stdin.take(),
            child,
            pidfd,
            streams: [stdout, stderr].map(|pipe| LineReader::new(pipe, MAX_LINE + MAX_PREFIX)),
            ports: None,
            has_ended: false,
            status: None,
        })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the unused ports of the host, after its agent has answered.
    pub(super) fn ports(&self) -> Option<[u16; 2]> {
        self.ports
    }

    pub(super) fn is_living(&self) -> bool {
        self.status.is_none()
    }

    /// Returns the process id of ssh, unless it has been reaped.
    pub(super) fn pid(&self) -> Option<Pid> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        pid.filter(|_| self.is_living())
    }

    /// Returns the descriptors to poll for reading.
    pub(super) fn fds(&self, queues: &[OutputQueue; 2]) -> Vec<BorrowedFd<'_>> {
        let streams = self.streams.iter().zip(queues);
        let open = streams.filter(|(stream, queue)| !stream.has_ended() && !queue.is_full());
        // See `step`.
        let is_awaited = self.is_living() && !queues.iter().any(OutputQueue::is_full);
        let pidfd = is_awaited.then(|| self.pidfd.as_fd());
        open.map(|(stream, _)| stream.as_fd()).chain(pidfd).collect()
    }

    /// Sends a message to the agent. If ssh does not read, the message is lost.
    pub(super) fn send(&mut self, message: &LauncherMessage) {
        // If the connection is broken, ssh does not read, and the launcher must not wait for it.
        if let Some(stdin) = self.stdin.as_mut().filter(|stdin| is_ready(stdin, PollFlags::OUT)) {
            // If ssh has exited, `step` reports it.
            let _ = stdin.write_all(&message.to_line());
        }
    }

    /// Ends the ranks of the host, by closing the stdin of its agent.
    pub(super) fn end(&mut self) {
        self.stdin = None;
    }

    /// Kills ssh. The agent then notices the end of the connection.
    pub(super) fn kill(&self) {
        if let Some(group) = self.pid() {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }

    /// Forwards the output of the host, and reaps ssh if it has exited. Returns what has happened.
    ///
    /// While a queue is full, the last messages of the agent may be unread, so ssh is reaped later, unless it `is_killed`.
    pub(super) fn step(&mut self, queues: &mut [OutputQueue; 2], is_killed: bool) -> Result<Vec<HostEvent>> {
        let mut events = Vec::new();
        self.forward(queues, &mut events);
        let can_reap = is_killed || !queues.iter().any(OutputQueue::is_full);
        if self.is_living() && can_reap && self.pidfd.has_exited()? {
            self.kill();
            let status = self.child.wait()?;
            self.status = Some(status);
            self.forward(queues, &mut events);
            if !self.has_ended {
                events.push(HostEvent::Failed(self.loss(status)));
            }
        }
        Ok(events)
    }

    /// Reads available output of the host. Returns true if anything was read.
    pub(super) fn forward(&mut self, queues: &mut [OutputQueue; 2], events: &mut Vec<HostEvent>) -> bool {
        let mut any = false;
        for index in 0..self.streams.len() {
            for _ in 0..MAX_READS {
                let stream = &mut self.streams[index];
                if stream.has_ended() || queues[index].is_full() || !is_ready(&*stream, PollFlags::IN) {
                    break;
                }
                let lines = stream.read(|_| Ok(())).unwrap_or_default();
                self.handle_lines(&lines, index, queues, events);
                any = true;
            }
        }
        any
    }

    /// Forwards the last lines of the output, which have no line break.
    pub(super) fn finish(&mut self, queues: &mut [OutputQueue; 2]) {
        for (stream, queue) in self.streams.iter_mut().zip(queues) {
            queue.push(&stream.finish());
        }
    }

    fn handle_lines(
        &mut self,
        lines: &[u8],
        stream: usize,
        queues: &mut [OutputQueue; 2],
        events: &mut Vec<HostEvent>,
    ) {
        for line in lines.split_inclusive(|byte| *byte == b'\n') {
            let message = AgentMessage::from_line(line.strip_suffix(b"\n").unwrap_or(line));
            match message.filter(|_| stream == 0) {
                None => queues[stream].push(line),
                Some(AgentMessage::Hello { version, .. }) if version != VERSION => {
                    let name = &self.name;
                    events.push(HostEvent::Failed(format!(
                        "`{}` on {name} is version {version}, and this program is version {VERSION}",
                        self.program
                    )));
                }
                Some(AgentMessage::Hello { ports, .. }) => self.ports = Some(ports),
                Some(AgentMessage::Error(error)) => {
                    // The agent ends after an error, so its exit is no further failure.
                    self.has_ended = true;
                    events.push(HostEvent::Failed(format!("{}: {error}", self.name)));
                }
                Some(AgentMessage::Failed { rank, status }) => {
                    events.push(HostEvent::RankFailed { rank, status });
                }
                Some(AgentMessage::Alive) => {}
                Some(AgentMessage::End) => self.has_ended = true,
            }
        }
    }

    /// Returns the reason why ssh has exited before its agent.
    fn loss(&self, status: ExitStatus) -> String {
        let Self { name, program, .. } = self;
        match (self.ports.is_some(), status.code()) {
            (true, _) => format!("the connection to {name} ended before its ranks: ssh: {status}"),
            (false, Some(127)) => {
                format!(
                    "cannot start `{program}` on {name}: it was not found; `--program` sets its path there"
                )
            }
            (false, Some(126)) => format!("cannot start `{program}` on {name}: it is not executable"),
            (false, Some(255)) => format!("cannot connect to {name}: ssh failed"),
            (false, _) => format!(
                "the connection to {name} ended before `{program} agent` answered: {status}; all hosts need version \
                 {VERSION} of wholemem"
            ),
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if self.is_living() {
            self.kill();
            self.status = self.child.wait().ok();
        }
    }
}

/// Returns a text as one word of a shell command.
fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_one_word_of_the_shell() {
        for path in ["/usr/bin/wholemem", "/a b/$(c)", "/it's"] {
            let output = std::process::Command::new("sh")
                .args(["-c", &format!("printf %s {}", shell_quoted(path))])
                .output()
                .unwrap();
            assert_eq!(String::from_utf8(output.stdout).unwrap(), path);
        }
    }
}
