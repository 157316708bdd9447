//! `wholemem bench`: runs the benchmark that was asked for.

use anyhow::Result;

use crate::args::{BenchArgs, BenchCommand};
use crate::collective::What;
use crate::rows::Op;
use crate::sweep::sweep;
use crate::{alloc, bootstrap, collective, comm, copy, death, rows, share, store};

/// Runs a benchmark, and prints its report.
///
/// # Errors
/// What went wrong; also that a result was not what it has to be, after the report is printed.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.what {
        BenchCommand::Alloc(args) => sweep(args, |device, _| alloc::Alloc::new(device)),
        BenchCommand::Share(args) => sweep(args, share::Share::<false>::start),
        BenchCommand::Hand(args) => sweep(args, share::Share::<true>::start),
        BenchCommand::Copy(args) => copy::run(args),
        BenchCommand::Bootstrap(args) => bootstrap::run(args),
        BenchCommand::Comm(args) => comm::run(args),
        BenchCommand::Death(args) => death::run(args),
        BenchCommand::Gather(args) => rows::run(Op::Gather, args),
        BenchCommand::Scatter(args) => rows::run(Op::Scatter, args),
        BenchCommand::Allreduce(args) => collective::reduce(args),
        BenchCommand::Allgather(args) => collective::moves(What::Allgather, args),
        BenchCommand::Broadcast(args) => collective::moves(What::Broadcast, args),
        BenchCommand::Barrier(args) => collective::barrier(args),
        BenchCommand::Store(args) => store::run(args),
    }
}
