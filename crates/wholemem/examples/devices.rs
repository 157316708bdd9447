//! One process with four devices, which creates a table that is divided among the devices, and gathers rows on each device.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use wholemem::prelude::*;

const ROWS: u64 = 1000;
const WIDTH: usize = 16;

fn main() -> wholemem::Result<()> {
    // Four virtual devices of the host backend represent four GPUs here. `Communicator::run_local` would use the available
    // devices.
    let backend = Backend::host(HostConfig::virtual_devices(4))?;
    let devices: Vec<_> = (0..4).map(|id| backend.device(id)).collect::<Result<_, _>>()?;
    let comms = Communicator::local(&devices)?;
    let spec = TensorSpec::of::<f32>(&[ROWS, WIDTH as u64]);

    let results = Communicator::on_each(&comms, |comm| {
        let table = WholeTensor::create(comm, &spec)?;

        // Every rank writes its own rows: all elements of row `n` have the value `n`.
        let own = table.memory().partition().range(comm.rank());
        let rows: Vec<f32> = own.clone().flat_map(|row| [row as f32; WIDTH]).collect();
        table.write_rows(own.start, &rows)?;
        comm.barrier()?;

        // Every rank gathers one row of each rank.
        let rows = table.gather::<f32>(&[3, 333, 666, 999])?;
        let firsts: Vec<_> = rows.into_iter().step_by(WIDTH).collect();
        Ok((own, firsts))
    })?;

    for (comm, (own, firsts)) in comms.iter().zip(results) {
        println!("rank {} has rows {own:?} and gathered {firsts:?}", comm.rank());
    }
    Ok(())
}
