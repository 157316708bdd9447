//! Loads and launches the kernels of collective calls on one device.

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

const _: () =
    assert!(size_of::<CollectiveRequest>() <= Args::INLINE_LEN, "every launch would allocate memory");

/// The collective kernels for compute capability 9.0 and later, which use programmatic dependent launch: a kernel starts while
/// the previous kernel of its stream runs, and itself waits for the end of that kernel.
const COLLECTIVE_90: KernelImage =
    KernelImage { ptx: Some(include_str!("../../kernels/ptx/collective.90.ptx")), ..COLLECTIVE };

/// The kind of a collective call. Zero is the kind of users' kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum CollectiveKind {
    AllReduce = 1,
    AllGather = 2,
    Broadcast = 3,
    Barrier = 4,
}

impl CollectiveKind {
    /// All kinds of collective calls, in the order of their codes.
    pub(super) const ALL: [Self; 4] = [Self::AllReduce, Self::AllGather, Self::Broadcast, Self::Barrier];

    /// Returns the kind with the given code; `None` if there is none.
    pub(super) fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == code)
    }
}

/// The collective kernels, loaded on one device.
#[derive(Debug)]
pub(super) struct CollectiveKernels {
    all_reduce: [CollectiveKernel; 3],
    all_gather: [CollectiveKernel; 2],
    broadcast: [CollectiveKernel; 2],
    barrier: CollectiveKernel,
    /// True if the collective kernels use programmatic dependent launch.
    programmatic: bool,
}

/// A collective kernel with its function for CPU ranks, which a CPU rank calls directly, because a launch would take longer than
/// a short collective call.
#[derive(Debug)]
struct CollectiveKernel {
    function: Function,
    cpu: cpu::CollectiveFunction,
}

impl CollectiveKernels {
    /// Loads the collective kernels. Call this before any kernel waits for other ranks, because drivers block in a load until
    /// running kernels end.
    pub(super) fn load(device: &Device, spec: &SymmetricSpec) -> Result<Self> {
        let programmatic = device.info().compute >= 90;
        let image = hooks::image(spec, if programmatic { COLLECTIVE_90 } else { COLLECTIVE });
        // SAFETY: every function of the image takes one `CollectiveRequest`, and `launch`, the only caller of the functions,
        // passes one.
        let module = unsafe { Module::load(device, &image) }?;
        let kernel = |name| {
            let cpu = cpu::collective_function(name).expect("every kernel has a CPU function");
            Ok::<_, crate::Error>(CollectiveKernel { function: module.function(name)?, cpu })
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
            programmatic,
        })
    }

    /// Returns the number of collective calls of one lane that can be resident on a device at once, on each rank: two with
    /// programmatic dependent launch, because a kernel becomes resident while the previous one runs; otherwise one.
    pub(super) fn concurrent_calls(&self) -> u32 {
        if self.programmatic { 2 } else { 1 }
    }

    /// Returns the number of blocks that can be resident on the device at once, for the collective kernel with the fewest.
    pub(super) fn resident_blocks(&self) -> Result<u32> {
        let all =
            self.all_reduce.iter().chain(&self.all_gather).chain(&self.broadcast).chain([&self.barrier]);
        let counts = all
            .map(|kernel| kernel.function.occupancy(COLLECTIVE_THREADS, 0))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(counts.into_iter().min().unwrap_or(0))
    }

    /// Launches each collective kernel once on a poisoned lane, where kernels do nothing, because drivers load a kernel at its
    /// first launch and block until running kernels end. A first launch during later calls could block on a kernel that waits for
    /// this rank, which is a deadlock.
    pub(super) fn warm_up(
        &self,
        stream: &Stream,
        request: &mut CollectiveRequest,
        operand: &Span,
    ) -> Result<()> {
        for algorithm in Algorithm::ALL {
            for kind in CollectiveKind::ALL {
                self.launch(stream, (kind, algorithm), 1, request, [operand])?;
            }
        }
        Ok(stream.synchronize(Deadline::NEVER)?)
    }

    fn kernel(&self, kind: CollectiveKind, algorithm: Algorithm) -> &CollectiveKernel {
        let packets = usize::from(algorithm != Algorithm::Packets);
        match kind {
            CollectiveKind::AllReduce => &self.all_reduce[algorithm as usize],
            CollectiveKind::AllGather => &self.all_gather[packets],
            CollectiveKind::Broadcast => &self.broadcast[packets],
            CollectiveKind::Barrier => &self.barrier,
        }
    }

    /// Runs this rank's part of a collective call in the calling thread, if work of the stream runs inline and the stream is not
    /// capturing. Otherwise does nothing and returns `false`.
    ///
    /// The caller has checked the request: it belongs to a lane of this rank; input and output, and windows on every rank, have the
    /// elements and rights that it needs. The caller keeps their memory alive.
    pub(super) fn run(
        &self,
        stream: &Stream,
        (kind, algorithm): (CollectiveKind, Algorithm),
        request: &CollectiveRequest,
    ) -> Result<bool> {
        let kernel = self.kernel(kind, algorithm);
        // SAFETY: the caller of `run` guarantees that the addresses in `request` are valid for the call's elements, and keeps
        // their memory alive during `run`.
        Ok(stream.run_inline(kernel.function.name(), || unsafe { (kernel.cpu)(request) })?)
    }

    /// Enqueues this rank's part of a collective call. The caller has checked the request as for [`run`](Self::run), and passes
    /// all memory that the kernel accesses as operands.
    pub(super) fn launch<'a>(
        &self,
        stream: &Stream,
        (kind, algorithm): (CollectiveKind, Algorithm),
        blocks: u32,
        request: &mut CollectiveRequest,
        operands: impl IntoIterator<Item = &'a Span, IntoIter: Clone>,
    ) -> Result<()> {
        let shape = LaunchShape {
            programmatic: self.programmatic,
            ..LaunchShape::linear(blocks, COLLECTIVE_THREADS)
        };
        request.programmatic = u32::from(self.programmatic);
        let args = Args::new().value(request);
        let function = &self.kernel(kind, algorithm).function;
        // SAFETY: every collective function takes one `CollectiveRequest`. The caller of `launch` guarantees that the addresses
        // in `request` are valid, and that their memory is among `operands`, which the stream holds until the kernel has ended.
        Ok(unsafe { stream.launch(function, &shape, &args, operands) }?)
    }
}
