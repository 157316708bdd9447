//! The process of one rank: it executes the command of `launch`, or a task of a benchmark or of the demo.
//!
//! The process first requests a SIGKILL for the exit of its parent (PR_SET_PDEATHSIG), which persists across `exec`. So no
//! rank outlives the process that started it.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use wholemem_comm::{Bootstrap, Error};
use wholemem_command::ranks::RankRole;
use wholemem_os::{pidfd, signal};

use crate::cli::RankArgs;

/// Runs the task of a rank: the command of `launch`, or a task of a benchmark or of the demo.
pub(crate) fn run_role(args: &RankArgs) -> Result<()> {
    pidfd::die_with_parent(args.parent).context("this command is internal: only wholemem starts it")?;
    match args.role {
        RankRole::Run => exec_command(&args.command),
        RankRole::Idle => write_stdout(&[0]).and_then(|()| wait_for_eof()),
        RankRole::Join => join(),
        RankRole::Survivor => survive(),
        RankRole::Victim => wait_to_be_killed(args.resident),
        RankRole::Rows => wholemem_bench::rows_rank(&args.plan),
        RankRole::Collective => wholemem_bench::collective_rank(&args.plan),
    }
}

fn exec_command(command: &[OsString]) -> Result<()> {
    let (program, rest) = command.split_first().context("no command was given")?;
    // Unblocks all signals, because the command would inherit the signal mask of the launcher, which blocks the signals that it
    // reads from a descriptor.
    signal::unblock_all()?;
    let error = Command::new(program).args(rest).exec();
    Err(error).with_context(|| format!("cannot run `{}`", program.display()))
}

/// Joins the group of ranks for `wholemem bench bootstrap`, writes the number of this rank's connections to stdout as one
/// byte, and leaves the group when stdin is closed.
fn join() -> Result<()> {
    let comm = Bootstrap::from_env()?;
    write_stdout(&[u8::try_from(comm.connections())?])?;
    wait_for_eof()?;
    comm.barrier()?;
    Ok(())
}

/// Joins the group of ranks and verifies an all-gather.
fn join_and_check() -> Result<Bootstrap> {
    let comm = Bootstrap::from_env()?;
    let all = comm.all_gather(&comm.rank().0.to_le_bytes())?;
    ensure!(
        all.iter().zip(0u32..).all(|(got, rank)| *got == rank.to_le_bytes()),
        "all_gather returned wrong bytes"
    );
    Ok(comm)
}

/// Waits in a barrier until another rank is killed, and writes the number of that rank and the time of detection to stdout.
fn survive() -> Result<()> {
    let comm = join_and_check()?;
    write_stdout(b"r")?;
    let outcome = comm.barrier();
    let now = clock_gettime(ClockId::Monotonic);
    let Err(Error::PeerLost { rank }) = outcome else {
        anyhow::bail!("the barrier returned {outcome:?} instead of the loss of the killed rank");
    };
    let nanos = now.tv_sec * 1_000_000_000 + now.tv_nsec;
    write_stdout(format!("{rank} {nanos}\n").as_bytes())
}

/// Joins the group of ranks, holds `resident` bytes of memory and waits to be killed.
fn wait_to_be_killed(resident: usize) -> Result<()> {
    let _comm = join_and_check()?;
    let mut memory = vec![0u8; resident];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    write_stdout(b"r")?;
    wait_for_eof()?;
    anyhow::bail!(
        "stdin was closed before the rank, with {len} bytes of memory, was killed",
        len = memory.len()
    )
}

fn write_stdout(bytes: &[u8]) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(bytes)?;
    Ok(stdout.flush()?)
}

/// Waits until the process that started this one closes stdin.
fn wait_for_eof() -> Result<()> {
    std::io::stdin().lock().read_to_end(&mut Vec::new())?;
    Ok(())
}
