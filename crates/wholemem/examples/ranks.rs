//! Ranks that are processes. Each rank stores a part of one table, adds to rows of all ranks, and reads the sums.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use wholemem::prelude::*;

fn main() -> wholemem::Result<()> {
    // The rank joins its group through the environment variables of `wholemem launch`, torchrun, Slurm or Open MPI.
    let comm = Communicator::from_env(&Backend::auto()?)?;

    // The table has a hundred counters, divided among all ranks.
    let counters = WholeTensor::create(&comm, &TensorSpec::of::<i64>(&[100]))?;

    // Each rank increments counter 7 once and counter 90 twice.
    counters.scatter_add(&[7, 90, 90], &[1_i64; 3])?;
    comm.barrier()?;

    // The gathered counters have the sums over all ranks.
    let counts = counters.gather::<i64>(&[7, 90])?;
    println!("{} of {}: {} times 7, {} times 90", comm.rank(), comm.size(), counts[0], counts[1]);
    Ok(())
}
