//! The options of the benches of collective calls.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use wholemem::{Algorithm, Dtype, ReduceOp};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

/// CollectiveOp every one of these benches takes. Of what takes several values, each goes with each.
#[derive(Debug, Clone, Args)]
pub(crate) struct BarrierArgs {
    /// Which machinery moves the bytes
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// How many ranks
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,3,4,8",
        value_name = "COUNTS",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub(crate) ranks: Vec<u32>,
    /// How calls are enqueued [default: eager on a host, and both on a GPU]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODES")]
    pub(crate) mode: Vec<LaunchMode>,
    /// Let ranks run on any core, instead of each on its own where there are enough
    #[arg(long)]
    pub(crate) any_core: bool,
    /// How many calls are timed together [default: as many as take about a millisecond, and 100 on a GPU]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) calls: Option<u32>,
    /// How often to measure each
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// A bench of calls that move bytes.
#[derive(Debug, Clone, Args)]
pub(crate) struct DataArgs {
    #[command(flatten)]
    pub(crate) all: BarrierArgs,
    /// How many bytes each rank brings along [default: from 8B to 64MiB, on a GPU to 256MiB, or what leaves enough free]
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Where inputs and outputs are
    #[arg(long, value_enum, value_delimiter = ',', default_value = "window,staged", value_name = "BUFFERS")]
    pub(crate) buffers: Vec<BufferKind>,
    /// How it is done, wherever it can be done so [default: as the library chooses] [possible values: packets, one-shot,
    /// two-shot]
    #[arg(long, value_delimiter = ',', value_name = "ALGORITHMS")]
    pub(crate) algorithm: Vec<Algorithm>,
}

/// A bench of reductions.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReduceArgs {
    #[command(flatten)]
    pub(crate) moves: DataArgs,
    /// Whether the output is where the input is
    #[arg(long, value_enum, value_delimiter = ',', default_value = "out,in", value_name = "PLACES")]
    pub(crate) place: Vec<OutputPlace>,
    /// The type of the elements [default: f32 on a host, bf16 on a GPU]
    #[arg(long, value_delimiter = ',', value_name = "TYPES")]
    pub(crate) dtype: Vec<Dtype>,
    /// How elements become one
    #[arg(long, value_delimiter = ',', default_value = "sum", value_name = "OPS")]
    pub(crate) op: Vec<ReduceOp>,
    /// Measure every algorithm at every size, and print the table of which is best up to where
    #[arg(long, conflicts_with_all = ["algorithm", "place", "buffers"])]
    pub(crate) tune: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LaunchMode {
    /// Each call by itself
    Eager,
    /// A graph of a hundred calls
    Graph,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BufferKind {
    /// In windows, which the other ranks reach
    Window,
    /// In memory of this rank alone
    Staged,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OutputPlace {
    /// Elsewhere
    Out,
    /// In the input's place
    In,
}
