//! Stream capture: recording enqueued work into a graph, by this crate or by the owner of a borrowed stream.

use super::stream::StreamOwner;
use super::{Graph, Stream};
use crate::raw::RawCapture;
use crate::{Attempt, BackendError, Error, Result};

impl Stream {
    /// Returns whether work that is enqueued on the stream is currently [captured](Self::capture) instead of run, by
    /// this crate or by other code.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.core.state().capture.is_some()
            || self.captured_elsewhere().is_ok_and(|capture| capture.is_some())
    }

    /// Returns the capture that the owner of a borrowed stream has begun, if there is one.
    pub(super) fn captured_elsewhere(&self) -> Result<Option<RawCapture>, BackendError> {
        if matches!(self.core.owner, StreamOwner::OwnedResource(_)) {
            return Ok(None);
        }
        // SAFETY: the stream is live, as the caller of `from_foreign` or `from_foreign_static` guaranteed.
        unsafe { self.device().backend().queue().capture_of(self.core.raw) }
    }

    /// Captures the work that the closure `work` enqueues on this stream into a graph, instead of running it.
    ///
    /// Work that other threads enqueue on the stream meanwhile is captured too, or fails.
    ///
    /// # Errors
    /// [`Error::Capturing`] inside another capture; the error of `work`; [`Error::Failed`].
    #[doc(alias = "cuStreamBeginCapture")]
    pub fn capture(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        let backend = self.device().backend();
        backend.check_fork(|| Attempt::Capture)?;
        {
            let mut state = self.core.state();
            if state.capture.is_some() {
                return Err(Error::Capturing { attempt: Attempt::Capture });
            }
            // SAFETY: the stream is live, and this crate is not capturing it; the driver refuses a stream that its
            // owner is capturing.
            unsafe { backend.queue().begin_capture(self.core.raw) }
                .map_err(|cause| backend.to_error(self.device().id(), Attempt::Capture, cause))?;
            state.capture = Some(Vec::new());
        }
        // `EndCapture` also ends the capture if `work` panics; otherwise the stream would stay in capture mode.
        let capture = EndCapture { stream: self };
        let result = work(self);
        let graph = capture.end();
        result.and(graph)
    }
}

/// Ends the capture of a stream, on drop or explicitly with a result.
struct EndCapture<'a> {
    stream: &'a Stream,
}

impl EndCapture<'_> {
    fn end(self) -> Result<Graph> {
        let stream = self.stream;
        std::mem::forget(self);
        Self::finish(stream)
    }

    fn finish(stream: &Stream) -> Result<Graph> {
        let (backend, device) = (stream.device().backend(), stream.device());
        // The closure `work` may have forked: in a child, the capture belongs to the parent.
        backend.check_fork(|| Attempt::Capture)?;
        let (operands, checks, raw) = {
            // The stream stays locked until the capture has ended. Otherwise another thread could add work to the graph
            // after the operands have been taken, and the graph would not hold the operands of that work.
            let mut state = stream.core.state();
            let operands = state.capture.take().expect("only this value ends the capture");
            let checks = std::mem::take(&mut state.checks);
            // SAFETY: the stream is live and being captured: this `EndCapture` was created when the capture began,
            // and ends it once.
            (operands, checks, unsafe { backend.queue().end_capture(stream.core.raw) })
        };
        let raw = raw.map_err(|cause| backend.to_error(device.id(), Attempt::Capture, cause))?;
        Ok(Graph::own(device, raw, operands, checks))
    }
}

impl Drop for EndCapture<'_> {
    fn drop(&mut self) {
        // The result of the capture is ignored, since a panic is reported instead; the graph, if any, is dropped.
        let _ = Self::finish(self.stream);
    }
}
