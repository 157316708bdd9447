//! Launches of empty kernels with parameters of several lengths: by the driver alone, and through the safe types.
//!
//! The time of a short eager call on a GPU is that of a launch on the CPU. These launches show which part of it is the driver's for
//! each length of the parameters, which part is that of making a context current, and which part is that of [`Stream::launch`].

use std::time::{Duration, Instant};

use wholemem_os::Deadline;

use super::RawError;
use crate::cuda::limits::{EmptyLaunch, launch_empty};
use crate::{Args, Device, Event, EventKind, Function, KernelImage, LaunchShape, Module, Stream};

/// Declares an empty kernel with one parameter of each length. On devices of compute capability 9.0 and later, the kernel permits
/// the next one to start, as those of collective calls do.
macro_rules! empty_kernels {
    ($($len:literal),*) => {
        const KERNELS: &[EmptyKernel] = &[$(EmptyKernel {
            len: $len,
            ptx: concat!(
                ".version 7.0\n.target sm_70\n.address_size 64\n",
                ".visible .entry nothing(.param .align 8 .b8 request[", $len, "])\n{\nret;\n}\n"
            ),
            ptx_90: concat!(
                ".version 7.8\n.target sm_90\n.address_size 64\n",
                ".visible .entry nothing(.param .align 8 .b8 request[", $len, "])\n",
                "{\ngriddepcontrol.wait;\ngriddepcontrol.launch_dependents;\nret;\n}\n"
            ),
        }),*];
    };
}

// The request of a collective call had 192 bytes before it contained terms, and has 248 bytes since.
empty_kernels!(8, 192, 240, 248, 256, 512);

/// The maximum length of the parameters, and the number of threads in a block, which is that of a collective kernel.
const MAX_LEN: usize = 512;
const THREADS: u32 = 512;

struct EmptyKernel {
    len: usize,
    ptx: &'static str,
    ptx_90: &'static str,
}

/// How an empty kernel is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchMethod {
    /// By the driver, in a context that stays current.
    DriverInContext,
    /// By the driver, with a context that is made current for each launch.
    Driver,
    /// Through [`Stream::launch`].
    Stream,
}

impl LaunchMethod {
    /// All methods.
    pub const ALL: [Self; 3] = [Self::DriverInContext, Self::Driver, Self::Stream];
}

/// The time of one launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchTime {
    /// The time of the calling thread.
    pub caller: Duration,
    /// The time between events before the first and after the last of the launches, on the device.
    pub device: Duration,
}

/// Empty kernels that are loaded on a GPU, and the stream on which they are launched.
#[derive(Debug)]
pub struct EmptyLaunches {
    device: Device,
    stream: Stream,
    events: [Event; 2],
    kernels: Vec<(usize, Function)>,
    shape: LaunchShape,
}

impl EmptyLaunches {
    /// Loads the empty kernels on a GPU.
    ///
    /// # Errors
    /// Those of [`Module::load`]; host devices have no such kernels.
    pub fn load(device: &Device) -> Result<Self, RawError> {
        let programmatic = device.info().compute >= 90;
        let load = |kernel: &EmptyKernel| {
            let ptx = if programmatic { kernel.ptx_90 } else { kernel.ptx };
            // SAFETY: the kernel has one parameter of `len` bytes, which is what all launches pass.
            let module = unsafe { Module::load(device, &KernelImage { ptx: Some(ptx), host: &[] }) }?;
            Ok::<_, crate::Error>((kernel.len, module.function("nothing")?))
        };
        let event = || Event::create(device, EventKind::Timed);
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            events: [event()?, event()?],
            kernels: KERNELS.iter().map(load).collect::<Result<_, _>>()?,
            shape: LaunchShape { programmatic, ..LaunchShape::linear(1, THREADS) },
        })
    }

    /// Returns the lengths of the parameters of the loaded kernels.
    pub fn parameter_lens(&self) -> impl Iterator<Item = usize> {
        self.kernels.iter().map(|(len, _)| *len)
    }

    /// Returns the average time of a launch when `count` launches of the kernel with this number follow each other.
    ///
    /// # Errors
    /// Those of the driver.
    ///
    /// # Panics
    /// If there is no such kernel.
    pub fn measure(&self, kernel: usize, method: LaunchMethod, count: u32) -> Result<LaunchTime, RawError> {
        let (len, function) = &self.kernels[kernel];
        let ([begin, end], request) = (&self.events, [0_u8; MAX_LEN]);
        let request = &request[..*len];
        self.stream.record(begin)?;
        let start = Instant::now();
        if method == LaunchMethod::Stream {
            for _ in 0..count {
                let args = Args::new().bytes(request, align_of::<u64>());
                // SAFETY: the kernel has one parameter of this length, and accesses no memory. A programmatic launch waits.
                unsafe { self.stream.launch(function, &self.shape, &args, []) }?;
            }
        } else {
            let launch = EmptyLaunch {
                stream: self.stream.handle(),
                function: function.raw(),
                shape: &self.shape,
                request,
                enters_each: method == LaunchMethod::Driver,
            };
            launch_empty(self.device.id(), &launch, count)?;
        }
        let caller = start.elapsed();
        self.stream.record(end)?;
        self.stream.synchronize(Deadline::NEVER)?;
        Ok(LaunchTime { caller: caller / count.max(1), device: begin.elapsed(end)? / count.max(1) })
    }
}
