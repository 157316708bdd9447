//! The raw operations on streams, events, copies, graphs and kernels.

use std::fmt;
use std::os::fd::OwnedFd;
use std::time::Duration;

use wholemem_os::Deadline;

use super::Address;
use crate::{Args, BackendError, DeviceId, KernelImage, LaunchShape};

macro_rules! raw_handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $name {
            /// The device of the object to which the handle refers.
            pub device: DeviceId,
            /// The backend's own handle of the object, as an integer.
            pub handle: u64,
        }
    )*};
}

raw_handles! {
    /// A raw handle of a stream: a queue of work on a device.
    RawStream;
    /// A raw handle of an event: a point in a stream.
    RawEvent;
    /// A raw handle of an instantiated graph.
    RawGraph;
    /// A raw handle of a capture that other code in the process has begun.
    RawCapture;
    /// A raw handle of a loaded kernel module.
    RawModule;
    /// A raw handle of a kernel in a module.
    RawFunction;
}

/// A value that another library's graph owns and drops (CUDA's user object).
pub type UserObject = Box<dyn Send>;

/// The purpose of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The event orders streams of this process.
    Order,
    /// The event orders streams, and measures time.
    Timed,
    /// The event orders streams of several processes.
    Shared,
}

/// A handle from which another process opens an event.
#[derive(Debug)]
#[non_exhaustive]
pub enum EventHandle {
    /// A file descriptor of a memory file that contains the event's counters.
    Fd(OwnedFd),
    /// A CUDA IPC event handle.
    CudaIpc([u8; 64]),
}

/// The raw operations on streams, which a backend implements without checks. The [module](super) states the contract of every `#
/// Safety` section.
///
/// # Safety
/// Work on one stream runs in the order in which it was enqueued; an event completes only after all work before its record; a
/// stream that has finished accesses no memory.
pub unsafe trait RawQueue: fmt::Debug + Send + Sync {
    /// Returns whether work on a stream has finished when the enqueuing call returns, so that no operands need to be kept alive.
    fn runs_inline(&self) -> bool {
        false
    }

    /// Creates a stream on a device.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuStreamCreate")]
    unsafe fn create_stream(&self, device: DeviceId) -> Result<RawStream, BackendError>;

    /// Destroys a stream. Its work still runs to completion; the call does not wait for it.
    ///
    /// # Errors
    /// Returns the driver's error; the stream still exists.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuStreamDestroy")]
    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), BackendError>;

    /// Waits until all work on the stream has finished. Returns `false` if the deadline passed first.
    ///
    /// # Errors
    /// Returns the driver's error: the work failed, or its state is unknown.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuStreamSynchronize")]
    unsafe fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> Result<bool, BackendError>;

    /// Creates an event of the given kind on a device.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuEventCreate")]
    unsafe fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent, BackendError>;

    /// Destroys an event.
    ///
    /// # Errors
    /// Returns the driver's error; the event still exists.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuEventDestroy")]
    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), BackendError>;

    /// Records the event after all work that is on the stream now.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuEventRecord")]
    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), BackendError>;

    /// Makes later work on the stream wait for the latest record of the event.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuStreamWaitEvent")]
    unsafe fn await_event(&self, stream: RawStream, event: RawEvent) -> Result<(), BackendError>;

    /// Returns whether the latest record of the event has completed. An event that was never recorded counts as completed.
    ///
    /// # Errors
    /// Returns the driver's error: the work failed, or its state is unknown.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuEventQuery")]
    unsafe fn is_done(&self, event: RawEvent) -> Result<bool, BackendError>;

    /// Blocks the calling thread until the latest record of the event completes. Returns `false` if the deadline passed first.
    ///
    /// # Errors
    /// Returns the driver's error: the work failed, or its state is unknown.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuEventSynchronize")]
    unsafe fn wait_event(&self, event: RawEvent, deadline: Deadline) -> Result<bool, BackendError>;

    /// Returns the time between the latest records of two timed events that have completed.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuEventElapsedTime")]
    unsafe fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration, BackendError>;

    /// Creates a handle with which another process opens a shared event.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuIpcGetEventHandle")]
    unsafe fn export_event(&self, event: RawEvent) -> Result<EventHandle, BackendError>;

    /// Opens an event from the handle of another process.
    ///
    /// # Errors
    /// Returns the error of an invalid handle, or the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds, except that the handle need not be valid.
    #[doc(alias = "cuIpcOpenEventHandle")]
    unsafe fn import_event(&self, device: DeviceId, handle: EventHandle) -> Result<RawEvent, BackendError>;

    /// Enqueues a copy of `len` bytes on the stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the ranges are accessible to the stream's device and do not overlap.
    #[doc(alias = "cuMemcpyAsync")]
    unsafe fn copy(
        &self,
        stream: RawStream,
        to: Address,
        from: Address,
        len: usize,
    ) -> Result<(), BackendError>;

    /// Enqueues work on the stream that sets `len` bytes to a value.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the range is writable by the stream's device.
    #[doc(alias = "cuMemsetD8Async")]
    unsafe fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> Result<(), BackendError>;

    /// Begins a capture of the stream: later work on the stream is captured instead of run.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the stream is not being captured.
    #[doc(alias = "cuStreamBeginCapture")]
    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), BackendError>;

    /// Ends the capture of the stream and instantiates the captured graph. Even after an error, the stream is no longer captured.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the stream is being captured.
    #[doc(alias = "cuStreamEndCapture")]
    #[doc(alias = "cuGraphInstantiate")]
    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, BackendError>;

    /// Returns the capture that other code in the process has begun on the stream, if any.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuStreamGetCaptureInfo")]
    unsafe fn capture_of(&self, _stream: RawStream) -> Result<Option<RawCapture>, BackendError> {
        Ok(None)
    }

    /// Attaches a value to a capture of another library. The value is dropped with the capture and the last graph created from
    /// it; after an error the value is leaked.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the capture has not ended. Dropping the value must not call the driver, because
    /// a thread of the driver drops it.
    #[doc(alias("cuUserObjectCreate", "cuGraphRetainUserObject"))]
    unsafe fn attach_user_object(
        &self,
        _capture: RawCapture,
        object: UserObject,
    ) -> Result<(), BackendError> {
        std::mem::forget(object);
        Ok(())
    }

    /// Enqueues the work of a graph on the stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the memory that the graph accesses is still accessible.
    #[doc(alias = "cuGraphLaunch")]
    unsafe fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<(), BackendError>;

    /// Destroys a graph.
    ///
    /// # Errors
    /// Returns the driver's error; the graph still exists.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuGraphExecDestroy")]
    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), BackendError>;

    /// Loads a module of kernels on a device.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the functions of the image have the parameters that later launches pass.
    #[doc(alias = "cuModuleLoadData")]
    unsafe fn load_module(&self, device: DeviceId, image: &KernelImage) -> Result<RawModule, BackendError>;

    /// Unloads a kernel module.
    ///
    /// # Errors
    /// Returns the driver's error; the module is still loaded.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuModuleUnload")]
    unsafe fn unload_module(&self, module: RawModule) -> Result<(), BackendError>;

    /// Looks up a kernel of the module by name.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuModuleGetFunction")]
    unsafe fn function(&self, module: RawModule, name: &str) -> Result<Option<RawFunction>, BackendError>;

    /// Returns the number of the kernel's blocks with `block` threads that can be resident on the device at once.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds.
    #[doc(alias = "cuOccupancyMaxActiveBlocksPerMultiprocessor")]
    unsafe fn occupancy(
        &self,
        function: RawFunction,
        block: u32,
        shared_len: u32,
    ) -> Result<u32, BackendError>;

    /// Enqueues a kernel launch on the stream.
    ///
    /// # Errors
    /// Returns the driver's error.
    ///
    /// # Safety
    /// The contract of the [module](super) holds; the arguments match the parameters of the kernel, and the memory it accesses is
    /// accessible.
    #[doc(alias = "cuLaunchKernel")]
    unsafe fn launch(
        &self,
        stream: RawStream,
        function: RawFunction,
        shape: &LaunchShape,
        args: &Args,
    ) -> Result<(), BackendError>;
}
