//! Graphs: work that is captured once and launched many times.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use wholemem::{CaptureRecording, RecordedWindows};
use wholemem_hal::Graph;

use crate::argument::{Output, checked, invalid};
use crate::call::call;
use crate::communicator::{CommState, wm_communicator_t};
use crate::handle::handle_type;
use crate::last_error;
use crate::status::{WM_OK, wm_status_t};
use crate::symmetric::wm_symmetric_memory_t;

/// Work that was captured from a stream.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_graph_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A recording of the memory of captured collective calls.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_capture_recording_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A graph, and what it shares with its communicator.
#[derive(Debug)]
pub(crate) struct GraphObject {
    graph: Graph,
    state: Arc<CommState>,
}

/// A recording, or the windows that it has registered.
#[derive(Debug)]
pub(crate) struct RecordingObject {
    used: Mutex<RecordingState>,
}

#[derive(Debug)]
enum RecordingState {
    Active(CaptureRecording),
    Finished(RecordedWindows),
    /// The recording could not be finished.
    Failed,
}

handle_type!(wm_graph_t, GraphObject, Graph);
handle_type!(wm_capture_recording_t, RecordingObject, CaptureRecording);

/// A function of the program that enqueues the work to capture. It returns `WM_OK`, or the status with which the capture shall fail. It
/// must not throw.
pub type wm_capture_work_t =
    Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> wm_status_t>;

/// Captures the work that `work` enqueues on a stream into a graph, instead of running it: `work` is called once, with `data` and
/// `stream`, and passes `stream` to calls of the communicator. Nothing else must use the stream meanwhile.
///
/// Programs that capture with the functions of CUDA need no `wm_graph_t`: work on a stream that CUDA captures is captured too, and the
/// graph of CUDA keeps the operands alive that belong to the library. The default stream of CUDA cannot be captured. The caller frees
/// the graph with `wm_graph_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_graph_capture(
    communicator: wm_communicator_t,
    stream: *mut c_void,
    work: wm_capture_work_t,
    data: *mut c_void,
    graph: *mut wm_graph_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(graph, "graph") }?;
        let Some(work) = work else {
            checked(std::ptr::null_mut::<u8>(), "work")?;
            unreachable!("a null pointer is an error");
        };
        let state = Arc::clone(&*communicator.get()?);
        // SAFETY: `stream` is null or a stream of the communicator's device that exists, as the header requires.
        let captured = unsafe { state.stream(stream) };
        let mut failed = None;
        let result = captured.capture(|_| {
            // SAFETY: `work` is a function of the program, which accepts its own data, and does not throw.
            let status = unsafe { work(data, stream) };
            failed = (status != WM_OK).then_some(status);
            Ok(())
        });
        if let Some(status) = failed {
            return Err(last_error::take_with(status));
        }
        output.write(wm_graph_t::create(GraphObject { graph: result?, state })?);
        Ok(())
    })
}

/// Enqueues the work of a graph on a stream.
///
/// Returns `WM_ERROR_FREED` if memory that the work uses was freed after the capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_graph_launch(graph: wm_graph_t, stream: *mut c_void) -> wm_status_t {
    call(|| {
        let object = graph.get()?;
        // SAFETY: `stream` is null or a stream of the communicator's device that exists, as the header requires.
        let stream = unsafe { object.state.stream(stream) };
        Ok(object.graph.launch(&stream)?)
    })
}

/// Frees the handle of a graph. Launched work completes.
#[unsafe(no_mangle)]
pub extern "C" fn wm_graph_destroy(graph: wm_graph_t) -> wm_status_t {
    call(|| Ok(graph.free()?))
}

/// Starts to record the memory of collective calls that are captured, so that graphs are not staged: until the recording is finished,
/// captured calls use memory in place that is not registered. All ranks capture the same calls, and then call
/// `wm_capture_recording_finish`; before that, they must not launch the graphs.
///
/// Returns `WM_ERROR_RECORDING` if a recording exists. The caller frees the recording with `wm_capture_recording_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_capture_recording_start(
    symmetric: wm_symmetric_memory_t,
    recording: *mut wm_capture_recording_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(recording, "recording") }?;
        let active = RecordingState::Active(symmetric.get()?.symmetric.record_captures()?);
        output.write(wm_capture_recording_t::create(RecordingObject { used: Mutex::new(active) })?);
        Ok(())
    })
}

/// Ends a recording, registers the memory of the captured calls on all ranks, and returns how many buffers were registered. Collective.
/// Graphs may be launched afterwards. The memory of all ranks stays mapped until the recording is freed.
///
/// If it fails, the group is aborted, because the graphs cannot be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_capture_recording_finish(
    recording: wm_capture_recording_t,
    count: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(count, "count") }?;
        let object = recording.get()?;
        let mut used = object.used.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *used, RecordingState::Failed) {
            RecordingState::Active(active) => *used = RecordingState::Finished(active.finish()?),
            finished => *used = finished,
        }
        match &*used {
            RecordingState::Finished(windows) => output.write(windows.len() as u64),
            _ => return Err(invalid("the recording has failed")),
        }
        Ok(())
    })
}

/// Frees the handle of a recording. If it was not finished and a call was captured, the group is aborted, because the graph cannot be
/// used.
#[unsafe(no_mangle)]
pub extern "C" fn wm_capture_recording_destroy(recording: wm_capture_recording_t) -> wm_status_t {
    call(|| Ok(recording.free()?))
}
