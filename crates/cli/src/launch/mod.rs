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
//!
//! With `--hosts`, the launcher starts an agent on each host over ssh, which starts and supervises the ranks of that host:
//!
//! ```text
//!   wholemem launch --hosts a:2,b:2 -- ./my_program
//!     ├─ ssh a ═══ sshd ─ wholemem agent ─┬─ rank 0      stdin: the plan with the secret, signals; its end ends the ranks
//!     │                                   └─ rank 1      stdout, stderr: prefixed lines; results on stdout
//!     └─ ssh b ═══ sshd ─ wholemem agent ─┬─ rank 2
//!                                         └─ rank 3
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`group`], [`rank`], [`orphans`] | the ranks of a node: processes, supervision, processes that they leave behind |
//! | [`output`], [`output_queue`], [`lines`] | the output of ranks |
//! | [`plan`] | the ranks of a node, with their environment |
//! | [`remote`], [`host`], [`host_list`] | `--hosts`: the launcher |
//! | [`agent`], [`protocol`] | `--hosts`: the agent on a host, and its messages |
//! | [`worker`] | `--worker` |

mod agent;
mod group;
mod host;
mod host_list;
mod lines;
mod orphans;
mod output;
mod output_queue;
mod plan;
mod protocol;
mod rank;
mod remote;
mod worker;

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wholemem_comm::UniqueId;
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;

use self::group::RankGroup;
use self::plan::{ByteText, NodePlan};
use crate::cli::LaunchArgs;

pub(crate) use self::agent::run as run_agent;
pub(crate) use self::rank::run_role;

/// The signals that the launcher forwards to all ranks.
const FORWARDED: [Signal; 6] =
    [Signal::HUP, Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::USR2];

/// The number of descriptors that the launcher needs for each rank: two pipes, two logs and a pidfd.
const DESCRIPTORS_PER_RANK: u64 = 5;

pub(crate) fn run(args: &LaunchArgs) -> Result<ExitCode> {
    // Signals are blocked before another thread exists, because threads inherit the signal mask.
    let signals = block_signals()?;
    if let Some(hosts) = &args.hosts {
        let hosts = host_list::parse(hosts, args.ranks.unwrap_or(1))?;
        return remote::run(args, &hosts, &signals);
    }
    // clap requires the number of ranks without `--hosts`.
    let ranks = args.ranks.context("the number of ranks is missing")?;
    let plan = if args.worker { worker::plan(args, ranks)? } else { local_plan(args, ranks)? };
    raise_file_limit(plan.ranks.into(), DESCRIPTORS_PER_RANK);
    orphans::become_subreaper();
    let failure = RankGroup::start(&plan, &[], None)?.supervise(&signals)?;
    Ok(match failure {
        None => ExitCode::SUCCESS,
        Some((rank, status)) => {
            report(&format!("rank {rank} failed: {status}"), plan.size);
            ExitCode::from(exit_code(status))
        }
    })
}

/// Blocks the signals that the launcher reads from a descriptor.
fn block_signals() -> Result<Signals> {
    Ok(Signals::block(&[&FORWARDED[..], &[Signal::CHILD]].concat())?)
}

/// Returns the plan for ranks that are all on this node.
fn local_plan(args: &LaunchArgs, ranks: u32) -> Result<NodePlan> {
    let id = UniqueId::create()?;
    let variables = [
        ("WHOLEMEM_ID", id.to_string()),
        ("MASTER_ADDR", "127.0.0.1".to_owned()),
        ("MASTER_PORT", free_port().to_string()),
        ("TORCHELASTIC_RUN_ID", format!("wholemem-{}", std::process::id())),
    ];
    Ok(NodePlan {
        first_rank: 0,
        ranks,
        size: ranks,
        node: 0,
        nodes: 1,
        host: None,
        variables: variables.map(|(name, value)| (name.to_owned(), value)).to_vec(),
        command: args.command.iter().map(ByteText::new).collect(),
        log_dir: args.log_dir.as_ref().map(ByteText::new),
    })
}

/// Reports the failure of a rank or a host, which has ended all `ranks`.
fn report(failure: &str, ranks: u32) {
    let title = Colour::of_stderr().paint(TextStyle::Error, "error:");
    let others = if ranks > 1 { "; the other ranks were terminated" } else { "" };
    terminal::print_stderr(&format!("{title} {failure}{others}\n"));
}

/// Returns the exit code of the launcher for the exit status of a rank: as in a shell, 128 plus the signal if a signal killed
/// the rank.
fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    u8::try_from(code).unwrap_or(1)
}

/// Raises the soft limit on open files, whose default is 1024, to 64 and some for each of the processes to start.
///
/// The limit is not raised further, because the ranks inherit it.
fn raise_file_limit(processes: u64, for_each: u64) {
    let limit = getrlimit(Resource::Nofile);
    let needed = 64 + for_each * processes;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_killed_by_a_signal_has_the_exit_code_of_a_shell() {
        assert_eq!(exit_code(ExitStatus::from_raw(3 << 8)), 3);
        assert_eq!(exit_code(ExitStatus::from_raw(9)), 137);
    }
}
