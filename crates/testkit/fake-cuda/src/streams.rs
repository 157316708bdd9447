//! The fake driver's streams, copies, fills and graphs.

use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::calls::{self, CallResult, api, ensure, write_output};
use crate::gpu::{self, Op};
use crate::ranges;

const READ: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
const READ_WRITE: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// Graphs and instantiated graphs by handle.
#[derive(Debug, Default)]
struct Graphs {
    last: usize,
    captured: BTreeMap<usize, Arc<CapturedWork>>,
    ready: BTreeMap<usize, Arc<CapturedWork>>,
    /// CUDA user objects that no graph owns yet.
    objects: BTreeMap<usize, UserObject>,
}

/// The operations that a stream capture has recorded, and the user objects that they need.
#[derive(Debug, Default)]
pub(crate) struct CapturedWork {
    number: usize,
    pub(crate) ops: Vec<Op>,
    objects: Vec<UserObject>,
}

/// A CUDA user object: a value that is destroyed with the last graph that holds it.
#[derive(Debug)]
struct UserObject {
    address: usize,
    destroy: CUhostFn,
}

impl Drop for UserObject {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the creator of the user object passed `destroy` and its argument for exactly one call, which is
            // this one.
            unsafe { destroy(ptr::with_exposed_provenance_mut(self.address)) };
        }
    }
}

fn graphs() -> MutexGuard<'static, Graphs> {
    static GRAPHS: Mutex<Graphs> = Mutex::new(Graphs {
        last: 0x6000,
        captured: BTreeMap::new(),
        ready: BTreeMap::new(),
        objects: BTreeMap::new(),
    });
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graphs {
    fn new_handle(&mut self) -> usize {
        self.last += 0x10;
        self.last
    }
}

impl gpu::StreamQueues {
    /// Returns the work of the stream capture in progress with this number.
    fn capture_in_progress(&mut self, number: usize) -> Option<&mut CapturedWork> {
        self.streams
            .values_mut()
            .filter_map(|queue| queue.capture.as_mut())
            .find(|captured| captured.number == number)
    }
}

pub(crate) fn graph_count() -> u64 {
    let graphs = graphs();
    (graphs.captured.len() + graphs.ready.len() + graphs.objects.len()) as u64
}

/// Enqueues an operation on a stream, which must belong to the current context's device.
pub(crate) fn enqueue(stream: CUstream, op: Op) -> CallResult {
    let mut queues = gpu::queues();
    let queue = queues.get(stream)?;
    ensure(queue.device == calls::current()?, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    queue.push(op);
    gpu::wake();
    Ok(())
}

/// Returns the device of a stream.
pub(crate) fn device_of(stream: CUstream) -> Result<CUdevice, CUresult> {
    Ok(gpu::queues().get(stream)?.device)
}

api! {
    Context fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) {
        let number = gpu::queues().create(calls::current()?);
        write_output(stream, ptr::without_provenance_mut(number as usize))
    }

    Context fn cuStreamDestroy(stream: CUstream) {
        gpu::queues().destroy(stream)
    }

    Context fn cuStreamQuery(stream: CUstream) {
        let mut queues = gpu::queues();
        let queue = queues.get(stream)?;
        ensure(queue.capture.is_none(), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        ensure(queue.is_idle(), CUresult::CUDA_ERROR_NOT_READY)
    }

    Context fn cuStreamSynchronize(stream: CUstream) {
        let mut queues = gpu::queues();
        let capturing = queues.get(stream)?.capture.is_some();
        ensure(!capturing, CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        let number = queues.number(stream)?;
        gpu::wait_for(queues, number);
        Ok(())
    }

    Context fn cuMemcpyAsync(to: CUdeviceptr_v2, from: CUdeviceptr_v2, len: usize, stream: CUstream) {
        let device = device_of(stream)?;
        ranges::check(device, to, len, READ_WRITE)?;
        ranges::check(device, from, len, READ)?;
        enqueue(stream, Op::Copy { to, from, len })
    }

    Context fn cuMemsetD8Async(to: CUdeviceptr_v2, value: c_uchar, len: usize, stream: CUstream) {
        ranges::check(device_of(stream)?, to, len, READ_WRITE)?;
        enqueue(stream, Op::Fill { to, value, len })
    }

    Context fn cuStreamBeginCapture(stream: CUstream, _mode: CUstreamCaptureMode) {
        ensure(!stream.is_null(), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)?;
        let mut queues = gpu::queues();
        let queue = queues.get(stream)?;
        ensure(queue.capture.is_none(), CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        queue.capture = Some(CapturedWork { number: graphs().new_handle(), ..CapturedWork::default() });
        Ok(())
    }

    // `cuStreamEndCapture` ends the capture even if the call fails, and does not need a current context.
    InitUncounted fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let captured = gpu::queues().get(stream)?.capture.take();
        let captured = captured.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        write_output(graph, ptr::null_mut())?;
        calls::count_call("cuStreamEndCapture\0")?;
        let number = captured.number;
        graphs().captured.insert(number, Arc::new(captured));
        write_output(graph, ptr::without_provenance_mut(number))
    }

    Context fn cuStreamGetCaptureInfo(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        _id: *mut cuuint64_t,
        graph: *mut CUgraph,
        _nodes: *mut *const CUgraphNode,
        _count: *mut usize,
    ) {
        let mut queues = gpu::queues();
        let number = queues.get(stream)?.capture.as_ref().map(|captured| captured.number);
        let (is_active, number) = (number.is_some(), number.unwrap_or_default());
        write_output(graph, ptr::without_provenance_mut(number))?;
        write_output(status, if is_active {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        } else {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
        })
    }

    Context fn cuUserObjectCreate(
        object: *mut CUuserObject,
        value: *mut c_void,
        destroy: CUhostFn,
        _references: c_uint,
        _flags: c_uint,
    ) {
        let mut graphs = graphs();
        let number = graphs.new_handle();
        graphs.objects.insert(number, UserObject { address: value.expose_provenance(), destroy });
        write_output(object, ptr::without_provenance_mut(number))
    }

    Context fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, _count: c_uint, _flags: c_uint) {
        let mut queues = gpu::queues();
        let captured = queues.capture_in_progress(graph.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let object = graphs().objects.remove(&object.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        captured.objects.push(object);
        Ok(())
    }

    Context fn cuGraphInstantiateWithFlags(ready: *mut CUgraphExec, graph: CUgraph, _flags: c_ulonglong) {
        let mut graphs = graphs();
        let captured = graphs.captured.get(&graph.addr()).map(Arc::clone);
        let captured = captured.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let number = graphs.new_handle();
        graphs.ready.insert(number, captured);
        write_output(ready, ptr::without_provenance_mut(number))
    }

    Context fn cuGraphLaunch(graph: CUgraphExec, stream: CUstream) {
        let ready = graphs().ready.get(&graph.addr()).map(Arc::clone);
        for op in ready.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.ops.iter() {
            enqueue(stream, op.clone())?;
        }
        Ok(())
    }

    Context fn cuGraphExecDestroy(graph: CUgraphExec) {
        graphs().ready.remove(&graph.addr()).map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    Init fn cuGraphDestroy(graph: CUgraph) {
        graphs().captured.remove(&graph.addr()).map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
