//! The raw stream operations on GPUs: streams, events, copies, graphs and kernels of the driver.

use std::ffi::{CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::time::Duration;

use smallvec::SmallVec;
use wholemem_os::Deadline;
use wholemem_os::width::{to_u64, to_usize};

use super::Gpus;
use super::bindings::*;
use super::code::{implausible, invalid_value, release_or_leak};
use super::driver::Driver;
use super::gpus::CurrentContext;
use crate::raw::{
    Address, EventHandle, EventKind, RawCapture, RawEvent, RawFunction, RawGraph, RawModule, RawQueue,
    RawStream, UserObject,
};
use crate::{Args, BackendError, Capability, DeviceId, KernelImage, LaunchShape};

/// The time for which a wait with a deadline spins before it sleeps between queries.
const SPIN: Duration = Duration::from_micros(50);

/// The time for which a wait sleeps between two queries, since the driver has no wait with a timeout.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// The size of the buffer for the error log of the PTX compiler.
const LOG_LEN: usize = 8192;

/// GPU streams as an implementation of `RawQueue`.
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

    fn enter(&self, device: DeviceId) -> Result<CurrentContext, BackendError> {
        self.gpus.enter(device)
    }

    /// Polls until `is_complete` returns `true`. Returns `false` if the deadline passes first.
    fn poll(
        deadline: Deadline,
        mut is_complete: impl FnMut() -> Result<bool, BackendError>,
    ) -> Result<bool, BackendError> {
        let spin = Deadline::after(SPIN);
        loop {
            if is_complete()? {
                return Ok(true);
            }
            if deadline.has_passed() {
                return Ok(false);
            }
            if spin.has_passed() {
                std::thread::sleep(
                    deadline.remaining().map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL)),
                );
            } else {
                std::hint::spin_loop();
            }
        }
    }
}

/// Converts a handle of the driver, which is a pointer, to an integer for storage.
fn number<T>(pointer: *mut T) -> u64 {
    to_u64(pointer.expose_provenance())
}

fn pointer<T>(handle: u64) -> *mut T {
    std::ptr::with_exposed_provenance_mut(to_usize(handle))
}

/// Drops a value that a graph owned. The driver calls this function once per value.
unsafe extern "C" fn drop_user_object(object: *mut c_void) {
    // SAFETY: `object` is the box that `attach_user_object` leaked, and the driver passes it once.
    drop(unsafe { Box::from_raw(object.cast::<UserObject>()) });
}

// SAFETY: streams and events of the driver have the order and the completion that `RawQueue` requires.
unsafe impl RawQueue for CudaQueue {
    unsafe fn create_stream(&self, device: DeviceId) -> Result<RawStream, BackendError> {
        let _current = self.enter(device)?;
        let mut stream = std::ptr::null_mut();
        // SAFETY: the driver call writes only `stream`, which is writable.
        unsafe { (self.driver().cuStreamCreate)(&raw mut stream, CUstream_flags::CU_STREAM_NON_BLOCKING.0) }
            .ok("cuStreamCreate")?;
        Ok(RawStream { device, handle: number(stream) })
    }

    unsafe fn destroy_stream(&self, stream: RawStream) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the caller of `destroy_stream` guarantees the contract of the module `raw`: the stream is live,
        // and this is its only release.
        unsafe { (self.driver().cuStreamDestroy)(pointer(stream.handle)) }.ok("cuStreamDestroy")
    }

    unsafe fn wait_stream(&self, stream: RawStream, deadline: Deadline) -> Result<bool, BackendError> {
        let _current = self.enter(stream.device)?;
        if deadline == Deadline::NEVER {
            // SAFETY: the caller of `wait_stream` guarantees the contract of the module `raw`: the stream is live.
            unsafe { (self.driver().cuStreamSynchronize)(pointer(stream.handle)) }
                .ok("cuStreamSynchronize")?;
            return Ok(true);
        }
        Self::poll(deadline, || {
            // SAFETY: the caller of `wait_stream` guarantees the contract of the module `raw`: the stream is live.
            unsafe { (self.driver().cuStreamQuery)(pointer(stream.handle)) }.is_complete("cuStreamQuery")
        })
    }

    unsafe fn create_event(&self, device: DeviceId, kind: EventKind) -> Result<RawEvent, BackendError> {
        let _current = self.enter(device)?;
        let untimed = CUevent_flags::CU_EVENT_DISABLE_TIMING.0;
        let flags = match kind {
            EventKind::Order => untimed,
            EventKind::Timed => CUevent_flags::CU_EVENT_DEFAULT.0,
            EventKind::Shared => untimed | CUevent_flags::CU_EVENT_INTERPROCESS.0,
        };
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver call writes only `event`, which is writable.
        unsafe { (self.driver().cuEventCreate)(&raw mut event, flags) }.ok("cuEventCreate")?;
        Ok(RawEvent { device, handle: number(event) })
    }

    unsafe fn destroy_event(&self, event: RawEvent) -> Result<(), BackendError> {
        let _current = self.enter(event.device)?;
        // SAFETY: the caller of `destroy_event` guarantees the contract of the module `raw`: the event is live, and
        // this is its only release.
        unsafe { (self.driver().cuEventDestroy)(pointer(event.handle)) }.ok("cuEventDestroy")
    }

    unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the caller of `record` guarantees the contract of the module `raw`: the event and the stream are
        // live.
        unsafe { (self.driver().cuEventRecord)(pointer(event.handle), pointer(stream.handle)) }
            .ok("cuEventRecord")
    }

    unsafe fn await_event(&self, stream: RawStream, event: RawEvent) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the caller of `await_event` guarantees the contract of the module `raw`: the stream and the event
        // are live.
        unsafe { (self.driver().cuStreamWaitEvent)(pointer(stream.handle), pointer(event.handle), 0) }
            .ok("cuStreamWaitEvent")
    }

    unsafe fn is_done(&self, event: RawEvent) -> Result<bool, BackendError> {
        let _current = self.enter(event.device)?;
        // SAFETY: the caller of `is_done` guarantees the contract of the module `raw`: the event is live.
        unsafe { (self.driver().cuEventQuery)(pointer(event.handle)) }.is_complete("cuEventQuery")
    }

    unsafe fn wait_event(&self, event: RawEvent, deadline: Deadline) -> Result<bool, BackendError> {
        let _current = self.enter(event.device)?;
        if deadline == Deadline::NEVER {
            // SAFETY: the caller of `wait_event` guarantees the contract of the module `raw`: the event is live.
            unsafe { (self.driver().cuEventSynchronize)(pointer(event.handle)) }.ok("cuEventSynchronize")?;
            return Ok(true);
        }
        Self::poll(deadline, || {
            // SAFETY: the caller of `wait_event` guarantees the contract of the module `raw`: the event is live.
            unsafe { (self.driver().cuEventQuery)(pointer(event.handle)) }.is_complete("cuEventQuery")
        })
    }

    unsafe fn elapsed(&self, start: RawEvent, end: RawEvent) -> Result<Duration, BackendError> {
        let _current = self.enter(end.device)?;
        let mut milliseconds = 0.0;
        // SAFETY: `milliseconds` is writable, and both events are live.
        let code = unsafe {
            (self.driver().cuEventElapsedTime)(
                &raw mut milliseconds,
                pointer(start.handle),
                pointer(end.handle),
            )
        };
        if code == CUresult::CUDA_ERROR_INVALID_HANDLE {
            let reason = "only timed events record a time";
            return Err(BackendError::Unsupported { capability: Capability::Timing, reason });
        }
        code.ok("cuEventElapsedTime")?;
        // The time is negative if the end event was recorded before the start event.
        Duration::try_from_secs_f32(milliseconds.max(0.0) / 1e3)
            .map_err(|_| implausible("cuEventElapsedTime"))
    }

    unsafe fn export_event(&self, event: RawEvent) -> Result<EventHandle, BackendError> {
        let _current = self.enter(event.device)?;
        let mut token = MaybeUninit::<CUipcEventHandle_v1>::zeroed();
        // SAFETY: `token` is writable, and the event is live.
        let code = unsafe { (self.driver().cuIpcGetEventHandle)(token.as_mut_ptr(), pointer(event.handle)) };
        if matches!(code, CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_INVALID_HANDLE) {
            let reason = "only shared events can be exported";
            return Err(BackendError::Unsupported { capability: Capability::SharedEvent, reason });
        }
        code.ok("cuIpcGetEventHandle")?;
        // SAFETY: zeroed bytes are a valid token, and the driver has filled them in.
        let token = unsafe { token.assume_init() };
        Ok(EventHandle::CudaIpc(token.reserved.map(|byte| byte.to_ne_bytes()[0])))
    }

    unsafe fn import_event(&self, device: DeviceId, handle: EventHandle) -> Result<RawEvent, BackendError> {
        let EventHandle::CudaIpc(token) = handle else {
            let reason = "GPU events are shared as CUDA IPC handles";
            return Err(BackendError::Unsupported { capability: Capability::SharedEvent, reason });
        };
        let _current = self.enter(device)?;
        let token = CUipcEventHandle_v1 { reserved: token.map(|byte| c_char::from_ne_bytes([byte])) };
        let mut event = std::ptr::null_mut();
        // SAFETY: `event` is writable; for an invalid token the driver returns an error.
        unsafe { (self.driver().cuIpcOpenEventHandle)(&raw mut event, token) }.ok("cuIpcOpenEventHandle")?;
        Ok(RawEvent { device, handle: number(event) })
    }

    unsafe fn copy(
        &self,
        stream: RawStream,
        to: Address,
        from: Address,
        len: usize,
    ) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the caller of `copy` guarantees the contract of the module `raw`: both ranges are accessible, and
        // held until the copy has run.
        unsafe { (self.driver().cuMemcpyAsync)(to.0, from.0, len, pointer(stream.handle)) }
            .ok("cuMemcpyAsync")
    }

    unsafe fn fill(&self, stream: RawStream, to: Address, value: u8, len: usize) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the caller of `fill` guarantees the contract of the module `raw`: the range is writable, and held
        // until the fill has run.
        unsafe { (self.driver().cuMemsetD8Async)(to.0, value, len, pointer(stream.handle)) }
            .ok("cuMemsetD8Async")
    }

    unsafe fn begin_capture(&self, stream: RawStream) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // The capture mode is relaxed, since other threads keep using the driver during the capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the caller of `begin_capture` guarantees the contract of the module `raw`: the stream is live, and
        // is not being captured.
        unsafe { (self.driver().cuStreamBeginCapture)(pointer(stream.handle), mode) }
            .ok("cuStreamBeginCapture")
    }

    unsafe fn end_capture(&self, stream: RawStream) -> Result<RawGraph, BackendError> {
        // The capture must end even if no context can be made current: `cuStreamEndCapture` needs no context.
        let current = self.enter(stream.device);
        let mut graph = std::ptr::null_mut();
        // SAFETY: `graph` is writable, and the stream is being captured.
        unsafe { (self.driver().cuStreamEndCapture)(pointer(stream.handle), &raw mut graph) }
            .ok("cuStreamEndCapture")?;
        let mut ready = std::ptr::null_mut();
        let made = current.as_ref().map_err(Clone::clone).and_then(|_| {
            // SAFETY: `ready` is writable, and the graph was created above.
            unsafe { (self.driver().cuGraphInstantiateWithFlags)(&raw mut ready, graph, 0) }
                .ok("cuGraphInstantiateWithFlags")
        });
        // SAFETY: the graph was created above, and the instantiated graph does not need it any more.
        release_or_leak("cuGraphDestroy", || unsafe { (self.driver().cuGraphDestroy)(graph) });
        made?;
        Ok(RawGraph { device: stream.device, handle: number(ready) })
    }

    unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<RawCapture>, BackendError> {
        // The default stream is never captured, and querying it while another stream is captured would invalidate that capture.
        if stream.handle == 0 {
            return Ok(None);
        }
        let _current = self.enter(stream.device)?;
        let (mut status, mut graph) =
            (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, std::ptr::null_mut());
        let (id, nodes, count) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream is live; `status` and `graph` are writable, and the other outputs may be null.
        let code = unsafe {
            (self.driver().cuStreamGetCaptureInfo)(
                pointer(stream.handle),
                &raw mut status,
                id,
                &raw mut graph,
                nodes,
                count,
            )
        };
        code.ok("cuStreamGetCaptureInfo")?;
        let is_active = status == CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        Ok(is_active.then_some(RawCapture { device: stream.device, handle: number(graph) }))
    }

    unsafe fn attach_user_object(&self, capture: RawCapture, object: UserObject) -> Result<(), BackendError> {
        let _current = self.enter(capture.device)?;
        // The value is boxed twice, since the driver stores a thin pointer, and `UserObject` is a fat one.
        let boxed = Box::into_raw(Box::new(object));
        let flags = CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC.0;
        let mut user_object = std::ptr::null_mut();
        // SAFETY: `user_object` is writable, and `drop_user_object` drops the value behind `boxed`. After an error the value is
        // leaked.
        unsafe {
            (self.driver().cuUserObjectCreate)(
                &raw mut user_object,
                boxed.cast(),
                Some(drop_user_object),
                1,
                flags,
            )
        }
        .ok("cuUserObjectCreate")?;
        let flags = CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE.0;
        // SAFETY: the capture has not ended, and `user_object` was created above; its only reference moves to the graph. After an
        // error the reference is leaked.
        unsafe { (self.driver().cuGraphRetainUserObject)(pointer(capture.handle), user_object, 1, flags) }
            .ok("cuGraphRetainUserObject")
    }

    unsafe fn launch_graph(&self, graph: RawGraph, stream: RawStream) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        // SAFETY: the caller of `launch_graph` guarantees the contract of the module `raw`: the graph and the stream
        // are live, and the operands of the graph are held until it has run.
        unsafe { (self.driver().cuGraphLaunch)(pointer(graph.handle), pointer(stream.handle)) }
            .ok("cuGraphLaunch")
    }

    unsafe fn destroy_graph(&self, graph: RawGraph) -> Result<(), BackendError> {
        let _current = self.enter(graph.device)?;
        // SAFETY: the graph is live, and this is its only release.
        unsafe { (self.driver().cuGraphExecDestroy)(pointer(graph.handle)) }.ok("cuGraphExecDestroy")
    }

    unsafe fn load_module(&self, device: DeviceId, image: &KernelImage) -> Result<RawModule, BackendError> {
        let reason = "the kernel image has no PTX";
        let missing = BackendError::Unsupported { capability: Capability::Kernels, reason };
        let text = image.ptx.and_then(|ptx| CString::new(ptx).ok()).ok_or(missing)?;
        let _current = self.enter(device)?;
        let mut log = vec![0_u8; LOG_LEN];
        let mut options =
            [CUjit_option::CU_JIT_ERROR_LOG_BUFFER, CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES];
        let mut values: [*mut c_void; 2] =
            [log.as_mut_ptr().cast(), std::ptr::without_provenance_mut(LOG_LEN)];
        let mut module = std::ptr::null_mut();
        // SAFETY: `module` is writable, `text` is null-terminated, and `log` has the given length.
        let code = unsafe {
            (self.driver().cuModuleLoadDataEx)(
                &raw mut module,
                text.as_ptr().cast(),
                2,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        code.ok("cuModuleLoadDataEx").inspect_err(|cause| {
            let log = log.split(|&byte| byte == 0).next().map(String::from_utf8_lossy).unwrap_or_default();
            tracing::error!(%cause, %log, "the driver cannot load a kernel module");
        })?;
        Ok(RawModule { device, handle: number(module) })
    }

    unsafe fn unload_module(&self, module: RawModule) -> Result<(), BackendError> {
        let _current = self.enter(module.device)?;
        // SAFETY: the module is live, and this is its only release.
        unsafe { (self.driver().cuModuleUnload)(pointer(module.handle)) }.ok("cuModuleUnload")
    }

    unsafe fn function(&self, module: RawModule, name: &str) -> Result<Option<RawFunction>, BackendError> {
        let _current = self.enter(module.device)?;
        let Ok(name) = CString::new(name) else { return Ok(None) };
        let mut function = std::ptr::null_mut();
        // SAFETY: `function` is writable, the module is live, and the name is a C string.
        let code = unsafe {
            (self.driver().cuModuleGetFunction)(&raw mut function, pointer(module.handle), name.as_ptr())
        };
        if code == CUresult::CUDA_ERROR_NOT_FOUND {
            return Ok(None);
        }
        code.ok("cuModuleGetFunction")?;
        Ok(Some(RawFunction { device: module.device, handle: number(function) }))
    }

    unsafe fn occupancy(
        &self,
        function: RawFunction,
        block: u32,
        shared_len: u32,
    ) -> Result<u32, BackendError> {
        let _current = self.enter(function.device)?;
        let call = "cuOccupancyMaxActiveBlocksPerMultiprocessor";
        let threads = i32::try_from(block).map_err(|_| invalid_value(call))?;
        let mut blocks = 0;
        // SAFETY: `blocks` is writable, and the function is live.
        let code = unsafe {
            (self.driver().cuOccupancyMaxActiveBlocksPerMultiprocessor)(
                &raw mut blocks,
                pointer(function.handle),
                threads,
                shared_len as usize,
            )
        };
        code.ok(call)?;
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
    ) -> Result<(), BackendError> {
        let _current = self.enter(stream.device)?;
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (shape.grid, shape.block);
        let mut params: SmallVec<[*mut c_void; 4]> = args.pointers().map(|at| at.cast_mut().cast()).collect();
        if shape.programmatic {
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
            // SAFETY: the function and the stream are live; `config` has one attribute; each parameter points to a value that the
            // driver copies before it returns; the caller guarantees the number and types of the parameters, and that the kernel
            // waits for the preceding work.
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
        // SAFETY: the function and the stream are live; each parameter points to a value that the driver copies before it
        // returns; the caller guarantees the number and types of the parameters.
        let code = unsafe {
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
        code.ok("cuLaunchKernel")
    }
}
