//! Cases of the collective benchmarks: their parameters, and how they are derived from the command line options.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use wholemem::{Algorithm, Dtype, ReduceOp};
use wholemem_command::size::{ByteCount, RoundedSize};
use wholemem_hal::BackendKind;

use super::CollectiveOp;
use crate::args::{BarrierArgs, BufferKind, DataArgs, LaunchMode, OutputPlace, ReduceArgs};

/// `ROUND` bytes are moved by the calls of one round on a host, on all ranks together. A call counts for at least `SHORT`
/// bytes. A round then takes about a millisecond.
const ROUND: usize = 32 << 20;
const SHORT: usize = 4 << 10;

/// The default number of collective calls in a round on a GPU, and thus in a CUDA graph.
const GRAPH: u32 = 100;

/// The default lengths of each rank's input. The last one is measured on GPUs only.
const SIZES: [usize; 12] =
    [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];

/// With the default sizes, all buffers together use at most the available memory divided by `PART`.
const PART: usize = 3;

/// The parameters of one case of a collective benchmark.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CollectiveCase {
    pub(super) what: CollectiveOp,
    pub(super) ranks: u32,
    /// Length of each rank's input in bytes.
    pub(super) len: usize,
    /// Numeric codes of the element type (`dtype`) and of the reduction operation (`op`).
    dtype: u32,
    op: u32,
    /// The name of the collective algorithm that the case forces, or `None` if wholemem chooses.
    algorithm: Option<String>,
    pub(super) mode: LaunchMode,
    pub(super) buffers: BufferKind,
    pub(super) place: OutputPlace,
    /// The number of collective calls in a round.
    pub(super) calls: u32,
    /// The number of calls in a round if the user or the device sets it, or `None` if it depends on the input length.
    asked: Option<u32>,
    /// The number of buffers that the calls of a round use cyclically.
    pub(super) slots: u32,
    pub(super) rounds: u32,
    /// True if each rank is pinned to its own core.
    pub(super) bound: bool,
}

impl CollectiveCase {
    /// Creates the cases of `bench allreduce`.
    pub(super) fn reductions(args: &ReduceArgs, machine: &MachineInfo) -> Result<Vec<Self>> {
        let usual = [if machine.on_gpu() { Dtype::Bf16 } else { Dtype::F32 }];
        let dtypes = if args.dtype.is_empty() { &usual[..] } else { &args.dtype };
        let mut cases = Vec::new();
        for case in Self::of_data(CollectiveOp::Allreduce, &args.moves, machine)? {
            for (dtype, op) in dtypes.iter().flat_map(|dtype| args.op.iter().map(move |op| (*dtype, *op))) {
                ensure!(op.applies_to(dtype), "the reduction {op} does not support {dtype}");
                let (len, unit) = (case.len, dtype.len());
                ensure!(
                    len.is_multiple_of(unit),
                    "the length of {len} bytes is not a multiple of the element size of {dtype}, {unit} bytes"
                );
                for &place in &args.place {
                    cases.push(case.clone().of(dtype, op, place));
                }
            }
        }
        Ok(cases)
    }

    /// Creates the cases of a collective benchmark that moves data, sorted by the number of ranks and then by algorithm.
    pub(super) fn of_data(what: CollectiveOp, args: &DataArgs, machine: &MachineInfo) -> Result<Vec<Self>> {
        let algorithms = match &args.algorithm[..] {
            [] => vec![None],
            some => some.iter().map(|algorithm| Some(algorithm.to_string())).collect(),
        };
        let mut cases = Vec::new();
        for case in Self::barriers(&args.all, machine)? {
            let sizes = sizes(what, &args.sizes, case.ranks, machine);
            for algorithm in &algorithms {
                for (&len, &buffers) in
                    sizes.iter().flat_map(|len| args.buffers.iter().map(move |at| (len, at)))
                {
                    let case = Self { what, len, buffers, algorithm: algorithm.clone(), ..case.clone() };
                    cases.push(case.of(Dtype::U8, ReduceOp::Sum, OutputPlace::Out));
                }
            }
        }
        Ok(cases)
    }

    /// Creates the cases of `bench barrier`. The cases of the other collective benchmarks are derived from them.
    pub(super) fn barriers(args: &BarrierArgs, machine: &MachineInfo) -> Result<Vec<Self>> {
        let modes = match (&args.mode[..], machine.on_gpu()) {
            ([], true) => vec![LaunchMode::Eager, LaunchMode::Graph],
            ([], false) => vec![LaunchMode::Eager],
            (some, _) => some.to_vec(),
        };
        let graphs = modes.contains(&LaunchMode::Graph);
        ensure!(
            machine.on_gpu() || !graphs,
            "`--mode graph` needs a GPU: on a host, graphs run calls one by one"
        );
        let asked = args.calls.or_else(|| machine.on_gpu().then_some(GRAPH));
        let case = |ranks: u32, mode| Self {
            what: CollectiveOp::Barrier,
            ranks,
            len: 0,
            dtype: Dtype::U8.code(),
            op: ReduceOp::Sum.code(),
            algorithm: None,
            mode,
            buffers: BufferKind::Window,
            place: OutputPlace::Out,
            calls: asked.unwrap_or_else(|| calls(ranks, 0)),
            asked,
            slots: 1,
            rounds: args.rounds,
            bound: !machine.on_gpu() && !args.any_core && ranks as usize <= machine.cores,
        };
        Ok(args.ranks.iter().flat_map(|ranks| modes.iter().map(|mode| case(*ranks, *mode))).collect())
    }

    /// Creates the case for `wholemem demo`: all-reduces in windows, in place.
    pub(super) fn for_demo(ranks: u32, len: usize) -> Self {
        let (calls, rounds) = (10, 3);
        let case = Self {
            what: CollectiveOp::Allreduce,
            ranks,
            len,
            dtype: 0,
            op: 0,
            algorithm: None,
            mode: LaunchMode::Eager,
            buffers: BufferKind::Window,
            place: OutputPlace::In,
            calls,
            asked: Some(calls),
            slots: 1,
            rounds,
            bound: false,
        };
        case.of(Dtype::F32, ReduceOp::Sum, OutputPlace::In)
    }

    /// Returns the case with another element type, reduction operation and output buffer, and with the numbers of calls and
    /// buffers that follow from them.
    fn of(mut self, dtype: Dtype, op: ReduceOp, place: OutputPlace) -> Self {
        (self.dtype, self.op, self.place) = (dtype.code(), op.code(), place);
        self.calls = self.asked.unwrap_or_else(|| calls(self.ranks, self.len));
        self.slots = match place {
            OutputPlace::In => self.calls.div_ceil(lifetime(dtype, op, self.ranks)),
            OutputPlace::Out => 1,
        };
        self
    }

    pub(super) fn dtype(&self) -> Dtype {
        Dtype::from_code(self.dtype).unwrap_or(Dtype::U8)
    }

    pub(super) fn op(&self) -> ReduceOp {
        ReduceOp::from_code(self.op).unwrap_or(ReduceOp::Sum)
    }

    /// Returns the collective algorithm that the case forces, if any.
    pub(super) fn forced_algorithm(&self) -> Option<Algorithm> {
        self.algorithm.as_deref().and_then(|name| name.parse().ok())
    }

    /// Returns true if both cases force the same collective algorithm, or none.
    pub(super) fn has_same_algorithm(&self, other: &Self) -> bool {
        self.algorithm == other.algorithm
    }

    /// Returns the length of each rank's output in bytes.
    pub(super) fn output_len(&self) -> usize {
        match self.what {
            CollectiveOp::Allgather => self.len * self.ranks as usize,
            _ => self.len,
        }
    }

    /// Returns the bytes of memory that the buffers of a case use on all ranks together.
    pub(super) fn footprint(&self) -> usize {
        let buffers = match self.place {
            OutputPlace::In => self.len,
            OutputPlace::Out => self.len + self.output_len(),
        };
        // The additional `output_len` bytes of each rank are the target of the plain copy with which the collective is compared.
        buffers
            .saturating_mul(self.slots as usize)
            .saturating_add(self.output_len())
            .saturating_mul(self.ranks as usize)
    }

    pub(super) fn label(&self) -> String {
        let Self { what, ranks, .. } = self;
        match what {
            CollectiveOp::Barrier => format!("{what} of {ranks}"),
            _ => format!("{what} of {} among {ranks}", RoundedSize(self.len)),
        }
    }
}

/// The properties of a machine that determine the default cases of a collective benchmark.
#[derive(Debug, Clone, Copy)]
pub(super) struct MachineInfo {
    pub(super) kind: BackendKind,
    pub(super) available: usize,
    pub(super) cores: usize,
}

impl MachineInfo {
    fn on_gpu(&self) -> bool {
        self.kind == BackendKind::Cuda
    }
}

/// Returns the requested input lengths, or the default lengths whose buffers fit in the available memory.
fn sizes(what: CollectiveOp, asked: &[ByteCount], ranks: u32, machine: &MachineInfo) -> Vec<usize> {
    if !asked.is_empty() {
        return asked.iter().map(|size| size.0).collect();
    }
    let copies = match what {
        CollectiveOp::Allgather => 2 * ranks as usize + 1,
        _ => 3,
    };
    let most = machine.available / PART / copies / ranks.max(1) as usize;
    let all = if machine.on_gpu() { &SIZES[..] } else { &SIZES[..SIZES.len() - 1] };
    all.iter().copied().filter(|len| *len <= most).collect()
}

/// Returns the number of collective calls on inputs of `len` bytes that take about a millisecond on a host.
fn calls(ranks: u32, len: usize) -> u32 {
    let calls = ROUND / ranks.max(1) as usize / len.max(SHORT);
    u32::try_from(calls).unwrap_or(u32::MAX).max(1)
}

/// Returns how many in-place reductions can be repeated on a buffer before its elements overflow or become zero.
fn lifetime(dtype: Dtype, op: ReduceOp, ranks: u32) -> u32 {
    let bits: u32 = match dtype {
        Dtype::F16 => 15,
        Dtype::Bf16 | Dtype::F32 => 127,
        Dtype::F64 => 1023,
        integer => u32::try_from(8 * integer.len()).unwrap_or(8),
    };
    match op {
        ReduceOp::Sum => ((bits - 6) / (u32::BITS - (ranks.max(2) - 1).leading_zeros())).max(1),
        ReduceOp::Prod | ReduceOp::Xor => 1,
        _ => u32::MAX,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::args::BenchCommand;
    use crate::args::tests::parse;

    const HOST: MachineInfo = MachineInfo { kind: BackendKind::Host, available: 4 << 30, cores: 2 };

    /// Parses the options of `bench allreduce` and returns its cases on a host.
    pub(in super::super) fn reductions(words: &[&str]) -> Vec<CollectiveCase> {
        tried(words).unwrap()
    }

    fn tried(words: &[&str]) -> Result<Vec<CollectiveCase>> {
        let words = [&["allreduce"], words].concat();
        let BenchCommand::Allreduce(args) = parse(&words) else { panic!("not an allreduce") };
        CollectiveCase::reductions(&args, &HOST)
    }

    #[test]
    fn cases_are_all_combinations_of_the_options() {
        let cases = reductions(&["--ranks", "2,3", "--sizes", "8,1KiB", "--dtype", "f32,u8"]);
        assert_eq!(cases.len(), 2 * 2 * 2 * 2 * 2);
        assert!(cases.is_sorted_by_key(|case| case.ranks));
        assert!(cases.iter().all(|case| case.bound == (case.ranks == 2)));
    }

    #[test]
    fn invalid_combinations_are_rejected() {
        let refused = |words: &[&str]| tried(words).unwrap_err().to_string();
        assert_eq!(refused(&["--op", "xor"]), "the reduction xor does not support f32");
        assert_eq!(
            refused(&["--sizes", "4097"]),
            "the length of 4097 bytes is not a multiple of the element size of f32, 4 bytes"
        );
        assert!(refused(&["--mode", "graph"]).starts_with("`--mode graph` needs a GPU"));
    }

    #[test]
    fn rounds_are_long_enough_and_elements_do_not_overflow() {
        assert_eq!([calls(2, 4), calls(2, 4096), calls(2, 1 << 20), calls(8, 1 << 30)], [4096, 4096, 16, 1]);
        assert_eq!(lifetime(Dtype::F32, ReduceOp::Sum, 2), 121);
        assert_eq!(lifetime(Dtype::F32, ReduceOp::Sum, 3), 60);
        assert_eq!(lifetime(Dtype::U8, ReduceOp::Sum, 8), 1);
        assert_eq!(lifetime(Dtype::U8, ReduceOp::Max, 8), u32::MAX);
    }

    #[test]
    fn default_sizes_fit_in_the_available_memory() {
        let machine = |available| MachineInfo { available, ..HOST };
        assert_eq!(sizes(CollectiveOp::Allreduce, &[], 2, &HOST).last(), Some(&(64 << 20)));
        assert_eq!(sizes(CollectiveOp::Allreduce, &[], 2, &machine(1 << 20)).last(), Some(&(16 << 10)));
        assert_eq!(sizes(CollectiveOp::Allgather, &[], 8, &HOST).last(), Some(&(4 << 20)));
    }
}
