//! One process with four devices: a table over all of them, gathered from by each.

#![expect(clippy::print_stdout, reason = "an example shows what it did")]

use std::error::Error;

use wholemem::{Communicator, Dtype, Indices, Order, RowBuffer, TensorSpec, WholeTensor};
use wholemem_hal::{Backend, HostConfig, PinnedBuffer};

const ROWS: u64 = 1000;
const WIDTH: u64 = 16;

fn main() -> Result<(), Box<dyn Error>> {
    // Four devices of the host stand for four GPUs. `Backend::auto()` has those that there are.
    let backend = Backend::host(HostConfig::virtual_devices(4))?;
    let devices: Vec<_> = (0..4).map(|id| backend.device(id)).collect::<Result<_, _>>()?;
    let comms = Communicator::local(&devices)?;
    let spec = TensorSpec::new(Dtype::F32, &[ROWS, WIDTH]);

    let found = Communicator::on_each(&comms, |comm| {
        let table = WholeTensor::create(comm, &spec)?;
        let (device, stream) = (comm.device(), comm.device().stream()?);

        // Every rank writes its own rows: all elements of row n are n.
        let own = table.memory().partition().range(comm.rank());
        let indices: Vec<u8> = (own.start..own.end).flat_map(u64::to_ne_bytes).collect();
        let rows: Vec<u8> = own.clone().flat_map(|row| (row as f32).to_ne_bytes().repeat(16)).collect();
        let (at, input) =
            (PinnedBuffer::create(device, indices.len())?, PinnedBuffer::create(device, rows.len())?);
        stream.write(&at.all(), &indices)?;
        stream.write(&input.all(), &rows)?;
        table.scatter_on(
            &stream,
            &Indices::i64(at.all()),
            &RowBuffer::new(input.all(), Dtype::F32),
            Order::Any,
        )?;
        comm.barrier_on(&stream)?;

        // And reads one of each rank's.
        let asked = [3_i64, 333, 666, 999];
        let (at, output) = (PinnedBuffer::create(device, 32)?, PinnedBuffer::create(device, 4 * 64)?);
        stream.write(&at.all(), asked.map(i64::to_ne_bytes).as_flattened())?;
        table.gather_on_sync(&stream, &Indices::i64(at.all()), &RowBuffer::new(output.all(), Dtype::F32))?;
        let mut bytes = [0; 4 * 64];
        stream.read(&output.all(), &mut bytes)?;
        let (elements, _) = bytes.as_chunks::<4>();
        let firsts: Vec<_> =
            elements.iter().step_by(16).map(|element| f32::from_ne_bytes(*element)).collect();
        Ok((own, firsts))
    })?;

    for (comm, (own, firsts)) in comms.iter().zip(found) {
        println!("rank {} has rows {own:?} and gathered {firsts:?}", comm.rank());
    }
    Ok(())
}
