//! Ranks that are processes: each has a part of one table, adds to all of it, and sees what the others added.

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::error::Error;

use wholemem::{Communicator, Dtype, Indices, Order, RowBuffer, TensorSpec, WholeTensor};
use wholemem_hal::{Backend, PinnedBuffer};

fn main() -> Result<(), Box<dyn Error>> {
    // From the variables of `wholemem launch`, torchrun, Slurm or Open MPI.
    let comm = Communicator::from_env(&Backend::auto()?)?;
    let (device, stream) = (comm.device(), comm.device().stream()?);

    // A counter for each of a hundred things, spread over all ranks.
    let counters = WholeTensor::create(&comm, &TensorSpec::new(Dtype::I64, &[100]))?;

    // Each rank counts 7 once, and 90 twice.
    let (at, one) = (PinnedBuffer::create(device, 12)?, PinnedBuffer::create(device, 24)?);
    stream.write(&at.all(), [7_i32, 90, 90].map(i32::to_ne_bytes).as_flattened())?;
    stream.write(&one.all(), [1_i64; 3].map(i64::to_ne_bytes).as_flattened())?;
    counters.scatter_add_on(
        &stream,
        &Indices::i32(at.all()),
        &RowBuffer::new(one.all(), Dtype::I64),
        Order::Any,
    )?;
    comm.barrier_on(&stream)?;

    // What all of them counted.
    let count = |row: u64| -> Result<i64, wholemem::Error> {
        let mut bytes = [0; 8];
        counters.read_rows_on(&stream, row, &mut bytes)?;
        Ok(i64::from_ne_bytes(bytes))
    };
    println!("{} of {}: {} times 7, {} times 90", comm.rank(), comm.size(), count(7)?, count(90)?);
    Ok(())
}
