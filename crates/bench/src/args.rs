//! The options of `wholemem bench`.

mod collective;

use clap::{Args, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

pub(crate) use collective::{BarrierArgs, BufferKind, DataArgs, LaunchMode, OutputPlace, ReduceArgs};

/// CollectiveOp to measure, and how.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: BenchCommand,
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
    /// As `gather`, the other way. CollectiveOp was scattered is gathered again and checked, and so is, in the end, the whole table.
    Scatter(RowsArgs),
    /// Reducing the elements of all ranks, beside a flag's round trip and a plain copy
    ///
    /// Ranks are processes. They begin each round together, make as many calls as take a millisecond, and the slowest of them
    /// is what counts. Inputs are others in every round, and all that comes out is checked.
    Allreduce(ReduceArgs),
    /// Giving the bytes of every rank to all ranks, measured as `allreduce`
    Allgather(DataArgs),
    /// Giving the bytes of one rank to all ranks, measured as `allreduce`
    Broadcast(DataArgs),
    /// Ranks waiting for each other, beside a flag's round trip, measured as `allreduce`
    Barrier(BarrierArgs),
    /// A store's objects: made, got, deleted, attached as packs and waited for, beside a socket's round trip
    Store(StoreArgs),
}

#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Where the objects are: with `cuda`, packs on a GPU are attached, and nothing else is measured
    #[arg(long, value_enum, default_value_t = BackendChoice::Host)]
    pub(crate) backend: BackendChoice,
    /// How many bytes the objects of a pack on a GPU have together
    #[arg(long, default_value = "16GiB")]
    pub(crate) pack_bytes: ByteCount,
    /// How long the objects are
    #[arg(long, value_delimiter = ',', default_value = "1B,4KiB,64KiB,1MiB,16MiB,256MiB")]
    pub(crate) sizes: Vec<ByteCount>,
    /// How many objects the packs have
    #[arg(long, value_delimiter = ',', default_value = "300,10000", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub(crate) packs: Vec<u32>,
    /// How many clients are connected
    #[arg(long, value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=512))]
    pub(crate) clients: Vec<u32>,
    /// How often to measure each
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Take turns with another program: say `"ready"`, wait for a line on stdin before each round, and print its times
    #[arg(long, hide = true)]
    pub(crate) in_turns: bool,
    /// How many objects are made in a row in each turn
    #[arg(long, hide = true, requires = "in_turns", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) burst: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
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
    pub(crate) spread: Vec<IndexDistribution>,
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
    pub(crate) share: Vec<RowShare>,
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
    /// How many calls are timed together [default: as many as move 8MiB, and one if it moves more]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub(crate) calls: Option<u64>,
    /// How often to measure each
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Take turns with another program: say `"ready"`, wait for a line on stdin before each round, and print its times
    #[arg(long)]
    pub(crate) in_turns: bool,
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
pub(crate) enum IndexDistribution {
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
pub(crate) enum RowShare {
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

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::{BenchArgs, BenchCommand};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        bench: BenchArgs,
    }

    /// CollectiveOp the words behind `wholemem bench` ask for.
    pub(crate) fn parse(words: &[&str]) -> BenchCommand {
        let words = [&["bench"], words].concat();
        Line::try_parse_from(words).unwrap().bench.command
    }
}
