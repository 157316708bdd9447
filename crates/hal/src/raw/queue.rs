//! The verbs of work: streams, events, copies, graphs, kernels.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use wholemem_os::Deadline;

use super::Address;
use crate::{Args, Cause, DeviceId, KernelImage, LaunchShape};

macro_rules! raw_handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name {
            /// The device it belongs to.
            pub device: DeviceId,
            /// The backend's own number for it.
            pub handle: u64,
        }
    )*};
}

raw_handles! {
    /// A queue of work on a device.
    RawStream;
    /// A mark in a stream.
    RawEvent;
    /// Work recorded once, to be launched many times.
    RawGraph;
    /// Work that somebody else is recording.
    RawCapture;
    /// Loaded kernels.
    RawModule;
    /// One kernel of a module.
    RawFunction;
}

/// What somebody else's recording keeps.
pub type Kept = Box<dyn Send>;

/// What an event is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Order between streams of this process.
    Order,
    /// Order, and the time between two of them.
    Timed,
    /// Order between processes.
    Shared,
}

/// An event on its way to another process.
#[derive(Debug)]
#[non_exhaustive]
pub enum EventHandle {
    /// A memory file that holds the event's counters.
    Fd(OwnedFd),
    /// The driver's own token.
    CudaIpc([u8; 64]),
}

/// The verbs of work. See the [module](super) for the contract behind every `# Safety`.
///
/// # Safety
/// Work on one stream runs in the order it was enqueued; an event is done only when all work before its record is;
/// a finished stream touches no memory any more.
pub unsafe trait RawQueue: fmt::Debug + Send + Sync {
    /// Whether enqueuing is doing: work has finished when the call returns, and needs nothing kept alive.
    fn runs_inline(&self) -> bool {
        false
    }

    /// Creates a stream.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuStreamCreate")]
    unsafe fn create_stream(&self, device: DeviceId) -> Result<RawStream, Cause>;

    /// Gives up a stream. Work on it still runs to its end; this does not wait for it.
    ///
    /// # Errors
    /// What the driver said; the stream remains then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuStreamDestroy")]
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), Cause>;

    /// Waits until all work on the stream is done; `false` when the deadline came first.
    ///
    /// # Errors
    /// What the driver said: the work failed, or nothing can be known of it.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuStreamSynchronize")]
    unsafe fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> Result<bool, Cause>;

    /// Creates an event.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuEventCreate")]
    unsafe fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent, Cause>;

    /// Gives up an event.
    ///
    /// # Errors
    /// What the driver said; the event remains then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuEventDestroy")]
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), Cause>;

    /// Marks the end of what is on the stream now.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuEventRecord")]
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), Cause>;

    /// Makes later work on the stream wait for the event's latest record.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuStreamWaitEvent")]
    unsafe fn await_event(&self, stream: RawStream, event: RawEvent) -> Result<(), Cause>;

    /// Whether the event's latest record is done. An event never recorded is.
    ///
    /// # Errors
    /// What the driver said: the work failed, or nothing can be known of it.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuEventQuery")]
    unsafe fn is_done(&self, event: RawEvent) -> Result<bool, Cause>;

    /// Waits on the processor until the event's latest record is done; `false` when the deadline came first.
    ///
    /// # Errors
    /// What the driver said: the work failed, or nothing can be known of it.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuEventSynchronize")]
    unsafe fn wait_event(&self, event: RawEvent, deadline: Deadline) -> Result<bool, Cause>;

    /// The time between the latest records of two timed events, both done.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuEventElapsedTime")]
    unsafe fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration, Cause>;

    /// A handle of a shared event for another process.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuIpcGetEventHandle")]
    unsafe fn export_event(&self, event: RawEvent) -> Result<EventHandle, Cause>;

    /// Another process's event, from its handle.
    ///
    /// # Errors
    /// What is wrong with the handle, or what the driver said.
    ///
    /// # Safety
    /// The module's contract, but for the handle: it may be anything.
    #[doc(alias = "cuIpcOpenEventHandle")]
    unsafe fn import_event(&self, device: DeviceId, handle: EventHandle) -> Result<RawEvent, Cause>;

    /// Copies bytes.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the ranges are accessible to the stream's device and do not overlap.
    #[doc(alias = "cuMemcpyAsync")]
    unsafe fn copy(&self, stream: RawStream, to: Address, from: Address, len: usize) -> Result<(), Cause>;

    /// Sets bytes.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the range is writable by the stream's device.
    #[doc(alias = "cuMemsetD8Async")]
    unsafe fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> Result<(), Cause>;

    /// From here on work on the stream is recorded, not run.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the stream is not being captured.
    #[doc(alias = "cuStreamBeginCapture")]
    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), Cause>;

    /// Ends the recording and makes it ready to launch. Whatever the answer, the stream runs its work again.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the stream is being captured.
    #[doc(alias = "cuStreamEndCapture")]
    #[doc(alias = "cuGraphInstantiate")]
    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, Cause>;

    /// The recording that somebody else makes on a stream, if one is made.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuStreamGetCaptureInfo")]
    unsafe fn capture_of(&self, _stream: RawStream) -> Result<Option<RawCapture>, Cause> {
        Ok(None)
    }

    /// Has somebody else's recording keep something as long as it, or a graph made of it, is there. Refused, it is kept
    /// for ever.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the recording is still made. Dropping what is kept calls nothing of the driver: it is dropped
    /// in a thread of the driver's own.
    #[doc(alias("cuUserObjectCreate", "cuGraphRetainUserObject"))]
    unsafe fn keep(&self, _capture: RawCapture, kept: Kept) -> Result<(), Cause> {
        std::mem::forget(kept);
        Ok(())
    }

    /// Runs recorded work once.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; what the graph touches is still accessible.
    #[doc(alias = "cuGraphLaunch")]
    unsafe fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<(), Cause>;

    /// Gives up a graph.
    ///
    /// # Errors
    /// What the driver said; the graph remains then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuGraphExecDestroy")]
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), Cause>;

    /// Loads kernels.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the image does what its functions promise.
    #[doc(alias = "cuModuleLoadData")]
    unsafe fn load_module(&self, device: DeviceId, image: &KernelImage) -> Result<RawModule, Cause>;

    /// Gives up loaded kernels.
    ///
    /// # Errors
    /// What the driver said; they remain then.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuModuleUnload")]
    unsafe fn unload_module(&self, module: RawModule) -> Result<(), Cause>;

    /// One kernel by name, or `None`.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuModuleGetFunction")]
    unsafe fn function(&self, module: RawModule, name: &str) -> Result<Option<RawFunction>, Cause>;

    /// How many blocks of this shape run at once on the device.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract.
    #[doc(alias = "cuOccupancyMaxActiveBlocksPerMultiprocessor")]
    unsafe fn occupancy(&self, function: RawFunction, block: u32, shared_len: u32) -> Result<u32, Cause>;

    /// Runs a kernel.
    ///
    /// # Errors
    /// What the driver said.
    ///
    /// # Safety
    /// The module's contract; the arguments are what the kernel takes, and what it touches is accessible.
    #[doc(alias = "cuLaunchKernel")]
    unsafe fn launch(
        &self,
        stream: RawStream,
        function: RawFunction,
        shape: &LaunchShape,
        args: &Args,
    ) -> Result<(), Cause>;
}
