//! The command line: commands, options, defaults and help texts.

mod launch;
mod store;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use wholemem::Dtype;
use wholemem_bench::BenchArgs;
use wholemem_command::backend::BackendChoice;
use wholemem_command::peer::PeerRole;
use wholemem_command::ranks::RankRole;
use wholemem_command::size::ByteCount;

pub(crate) use self::launch::LaunchArgs;
pub(crate) use self::store::*;

/// One memory over many GPUs, processes and threads.
#[derive(Debug, Parser)]
#[command(name = "wholemem", version)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Try every feature on this machine, and report which work and why others do not
    Doctor(DoctorArgs),
    /// Demonstrate the features of wholemem, and verify every result
    ///
    /// A second process creates memory, fills it and sends its file descriptor. This process maps the memory, verifies every
    /// byte, kills the second process, and verifies every byte again. Then four processes join as ranks, and one of them is
    /// killed: the others report its rank. Four ranks create a table together, and gather and scatter its rows. Four ranks sum
    /// buffers in a window. Finally an object is put into a store, the store's server is killed, and the object is read from
    /// the next server.
    Demo(DemoArgs),
    /// Run a command as several ranks
    ///
    /// Every rank has the environment variables of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) and those that
    /// `Bootstrap::from_env()` reads. Each line that a rank writes is printed with the rank as prefix. Signals are forwarded
    /// to all ranks. If a rank fails, the other ranks are terminated, and its exit code is the exit code of the launcher.
    ///
    /// With `--hosts`, the ranks run on several hosts: `wholemem launch --hosts a:4,b:4 -- ./my_program`. The launcher starts
    /// `wholemem` on each host over ssh, which must not ask for a password, and passes it a new secret of the group. The ranks
    /// run in the folder of the launcher and have no stdin, and the prefix of their output also has the host. If the launcher
    /// or a connection ends, the ranks of that connection are terminated.
    ///
    /// With `--worker`, one launcher runs on each node, as under Slurm: `srun --ntasks-per-node=1 wholemem launch --worker -n 4
    /// -- ./my_program`. The group's secret is in the file `WHOLEMEM_SECRET_FILE`, which only its user can access. Under
    /// Kubernetes, an indexed job sets `WHOLEMEM_ADDR` to the first pod and a port, `WHOLEMEM_SECRET` from a secret, and
    /// passes `--nodes 2 --node $JOB_COMPLETION_INDEX`.
    Launch(LaunchArgs),
    /// Save, check and export tables as files
    Table(TableArgs),
    /// Serve a store of named objects, which outlive the processes that created them and a crash of the server
    ///
    /// Two processes run: this process, the keeper, holds the descriptors of all memory. It starts the server and restarts it
    /// if it is killed. SIGTERM to this process ends both, and frees all objects.
    Serve(ServeArgs),
    /// Put a file into a store as an object; a .safetensors file as a pack (several objects in one memory) with an object for
    /// each tensor
    Put(PutArgs),
    /// Write an object of a store to a file
    Get(GetArgs),
    /// List the objects of a store
    Ls(ListArgs),
    /// Show the properties of an object, or the state of a store
    Stat(StatArgs),
    /// Delete objects of a store; memory is freed when no client holds the object
    Rm(RemoveArgs),
    /// Print events of a store: published, replaced and deleted objects
    Watch(WatchArgs),
    /// Show the memory, the objects and the requests of a store, and update them
    ///
    /// `q`, Esc and Ctrl-C end it. If stdout is not a terminal, it prints the state once, as with `--once`.
    Top(TopArgs),
    /// Run a benchmark that compares wholemem with raw system calls or plain copies
    Bench(BenchArgs),
    /// Print a script with which a shell completes commands and options
    ///
    /// bash: `wholemem completions bash > ~/.local/share/bash-completion/completions/wholemem`; zsh: a file `_wholemem` in a folder
    /// of `$fpath`; fish: `wholemem completions fish > ~/.config/fish/completions/wholemem.fish`.
    Completions(CompletionsArgs),
    /// Print the manual page of a command, for `man -l -`
    Man(ManArgs),
    /// Run as the second process of another command (internal)
    #[command(hide = true)]
    Peer(PeerArgs),
    /// Run as one rank of another command (internal)
    #[command(hide = true)]
    Rank(RankArgs),
    /// Start the ranks of one host for `launch --hosts` (internal)
    #[command(hide = true)]
    Agent,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: CompletedShell,
}

/// A shell that completes commands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletedShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The command, such as `ls` or `bench gather` [default: the program]
    pub(crate) command: Vec<String>,
    /// Write the pages of all commands to this folder instead
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    pub(crate) dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct TableArgs {
    #[command(subcommand)]
    pub(crate) command: TableCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TableCommand {
    /// Show the element type and the shape of a table file or a saved table
    Info(TableSource),
    /// Save the rows of a table file as a folder of files with checksums, which any number of ranks can load in parallel
    Import(TableImport),
    /// Read a saved table and verify its checksums
    Check(TableSource),
    /// Write the rows of a table to a .npy file
    Export(TableExport),
}

/// The file or folder that a table is read from.
#[derive(Debug, Default, Args)]
pub(crate) struct TableSource {
    /// The table to read: a saved table, a .npy file, a .safetensors file, or a file of raw rows
    pub(crate) path: PathBuf,
    /// Name of the tensor to read from a .safetensors file
    #[arg(long, value_name = "NAME", conflicts_with_all = ["dtype", "row_shape"])]
    pub(crate) tensor: Option<String>,
    /// Element type of the table in a file of raw rows, such as `f32`
    #[arg(long, requires = "row_shape")]
    pub(crate) dtype: Option<Dtype>,
    /// Shape of each row in a file of raw rows, such as `128` or `3,224,224`
    #[arg(long, value_delimiter = ',', requires = "dtype")]
    pub(crate) row_shape: Vec<u64>,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TableImport {
    #[command(flatten)]
    pub(crate) source: TableSource,
    /// The folder to save the table in
    pub(crate) to: PathBuf,
    /// Number of files to save the table in
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=99999))]
    pub(crate) parts: u32,
    /// Replace an existing saved table
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TableExport {
    #[command(flatten)]
    pub(crate) source: TableSource,
    /// The .npy file to write
    pub(crate) to: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// Task of this rank in a launch, in a benchmark or in the demo
    #[arg(value_enum)]
    pub(crate) role: RankRole,
    /// Process id of the process that started this one
    #[arg(long)]
    pub(crate) parent: u32,
    /// Bytes of resident memory that this rank holds until it is killed
    #[arg(long, default_value_t = 0)]
    pub(crate) resident: usize,
    /// Benchmark cases that this rank runs, as JSON
    #[arg(long, default_value = "")]
    pub(crate) plan: String,
    /// Command that this rank executes
    #[arg(last = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Size of the shared memory, such as `64KiB` or `1.5GiB`
    #[arg(long, default_value = "256MiB")]
    pub(crate) size: ByteCount,
    /// Seed of the test data, to repeat a run [default: a random seed, which is printed]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PeerArgs {
    /// Task of this second process in a benchmark or in the demo
    #[arg(value_enum)]
    pub(crate) role: PeerRole,
    /// Process id of the process that started this one
    #[arg(long)]
    pub(crate) parent: u32,
    /// Memory to use: GPU or host
    #[arg(long, value_enum)]
    pub(crate) backend: BackendChoice,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }
}
