//! Keeps the operands of enqueued work (the memory and other resources that it uses) alive until the work has run.
//!
//! One event per operation would cost as much as the operation, so one event is recorded after a batch of operations. Completed
//! events are reused.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Backend, Device, Operand, OwnedResource, Retired, Teardown};
use crate::BackendError;
use crate::raw::{EventKind, RawEvent, RawStream};

/// The maximum numbers of operands and of operations in a batch of enqueued work. After a batch, an event is recorded.
const BATCH_OPERANDS: usize = 32;
const BATCH_OPERATIONS: usize = 64;

/// The number of most recent operands that `hold` searches for duplicates.
const RECENT: usize = 16;

/// The operands of the unfinished work of one stream, oldest first.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    batches: VecDeque<OperandBatch>,
    /// The operands of work that was enqueued on the stream after the last event.
    open: Vec<Operand>,
    /// The number of operations that were enqueued on the stream after the last event.
    operations: usize,
    /// Completed events, which are reused for later batches of work.
    spare: Vec<Fence>,
}

/// The operands of a batch of work, and the event that completes after their last use.
#[derive(Debug)]
struct OperandBatch {
    fence: Fence,
    _operands: Vec<Operand>,
}

#[derive(Debug)]
struct Fence {
    event: RawEvent,
    _owned: OwnedResource,
}

impl InFlight {
    /// Keeps the operands of work that was just enqueued on a stream alive.
    ///
    /// If no event can be recorded after a full batch, the batch grows; no operand is released early.
    pub(crate) fn hold(
        &mut self,
        device: &Device,
        stream: RawStream,
        operands: impl IntoIterator<Item = Operand>,
        is_borrowed: bool,
    ) {
        for operand in operands {
            // Repeated work has the same operands. All operands since the last event are held until the newest of that work has
            // finished, so one reference to each operand is enough.
            let recent = self.open.len().saturating_sub(RECENT);
            if !self.open[recent..].iter().any(|held| Arc::ptr_eq(held, &operand)) {
                self.open.push(operand);
            }
        }
        // The owner of a borrowed stream may destroy it before a batch is full, so an event is recorded now.
        self.operations += 1;
        if is_borrowed || self.open.len() >= BATCH_OPERANDS || self.operations >= BATCH_OPERATIONS {
            self.reap(device.backend());
            if let Err(cause) = self.close(device, stream) {
                tracing::debug!(%cause, "cannot record an event after a batch of work; holding its operands longer");
            }
        }
    }

    /// Records an event after the work that was enqueued since the last event, and closes the batch of operands of that work.
    fn close(&mut self, device: &Device, stream: RawStream) -> Result<(), BackendError> {
        let queue = device.backend().queue();
        let fence = match self.spare.pop() {
            Some(fence) => fence,
            None => {
                // SAFETY: the device exists, and the callers have checked that the process is not a forked child.
                let event = unsafe { queue.create_event(device.id(), EventKind::Order) }?;
                Fence { event, _owned: OwnedResource::new(device.backend(), Teardown::DestroyEvent(event)) }
            }
        };
        // SAFETY: this stream owns the event, and no thread waits for an older record of it; the callers guarantee that the
        // stream is live.
        unsafe { queue.record(fence.event, stream) }?;
        self.operations = 0;
        self.batches.push_back(OperandBatch { fence, _operands: std::mem::take(&mut self.open) });
        Ok(())
    }

    /// Releases the operands of work that has finished.
    pub(crate) fn reap(&mut self, backend: &Backend) {
        while let Some(batch) = self.batches.front() {
            // SAFETY: the event is live, since the batch owns it.
            match unsafe { backend.queue().is_done(batch.fence.event) } {
                Ok(true) => self.spare.extend(self.batches.pop_front().map(|batch| batch.fence)),
                Ok(false) => break,
                Err(cause) => {
                    tracing::debug!(%cause, "cannot query whether work has finished; holding its operands");
                    break;
                }
            }
        }
    }

    /// Releases all operands of the stream's work. The caller has observed that the stream is idle.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
        self.operations = 0;
        self.spare.extend(self.batches.drain(..).map(|batch| batch.fence));
    }

    /// Adds the operands of earlier work of the stream before those that are held now.
    pub(crate) fn prepend(&mut self, mut earlier: Self) {
        std::mem::swap(&mut self.batches, &mut earlier.batches);
        self.batches.append(&mut earlier.batches);
        // The operands that follow the last event of the earlier work are released after the next event, which is later than
        // necessary but never too early.
        self.open.append(&mut earlier.open);
        self.operations += earlier.operations;
        self.spare.append(&mut earlier.spare);
    }
}

impl Drop for InFlight {
    /// Leaks the operands of unfinished work. Only a panic in a host kernel drops this value before the work has finished.
    fn drop(&mut self) {
        let (batches, open) = (std::mem::take(&mut self.batches), std::mem::take(&mut self.open));
        if !batches.is_empty() || !open.is_empty() {
            tracing::warn!("leaking the operands of unfinished work of a stream");
            std::mem::forget((batches, open));
        }
    }
}

/// The operands of work that the owner of a borrowed stream captures. The owner's graph holds them while it can be launched.
#[derive(Debug)]
pub(crate) struct CapturedOperands {
    backend: Backend,
    operands: Vec<Operand>,
}

impl CapturedOperands {
    pub(crate) fn new(backend: &Backend, operands: impl IntoIterator<Item = Operand>) -> Self {
        Self { backend: backend.clone(), operands: operands.into_iter().collect() }
    }
}

impl Drop for CapturedOperands {
    /// Retires the operands: the next teardown on another thread releases them. The driver usually drops this value in one of its
    /// own threads, which must not call the driver.
    fn drop(&mut self) {
        self.backend.retire(Retired::CapturedOperands(std::mem::take(&mut self.operands)));
    }
}

/// A stream whose last handle was dropped, with the operands of its unfinished work. Both are released when the work has
/// finished.
#[derive(Debug)]
pub(crate) struct DrainingStream {
    pub(crate) device: Device,
    pub(crate) raw: RawStream,
    pub(crate) in_flight: InFlight,
    pub(crate) _owned: Option<OwnedResource>,
}

impl DrainingStream {
    /// Returns whether the work of the dropped stream has finished, without waiting for it.
    pub(crate) fn has_finished(&mut self) -> bool {
        let Self { device, raw, in_flight, .. } = self;
        if !in_flight.open.is_empty()
            && let Err(cause) = in_flight.close(device, *raw)
        {
            tracing::debug!(%cause, "cannot record an event after the last work of a stream; holding its operands longer");
            return false;
        }
        in_flight.reap(device.backend());
        in_flight.batches.is_empty()
    }
}
