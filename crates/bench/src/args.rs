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
    /// Allocate and map memory
    Alloc(SweepArgs),
    /// Allocate memory and send it to a waiting process, which maps it and reads its first and last byte
    Share(SweepArgs),
    /// Send memory that was exported before to a waiting process, which maps it and reads its first and last byte
    Hand(SweepArgs),
    /// Copy within a device, between devices, and between a device and the host
    Copy(CopyArgs),
    /// Start and join ranks: the time from the first thread or process until the last rank has joined
    Bootstrap(BootstrapArgs),
    /// Barrier and all_gather, compared with a round trip over a socket
    Comm(CommArgs),
    /// Time until every survivor has detected that a rank was killed
    Death(DeathArgs),
    /// Gather rows of a table by index, compared with a plain copy of as many bytes
    ///
    /// Every call has new indices, which are generated outside of the measured time, and an output that is not in the caches. All
    /// gathered bytes are verified. With several ranks, which are processes, the table is divided among them, and all
    /// gather at the same time: the result is the sum of their rates.
    Gather(RowsArgs),
    /// Scatter rows to a table by index, compared with a plain copy of as many bytes
    ///
    /// Measured as `gather`. Scattered rows are gathered and verified, and the whole table is verified at the end.
    Scatter(RowsArgs),
    /// All-reduce, compared with a flag's round trip and a plain copy
    ///
    /// Ranks are processes. They start each round together and make calls for about a millisecond. The time of the slowest rank
    /// is reported. Inputs change in every round, and all outputs are verified.
    Allreduce(ReduceArgs),
    /// All-gather, measured as `allreduce`
    Allgather(DataArgs),
    /// Broadcast, measured as `allreduce`
    Broadcast(DataArgs),
    /// Barrier, compared with a flag's round trip, measured as `allreduce`
    Barrier(BarrierArgs),
    /// Create, get and delete objects of a store, compared with a round trip over a socket
    Store(StoreArgs),
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Memory of the objects: with `cuda`, only the attachment of packs on a GPU is measured
    #[arg(long, value_enum, default_value_t = BackendChoice::Host)]
    pub(crate) backend: BackendChoice,
    /// Total bytes of a pack on a GPU
    #[arg(long, default_value = "16GiB")]
    pub(crate) pack_bytes: ByteCount,
    /// Lengths of the objects
    #[arg(long, value_delimiter = ',', default_value = "1B,4KiB,64KiB,1MiB,16MiB,256MiB")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Numbers of objects in a pack
    #[arg(long, value_delimiter = ',', default_value = "300,10000", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) packs: Vec<u32>,
    /// Numbers of connected clients
    #[arg(long, value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) clients: Vec<u32>,
    /// Rounds for each case
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Alternate with another program: before each round print `"ready"` and wait for a line on stdin, then print the times
    #[arg(long, hide = true)]
    pub(crate) in_turns: bool,
    /// Objects that are created in each round
    #[arg(long, hide = true, requires = "in_turns", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `gather` and `scatter`. All combinations of the values of lists are measured.
#[derive(Debug, Args)]
pub(crate) struct RowsArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Lengths of a row
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "SIZES",
        default_value = "4,8,12,16,32,64,100,128,130,256,512,1KiB,2KiB,4KiB,8KiB"
    )]
    pub(crate) row_bytes: Vec<ByteCount>,
    /// Types of the indices
    #[arg(long, value_enum, value_delimiter = ',', default_value = "i64", value_name = "TYPES")]
    pub(crate) index: Vec<IndexChoice>,
    /// Distributions of the indices
    #[arg(long, value_enum, value_delimiter = ',', default_value = "uniform", value_name = "SPREADS")]
    pub(crate) spread: Vec<IndexDistribution>,
    /// How ranks address the table
    #[arg(long, value_enum, value_delimiter = ',', default_value = "continuous", value_name = "KINDS")]
    pub(crate) kind: Vec<KindChoice>,
    /// Location of the table
    #[arg(long, value_enum, value_delimiter = ',', default_value = "device", value_name = "LOCATIONS")]
    pub(crate) location: Vec<LocationChoice>,
    /// Numbers of ranks
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
    /// Only rank 0 moves rows; the other ranks only have a part of the table
    #[arg(long)]
    pub(crate) first_only: bool,
    /// Length of the table, such as `4GiB` [default: 16GiB on a GPU, 4GiB on a host, or less if memory is short]
    #[arg(long)]
    pub(crate) table: Option<ByteCount>,
    /// Rows in a call, such as `1,10,100` [default: 2GiB on a GPU and 64MiB on a host, but at most 32 or 4
    /// million rows]
    #[arg(long, value_delimiter = ',', value_name = "COUNTS", value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    pub(crate) rows: Vec<u64>,
    /// Calls that are timed together [default: as many as move 8MiB, at least one]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(crate) calls: Option<u64>,
    /// Rounds for each case
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
    /// 32-bit indices
    I32,
    /// 64-bit indices
    I64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum IndexDistribution {
    /// All rows are equally frequent
    Uniform,
    /// Zipf distribution with exponent 0.99
    Zipf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KindChoice {
    /// One range of addresses for the whole table
    Continuous,
    /// One range of addresses for each rank
    Chunked,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LocationChoice {
    /// Memory of the ranks' devices
    Device,
    /// Host memory
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RowShare {
    /// Equal parts
    Even,
    /// Parts of different lengths
    Uneven,
    /// Rank 0 has all rows
    First,
    /// The last rank has all rows: for rank 0 they are memory of another process
    Last,
}

#[derive(Debug, Args)]
pub(crate) struct BootstrapArgs {
    /// Numbers of ranks
    #[arg(long, value_delimiter = ',', default_value = "16,64,256,1024")]
    pub(crate) ranks: Vec<u32>,
    /// Rounds for each case
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
    /// Lengths of each rank's input of all_gather
    #[arg(long, value_delimiter = ',', default_value = "8B,4KiB,64KiB,1MiB")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Rounds for each case
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DeathArgs {
    /// Number of ranks, which are processes
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..=64))]
    pub(crate) ranks: u32,
    /// Number of kills, each in a new group
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) kills: u32,
    /// Resident memory of the killed rank
    #[arg(long)]
    pub(crate) resident: Option<ByteCount>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `copy`.
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Sizes, such as `4MiB,1GiB` [default: 4MiB,64MiB,512MiB]
    #[arg(long, value_delimiter = ',')]
    pub(crate) sizes: Vec<ByteCount>,
    /// Rounds for each case [default: 15]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: Option<u32>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of `alloc`, `share` and `hand`.
#[derive(Debug, Args)]
pub(crate) struct SweepArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Sizes, such as `64KiB,1MiB` [default: from one granule up to --max-size, by factors of four]
    #[arg(long, value_delimiter = ',', conflicts_with = "max_size")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Largest size [default: a third of the available memory, or what can be measured within a minute]
    #[arg(long)]
    pub(crate) max_size: Option<ByteCount>,
    /// Do not pin both processes to one core
    #[arg(long)]
    pub(crate) any_core: bool,
    /// Rounds for each size [default: as many as fit in four seconds, between 7 and 400]
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
