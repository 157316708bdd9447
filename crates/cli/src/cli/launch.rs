//! The options of `wholemem launch`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Number of ranks to start; with `--hosts` on each host without a number of its own [default there: 1], with
    /// `--worker` on each node
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536),
          required_unless_present = "hosts")]
    pub(crate) ranks: Option<u32>,
    /// Also write the output of each rank to files in this folder of its host: `rank-N.out` and `rank-N.err`
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Start the ranks on these hosts over ssh, with a number of ranks for each: `node1:4,user@node2:2,[fd00::3]:4`. Rank 0 is
    /// on the first host, under whose name the others connect to it, unless `WHOLEMEM_ADDR` is set
    #[arg(long, value_name = "HOSTS", conflicts_with = "worker", help_heading = "Several nodes")]
    pub(crate) hosts: Option<String>,
    /// The ssh program, with options separated by spaces [default: `WHOLEMEM_SSH`, or else `ssh`]
    #[arg(long, value_name = "COMMAND", requires = "hosts", help_heading = "Several nodes")]
    pub(crate) ssh: Option<String>,
    /// The path of the program `wholemem` on the hosts [default: the path of this program]
    #[arg(long, value_name = "PATH", requires = "hosts", help_heading = "Several nodes")]
    pub(crate) program: Option<String>,
    /// Pass this environment variable to the ranks on the hosts; those with the prefix `WHOLEMEM_` are always passed
    #[arg(long = "env", value_name = "NAME", requires = "hosts", help_heading = "Several nodes")]
    pub(crate) variables: Vec<String>,
    /// Start the ranks of this node only: one of several launchers, one on each node, as `srun --ntasks-per-node=1` starts
    /// them. Needs `WHOLEMEM_SECRET_FILE` or `WHOLEMEM_SECRET`
    #[arg(long, help_heading = "Several nodes")]
    pub(crate) worker: bool,
    /// Number of nodes of all workers [default: that of Slurm]
    #[arg(long, value_name = "N", requires = "worker", requires = "node", help_heading = "Several nodes",
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) nodes: Option<u32>,
    /// Number of this node, from 0; rank 0 is on node 0 [default: that of Slurm]
    #[arg(long, value_name = "N", requires = "worker", requires = "nodes", help_heading = "Several nodes")]
    pub(crate) node: Option<u32>,
    /// The command that every rank runs, and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}
