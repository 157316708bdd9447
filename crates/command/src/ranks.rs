//! This program, started again as the ranks of a group.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use wholemem_comm::UniqueId;

/// What a rank does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RankRole {
    /// Becomes the command
    Run,
    /// Is there, and nothing else
    Idle,
    /// Joins, and leaves
    Join,
    /// Joins, and waits for one of the others to be killed
    Survive,
    /// Joins, and waits to be killed
    Doomed,
    /// Joins, and moves rows of a table with the others
    Rows,
    /// Joins, and reduces, gathers, broadcasts and waits with the others
    Collective,
}

/// Ranks as processes, all of them dead when this is dropped.
#[derive(Debug)]
pub struct RankProcesses {
    /// The processes, in the order of ranks.
    pub ranks: Vec<Child>,
    /// They leave when this is closed.
    stay: Vec<ChildStdin>,
    /// What all of them write, unless each has a pipe of its own.
    output: Option<std::io::PipeReader>,
}

impl RankProcesses {
    /// Starts `count` ranks that all write to one pipe, or each to its own.
    pub fn start(count: u32, role: impl Fn(u32) -> (RankRole, usize), own: bool) -> Result<Self> {
        let args = |rank| {
            let (role, resident) = role(rank);
            (role, vec!["--resident".to_owned(), resident.to_string()])
        };
        Self::start_with(count, args, own)
    }

    /// As [`start`](Self::start), with whatever arguments a rank's role takes.
    pub fn start_with(count: u32, role: impl Fn(u32) -> (RankRole, Vec<String>), own: bool) -> Result<Self> {
        let id = UniqueId::create()?.to_string();
        let (output, write) = std::io::pipe().context("cannot make a pipe")?;
        let mut group = Self { ranks: Vec::new(), stay: Vec::new(), output: Some(output) };
        for rank in 0..count {
            let (role, args) = role(rank);
            let word = role.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            let mut command = Command::new("/proc/self/exe");
            command
                .arg0("wholemem")
                .args(["rank", &word, "--parent", &std::process::id().to_string()])
                .args(args)
                .env("WHOLEMEM_ID", &id)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", count.to_string())
                .stdin(Stdio::piped());
            if own {
                command.stdout(Stdio::piped());
            } else {
                command.stdout(write.try_clone().context("cannot share a pipe")?);
            }
            let mut child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
            group.stay.extend(child.stdin.take());
            group.ranks.push(child);
        }
        Ok(group)
    }

    /// Waits for one byte of each rank.
    pub fn words(&mut self) -> Result<Vec<u8>> {
        let mut words = vec![0; self.ranks.len()];
        if let Some(output) = &mut self.output {
            output.read_exact(&mut words).context("a rank ended before it said anything")?;
        }
        Ok(words)
    }

    /// Waits for all ranks to end by themselves, which they must do well, and kills nobody.
    pub fn leave(mut self) -> Result<()> {
        self.stay.clear();
        for (rank, child) in self.ranks.iter_mut().enumerate() {
            let status = child.wait()?;
            ensure!(status.success(), "rank {rank} ended with {status}");
        }
        self.ranks.clear();
        Ok(())
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
