//! The options of the collective benchmarks.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};
use wholemem::{Algorithm, Dtype, ReduceOp};
use wholemem_command::backend::BackendChoice;
use wholemem_command::size::ByteCount;

/// The options of all collective benchmarks. All combinations of the values of lists are measured.
#[derive(Debug, Clone, Args)]
pub(crate) struct BarrierArgs {
    /// Memory to use: GPU or host
    #[arg(long, value_enum, default_value_t = BackendChoice::Auto)]
    pub(crate) backend: BackendChoice,
    /// Numbers of ranks to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "2,3,4,8",
        value_name = "COUNTS",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    pub(crate) ranks: Vec<u32>,
    /// How collective calls are enqueued [default: eager on a host, both on a GPU]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODES")]
    pub(crate) mode: Vec<LaunchMode>,
    /// Do not pin each rank to its own core
    #[arg(long)]
    pub(crate) any_core: bool,
    /// Consecutive calls that are timed together as one round [default: as many as take about a millisecond, 100 on a GPU]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub(crate) calls: Option<u32>,
    /// Timed rounds for each combination of options
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// The options of the benchmarks of collectives that move data: all-reduce, all-gather and broadcast.
#[derive(Debug, Clone, Args)]
pub(crate) struct DataArgs {
    #[command(flatten)]
    pub(crate) all: BarrierArgs,
    /// Lengths of each rank's input [default: from 8B to 64MiB, on a GPU to 256MiB, or less if memory is short]
    #[arg(long, value_delimiter = ',', value_name = "SIZES")]
    pub(crate) sizes: Vec<ByteCount>,
    /// Kinds of memory that hold inputs and outputs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "window,staged", value_name = "BUFFERS")]
    pub(crate) buffers: Vec<BufferKind>,
    /// Collective algorithms to force where they are supported [default: chosen by wholemem] [possible values: packets,
    /// one-shot, two-shot]
    #[arg(long, value_delimiter = ',', value_name = "ALGORITHMS")]
    pub(crate) algorithm: Vec<Algorithm>,
}

/// The options of `wholemem bench allreduce`.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReduceArgs {
    #[command(flatten)]
    pub(crate) moves: DataArgs,
    /// Whether the output is another buffer or the input buffer
    #[arg(long, value_enum, value_delimiter = ',', default_value = "out,in", value_name = "PLACES")]
    pub(crate) place: Vec<OutputPlace>,
    /// Types of the elements to reduce [default: f32 on a host, bf16 on a GPU]
    #[arg(long, value_delimiter = ',', value_name = "TYPES")]
    pub(crate) dtype: Vec<Dtype>,
    /// Reduction operations that combine elements
    #[arg(long, value_delimiter = ',', default_value = "sum", value_name = "OPS")]
    pub(crate) op: Vec<ReduceOp>,
    /// Measure every algorithm at every size, and print the sizes up to which each algorithm should be used
    #[arg(long, conflicts_with_all = ["algorithm", "place", "buffers"])]
    pub(crate) tune: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LaunchMode {
    /// Each collective call is enqueued separately
    Eager,
    /// All collective calls of a round are enqueued as one CUDA graph
    Graph,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum BufferKind {
    /// Inputs and outputs are in windows: memory of each rank that the other ranks have mapped
    Window,
    /// Inputs and outputs are in memory that only their own rank has mapped
    Staged,
    /// Inputs and outputs are registered: memory of another allocator (on a GPU, `cudaMalloc`), which each rank passes by its address
    Registered,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum OutputPlace {
    /// The output is another buffer than the input (out of place)
    Out,
    /// The output is the input buffer (in place)
    In,
}
