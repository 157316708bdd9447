//! Ranks that are processes: each has a part of one table, adds to all of it, and sees what the others added.

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use wholemem::prelude::*;

fn main() -> wholemem::Result<()> {
    // From the variables of `wholemem launch`, torchrun, Slurm or Open MPI.
    let comm = Communicator::from_env(&Backend::auto()?)?;

    // A counter for each of a hundred things, spread over all ranks.
    let counters = WholeTensor::create(&comm, &TensorSpec::of::<i64>(&[100]))?;

    // Each rank counts 7 once, and 90 twice.
    counters.scatter_add(&[7, 90, 90], &[1_i64; 3])?;
    comm.barrier()?;

    // What all of them counted.
    let counts = counters.gather::<i64>(&[7, 90])?;
    println!("{} of {}: {} times 7, {} times 90", comm.rank(), comm.size(), counts[0], counts[1]);
    Ok(())
}
