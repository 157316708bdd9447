//! Creates objects, at once in an arena or as soon as there is memory, and holds the requests that wait for memory.
//!
//! ```text
//!   create --> begin --+--> in an arena, or in preallocated memory ------------> answered
//!                      |
//!                      +--> waits for an allocation of its own --- allocated --> answered
//!                      +--> waits for an arena of its place ------- allocated --> begin again
//!                      +--> waits for pins of deleted objects ----- scanned ----> begin again
//! ```
//!
//! Any number of requests may wait for the same event. A step resumes a bounded number of them, users round-robin, and the
//! following steps resume the others: while there are any, [`Creation::is_ready`] requests another step at once.

mod adoption;
mod attempt;
#[cfg(test)]
mod tests;

use attempt::{CreateProgress, begin, finish};

use super::interface::{Requester, ServerMemory};
use super::ledger::HOST;
use super::pending::{ArenaFailure, PendingMemory, PendingRequest};
use super::state::StoreState;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, SlotState};
use crate::protocol::frame::Payload;
use crate::protocol::{ByteRange, Label, Refusal, Request, RequestKind};
use crate::server::budget::Charge;

/// The maximum number of waiting requests that one step of the state machine resumes: of the requests for an arena of each place
/// (the host or a device), and of the requests that found the store full.
const MAX_RESUMED: usize = 8;

/// The number of copied bytes of small objects after which a step of the state machine resumes no further requests.
const MAX_COPIED: usize = 128 << 10;

/// The number of requests of departed clients, with their payloads, that one step of the state machine drops.
const MAX_DROPPED: usize = 8;

/// The requests to create objects that wait for memory.
#[derive(Debug, Default)]
pub(super) struct Creation {
    pending: PendingMemory,
}

impl Creation {
    /// Returns true if a request that waits for memory can be resumed or dropped now. `passes` is the number of completed scans
    /// of all pins, for which deferred requests wait.
    pub(super) fn is_ready(&self, passes: u64) -> bool {
        self.pending.is_ready() || self.pending.has_due(passes) || self.pending.has_abandoned()
    }

    /// Removes the requests of a client that has left from the requests that wait for memory.
    pub(super) fn forget_client(&mut self, client: ClientId) {
        self.pending.forget_client(client);
    }

    /// Drops some requests of departed clients that waited for memory.
    pub(super) fn trim(&mut self) {
        self.pending.trim(MAX_DROPPED);
    }

    /// Creates an object or a pack (several objects in one memory): at once in an arena, or as soon as there is memory.
    pub(super) fn create<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
        server_memory: &mut impl ServerMemory,
    ) {
        let id = request.id;
        if self.is_known(store, client, id, request.resends != 0) {
            return;
        }
        let progress = match begin(store, client, &request, &payload, server_memory) {
            Ok(CreateProgress::Done) => return,
            Err(refusal) if !may_find_space(store, &refusal) => {
                return store.answer(client, id, Err(refusal));
            }
            progress => progress,
        };
        match PendingRequest::new(client, request, payload, charge, &store.sessions) {
            Ok(pending) => self.wait_for_memory(store, progress, pending, true),
            // The request is refused, because it cannot be charged to its client. Memory that is being allocated for it is
            // released when the allocation is ready.
            Err(refusal) => store.answer(client, id, Err(refusal)),
        }
    }

    /// Creates an object from memory that was sent with a request, as soon as the memory is checked and the keeper process has
    /// its descriptor.
    pub(super) fn adopt<C: Cells>(&mut self, store: &mut StoreState<C>, client: ClientId, request: Request) {
        let id = request.id;
        if self.is_known(store, client, id, request.resends != 0) {
            return;
        }
        let begun =
            request.check_server_deaths().and_then(|()| adoption::begin(store, client, &request.kind));
        let pending = begun.and_then(|allocation| {
            // If the request cannot be charged and so cannot wait, its memory is released after the check.
            let payload = Payload::default();
            Ok((allocation, PendingRequest::new(client, request, payload, None, &store.sessions)?))
        });
        match pending {
            Ok((allocation, pending)) => self.pending.wait_for_allocation(allocation, pending),
            Err(refusal) => store.answer(client, id, Err(refusal)),
        }
    }

    /// Creates another sealed object with a name that shares the bytes of an existing object, or a range of the memory region
    /// that was allocated for that object.
    pub(super) fn alias<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        (client, id, is_repeated): (ClientId, u64, bool),
        label: Label,
        object: ObjectId,
        part: Option<ByteRange>,
    ) {
        if self.is_known(store, client, id, is_repeated) {
            return;
        }
        let outcome = label.check().and_then(|()| {
            store.check_owner(client, &label.name)?;
            let record = match store.objects.read(object) {
                Some((SlotState::Sealed, record)) => record,
                Some((SlotState::Created, _)) => return Err(Refusal::NotSealed { object }),
                _ => return Err(Refusal::NoSuchObject { object }),
            };
            let own = ByteRange { offset: record.offset - record.region.offset, len: record.len };
            let part = part.unwrap_or(own);
            part.check(record.region.len)?;
            store.insert_part(client, id, label, record.region, part)
        });
        store.answer(client, id, outcome);
    }

    /// Returns true if a request that creates an object was received before: the request is answered now, or when its memory is
    /// ready. A client that uses an id for two different requests is refused.
    fn is_known<C: Cells>(
        &self,
        store: &mut StoreState<C>,
        client: ClientId,
        id: u64,
        is_repeated: bool,
    ) -> bool {
        match store.history.get(client, id) {
            // The client has sent the request again: the object was created before the server was replaced.
            Some(object) if is_repeated => store.answer_created(client, id, object),
            Some(_) => {
                let refusal = Refusal::malformed("a request has an id that was used before");
                store.answer(client, id, Err(refusal));
            }
            // The request has created no object yet: it was received before only if it is still waiting for memory.
            None => return self.pending.contains(client, id),
        }
        true
    }

    /// Makes a request wait for memory that is being allocated or, if `may_defer` is true, for the scan of the pins of deleted
    /// objects.
    fn wait_for_memory<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        progress: Result<CreateProgress, Refusal>,
        pending: PendingRequest,
        may_defer: bool,
    ) {
        let (client, id) = (pending.client, pending.request.id);
        let user = store.sessions.user_or_server(client);
        let refusal = match progress {
            Ok(CreateProgress::Done) => return,
            Ok(CreateProgress::NeedsAllocation(allocation)) => {
                return self.pending.wait_for_allocation(allocation, pending);
            }
            Ok(CreateProgress::NeedsArena { place, len }) => match self.allocate_arena(store, place, len) {
                Ok(()) => return self.pending.wait_for_arena(place, user, pending),
                Err(refusal) => refusal,
            },
            Err(refusal) => refusal,
        };
        if may_defer && may_find_space(store, &refusal) {
            return self.pending.wait_for_passes(store.retirement.passes_to_come(), user, pending);
        }
        store.answer(client, id, Err(refusal));
    }

    /// Starts to allocate an arena for at least `len` bytes, unless an arena of this place (the host or a device) is already
    /// being allocated.
    fn allocate_arena<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        place: u32,
        len: u64,
    ) -> Result<(), Refusal> {
        if self.pending.needs_arena(place) {
            let StoreState { memory, outputs, .. } = store;
            let allocation = memory.allocate(place, len, true, Requester::Everyone, outputs)?;
            self.pending.begin_arena(place, allocation);
        }
        Ok(())
    }

    /// Continues the requests that wait for an allocation whose memory is ready or could not be allocated.
    pub(super) fn allocated<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        allocation: AllocationId,
        outcome: Result<(), String>,
    ) {
        let StoreState { memory, outputs, now, .. } = store;
        if memory.preallocated(allocation, outcome.is_ok(), now.elapsed, outputs) {
            return;
        }
        let Some(record) = memory.ledger().record(allocation) else { return };
        if let Err(reason) = outcome {
            return self.allocation_failed(store, allocation, reason);
        }
        memory.ready(allocation, store.objects.index());
        if record.is_arena {
            // Requests that wait for the arena are resumed at the end of this step.
            return self.pending.finish_arena(record.place, Ok(()));
        }
        if let Some(pending) = self.pending.take(allocation) {
            finish(store, &pending, allocation);
        }
        // If the client has left while the memory was being allocated, the memory has no object and is released.
        store.memory.release_if_idle(allocation, store.objects.index(), &mut store.outputs);
    }

    fn allocation_failed<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        allocation: AllocationId,
        reason: String,
    ) {
        let Some(record) = store.memory.ledger().record(allocation) else { return };
        if record.place == HOST
            && let Some(requester) = self.requester(store, allocation, record.is_arena)
            && store.memory.may_retry(allocation, &mut store.outputs)
        {
            return store.memory.allocate_again(allocation, requester, &mut store.outputs);
        }
        store.memory.failed(allocation, &mut store.outputs);
        let len = record.len;
        if record.is_arena {
            self.pending.finish_arena(record.place, Err(ArenaFailure { len, reason }));
        } else if let Some(PendingRequest { client, request, .. }) = self.pending.take(allocation) {
            let refusal = match request.kind {
                RequestKind::Adopt { .. } => Refusal::CannotAdopt { len, reason },
                _ => Refusal::NoMemory { len, reason },
            };
            store.answer(client, request.id, Err(refusal));
        }
    }

    /// Returns the requester for whom a failed allocation may be tried again; `None` if the memory is adopted, if servers died
    /// during the request, or if the client has left.
    fn requester<C: Cells>(
        &self,
        store: &StoreState<C>,
        allocation: AllocationId,
        is_arena: bool,
    ) -> Option<Requester> {
        if is_arena {
            return Some(Requester::Everyone);
        }
        let pending = self.pending.waits_for(allocation)?;
        let is_allocated = !matches!(pending.request.kind, RequestKind::Adopt { .. })
            && pending.request.check_server_deaths().is_ok();
        is_allocated.then(|| store.sessions.requester(pending.client))
    }

    /// Resumes some of the requests that waited for memory and can continue.
    pub(super) fn resume<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        server_memory: &mut impl ServerMemory,
    ) {
        self.resume_deferred(store, server_memory);
        self.resume_small(store, server_memory);
    }

    /// Resumes requests that found no space, after the pins of deleted objects have been scanned.
    fn resume_deferred<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        server_memory: &mut impl ServerMemory,
    ) {
        for _ in 0..MAX_RESUMED {
            let Some(pending) = self.pending.pop_due(store.retirement.passes()) else { return };
            // The request is `None` if its client has left.
            if let Some(pending) = pending {
                let progress =
                    begin(store, pending.client, &pending.request, &pending.payload, server_memory);
                self.wait_for_memory(store, progress, pending, false);
            }
        }
    }

    /// Creates the small objects of waiting requests if an arena has space, or refuses the requests if their arena could not be
    /// allocated.
    fn resume_small<C: Cells>(&mut self, store: &mut StoreState<C>, server_memory: &mut impl ServerMemory) {
        for place in self.pending.ready_places() {
            let mut copied = 0;
            for _ in 0..MAX_RESUMED {
                let Some((user, pending)) = self.pending.pop(place) else { break };
                // The request is `None` if its client has left.
                if let Some(pending) = pending {
                    copied += pending.payload.len();
                    self.resume_one(store, (place, user), pending, server_memory);
                }
                if copied >= MAX_COPIED {
                    break;
                }
            }
            // If the clients that waited for the arena have left while it was being allocated, the arena is empty and may be
            // released.
            if let Some(arena) = self.pending.finish_round(place) {
                store.memory.release_if_idle(arena, store.objects.index(), &mut store.outputs);
            }
        }
    }

    fn resume_one<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        (place, user): (u32, u32),
        pending: PendingRequest,
        server_memory: &mut impl ServerMemory,
    ) {
        let (client, id) = (pending.client, pending.request.id);
        if let Some(ArenaFailure { len, reason }) = self.pending.failure(place).cloned() {
            return store.answer(client, id, Err(Refusal::NoMemory { len, reason }));
        }
        let outcome = match begin(store, client, &pending.request, &pending.payload, server_memory) {
            Ok(CreateProgress::Done) => return,
            Ok(CreateProgress::NeedsAllocation(_)) => {
                unreachable!("a small object has no allocation of its own")
            }
            Ok(CreateProgress::NeedsArena { place, len }) => self.allocate_arena(store, place, len),
            Err(refusal) => Err(refusal),
        };
        match outcome {
            Ok(()) => self.pending.requeue(place, user, pending),
            Err(refusal) => self.wait_for_memory(store, Err(refusal), pending, true),
        }
    }
}

/// Returns true if a refused request may find space after the pins of deleted objects have been scanned.
fn may_find_space<C: Cells>(store: &StoreState<C>, refusal: &Refusal) -> bool {
    let is_full = matches!(refusal, Refusal::OverQuota { .. } | Refusal::IndexFull { .. });
    is_full && store.retirement.is_active()
}
