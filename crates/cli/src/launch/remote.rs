//! `wholemem launch --hosts`: starts an agent on each host over ssh, and supervises the agents.
//!
//! No rank starts before all agents have answered. If a rank fails or a host is lost, the stdin of all agents is closed,
//! whereupon they terminate their ranks. If the reader of the launcher's output does not read, a failure on another host is
//! noticed when it reads again, or when a signal ends the launch.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_comm::discovery::HostPort;
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;

use super::group::GRACE_PERIOD;
use super::host::{Host, HostEvent};
use super::host_list::HostRanks;
use super::output_queue::OutputQueue;
use super::plan::{ByteText, NodePlan};
use super::protocol::{LauncherMessage, SecretText, Start};
use super::{exit_code, orphans, raise_file_limit, report};
use crate::cli::LaunchArgs;

/// The prefix of the environment variables that are passed to ranks on other hosts.
const PASSED: &str = "WHOLEMEM_";

/// The variables with this prefix that are not passed: those of another group, and paths and options of this host.
const NOT_PASSED: [&str; 6] = [
    "WHOLEMEM_ID",
    "WHOLEMEM_ADDR",
    "WHOLEMEM_RENDEZVOUS",
    "WHOLEMEM_SECRET",
    "WHOLEMEM_SECRET_FILE",
    "WHOLEMEM_SSH",
];

/// The time for the agents to end their ranks, which they kill after their grace period.
const END_TIMEOUT: Duration = GRACE_PERIOD.saturating_add(Duration::from_secs(5));

/// The agents of a launch.
#[derive(Debug)]
struct HostGroup {
    hosts: Vec<Host>,
    /// The reason why the launch ends, if it is not the end of all ranks.
    failure: Option<Failure>,
}

#[derive(Debug)]
enum Failure {
    Rank {
        rank: u32,
        host: String,
        status: ExitStatus,
    },
    Host(String),
    /// A signal ended the launch before the ranks were started, or while the output was not read.
    Interrupted(Signal),
}

pub(super) fn run(args: &LaunchArgs, list: &[HostRanks], signals: &Signals) -> Result<ExitCode> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let ssh = args.ssh.clone().or_else(|| variable("WHOLEMEM_SSH")).unwrap_or_else(|| "ssh".to_owned());
    let ssh: Vec<_> = ssh.split_whitespace().map(str::to_owned).collect();
    if ssh.is_empty() {
        bail!("the ssh program is empty");
    }
    let program = match &args.program {
        Some(program) => program.clone(),
        None => {
            let path = std::env::current_exe().context("cannot find the path of this program")?;
            path.to_str().context("the path of this program is not UTF-8: set `--program`")?.to_owned()
        }
    };
    // Checked before ssh is started.
    let variables = passed_variables(&args.variables)?;
    let address = variable("WHOLEMEM_ADDR").map(|address| address.parse()).transpose()?;
    // Three pipes and a pidfd for each host.
    raise_file_limit(list.len() as u64, 4);
    orphans::become_subreaper();
    let hosts = list.iter().map(|host| Host::start(&ssh, host, &program)).collect::<Result<_>>()?;
    let mut group = HostGroup { hosts, failure: None };
    let size = list.iter().map(|host| host.ranks).sum();
    group.supervise(signals, |ports| starts(args, list, size, &variables, address.as_ref(), ports))?;
    Ok(match group.failure.take() {
        None => ExitCode::SUCCESS,
        Some(Failure::Rank { rank, host, status }) => {
            report(&format!("rank {rank} on {host} failed: {status}"), size);
            ExitCode::from(exit_code(status))
        }
        Some(Failure::Interrupted(signal)) => {
            ExitCode::from(u8::try_from(128 + signal.as_raw()).unwrap_or(1))
        }
        Some(Failure::Host(problem)) => bail!(problem),
    })
}

/// Returns the plans of all hosts. `ports` are unused ports of the first one.
fn starts(
    args: &LaunchArgs,
    list: &[HostRanks],
    size: u32,
    passed: &[(String, String)],
    address: Option<&HostPort>,
    ports: [u16; 2],
) -> Result<Vec<Start>> {
    let [port, master_port] = ports;
    let first = list.first().context("no hosts")?.host().to_owned();
    let address = address.cloned().unwrap_or(HostPort { host: first, port });
    let run = format!("launch-{}", random_hex::<8>()?);
    let secret = SecretText(random_hex::<32>()?);
    let mut variables = passed.to_vec();
    variables.extend(
        [
            ("WHOLEMEM_ADDR", address.to_string()),
            ("WHOLEMEM_RENDEZVOUS", run.clone()),
            ("MASTER_ADDR", address.host),
            ("MASTER_PORT", master_port.to_string()),
            ("TORCHELASTIC_RUN_ID", run),
        ]
        .map(|(name, value)| (name.to_owned(), value)),
    );
    let folder = std::env::current_dir().context("cannot find the current folder")?;
    let nodes = u32::try_from(list.len()).context("too many hosts")?;
    let mut first_rank = 0;
    let starts = list.iter().zip(0..).map(|(host, node)| {
        let plan = NodePlan {
            first_rank,
            ranks: host.ranks,
            size,
            node,
            nodes,
            host: Some(host.host().to_owned()),
            variables: variables.clone(),
            command: args.command.iter().map(ByteText::new).collect(),
            log_dir: args.log_dir.as_ref().map(ByteText::new),
        };
        first_rank += host.ranks;
        Start { folder: ByteText::new(&folder), secret: secret.clone(), plan }
    });
    Ok(starts.collect())
}

/// Returns the environment variables of the launcher that the ranks get: those with the prefix `WHOLEMEM_`, and the `named` ones.
fn passed_variables(named: &[String]) -> Result<Vec<(String, String)>> {
    let all = std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let passed = all.filter(|(name, _)| name.starts_with(PASSED) && !NOT_PASSED.contains(&name.as_str()));
    let named = named.iter().map(|name| {
        let value =
            std::env::var_os(name).with_context(|| format!("`--env {name}`: the variable is not set"))?;
        Ok((name.clone(), value))
    });
    let with_text = |variable: Result<(String, OsString)>| {
        let (name, value) = variable?;
        let text = value.into_string().ok().with_context(|| format!("the value of `{name}` is not UTF-8"))?;
        Ok((name, text))
    };
    passed.map(Ok).chain(named).map(with_text).collect()
}

/// Returns `N` random bytes as hexadecimal digits.
fn random_hex<const N: usize>() -> Result<String> {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes[filled..], flags) {
            Ok(more) => filled += more,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(std::io::Error::from(errno)).context("cannot create a secret"),
        }
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

impl HostGroup {
    /// Starts the ranks when all agents have answered, with the plans that `starts` returns for the unused ports of the first
    /// host. Returns when all agents have ended.
    fn supervise(
        &mut self,
        signals: &Signals,
        starts: impl Fn([u16; 2]) -> Result<Vec<Start>>,
    ) -> Result<()> {
        let mut queues = OutputQueue::both();
        let (mut is_started, mut kill_at) = (false, None);
        while self.hosts.iter().any(Host::is_living) {
            self.poll(signals, &queues, kill_at);
            queues.iter_mut().try_for_each(OutputQueue::flush)?;
            // If the output is not read, the end of the ranks is not either: then a signal ends the launch itself.
            let is_blocked = queues.iter().any(OutputQueue::is_full);
            self.handle_signals(signals, is_started, is_blocked)?;
            let is_killed = kill_at.is_some_and(|at| at <= Instant::now());
            for host in &mut self.hosts {
                for event in host.step(&mut queues, is_killed)? {
                    let failure = match event {
                        HostEvent::RankFailed { rank, status } => Failure::Rank {
                            rank,
                            host: host.name().to_owned(),
                            status: ExitStatus::from_raw(status),
                        },
                        HostEvent::Failed(problem) => Failure::Host(problem),
                    };
                    self.failure.get_or_insert(failure);
                }
            }
            let is_ready = self.hosts.iter().all(|host| host.ports().is_some());
            if let Some(ports) = self.hosts[0].ports()
                && is_ready
                && !is_started
                && self.failure.is_none()
            {
                for (host, start) in self.hosts.iter_mut().zip(starts(ports)?) {
                    host.send(&LauncherMessage::Start(Box::new(start)));
                }
                is_started = true;
            }
            if self.failure.is_some() && kill_at.is_none() {
                self.hosts.iter_mut().for_each(Host::end);
                // Before the ranks have been started, nothing has to be ended, and ssh may still be connecting.
                kill_at = Some(Instant::now() + if is_started { END_TIMEOUT } else { Duration::ZERO });
            }
            if is_killed {
                self.hosts.iter().for_each(Host::kill);
            }
        }
        self.finish(signals, &mut queues)
    }

    fn handle_signals(&mut self, signals: &Signals, is_started: bool, is_blocked: bool) -> Result<()> {
        while let Some(signal) = signals.next()? {
            if signal == Signal::CHILD {
                orphans::reap(|child| self.hosts.iter().any(|host| host.pid() == Some(child)));
                continue;
            }
            if is_started {
                let message = LauncherMessage::Signal(signal.as_raw());
                self.hosts.iter_mut().for_each(|host| host.send(&message));
            }
            if !is_started || is_blocked {
                self.failure.get_or_insert(Failure::Interrupted(signal));
            }
        }
        Ok(())
    }

    /// Forwards the output that the hosts left in their pipes. A signal ends the wait for a reader that does not read.
    fn finish(&mut self, signals: &Signals, queues: &mut [OutputQueue; 2]) -> Result<()> {
        orphans::kill_all();
        let mut is_finished = false;
        loop {
            let mut any = false;
            for host in &mut self.hosts {
                any |= host.forward(queues, &mut Vec::new());
            }
            if !any && !is_finished && !queues.iter().any(OutputQueue::is_full) {
                self.hosts.iter_mut().for_each(|host| host.finish(queues));
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

    /// Waits until a signal arrives, a host writes or ends, queued output can be written, or `kill_at` has passed.
    fn poll(&self, signals: &Signals, queues: &[OutputQueue; 2], kill_at: Option<Instant>) {
        let mut polls = vec![PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        let fds = self.hosts.iter().flat_map(|host| host.fds(queues));
        polls.extend(fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        polls.extend(queues.iter().filter_map(OutputQueue::poll));
        let left = kill_at.map(|at| at.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
        let _ = poll(&mut polls, left.as_ref());
    }
}
