//! Streams, copies, fills, and graphs: work recorded once and enqueued many times.

use std::collections::BTreeMap;
use std::ffi::{c_uchar, c_uint, c_ulonglong};
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
    recorded: BTreeMap<usize, Arc<Vec<Op>>>,
    ready: BTreeMap<usize, Arc<Vec<Op>>>,
}

fn graphs() -> MutexGuard<'static, Graphs> {
    static GRAPHS: Mutex<Graphs> =
        Mutex::new(Graphs { last: 0x6000, recorded: BTreeMap::new(), ready: BTreeMap::new() });
    GRAPHS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Graphs {
    fn number(&mut self) -> usize {
        self.last += 0x10;
        self.last
    }
}

pub(crate) fn graph_count() -> u64 {
    let graphs = graphs();
    (graphs.recorded.len() + graphs.ready.len()) as u64
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
        queue.capture = Some(Vec::new());
        Ok(())
    }

    // A capture ends whatever the answer. The stream knows its context, so none has to be current.
    Late fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let recorded = gpu::queues().get(stream)?.capture.take();
        let recorded = recorded.ok_or(CUresult::CUDA_ERROR_ILLEGAL_STATE)?;
        put(graph, ptr::null_mut())?;
        calls::pass("cuStreamEndCapture\0")?;
        let mut graphs = graphs();
        let number = graphs.number();
        graphs.recorded.insert(number, Arc::new(recorded));
        put(graph, ptr::without_provenance_mut(number))
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
        for op in ready.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?.iter() {
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
