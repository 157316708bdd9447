//! One attempt to create an object or a pack: it is entered if there is memory for it, and otherwise the memory that it
//! needs is named or requested.

use super::adoption;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, SlotState};
use crate::protocol::{Refusal, Request, RequestKind};
use crate::server::machine::interface::{Output, ServerMemory};
use crate::server::machine::ledger::HOST;
use crate::server::machine::pending::PendingRequest;
use crate::server::machine::plan::Plan;
use crate::server::machine::state::StoreState;

/// How far a request to create something has come.
#[derive(Debug)]
pub(super) enum Progress {
    Done,
    /// It continues when this memory is ready.
    NeedsAllocation(AllocationId),
    /// It continues when an arena of this place has room for so many bytes.
    NeedsArena {
        place: u32,
        len: u64,
    },
}

/// Processes a request to create something, or returns what memory it needs first.
pub(super) fn begin<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    request: &Request,
    payload: &[u8],
    server_memory: &mut impl ServerMemory,
) -> Result<Progress, Refusal> {
    let plan = Plan::new(&request.kind)?;
    for name in plan.names() {
        store.check_owner(client, name)?;
    }
    let ledger = store.memory.ledger();
    ledger.check_place(plan.place)?;
    store.objects.check_room(plan.count())?;
    let is_small = plan.len < ledger.terms(plan.place).small;
    let brings_bytes = plan.place == HOST && is_small;
    if payload.len() as u64 != if brings_bytes { plan.len } else { 0 } {
        return Err(Refusal::malformed("small host objects bring their bytes along, and others bring none"));
    }
    if !is_small {
        return begin_large(store, client, request, &plan);
    }
    let Some(region) = store.memory.carve(plan.place, plan.len) else {
        request.check_server_deaths()?;
        return Ok(Progress::NeedsArena { place: plan.place, len: plan.len });
    };
    if brings_bytes && !server_memory.write(region.allocation, region.offset, payload) {
        store.memory.return_region(region);
        let reason = "the arena cannot be mapped".to_owned();
        return Err(Refusal::NoMemory { len: plan.len, reason });
    }
    let state = if brings_bytes { SlotState::Sealed } else { SlotState::Created };
    let object = store.insert(client, request.id, &plan, region, state);
    store.answer_created(client, request.id, object);
    Ok(Progress::Done)
}

/// Creates a large object in preallocated memory, or has memory allocated for it.
fn begin_large<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    request: &Request,
    plan: &Plan<'_>,
) -> Result<Progress, Refusal> {
    let StoreState { objects, memory, sessions, outputs, .. } = store;
    let Some((allocation, is_ready)) = memory.take_preallocated(plan.place, plan.len) else {
        request.check_server_deaths()?;
        let requester = sessions.requester(client);
        let allocation = memory.allocate(plan.place, plan.len, false, requester, outputs)?;
        return Ok(Progress::NeedsAllocation(allocation));
    };
    if !is_ready {
        outputs.push(Output::Promote { allocation, user: sessions.user_or_server(client) });
        return Ok(Progress::NeedsAllocation(allocation));
    }
    memory.ready(allocation, objects.index());
    fill(store, client, request, plan, allocation);
    Ok(Progress::Done)
}

/// Enters a large object that has an allocation to itself.
fn fill<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    request: &Request,
    plan: &Plan<'_>,
    allocation: AllocationId,
) {
    let region = store.memory.ledger().whole(allocation).expect("memory that is ready is in the ledger");
    let object = store.insert(client, request.id, plan, region, SlotState::Created);
    store.answer_created(client, request.id, object);
}

/// Enters what a request creates in memory that is ready now.
pub(super) fn finish<C: Cells>(
    store: &mut StoreState<C>,
    pending: &PendingRequest,
    allocation: AllocationId,
) {
    let PendingRequest { client, request, .. } = pending;
    if matches!(request.kind, RequestKind::Adopt { .. }) {
        adoption::finish(store, pending, allocation);
    } else {
        let plan = Plan::new(&request.kind).expect("a request waits for memory only if it has a plan");
        match store.objects.check_room(plan.count()) {
            Ok(()) => fill(store, *client, request, &plan, allocation),
            Err(refusal) => store.answer(*client, request.id, Err(refusal)),
        }
    }
}
