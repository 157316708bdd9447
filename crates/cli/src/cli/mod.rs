//! The command line: its words, its defaults and its help. Nothing here does anything.

mod store;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use wholemem::Dtype;
use wholemem_bench::BenchArgs;
use wholemem_command::backend::BackendChoice;
use wholemem_command::peer::PeerRole;
use wholemem_command::ranks::RankRole;
use wholemem_command::size::ByteCount;

pub(crate) use self::store::*;

/// One memory over many GPUs, processes and threads.
#[derive(Debug, Parser)]
#[command(name = "wholemem", version, disable_help_subcommand = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Say what this machine can do, each thing tried, with the reason where not
    Doctor(DoctorArgs),
    /// Take a tour that checks its own results
    ///
    /// A second process creates memory, fills it and passes it on as a file descriptor. This one maps it, checks every
    /// byte, kills the other, and checks every byte again. Then four processes join as ranks, and one of them is killed:
    /// the others say which. Four others make one table between them, and gather and scatter its rows. Others add up what each
    /// of them has in a window. At last an object is put into a store, whose server is killed, and got from the next one.
    Demo(DemoArgs),
    /// Run a command as several ranks
    ///
    /// Every rank has torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) and what
    /// `Bootstrap::from_env()` needs to join the others. What ranks write comes out line by line behind their rank.
    /// Signals go to all ranks. The first rank that fails ends the others, and its exit code is this program's.
    Launch(LaunchArgs),
    /// Save, check and export tables of rows as files
    Table(TableArgs),
    /// Serve a store of named objects, which outlive whoever made them, and this server
    ///
    /// Two processes serve it: this one, which holds all memory, and a server, which may be killed at any time and is
    /// started again. SIGTERM ends both, and the store with them.
    Serve(ServeArgs),
    /// Put a file into a store, as an object; a .safetensors file as a pack, with an object for each tensor
    Put(PutArgs),
    /// Write an object of a store to a file
    Get(GetArgs),
    /// List the objects of a store
    Ls(ListArgs),
    /// Say what there is to know of an object, or of a store
    Stat(StatArgs),
    /// Delete objects of a store: their memory goes with the last who holds them
    Rm(RemoveArgs),
    /// Tell what happens in a store, as it happens
    Watch(WatchArgs),
    /// Measure, beside the same system calls made raw
    Bench(BenchArgs),
    /// Play the second process; started by the other commands only
    #[command(hide = true)]
    Peer(PeerArgs),
    /// Play one rank; started by the other commands only
    #[command(hide = true)]
    Rank(RankArgs),
}

#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// How many ranks
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) ranks: u32,
    /// Also write what each rank writes to files in this folder: `rank-N.out` and `rank-N.err`
    #[arg(long, value_name = "DIR")]
    pub(crate) log_dir: Option<PathBuf>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct TableArgs {
    #[command(subcommand)]
    pub(crate) command: TableCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TableCommand {
    /// Say what a file or a saved table holds
    Info(TableSource),
    /// Save the rows of a file as a folder of files with checksums, which any number of ranks loads at once
    Import(TableImport),
    /// Read all of a saved table, and compare it with its checksums
    Check(TableSource),
    /// Write rows to a .npy file
    Export(TableExport),
}

/// Rows in files.
#[derive(Debug, Default, Args)]
pub(crate) struct TableSource {
    /// A saved table, a .npy file, a .safetensors file, or raw rows
    pub(crate) path: PathBuf,
    /// Which tensor of a .safetensors file
    #[arg(long, value_name = "NAME", conflicts_with_all = ["dtype", "row_shape"])]
    pub(crate) tensor: Option<String>,
    /// The type of raw elements, such as `f32`
    #[arg(long, requires = "row_shape")]
    pub(crate) dtype: Option<Dtype>,
    /// The shape of a raw row, such as `128` or `3,224,224`
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
    /// Where to save it
    pub(crate) to: PathBuf,
    /// How many files to save it in
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=99999))]
    pub(crate) parts: u32,
    /// Replace a saved table that is there
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
    /// What to do
    #[arg(value_enum)]
    pub(crate) role: RankRole,
    /// The process that started this one
    #[arg(long)]
    pub(crate) parent: u32,
    /// How much memory to have when it dies
    #[arg(long, default_value_t = 0)]
    pub(crate) resident: usize,
    /// What to measure, as JSON
    #[arg(long, default_value = "")]
    pub(crate) plan: String,
    /// The command to become
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
    /// Which machinery moves the bytes
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// How much memory to share, such as `64KiB` or `1.5GiB`
    #[arg(long, default_value = "256MiB")]
    pub(crate) size: ByteCount,
    /// The seed of the bytes, to repeat a run [default: a random one, which is printed]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PeerArgs {
    /// What to do
    #[arg(value_enum)]
    pub(crate) role: PeerRole,
    /// The process that started this one
    #[arg(long)]
    pub(crate) parent: u32,
    /// Which machinery moves the bytes
    #[arg(long, value_enum)]
    pub(crate) backend: BackendChoice,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_makes_sense() {
        Cli::command().debug_assert();
    }
}
