//! The operands that enqueued work of a stream still uses.
//!
//! Recording an event with each operation would cost as much as the operation, so operands are gathered and one event
//! is recorded behind a batch of them. Events are used again once they have passed.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Backend, Device, Operand, Owned, Retired, Teardown};
use crate::Cause;
use crate::raw::{EventKind, RawEvent, RawStream};

/// How many operands share one event, and how much work.
const BATCH: usize = 32;
const WORKS: usize = 64;

/// Among how many of the last ones an operand is looked for before it is held once more.
const RECENT: usize = 16;

/// What the work of one stream still uses, oldest first.
#[derive(Debug, Default)]
pub(crate) struct InFlight {
    batches: VecDeque<Batch>,
    /// Operands of work behind the last event.
    open: Vec<Operand>,
    /// How much work that is.
    works: usize,
    /// Events that have passed.
    spare: Vec<Fence>,
}

/// Operands, and the event after which nothing uses them.
#[derive(Debug)]
struct Batch {
    fence: Fence,
    _operands: Vec<Operand>,
}

#[derive(Debug)]
struct Fence {
    event: RawEvent,
    _owned: Owned,
}

impl InFlight {
    /// Holds the operands of work that was just enqueued.
    ///
    /// If the event behind a full batch cannot be had, the batch just grows: nothing is let go early.
    pub(crate) fn hold(
        &mut self,
        device: &Device,
        stream: RawStream,
        operands: impl IntoIterator<Item = Operand>,
        is_borrowed: bool,
    ) {
        for operand in operands {
            // The same work again and again would fill a batch with the same operands. What is open is held until the
            // newest work is over.
            let recent = self.open.len().saturating_sub(RECENT);
            if !self.open[recent..].iter().any(|held| Arc::ptr_eq(held, &operand)) {
                self.open.push(operand);
            }
        }
        // A stream that is not ours may be gone when the next event is due, unless it is said to stay.
        self.works += 1;
        if is_borrowed || self.open.len() >= BATCH || self.works >= WORKS {
            self.reap(device.backend());
            if let Err(cause) = self.close(device, stream) {
                tracing::debug!(%cause, "no event behind a batch of work; keeping its operands longer");
            }
        }
    }

    /// Records an event behind what is open.
    fn close(&mut self, device: &Device, stream: RawStream) -> Result<(), Cause> {
        let queue = device.backend().queue();
        let fence = match self.spare.pop() {
            Some(fence) => fence,
            None => {
                // SAFETY: the device exists, and the caller checked that this is no forked child.
                let event = unsafe { queue.create_event(device.id(), EventKind::Order) }?;
                Fence { event, _owned: Owned::new(device.backend(), Teardown::DestroyEvent(event)) }
            }
        };
        // SAFETY: the event is ours and nobody waits for an older record of it; the stream is the caller's.
        unsafe { queue.record(fence.event, stream) }?;
        self.works = 0;
        self.batches.push_back(Batch { fence, _operands: std::mem::take(&mut self.open) });
        Ok(())
    }

    /// Lets go of what finished work used.
    pub(crate) fn reap(&mut self, backend: &Backend) {
        while let Some(batch) = self.batches.front() {
            // SAFETY: the event is live, the batch holds it.
            match unsafe { backend.queue().is_done(batch.fence.event) } {
                Ok(true) => self.spare.extend(self.batches.pop_front().map(|batch| batch.fence)),
                Ok(false) => break,
                Err(cause) => {
                    tracing::debug!(%cause, "cannot tell whether work is over; keeping its operands");
                    break;
                }
            }
        }
    }

    /// Lets go of everything: the stream was seen to be idle.
    pub(crate) fn clear(&mut self) {
        self.open.clear();
        self.works = 0;
        self.spare.extend(self.batches.drain(..).map(|batch| batch.fence));
    }

    /// Takes in what was enqueued before.
    pub(crate) fn prepend(&mut self, mut earlier: Self) {
        std::mem::swap(&mut self.batches, &mut earlier.batches);
        self.batches.append(&mut earlier.batches);
        // Behind the next event instead of an earlier one: held longer, never shorter.
        self.open.append(&mut earlier.open);
        self.works += earlier.works;
        self.spare.append(&mut earlier.spare);
    }
}

impl Drop for InFlight {
    /// What is still in here may still be in use: only a panic, in a host kernel, leads here before the work is over.
    fn drop(&mut self) {
        let (batches, open) = (std::mem::take(&mut self.batches), std::mem::take(&mut self.open));
        if !batches.is_empty() || !open.is_empty() {
            tracing::warn!("leaking what unfinished work of a stream uses");
            std::mem::forget((batches, open));
        }
    }
}

/// The operands of work that the owner of a borrowed stream records: the owner's graph holds them for as long as it can be
/// launched.
#[derive(Debug)]
pub(crate) struct Recorded {
    backend: Backend,
    operands: Vec<Operand>,
}

impl Recorded {
    pub(crate) fn new(backend: &Backend, operands: impl IntoIterator<Item = Operand>) -> Self {
        Self { backend: backend.clone(), operands: operands.into_iter().collect() }
    }
}

impl Drop for Recorded {
    /// Usually runs in a thread of the driver, which must not call the driver: the operands are retired, and the next
    /// teardown in another thread gives them back.
    fn drop(&mut self) {
        self.backend.retire(Retired::Recorded(std::mem::take(&mut self.operands)));
    }
}

/// A stream whose last handle was dropped, and what its work may still be using. Both are released when the work is over.
#[derive(Debug)]
pub(crate) struct Drain {
    pub(crate) device: Device,
    pub(crate) raw: RawStream,
    pub(crate) in_flight: InFlight,
    pub(crate) _owned: Option<Owned>,
}

impl Drain {
    /// Looks whether the work is over, without waiting for it.
    pub(crate) fn is_over(&mut self) -> bool {
        let Self { device, raw, in_flight, .. } = self;
        if !in_flight.open.is_empty()
            && let Err(cause) = in_flight.close(device, *raw)
        {
            tracing::debug!(%cause, "no event behind the last work of a stream; keeping its operands longer");
            return false;
        }
        in_flight.reap(device.backend());
        in_flight.batches.is_empty()
    }
}
