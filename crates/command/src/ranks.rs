//! Processes of the program `wholemem` that are the ranks of a group.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use wholemem_comm::UniqueId;

/// The task of a rank process that a command starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RankRole {
    /// Executes the program that was passed to `wholemem launch`
    Run,
    /// Waits until stdin is closed, without joining the group
    Idle,
    /// Joins the group, and leaves it when stdin is closed
    Join,
    /// Joins the group, and waits in a barrier until another rank is killed
    Survivor,
    /// Joins the group, and waits to be killed
    Victim,
    /// Joins the group, and runs benchmarks of gather and scatter
    Rows,
    /// Joins the group, and runs benchmarks of collectives
    Collective,
}

/// The rank processes of a group, which are killed on drop.
#[derive(Debug)]
pub struct RankProcesses {
    /// The rank processes, ordered by rank.
    pub ranks: Vec<Child>,
    /// The pipes to the ranks' stdin. A rank exits when its stdin is closed.
    stdins: Vec<ChildStdin>,
    /// The pipe that is the stdout of all ranks, unless each rank has a pipe of its own.
    output: Option<std::io::PipeReader>,
}

impl RankProcesses {
    /// Starts `count` rank processes. Their stdout is one common pipe or, if `own` is true, one pipe for each rank.
    ///
    /// `role` returns the role of a rank and the bytes of memory that it holds.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub fn start(count: u32, role: impl Fn(u32) -> (RankRole, usize), own: bool) -> Result<Self> {
        let args = |rank| {
            let (role, resident) = role(rank);
            (role, vec!["--resident".to_owned(), resident.to_string()])
        };
        Self::start_with(count, args, own)
    }

    /// Starts rank processes like [`start`](Self::start), with command-line arguments that `role` chooses for each rank.
    ///
    /// # Errors
    /// If a process cannot be started.
    pub fn start_with(count: u32, role: impl Fn(u32) -> (RankRole, Vec<String>), own: bool) -> Result<Self> {
        let id = UniqueId::create()?.to_string();
        let (output, write) = std::io::pipe().context("cannot create a pipe")?;
        let mut group = Self { ranks: Vec::new(), stdins: Vec::new(), output: Some(output) };
        for rank in 0..count {
            let (role, args) = role(rank);
            let name = role.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            let mut command = Command::new("/proc/self/exe");
            command
                .arg0("wholemem")
                .args(["rank", &name, "--parent", &std::process::id().to_string()])
                .args(args)
                .env("WHOLEMEM_ID", &id)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", count.to_string())
                .stdin(Stdio::piped());
            if own {
                command.stdout(Stdio::piped());
            } else {
                command.stdout(write.try_clone().context("cannot duplicate a pipe")?);
            }
            let mut child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
            group.stdins.extend(child.stdin.take());
            group.ranks.push(child);
        }
        Ok(group)
    }

    /// Reads one byte from each rank out of the common pipe, in the order of arrival.
    ///
    /// # Errors
    /// If a rank exits before it has written its byte.
    pub fn read_bytes(&mut self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.ranks.len()];
        if let Some(output) = &mut self.output {
            output.read_exact(&mut bytes).context("a rank exited before it wrote its byte")?;
        }
        Ok(bytes)
    }

    /// Closes the ranks' stdin and waits until all ranks have exited.
    ///
    /// # Errors
    /// If a rank fails.
    pub fn wait_for_exit(mut self) -> Result<()> {
        self.stdins.clear();
        for (rank, child) in self.ranks.iter_mut().enumerate() {
            let status = child.wait()?;
            ensure!(status.success(), "rank {rank} exited with {status}");
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
