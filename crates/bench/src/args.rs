//! The options of `wholemem bench`.

mod collective;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

pub(crate) use collective::{BarrierArgs, BufferKind, DataArgs, LaunchMode, OutputPlace, ReduceArgs};

/// The arguments of `wholemem bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Measure the time to allocate and map memory
    Alloc(SweepArgs),
    /// Measure the time to allocate memory and send it to a waiting process, which maps it and reads its first and last byte
    Share(SweepArgs),
    /// Measure the time to send memory that was exported before to a waiting process, which maps it and reads its first and
    /// last byte
    Hand(SweepArgs),
    /// Measure copies within a device, between devices, and between a device and the host
    Copy(CopyArgs),
    /// Measure launches of empty kernels on a GPU, by the driver alone and through wholemem
    ///
    /// The kernels have parameters of several lengths, and those of collective calls are among them. The time is that of the calling
    /// thread, which bounds short collective calls that are not in a graph.
    Launch(LaunchArgs),
    /// Measure the time to start and join ranks: from the first thread or process until the last rank has joined
    Bootstrap(BootstrapArgs),
    /// Measure barrier and all_gather on the CPU, compared with a round trip over a socket
    Comm(CommArgs),
    /// Measure the time from the kill of a rank until every surviving rank has detected it
    Death(DeathArgs),
    /// Measure gathering rows of a table by index, compared with a plain copy of as many bytes
    ///
    /// Every call has new indices, which are generated outside of the measured time, and an output that is not in the caches. All
    /// gathered bytes are verified. With several ranks, which are processes, the table is divided among them, and all
    /// gather at the same time: the result is the sum of their rates.
    Gather(RowsArgs),
    /// Measure scattering rows to a table by index, compared with a plain copy of as many bytes
    ///
    /// Measured as `gather`. Scattered rows are gathered and verified, and the whole table is verified at the end.
    Scatter(RowsArgs),
    /// Measure all-reduce, compared with a flag's round trip and a plain copy
    ///
    /// Ranks are processes. They start each round together and make calls for about a millisecond. The time of the slowest rank
    /// is reported. Inputs change in every round, and all outputs are verified.
    Allreduce(ReduceArgs),
    /// Measure all-gather in the same way as `allreduce`
    Allgather(DataArgs),
    /// Measure broadcast in the same way as `allreduce`
    Broadcast(DataArgs),
    /// Measure a barrier, compared with a flag's round trip
    Barrier(BarrierArgs),
    /// Measure creating, getting and deleting objects of a store, compared with a round trip over a socket
    Store(StoreArgs),
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Memory that holds the store's objects; with `cuda`, only attaching to packs (several objects in one memory) on a GPU is
    /// measured
    #[arg(long, value_enum, default_value_t = BackendChoice::Host)]
    pub(crate) backend: BackendChoice,
    /// Total length of the objects in a pack on a GPU (with `--backend cuda`)
    #[arg(long, default_value = "16GiB")]
    pub(crate) pack_bytes: ByteCount,
    /// Lengths of the store objects to measure
    #[arg(long, value_delimiter = ',', default_value = "1B,4KiB,64KiB,1MiB,16MiB,256MiB")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Numbers of objects to measure in a pack (several objects in one memory)
    #[arg(long, value_delimiter = ',', default_value = "300,10000", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) packs: Vec<u32>,
    /// Numbers of clients that are connected to the store while requests are measured
    #[arg(long, value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) clients: Vec<u32>,
    /// Timed rounds for each combination of options
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Alternate with another program: before each round print `"ready"` and wait for a line on stdin, then print the times
    #[arg(long, hide = true)]
    pub(crate) in_turns: bool,
    /// Number of store objects that each round creates (with `--in-turns`)
    #[arg(long, hide = true, requires = "in_turns", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `wholemem bench gather` and `scatter`. All combinations of the values of lists are measured.
#[derive(Debug, Args)]
pub(crate) struct RowsArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Row lengths of the tables to measure
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZES",
        default_value = "4,8,12,16,32,64,100,128,130,256,512,1KiB,2KiB,4KiB,8KiB"
    )]
    pub(crate) row_bytes: Vec<ByteCount>,
    /// Integer types of the row indices
    #[arg(long, value_enum, value_delimiter = ',', default_value = "i64", value_name = "TYPES")]
    pub(crate) index: Vec<IndexChoice>,
    /// Distributions of the random row indices
    #[arg(long, value_enum, value_delimiter = ',', default_value = "uniform", value_name = "SPREADS")]
    pub(crate) spread: Vec<IndexDistribution>,
    /// Layout of the table in each rank's address space
    #[arg(long, value_enum, value_delimiter = ',', default_value = "continuous", value_name = "KINDS")]
    pub(crate) kind: Vec<KindChoice>,
    /// Memory in which the table is stored
    #[arg(long, value_enum, value_delimiter = ',', default_value = "device", value_name = "LOCATIONS")]
    pub(crate) location: Vec<LocationChoice>,
    /// Numbers of ranks to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1",
        value_name = "COUNTS",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub(crate) ranks: Vec<u32>,
    /// How the table is divided among the ranks
    #[arg(long, value_enum, value_delimiter = ',', default_value = "even", value_name = "SHARES")]
    pub(crate) share: Vec<RowShare>,
    /// Only rank 0 gathers or scatters rows; the other ranks only store a part of the table
    #[arg(long)]
    pub(crate) first_only: bool,
    /// Length of the table, such as `4GiB` [default: 16GiB on a GPU, 4GiB on a host, or less if memory is short]
    #[arg(long)]
    pub(crate) table: Option<ByteCount>,
    /// Rows in each gather or scatter call, such as `1,10,100` [default: as many as have 2GiB on a GPU or 64MiB on a host, but
    /// at most 32 or 4 million]
    #[arg(long, value_delimiter = ',', value_name = "COUNTS", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub(crate) rows: Vec<u64>,
    /// Consecutive calls that are timed together as one round [default: as many as move 8MiB, at least one]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(crate) calls: Option<u64>,
    /// Timed rounds for each combination of options
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Alternate with another program: before each round print `"ready"` and wait for a line on stdin, then print the times
    #[arg(long)]
    pub(crate) in_turns: bool,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IndexChoice {
    /// 32-bit row indices
    I32,
    /// 64-bit row indices
    I64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IndexDistribution {
    /// Random row indices in which all rows are equally frequent
    Uniform,
    /// Random row indices with a Zipf distribution of exponent 0.99
    Zipf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KindChoice {
    /// Each rank maps the whole table to one range of addresses
    Continuous,
    /// Each rank maps the table to several ranges of addresses: one for the part of each rank
    Chunked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LocationChoice {
    /// The table is in the memory of the ranks' devices
    Device,
    /// The table is in host memory
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RowShare {
    /// All ranks have equal parts of the table
    Even,
    /// The ranks have parts of the table of different lengths
    Uneven,
    /// Rank 0 has all rows of the table
    First,
    /// The last rank has all rows of the table, so that rank 0 accesses memory of another process
    Last,
}

#[derive(Debug, Args)]
pub(crate) struct BootstrapArgs {
    /// Numbers of ranks to start
    #[arg(long, value_delimiter = ',', default_value = "16,64,256,1024")]
    pub(crate) ranks: Vec<u32>,
    /// Timed rounds for each combination of options
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct CommArgs {
    /// Numbers of ranks, which are threads of one process on one core
    #[arg(long, value_delimiter = ',', default_value = "2,4,8,16")]
    pub(crate) ranks: Vec<u32>,
    /// Lengths of the bytes that each rank passes to all_gather
    #[arg(long, value_delimiter = ',', default_value = "8B,4KiB,64KiB,1MiB")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Timed rounds for each combination of options
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DeathArgs {
    /// Number of ranks in each group; each rank is a process
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub(crate) ranks: u32,
    /// Number of kills to measure, each of one rank in a new group
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) kills: u32,
    /// Resident memory of the rank that is killed
    #[arg(long)]
    pub(crate) resident: Option<ByteCount>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `wholemem bench copy`.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Lengths of the copies to measure, such as `4MiB,1GiB` [default: 4MiB,64MiB,512MiB]
    #[arg(long, value_delimiter = ',')]
    pub(crate) sizes: Vec<ByteCount>,
    /// Timed rounds for each combination of options [default: 15]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: Option<u32>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `wholemem bench launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// Consecutive launches that are timed together as one round
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) calls: u32,
    /// Timed rounds for each length of the parameters
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `wholemem bench alloc`, `share` and `hand`.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Memory sizes to measure, such as `64KiB,1MiB` [default: from one granule up to --max-size, by factors of four]
    #[arg(long, value_delimiter = ',', conflicts_with = "max_size")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Largest memory size to measure [default: a third of the available memory, or what can be measured within a minute]
    #[arg(long)]
    pub(crate) max_size: Option<ByteCount>,
    /// Do not pin both processes to one core
    #[arg(long)]
    pub(crate) any_core: bool,
    /// Timed rounds for each memory size [default: as many as fit in four seconds, between 7 and 400]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: Option<u32>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::{BenchArgs, BenchCommand};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArgs,
    }

    /// Parses the arguments of `wholemem bench`.
    pub(crate) fn parse(words: &[&str]) -> BenchCommand {
        let words = [&["bench"], words].concat();
        Line::try_parse_from(words).unwrap().bench.command
    }
}
