//! The verbs of work on a GPU: streams, events, copies, graphs and kernels of the driver.

use std::ffi::{CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::time::Duration;

use wholemem_os::Deadline;
use wholemem_os::width::{to_u64, to_usize};

use super::Gpus;
use super::bindings::*;
use super::code::{give_back, implausible, invalid_value};
use super::driver::Driver;
use super::gpus::Current;
use crate::raw::{
    Address, EventHandle, EventKind, Kept, RawCapture, RawEvent, RawFunction, RawGraph, RawModule, RawQueue,
    RawStream,
};
use crate::{Args, Capability, Cause, DeviceId, KernelImage, LaunchShape};

/// How long a wait with a deadline keeps asking before it rests in between.
const SPIN: Duration = Duration::from_micros(50);

/// How long it rests between two questions: the driver has no wait that ends at a moment.
const REST: Duration = Duration::from_micros(50);

/// How much of the compiler's complaint about a kernel is kept.
const LOG_LEN: usize = 8192;

/// GPU streams under the raw trait.
#[derive(Debug)]
pub(crate) struct CudaQueue {
    gpus: &'static Gpus,
}

impl CudaQueue {
    pub(super) fn new(gpus: &'static Gpus) -> Self {
        Self { gpus }
    }

    fn driver(&self) -> &'static Driver {
        self.gpus.driver()
    }

    fn enter(&self, device: DeviceId) -> Result<Current, Cause> {
        self.gpus.enter(device)
    }

    /// Asks until the answer is yes, or until the deadline.
    fn poll(deadline: Deadline, mut is_over: impl FnMut() -> Result<bool, Cause>) -> Result<bool, Cause> {
        let spin = Deadline::after(SPIN);
        loop {
            if is_over()? {
                return Ok(true);
            }
            if deadline.has_passed() {
                return Ok(false);
            }
            if spin.has_passed() {
                std::thread::sleep(deadline.remaining().map_or(REST, |left| left.min(REST)));
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// The driver's handles are pointers of its own, which we keep as numbers.
fn number<T>(pointer: *mut T) -> u64 {
    to_u64(pointer.expose_provenance())
}

fn pointer<T>(handle: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(to_usize(handle))
}

/// Lets go of what a graph has kept. Called by the driver, once.
unsafe extern "C" fn let_go(kept: *mut c_void) {
    // SAFETY: the box that `keep` gave away.
    drop(unsafe { Box::from_raw(kept.cast::<Kept>()) });
}

// SAFETY: order, events and completion are the driver's, whose streams keep exactly these promises.
unsafe impl RawQueue for CudaQueue {
    unsafe fn create_stream(&self, device: DeviceId) -> Result<RawStream, Cause> {
        let _current = self.enter(device)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: `stream` is writable.
        unsafe { (self.driver().cuStreamCreate)(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING.0) }
            .ok("cuStreamCreate")?;
        Ok(RawStream { device, handle: number(stream) })
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the stream is live, and is given up once.
        unsafe { (self.driver().cuStreamDestroy)(pointer(stream.handle)) }.ok("cuStreamDestroy")
    }

    unsafe fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> Result<bool, Cause> {
        let _current = self.enter(stream.device)?;
        if deadline == Deadline::NEVER {
            // SAFETY: the stream is live.
            unsafe { (self.driver().cuStreamSynchronize)(pointer(stream.handle)) }
                .ok("cuStreamSynchronize")?;
            return Ok(true);
        }
        Self::poll(deadline, || {
            // SAFETY: the stream is live.
            unsafe { (self.driver().cuStreamQuery)(pointer(stream.handle)) }.is_over("cuStreamQuery")
        })
    }

    unsafe fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent, Cause> {
        let _current = self.enter(device)?;
        let untimed = CUevent_flags::CU_EVENT_DISABLE_TIMING.0;
        let flags = match kind {
            EventKind::Order => untimed,
            EventKind::Timed => CUevent_flags::CU_EVENT_DEFAULT.0,
            EventKind::Shared => untimed | CUevent_flags::CU_EVENT_INTERPROCESS.0,
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is writable.
        unsafe { (self.driver().cuEventCreate)(&raw mut event, flags) }.ok("cuEventCreate")?;
        Ok(RawEvent { device, handle: number(event) })
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), Cause> {
        let _current = self.enter(event.device)?;
        // SAFETY: the event is live, and is given up once.
        unsafe { (self.driver().cuEventDestroy)(pointer(event.handle)) }.ok("cuEventDestroy")
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // SAFETY: both are live.
        unsafe { (self.driver().cuEventRecord)(pointer(event.handle), pointer(stream.handle)) }
            .ok("cuEventRecord")
    }

    unsafe fn await_event(&self, stream: RawStream, event: RawEvent) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // SAFETY: both are live.
        unsafe { (self.driver().cuStreamWaitEvent)(pointer(stream.handle), pointer(event.handle), 0) }
            .ok("cuStreamWaitEvent")
    }

    unsafe fn is_done(&self, event: RawEvent) -> Result<bool, Cause> {
        let _current = self.enter(event.device)?;
        // SAFETY: the event is live.
        unsafe { (self.driver().cuEventQuery)(pointer(event.handle)) }.is_over("cuEventQuery")
    }

    unsafe fn wait_event(&self, event: RawEvent, deadline: Deadline) -> Result<bool, Cause> {
        let _current = self.enter(event.device)?;
        if deadline == Deadline::NEVER {
            // SAFETY: the event is live.
            unsafe { (self.driver().cuEventSynchronize)(pointer(event.handle)) }.ok("cuEventSynchronize")?;
            return Ok(true);
        }
        Self::poll(deadline, || {
            // SAFETY: the event is live.
            unsafe { (self.driver().cuEventQuery)(pointer(event.handle)) }.is_over("cuEventQuery")
        })
    }

    unsafe fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration, Cause> {
        let _current = self.enter(end.device)?;
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is writable, and both events are live.
        let answer = unsafe {
            (self.driver().cuEventElapsedTime)(
                &raw mut milliseconds,
                pointer(start.handle),
                pointer(end.handle),
            )
        };
        if answer == CUresult::CUDA_ERROR_INVALID_HANDLE {
            let reason = "only timed events keep their time";
            return Err(Cause::Unsupported { capability: Capability::Timing, reason });
        }
        answer.ok("cuEventElapsedTime")?;
        // Negative if the end was recorded before the start.
        Duration::try_from_secs_f32(milliseconds.max(0.0) / 1e3)
            .map_err(|_| implausible("cuEventElapsedTime"))
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<EventHandle, Cause> {
        let _current = self.enter(event.device)?;
        let mut token = MaybeUninit::<CUipcEventHandle_v1>::zeroed();
        // SAFETY: `token` is writable, and the event is live.
        let answer =
            unsafe { (self.driver().cuIpcGetEventHandle)(token.as_mut_ptr(), pointer(event.handle)) };
        if matches!(answer, CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_HANDLE) {
            let reason = "only shared events can go to another process";
            return Err(Cause::Unsupported { capability: Capability::SharedEvent, reason });
        }
        answer.ok("cuIpcGetEventHandle")?;
        // SAFETY: it was zeroed, which is a value, and then filled in.
        let token = unsafe { token.assume_init() };
        Ok(EventHandle::CudaIpc(token.reserved.map(|byte| byte.to_ne_bytes()[0])))
    }

    unsafe fn import_event(&self, device: DeviceId, handle: EventHandle) -> Result<RawEvent, Cause> {
        let EventHandle::CudaIpc(token) = handle else {
            let reason = "events of a GPU travel as tokens of the driver";
            return Err(Cause::Unsupported { capability: Capability::SharedEvent, reason });
        };
        let _current = self.enter(device)?;
        let token = CUipcEventHandle_v1 { reserved: token.map(|byte| c_char::from_ne_bytes([byte])) };
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is writable; a token that is none is an error.
        unsafe { (self.driver().cuIpcOpenEventHandle)(&raw mut event, token) }.ok("cuIpcOpenEventHandle")?;
        Ok(RawEvent { device, handle: number(event) })
    }

    unsafe fn copy(&self, stream: RawStream, to: Address, from: Address, len: usize) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the module's contract: accessible, and kept until it has run.
        unsafe { (self.driver().cuMemcpyAsync)(to.0, from.0, len, pointer(stream.handle)) }
            .ok("cuMemcpyAsync")
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the module's contract: writable, and kept until it has run.
        unsafe { (self.driver().cuMemsetD8Async)(to.0, value, len, pointer(stream.handle)) }
            .ok("cuMemsetD8Async")
    }

    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // Relaxed: other threads go on using the driver meanwhile.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is live, and is not being captured.
        unsafe { (self.driver().cuStreamBeginCapture)(pointer(stream.handle), mode) }
            .ok("cuStreamBeginCapture")
    }

    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, Cause> {
        // The capture has to end also where no context can be made current; the stream knows its own.
        let current = self.enter(stream.device);
        let mut graph = std::ptr::null_mut();
        // SAFETY: `graph` is writable, and the stream is being captured.
        unsafe { (self.driver().cuStreamEndCapture)(pointer(stream.handle), &raw mut graph) }
            .ok("cuStreamEndCapture")?;
        let mut ready = std::ptr::null_mut();
        let made = current.as_ref().map_err(Clone::clone).and_then(|_| {
            // SAFETY: `ready` is writable, and the graph was made in the lines above.
            unsafe { (self.driver().cuGraphInstantiateWithFlags)(&raw mut ready, graph, 0) }
                .ok("cuGraphInstantiateWithFlags")
        });
        // SAFETY: what was instantiated does not need it any more.
        give_back("cuGraphDestroy", || unsafe { (self.driver().cuGraphDestroy)(graph) });
        made?;
        Ok(RawGraph { device: stream.device, handle: number(ready) })
    }

    unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<RawCapture>, Cause> {
        // The default stream is never recorded, and asked about it while another is, the driver gives up that recording.
        if stream.handle == 0 {
            return Ok(None);
        }
        let _current = self.enter(stream.device)?;
        let (mut status, mut graph) =
            (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, std::ptr::null_mut());
        let (id, nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is live; the status and the graph are writable, and what is null is not asked for.
        let answer = unsafe {
            (self.driver().cuStreamGetCaptureInfo)(
                pointer(stream.handle),
                &raw mut status,
                id,
                &raw mut graph,
                nodes,
                count,
            )
        };
        answer.ok("cuStreamGetCaptureInfo")?;
        let is_made = status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        Ok(is_made.then_some(RawCapture { device: stream.device, handle: number(graph) }))
    }

    unsafe fn keep(&self, capture: RawCapture, kept: Kept) -> Result<(), Cause> {
        let _current = self.enter(capture.device)?;
        // A pointer to a pointer with a table: the driver keeps plain ones.
        let kept = Box::into_raw(Box::new(kept));
        let flags = CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC.0;
        let mut object = std::ptr::null_mut();
        // SAFETY: `object` is writable, and the function lets go of what the pointer is of. Refused, nobody does.
        unsafe { (self.driver().cuUserObjectCreate)(&raw mut object, kept.cast(), Some(let_go), 1, flags) }
            .ok("cuUserObjectCreate")?;
        let flags = CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE.0;
        // SAFETY: the recording is still made, and the object was made in the lines above; the one hold on it becomes the
        // graph's. Refused, it stays ours for ever.
        unsafe { (self.driver().cuGraphRetainUserObject)(pointer(capture.handle), object, 1, flags) }
            .ok("cuGraphRetainUserObject")
    }

    unsafe fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        // SAFETY: both are live, and what the graph touches is kept until it has run.
        unsafe { (self.driver().cuGraphLaunch)(pointer(graph.handle), pointer(stream.handle)) }
            .ok("cuGraphLaunch")
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), Cause> {
        let _current = self.enter(graph.device)?;
        // SAFETY: the graph is live, and is given up once.
        unsafe { (self.driver().cuGraphExecDestroy)(pointer(graph.handle)) }.ok("cuGraphExecDestroy")
    }

    unsafe fn load_module(&self, device: DeviceId, image: &KernelImage) -> Result<RawModule, Cause> {
        let reason = "the image has no text for CUDA devices";
        let missing = Cause::Unsupported { capability: Capability::Kernels, reason };
        let text = image.ptx.and_then(|ptx| CString::new(ptx).ok()).ok_or(missing)?;
        let _current = self.enter(device)?;
        let mut log = vec![0_u8; LOG_LEN];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_LEN)];
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is writable, the text ends with a zero, and the log is as long as is said.
        let answer = unsafe {
            (self.driver().cuModuleLoadDataEx)(
                &raw mut module,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        answer.ok("cuModuleLoadDataEx").inspect_err(|cause| {
            let log = log.split(|&byte| byte == 0).next().map(String::from_utf8_lossy).unwrap_or_default();
            tracing::error!(%cause, %log, "the driver could not load a kernel module");
        })?;
        Ok(RawModule { device, handle: number(module) })
    }

    unsafe fn unload_module(&self, module: RawModule) -> Result<(), Cause> {
        let _current = self.enter(module.device)?;
        // SAFETY: the module is live, and is given up once.
        unsafe { (self.driver().cuModuleUnload)(pointer(module.handle)) }.ok("cuModuleUnload")
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> Result<Option<RawFunction>, Cause> {
        let _current = self.enter(module.device)?;
        let Ok(name) = CString::new(name) else { return Ok(None) };
        let mut function = std::ptr::null_mut();
        // SAFETY: `function` is writable, the module is live, and the name is a string.
        let answer = unsafe {
            (self.driver().cuModuleGetFunction)(&raw mut function, pointer(module.handle), name.as_ptr())
        };
        if answer == CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(None);
        }
        answer.ok("cuModuleGetFunction")?;
        Ok(Some(RawFunction { device: module.device, handle: number(function) }))
    }

    unsafe fn occupancy(&self, function: RawFunction, block: u32, shared_len: u32) -> Result<u32, Cause> {
        let _current = self.enter(function.device)?;
        let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        let threads = i32::try_from(block).map_err(|_| invalid_value(call))?;
        let mut blocks = 0;
        // SAFETY: `blocks` is writable, and the function is live.
        let answer = unsafe {
            (self.driver().cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &raw mut blocks,
                pointer(function.handle),
                threads,
                shared_len as usize,
            )
        };
        answer.ok(call)?;
        let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = self.gpus.attribute(function.device, count)?;
        let blocks = blocks.checked_mul(multiprocessors).and_then(|blocks| u32::try_from(blocks).ok());
        blocks.ok_or_else(|| implausible(call))
    }

    unsafe fn launch(
        &self,
        stream: RawStream,
        function: RawFunction,
        shape: &LaunchShape,
        args: &Args,
    ) -> Result<(), Cause> {
        let _current = self.enter(stream.device)?;
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (shape.grid, shape.block);
        let mut params: Vec<*mut c_void> = args.pointers().map(|at| at.cast_mut().cast()).collect();
        if shape.early {
            let mut attribute = CUlaunchAttribute {
                id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                pad: [0; 4],
                value: CUlaunchAttributeValue { pad: [0; 64] },
            };
            attribute.value.programmaticStreamSerializationAllowed = 1;
            let config = CUlaunchConfig {
                gridDimX: grid_x,
                gridDimY: grid_y,
                gridDimZ: grid_z,
                blockDimX: block_x,
                blockDimY: block_y,
                blockDimZ: block_z,
                sharedMemBytes: shape.shared_len,
                hStream: pointer(stream.handle),
                attrs: &raw mut attribute,
                numAttrs: 1,
            };
            // SAFETY: as below; the configuration is as long as it says, and the caller answers for the kernel's own wait.
            return unsafe {
                (self.driver().cuLaunchKernelEx)(
                    &raw const config,
                    pointer(function.handle),
                    params.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
            .ok("cuLaunchKernelEx");
        }
        // SAFETY: both are live; each parameter points at a value that the driver copies before it returns; the caller
        // answers for their number and types.
        let answer = unsafe {
            (self.driver().cuLaunchKernel)(
                pointer(function.handle),
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                shape.shared_len,
                pointer(stream.handle),
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        answer.ok("cuLaunchKernel")
    }
}
