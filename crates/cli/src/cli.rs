//! The command line: its words, its defaults and its help. Nothing here does anything.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use wholemem::Dtype;

use crate::size::ByteCount;

/// One memory over many GPUs, processes and nodes.
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
    /// the others say which. Four others make one table between them, and gather and scatter its rows.
    Demo(DemoArgs),
    /// Run a command as several ranks
    ///
    /// Every rank has torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...) and what
    /// `Communicator::from_env()` needs to join the others. What ranks write comes out line by line behind their rank.
    /// Signals go to all ranks. The first rank that fails ends the others, and its exit code is this program's.
    Launch(LaunchArgs),
    /// Save, check and export tables of rows as files
    Table(TableArgs),
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
    pub(crate) what: TableCommand,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RankRole {
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
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Creating memory and mapping it
    Alloc(SweepArgs),
    /// Creating memory and passing it to a waiting process, which maps it and reads its first and last byte
    Share(SweepArgs),
    /// Passing memory that was exported before to a waiting process, which maps it and reads its first and last byte
    Hand(SweepArgs),
    /// Copying within a device, between devices, and between a device and the host
    Copy(CopyArgs),
    /// Ranks coming together, from the first thread or process started to the last rank that has joined
    Bootstrap(BootstrapArgs),
    /// Barrier and all_gather, beside a socket's round trip
    Comm(CommArgs),
    /// How soon every survivor knows that a rank was killed
    Death(DeathArgs),
    /// Gathering rows of a table by their indices, beside a plain copy of as many bytes
    ///
    /// Every call has indices of its own, made outside of the time, and an output that has left the caches. All that is
    /// gathered is checked. With several ranks, each of them a process, the table is divided among them, and all
    /// gather at once: the figure is what they move together.
    Gather(RowsArgs),
    /// Scattering rows to a table by their indices, beside a plain copy of as many bytes
    ///
    /// As `gather`, the other way. What was scattered is gathered again and checked, and so is, in the end, the whole table.
    Scatter(RowsArgs),
}

/// A measurement of rows that are moved by their indices. Of what takes several values, each goes with each.
#[derive(Debug, Args)]
pub(crate) struct RowsArgs {
    /// Which machinery moves the bytes
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// How long a row is
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZES",
        default_value = "4,8,12,16,32,64,100,128,130,256,512,1KiB,2KiB,4KiB,8KiB"
    )]
    pub(crate) row_bytes: Vec<ByteCount>,
    /// The type of the indices
    #[arg(long, value_enum, value_delimiter = ',', default_value = "i64", value_name = "TYPES")]
    pub(crate) index: Vec<IndexChoice>,
    /// Which rows are asked for
    #[arg(long, value_enum, value_delimiter = ',', default_value = "uniform", value_name = "SPREADS")]
    pub(crate) spread: Vec<Spread>,
    /// How ranks see the table
    #[arg(long, value_enum, value_delimiter = ',', default_value = "continuous", value_name = "KINDS")]
    pub(crate) kind: Vec<KindChoice>,
    /// Where the table is
    #[arg(long, value_enum, value_delimiter = ',', default_value = "device", value_name = "LOCATIONS")]
    pub(crate) location: Vec<LocationChoice>,
    /// How many ranks
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1",
        value_name = "COUNTS",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub(crate) ranks: Vec<u32>,
    /// Which rank has how much of the table
    #[arg(long, value_enum, value_delimiter = ',', default_value = "even", value_name = "SHARES")]
    pub(crate) share: Vec<Share>,
    /// Only rank 0 moves rows; the others have their part of the table, and wait
    #[arg(long)]
    pub(crate) first_only: bool,
    /// How long the table is, such as `4GiB` [default: 16GiB on a GPU, 4GiB on a host, or what leaves enough free]
    #[arg(long)]
    pub(crate) table: Option<ByteCount>,
    /// How many rows a call moves, such as `1,10,100` [default: what is 2GiB on a GPU, and 64MiB on a host, and 32 or 4
    /// million at most]
    #[arg(long, value_delimiter = ',', value_name = "COUNTS", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub(crate) rows: Vec<u64>,
    /// How often to measure each
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IndexChoice {
    /// Four bytes
    I32,
    /// Eight bytes
    I64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Spread {
    /// All alike
    Uniform,
    /// Some far more often than others: by Zipf's law with the exponent 0.99
    Zipf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KindChoice {
    /// One range of addresses
    Continuous,
    /// An address for each rank
    Chunked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LocationChoice {
    /// In the memory of the ranks' devices
    Device,
    /// In the memory of the machine
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Share {
    /// All the same
    Even,
    /// Each another part, some of them small
    Uneven,
    /// The first has all
    First,
    /// The last has all: to rank 0 it is memory of another process
    Last,
}

#[derive(Debug, Args)]
pub(crate) struct BootstrapArgs {
    /// How many ranks
    #[arg(long, value_delimiter = ',', default_value = "16,64,256,1024")]
    pub(crate) ranks: Vec<u32>,
    /// How often to measure each
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CommArgs {
    /// How many ranks, as threads of one process on one core
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16")]
    pub(crate) ranks: Vec<u32>,
    /// How much each rank gives to all_gather
    #[arg(long, value_delimiter = ',', default_value = "8B,4KiB,64KiB,1MiB")]
    pub(crate) sizes: Vec<ByteCount>,
    /// How often to measure each
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DeathArgs {
    /// How many ranks, as processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub(crate) ranks: u32,
    /// How many of them are killed, one after the other, each in a new group
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) kills: u32,
    /// How much memory the killed rank has
    #[arg(long)]
    pub(crate) resident: Option<ByteCount>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// A measurement of copies.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Which machinery moves the bytes
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Exactly these sizes, such as `4MiB,1GiB` [default: 4MiB,64MiB,512MiB]
    #[arg(long, value_delimiter = ',')]
    pub(crate) sizes: Vec<ByteCount>,
    /// How often to measure each [default: 15]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: Option<u32>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// A measurement over many sizes of memory.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Which machinery moves the bytes
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Exactly these sizes, such as `64KiB,1MiB` [default: from one granule up to --max-size, by factors of four]
    #[arg(long, value_delimiter = ',', conflicts_with = "max_size")]
    pub(crate) sizes: Vec<ByteCount>,
    /// The largest size [default: a third of the memory that is free, or what can be measured within a minute]
    #[arg(long)]
    pub(crate) max_size: Option<ByteCount>,
    /// Let the processes run on any core, instead of both on one: for machines with cores to spare
    #[arg(long)]
    pub(crate) any_core: bool,
    /// How often to measure each size [default: what four seconds allow, between 7 and 400]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: Option<u32>,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PeerRole {
    /// Creates the memory of the tour
    Creator,
    /// Receives what `bench share` creates
    Receiver,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendChoice {
    /// CUDA where it works, otherwise the host
    Auto,
    /// Linux shared memory
    Host,
    /// GPU memory
    Cuda,
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
