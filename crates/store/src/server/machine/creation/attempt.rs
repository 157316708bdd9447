//! Attempts to create an object or a pack (several objects in one memory): creates it if there is memory, and otherwise returns
//! which memory is needed.

use super::adoption;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, SlotState};
use crate::protocol::{Refusal, Request, RequestKind};
use crate::server::machine::interface::{Output, ServerMemory};
use crate::server::machine::ledger::HOST;
use crate::server::machine::pending::PendingRequest;
use crate::server::machine::plan::CreatePlan;
use crate::server::machine::state::StoreState;

/// The result of an attempt to create an object.
#[derive(Debug)]
pub(super) enum CreateProgress {
    Done,
    /// The request continues when the memory of this allocation is ready.
    NeedsAllocation(AllocationId),
    /// The request continues when an arena of this place (the host or a device) has space for this many bytes.
    NeedsArena {
        place: u32,
        len: u64,
    },
}

/// Processes a request to create an object or a pack, or returns which memory the request needs first.
pub(super) fn begin<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    request: &Request,
    payload: &[u8],
    server_memory: &mut impl ServerMemory,
) -> Result<CreateProgress, Refusal> {
    let plan = CreatePlan::new(&request.kind)?;
    for name in plan.names() {
        store.check_owner(client, name)?;
    }
    let ledger = store.memory.ledger();
    ledger.check_place(plan.place)?;
    store.objects.check_slots(plan.count())?;
    let is_small = plan.len < ledger.policy(plan.place).small;
    let has_payload = plan.place == HOST && is_small;
    if payload.len() as u64 != if has_payload { plan.len } else { 0 } {
        return Err(Refusal::malformed(
            "a request has a payload if and only if it creates a small host object",
        ));
    }
    if !is_small {
        return begin_large(store, client, request, &plan);
    }
    let Some(region) = store.memory.carve(plan.place, plan.len) else {
        request.check_server_deaths()?;
        return Ok(CreateProgress::NeedsArena { place: plan.place, len: plan.len });
    };
    if has_payload && !server_memory.write(region.allocation, region.offset, payload) {
        store.memory.free_region(region);
        let reason = "the arena cannot be mapped".to_owned();
        return Err(Refusal::NoMemory { len: plan.len, reason });
    }
    let state = if has_payload { SlotState::Sealed } else { SlotState::Created };
    let object = store.insert(client, request.id, &plan, region, state);
    store.answer_created(client, request.id, object);
    Ok(CreateProgress::Done)
}

/// Creates a large object in preallocated memory, or starts to allocate memory for the object.
fn begin_large<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    request: &Request,
    plan: &CreatePlan<'_>,
) -> Result<CreateProgress, Refusal> {
    let StoreState { objects, memory, sessions, outputs, now, .. } = store;
    let Some((allocation, is_ready)) = memory.take_preallocated(plan.place, plan.len, now.elapsed) else {
        request.check_server_deaths()?;
        let requester = sessions.requester(client);
        let allocation = memory.allocate(plan.place, plan.len, false, requester, outputs)?;
        return Ok(CreateProgress::NeedsAllocation(allocation));
    };
    if !is_ready {
        outputs.push(Output::Promote { allocation, user: sessions.user_or_server(client) });
        return Ok(CreateProgress::NeedsAllocation(allocation));
    }
    memory.ready(allocation, objects.index());
    insert_large(store, client, request, plan, allocation);
    Ok(CreateProgress::Done)
}

/// Creates a large object in an allocation of its own, and answers the request.
fn insert_large<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    request: &Request,
    plan: &CreatePlan<'_>,
    allocation: AllocationId,
) {
    let region = store.memory.ledger().whole(allocation).expect("memory that is ready is in the ledger");
    let object = store.insert(client, request.id, plan, region, SlotState::Created);
    store.answer_created(client, request.id, object);
}

/// Creates the object of a request that waited for memory which is ready now.
pub(super) fn finish<C: Cells>(
    store: &mut StoreState<C>,
    pending: &PendingRequest,
    allocation: AllocationId,
) {
    let PendingRequest { client, request, .. } = pending;
    if matches!(request.kind, RequestKind::Adopt { .. }) {
        adoption::finish(store, pending, allocation);
    } else {
        let plan = CreatePlan::new(&request.kind).expect("a request waits for memory only if it has a plan");
        match store.objects.check_slots(plan.count()) {
            Ok(()) => insert_large(store, *client, request, &plan, allocation),
            Err(refusal) => store.answer(*client, request.id, Err(refusal)),
        }
    }
}
