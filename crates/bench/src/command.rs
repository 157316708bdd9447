//! `wholemem bench`: runs the selected benchmark.

use anyhow::Result;

use crate::args::{BenchArgs, BenchCommand};
use crate::collective::CollectiveOp;
use crate::rows::RowOp;
use crate::sweep::sweep;
use crate::{alloc, bootstrap, collective, comm, copy, death, launch, rows, share, store};

/// Runs a benchmark and prints its report.
///
/// # Errors
/// The error of the benchmark. If a result is wrong, the report is printed before.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.command {
        BenchCommand::Alloc(args) => sweep(args, |device, _| alloc::AllocComparison::new(device)),
        BenchCommand::Share(args) => sweep(args, share::ShareComparison::<false>::start),
        BenchCommand::Hand(args) => sweep(args, share::ShareComparison::<true>::start),
        BenchCommand::Copy(args) => copy::run(args),
        BenchCommand::Launch(args) => launch::run(args),
        BenchCommand::Bootstrap(args) => bootstrap::run(args),
        BenchCommand::Comm(args) => comm::run(args),
        BenchCommand::Death(args) => death::run(args),
        BenchCommand::Gather(args) => rows::run(RowOp::Gather, args),
        BenchCommand::Scatter(args) => rows::run(RowOp::Scatter, args),
        BenchCommand::Allreduce(args) => collective::reduce(args),
        BenchCommand::Allgather(args) => collective::move_data(CollectiveOp::Allgather, args),
        BenchCommand::Broadcast(args) => collective::move_data(CollectiveOp::Broadcast, args),
        BenchCommand::Barrier(args) => collective::barrier(args),
        BenchCommand::Store(args) => store::run(args),
    }
}
