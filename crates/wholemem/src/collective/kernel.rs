//! The kernels of collective calls on one device: loading and launching.

#![allow(unsafe_code, reason = "a kernel launch is unsafe")]

use wholemem_hal::{Args, Device, Function, KernelImage, LaunchShape, Module, Span, Stream};

use wholemem_os::Deadline;

use super::hooks;
use super::spec::SymmetricSpec;
use super::tuning::Algorithm;
use crate::abi::COLLECTIVE_THREADS;
use crate::{CollectiveRequest, Result, cpu};

const COLLECTIVE: KernelImage =
    KernelImage { ptx: Some(include_str!("../../kernels/ptx/collective.ptx")), host: cpu::COLLECTIVES };

/// The same for newer devices, where a kernel can wait for the one before it by itself.
const COLLECTIVE_90: KernelImage =
    KernelImage { ptx: Some(include_str!("../../kernels/ptx/collective.90.ptx")), ..COLLECTIVE };

/// What ranks do together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Collective {
    AllReduce,
    AllGather,
    Broadcast,
    Barrier,
}

/// The kernels, loaded.
#[derive(Debug)]
pub(super) struct Kernels {
    all_reduce: [Kernel; 3],
    all_gather: [Kernel; 2],
    broadcast: [Kernel; 2],
    barrier: Kernel,
    /// Whether they wait for what is before them on their stream by themselves.
    wait: bool,
}

/// A kernel, and the function that a CPU rank calls instead of a launch, which would take longer than a short call.
#[derive(Debug)]
struct Kernel {
    function: Function,
    cpu: cpu::CollectiveFunction,
}

impl Kernels {
    /// Loads the kernels: before anything waits, since drivers wait here for what runs.
    pub(super) fn load(device: &Device, spec: &SymmetricSpec) -> Result<Self> {
        let wait = device.info().compute >= 90;
        let image = hooks::image(spec, if wait { COLLECTIVE_90 } else { COLLECTIVE });
        // SAFETY: the functions of the image take a `CollectiveRequest`. `launch`, their only caller, passes one.
        let module = unsafe { Module::load(device, &image) }?;
        let kernel = |name| {
            let cpu = cpu::collective_function(name).expect("every kernel has a CPU function");
            Ok::<_, crate::Error>(Kernel { function: module.function(name)?, cpu })
        };
        Ok(Self {
            all_reduce: [
                kernel("all_reduce_ll")?,
                kernel("all_reduce_one_shot")?,
                kernel("all_reduce_two_shot")?,
            ],
            all_gather: [kernel("all_gather_ll")?, kernel("all_gather")?],
            broadcast: [kernel("broadcast_ll")?, kernel("broadcast")?],
            barrier: kernel("barrier")?,
            wait,
        })
    }

    /// How many calls of a lane can be on the device at once, on each rank: where kernels wait for what is before them by
    /// themselves, they are set up while that still runs.
    pub(super) fn calls_at_once(&self) -> u32 {
        if self.wait { 2 } else { 1 }
    }

    /// How many blocks of any of them run at once on the device.
    pub(super) fn resident_blocks(&self) -> Result<u32> {
        let all =
            self.all_reduce.iter().chain(&self.all_gather).chain(&self.broadcast).chain([&self.barrier]);
        let counts = all
            .map(|kernel| kernel.function.occupancy(COLLECTIVE_THREADS, 0))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(counts.into_iter().min().unwrap_or(0))
    }

    /// Runs each of them once, on a lane that has ended, so that they do nothing. Drivers load a kernel when it is first
    /// launched, and wait for what runs: later, that could be a kernel which waits for this one.
    pub(super) fn warm_up(&self, stream: &Stream, request: &CollectiveRequest, operand: &Span) -> Result<()> {
        for algorithm in Algorithm::ALL {
            for what in
                [Collective::AllReduce, Collective::AllGather, Collective::Broadcast, Collective::Barrier]
            {
                self.launch(stream, (what, algorithm), 1, request, [operand])?;
            }
        }
        Ok(stream.synchronize(Deadline::NEVER)?)
    }

    fn kernel(&self, what: Collective, algorithm: Algorithm) -> &Kernel {
        let packets = usize::from(algorithm != Algorithm::Packets);
        match what {
            Collective::AllReduce => &self.all_reduce[algorithm as usize],
            Collective::AllGather => &self.all_gather[packets],
            Collective::Broadcast => &self.broadcast[packets],
            Collective::Barrier => &self.barrier,
        }
    }

    /// Does this rank's part in a call at once, if work runs inline and is not being recorded; `false` otherwise, and nothing
    /// was done. `call` has planned it: the request is of a lane of this rank; its input and output have as many elements as
    /// it says and the rights that it needs, and so have windows on every rank; and the caller holds all of that.
    pub(super) fn run(
        &self,
        stream: &Stream,
        (what, algorithm): (Collective, Algorithm),
        request: &CollectiveRequest,
    ) -> Result<bool> {
        let kernel = self.kernel(what, algorithm);
        // SAFETY: the caller of `run` has checked that the addresses of the request are valid, and holds their memory.
        Ok(stream.run_inline(kernel.function.name(), || unsafe { (kernel.cpu)(request) })?)
    }

    /// Enqueues this rank's part in a call, planned likewise: all that it touches is among the operands.
    pub(super) fn launch<'a>(
        &self,
        stream: &Stream,
        (what, algorithm): (Collective, Algorithm),
        blocks: u32,
        request: &CollectiveRequest,
        operands: impl IntoIterator<Item = &'a Span, IntoIter: Clone>,
    ) -> Result<()> {
        let shape =
            LaunchShape { programmatic: self.wait, ..LaunchShape::linear(blocks, COLLECTIVE_THREADS) };
        let request = CollectiveRequest { programmatic: u32::from(self.wait), ..*request };
        let args = Args::new().value(&request);
        let function = &self.kernel(what, algorithm).function;
        // SAFETY: the functions take a `CollectiveRequest`. The caller has checked that its addresses are valid, and their memory
        // is among the operands, which the stream holds until the kernel has ended.
        Ok(unsafe { stream.launch(function, &shape, &args, operands) }?)
    }
}
