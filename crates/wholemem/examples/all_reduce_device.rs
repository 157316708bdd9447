//! All-reduce with a user's kernel, which reads every rank's input through a window and adds them.
//!
//! The kernel is a Rust function below, for the host backend. A barrier before the kernel ensures that all inputs are written; a
//! barrier after it ensures that no input is overwritten while another rank reads it.

#![allow(unsafe_code, reason = "loading and launching a kernel is unsafe")]
#![expect(clippy::print_stdout, reason = "an example prints its results")]

use wholemem::{
    Args, Backend, Communicator, Deadline, HostConfig, KernelImage, LaunchShape, Module, PinnedBuffer,
    SymmetricMemory, SymmetricSpec, WindowRef,
};

const IMAGE: KernelImage = KernelImage { ptx: None, host: &[("add_up", add_up)] };

const RANKS: u32 = 4;
const COUNT: usize = 1000;

fn main() -> wholemem::Result<()> {
    let device = Backend::host(HostConfig::default())?.device(0)?;
    let comms = Communicator::local(&vec![device; RANKS as usize])?;
    let sums = Communicator::on_each(&comms, |comm| {
        let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
        let inputs = symmetric.mem_alloc(COUNT * size_of::<f32>())?;
        let output = PinnedBuffer::create(comm.device(), COUNT * size_of::<f32>())?;
        let stream = comm.device().stream()?;
        let own: Vec<u8> =
            (0..COUNT).flat_map(|at| (at as f32 + comm.rank().0 as f32).to_ne_bytes()).collect();
        let local = inputs.part_of(comm.rank(), 0, own.len())?;
        stream.write(&local, &own)?;

        // SAFETY: the image has one function, `add_up`, which is launched below with the arguments that it takes.
        let module = unsafe { Module::load(comm.device(), &IMAGE) }?;
        let kernel = module.function("add_up")?;
        let WindowRef { base, stride, .. } = inputs.window_ref(); // windows of `mem_alloc` have a constant stride
        let args = Args::new()
            .u64(base)
            .u64(stride)
            .u64(u64::from(RANKS))
            .u64(output.all().address())
            .u64(COUNT as u64);
        let operands = [local, output.all()];
        symmetric.barrier(&stream)?;
        // SAFETY: `args` are the arguments of `add_up`. The window has `COUNT` elements on every rank, and so has the output.
        // Every rank keeps its window until the second barrier.
        unsafe { stream.launch(&kernel, &LaunchShape::linear(1, 32), &args, &operands) }?;
        symmetric.barrier(&stream)?;

        stream.synchronize(Deadline::NEVER)?;
        let mut last = [0; 4];
        stream.read(&output.all().part(COUNT * 4 - 4, 4)?, &mut last)?;
        Ok(f32::from_ne_bytes(last))
    })?;
    for (rank, sum) in sums.iter().enumerate() {
        println!("rank {rank} has {sum}");
    }
    Ok(())
}

/// Adds the inputs of all ranks. This is the kernel for the CPU, where one call does the work of the whole grid.
///
/// # Safety
/// The arguments are those of the kernel, and all addresses are mapped.
unsafe fn add_up(_: &LaunchShape, args: &Args) {
    let number = |index| args.read_u64(index).expect("the argument has eight bytes");
    let (base, stride, ranks, output, count) = (number(0), number(1), number(2), number(3), number(4));
    for at in 0..count {
        let element = |array: u64| {
            usize::try_from(array + at * size_of::<f32>() as u64).expect("an address is a `usize`")
        };
        let mut sum = 0.0;
        for rank in 0..ranks {
            let place = std::ptr::with_exposed_provenance::<f32>(element(base + rank * stride));
            // SAFETY: every rank's part of the window has `count` elements, and no rank writes them while the kernel runs.
            sum += unsafe { place.read() };
        }
        let place = std::ptr::with_exposed_provenance_mut::<f32>(element(output));
        // SAFETY: the output has `count` elements, and only this rank accesses it.
        unsafe { place.write(sum) };
    }
}
