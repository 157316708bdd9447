//! Streams, copies, fills, and graphs: work recorded once and enqueued many times.

use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_ulonglong, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bindings::*;
use crate::calls::{self, Answer, api, ensure, put};
use crate::gpu::{self, Op};
use crate::ranges;

const READ: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
const READ_WRITE: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// Recorded work by its handle, and whether it is ready to launch.
#[derive(Debug, Default)]
struct Graphs {
    last: usize,
    recorded: BTreeMap<usize, Arc<Recording>>,
    ready: BTreeMap<usize, Arc<Recording>>,
    /// What no graph keeps yet.
    objects: BTreeMap<usize, UserObject>,
}

/// Work that is being recorded, or was.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    number: usize,
    pub(crate) ops: Vec<Op>,
    kept: Vec<UserObject>,
}

/// Something that goes with the last graph that keeps it.
#[derive(Debug)]
struct UserObject {
    address: usize,
    destroy: CUhostFn,
}

impl Drop for UserObject {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: who made the object gave both, for this one call.
            unsafe { destroy(ptr::with_exposed_provenance_mut(self.address)) };
        }
    }
}

fn graphs() -> MutexGuard<'static, Graphs> {
    static GRAPHS: Mutex<Graphs> = Mutex::new(Graphs {
        last: 0x6000,
        recorded: BTreeMap::new(),
        ready: BTreeMap::new(),
        objects: BTreeMap::new(),
    });
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graphs {
    fn number(&mut self) -> usize {
        self.last += 0x10;
        self.last
    }
}

impl gpu::Queues {
    /// The recording of a number that is being made.
    fn recording(&mut self, number: usize) -> Option<&mut Recording> {
        self.streams
            .values_mut()
            .filter_map(|queue| queue.capture.as_mut())
            .find(|made| made.number == number)
    }
}

pub(crate) fn graph_count() -> u64 {
    let graphs = graphs();
    (graphs.recorded.len() + graphs.ready.len() + graphs.objects.len()) as u64
}

/// Enqueues work on a stream of the current context's device.
pub(crate) fn enqueue(stream: CUstream, op: Op) -> Answer {
    let mut queues = gpu::queues();
    let queue = queues.get(stream)?;
    ensure(queue.device == calls::current()?, CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    queue.push(op);
    gpu::wake();
    Ok(())
}

/// The device of a stream.
pub(crate) fn device_of(stream: CUstream) -> Result<CUdevice, CUresult> {
    Ok(gpu::queues().get(stream)?.device)
}

api! {
    Context fn cuStreamCreate(stream: *mut CUstream, _flags: c_uint) {
        let number = gpu::queues().create(calls::current()?);
        put(stream, ptr::without_provenance_mut(number as usize))
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
        queue.capture = Some(Recording { number: graphs().number(), ..Recording::default() });
        Ok(())
    }

    // A capture ends whatever the answer. The stream knows its context, so none has to be current.
    Late fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let recorded = gpu::queues().get(stream)?.capture.take();
        let recorded = recorded.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        put(graph, ptr::null_mut())?;
        calls::pass("cuStreamEndCapture\0")?;
        let number = recorded.number;
        graphs().recorded.insert(number, Arc::new(recorded));
        put(graph, ptr::without_provenance_mut(number))
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
        let made = queues.get(stream)?.capture.as_ref().map(|recording| recording.number);
        let (is_made, number) = (made.is_some(), made.unwrap_or_default());
        put(graph, ptr::without_provenance_mut(number))?;
        put(status, if is_made {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE
        } else {
            CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
        })
    }

    Context fn cuUserObjectCreate(
        object: *mut CUuserObject,
        kept: *mut c_void,
        destroy: CUhostFn,
        _references: c_uint,
        _flags: c_uint,
    ) {
        let mut graphs = graphs();
        let number = graphs.number();
        graphs.objects.insert(number, UserObject { address: kept.expose_provenance(), destroy });
        put(object, ptr::without_provenance_mut(number))
    }

    Context fn cuGraphRetainUserObject(graph: CUgraph, object: CUuserObject, _count: c_uint, _flags: c_uint) {
        let mut queues = gpu::queues();
        let recording = queues.recording(graph.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let object = graphs().objects.remove(&object.addr()).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        recording.kept.push(object);
        Ok(())
    }

    Context fn cuGraphInstantiateWithFlags(ready: *mut CUgraphExec, graph: CUgraph, _flags: c_ulonglong) {
        let mut graphs = graphs();
        let recorded = graphs.recorded.get(&graph.addr()).map(Arc::clone);
        let recorded = recorded.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let number = graphs.number();
        graphs.ready.insert(number, recorded);
        put(ready, ptr::without_provenance_mut(number))
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
        graphs().recorded.remove(&graph.addr()).map(drop).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
