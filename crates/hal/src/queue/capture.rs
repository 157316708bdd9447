//! Recording what is enqueued on a stream instead of running it: here, or by whoever made the stream.

use super::stream::StreamOwner;
use super::{Graph, Stream};
use crate::raw::RawCapture;
use crate::{Attempt, Cause, Error, Result};

impl Stream {
    /// Whether what is enqueued now is [recorded](Self::capture) instead of run, by whomever.
    #[must_use]
    pub fn is_capturing(&self) -> bool {
        self.core.state().capture.is_some()
            || self.captured_elsewhere().is_ok_and(|capture| capture.is_some())
    }

    /// The capture that the owner of a borrowed stream has begun, if any.
    pub(super) fn captured_elsewhere(&self) -> Result<Option<RawCapture>, Cause> {
        if matches!(self.core.owner, StreamOwner::Owned(_)) {
            return Ok(None);
        }
        // SAFETY: the stream is live, as whoever named it has said.
        unsafe { self.device().backend().queue().capture_of(self.core.raw) }
    }

    /// Records what `work` enqueues on this stream, instead of running it.
    ///
    /// While it runs, what other threads enqueue on the stream is recorded too, or refused.
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
            // SAFETY: the stream is live, and is not being captured.
            unsafe { backend.queue().begin_capture(self.core.raw) }
                .map_err(|cause| backend.refused(self.device().id(), Attempt::Capture, cause))?;
            state.capture = Some(Vec::new());
        }
        // Ended also if `work` panics, or the stream would record for ever.
        let capture = EndCapture { stream: self };
        let result = work(self);
        let graph = capture.end();
        result.and(graph)
    }
}

/// Ends a capture, with an answer or without.
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
        // What was captured may have forked: the recording is the parent's.
        backend.check_fork(|| Attempt::Capture)?;
        let (operands, raw) = {
            // Under the lock, so that nothing is recorded once the operands have been taken.
            let mut state = stream.core.state();
            let operands =
                state.capture.take().expect("this value ends the capture, and there is one for each");
            // SAFETY: the stream is live and being captured: this value was made when the capture began, and ends it
            // once.
            (operands, unsafe { backend.queue().end_capture(stream.core.raw) })
        };
        let raw = raw.map_err(|cause| backend.refused(device.id(), Attempt::Capture, cause))?;
        Ok(Graph::own(device, raw, operands))
    }
}

impl Drop for EndCapture<'_> {
    fn drop(&mut self) {
        // The panic that brought us here is the news; the graph, if there is one, goes with it.
        let _ = Self::finish(self.stream);
    }
}
