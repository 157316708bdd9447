//! All-reduce in place through a window: four ranks sum their gradients without a copy, with bitwise equal results.

#![expect(clippy::print_stdout, reason = "an example prints its results")]

use wholemem::prelude::*;

const COUNT: usize = 1 << 20;

fn main() -> wholemem::Result<()> {
    // The ranks are four threads of this process. Ranks that are processes would call
    // `Communicator::from_env(&Backend::auto()?)?`.
    let sums = Communicator::run_local(4, |comm| {
        let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
        let gradients = symmetric.mem_alloc(COUNT * size_of::<f32>())?; // the same window on every rank
        let stream = comm.device().stream()?;
        let own = 0.1 * (comm.rank().0 + 1) as f32;
        stream.write(&gradients.part_of(comm.rank(), 0, COUNT * 4)?, &own.to_ne_bytes().repeat(COUNT))?;

        symmetric.all_reduce(&stream, &gradients, &gradients, Dtype::F32, ReduceOp::Sum)?;

        stream.synchronize(Deadline::NEVER)?;
        symmetric.check()?; // returns an error that names a rank that did not arrive
        let mut last = [0; 4];
        stream.read(&gradients.part_of(comm.rank(), COUNT * 4 - 4, 4)?, &mut last)?;
        Ok(f32::from_ne_bytes(last))
    })?;
    for (rank, sum) in sums.iter().enumerate() {
        println!("rank {rank} has {sum}, which is {:#010x}", sum.to_bits());
    }
    Ok(())
}
