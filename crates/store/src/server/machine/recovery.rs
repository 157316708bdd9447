//! Recovery: derives the state of a new server from the index of the previous one, and completes or undoes unfinished operations.
//!
//! Every operation has one store that commits it. If that store was made, its consequences are completed now; if not, earlier
//! stores of the operation are undone. Recovery may be interrupted at any store and started again.

use std::collections::{BTreeMap, BTreeSet};

use super::interface::{Output, ServerMemory, ServerSettings, StepTime};
use super::server::Server;
use super::state::StoreState;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, SlotState};
use crate::index::{ObjectIndex, ObjectRecord};
use crate::protocol::Answer;
use crate::server::budget::Account;

/// The resources that the keeper process held when the previous server died, besides the index.
#[derive(Debug, Default)]
pub(crate) struct InheritedState {
    /// The allocations whose memory the keeper process holds.
    pub(crate) allocations: BTreeSet<AllocationId>,
    /// The connected clients, with the accounts to which their resources are charged.
    pub(crate) clients: BTreeMap<ClientId, Account>,
}

impl<C: Cells> Server<C> {
    /// Takes over an index, which may be new, as the next server of a store. Returns the server, and the outputs of the recovery.
    pub(crate) fn recover(
        index: ObjectIndex<C>,
        settings: &ServerSettings,
        inherited: &InheritedState,
        now: StepTime,
        server_memory: &mut impl ServerMemory,
    ) -> (Self, Vec<Output>) {
        index.begin_epoch();
        let mut state = StoreState::new(index, settings, now);
        let exists = |id| inherited.allocations.contains(&id);
        state.memory.recover(state.objects.index(), exists);
        recover_objects(&mut state, inherited);
        for replaced in state.objects.recover_names() {
            state.retire(replaced);
        }
        release_idle(&mut state, inherited);
        for (client, account) in &inherited.clients {
            state.sessions.take_over(*client, account.clone());
            state.answer(*client, 0, Ok(Answer::Restarted));
        }
        recover_drafts(&mut state);
        state.scan_pins(server_memory);
        let outputs = state.outputs.take();
        (Self::new(state), outputs)
    }
}

/// Recovers every object of the index that can be recovered. An object of a pack gets the state of the pack.
fn recover_objects<C: Cells>(state: &mut StoreState<C>, inherited: &InheritedState) {
    for slot in 0..state.objects.index().used_slots() {
        let word = state.objects.index().word(slot);
        if word.state == SlotState::Free {
            state.objects.recover_free_slot(slot, word.generation);
            continue;
        }
        let id = ObjectId::new(slot, word.generation);
        let found = state.objects.read(id);
        if !found.is_some_and(|(found, record)| recover_object(state, id, found, &record)) {
            state.objects.recover_lost(id);
        }
    }
    state.history.retain(|client| inherited.clients.contains_key(&client));
}

/// Recovers an object of the index in the state of its pack. Returns false if the object cannot be recovered.
fn recover_object<C: Cells>(
    state: &mut StoreState<C>,
    id: ObjectId,
    found: SlotState,
    record: &ObjectRecord,
) -> bool {
    let first = record.pack.filter(|first| *first != id);
    let recovered = match first.map(|first| state.objects.state(first)) {
        // The first object of the pack does not exist, so the pack was never committed.
        Some(None) => return false,
        Some(Some(SlotState::Deleted)) if found != SlotState::Deleted => SlotState::Deleted,
        Some(Some(SlotState::Sealed)) if found == SlotState::Created => SlotState::Sealed,
        _ => found,
    };
    if !state.memory.recover_region(record.region) {
        tracing::error!(%id, name = record.name, "an object is lost because its memory is invalid");
        return false;
    }
    state.objects.recover_object(id, recovered, record);
    if first.is_none() {
        state.history.insert(record.client, record.request, id);
    }
    if recovered == SlotState::Deleted && !state.objects.is_in_sealed_pack(id, record) {
        state.retirement.recover(id, record.pack.unwrap_or(id));
    }
    true
}

/// Releases memory that contains no objects, and memory that the index does not list.
fn release_idle<C: Cells>(state: &mut StoreState<C>, inherited: &InheritedState) {
    let StoreState { objects, memory, outputs, .. } = state;
    for id in memory.ledger().allocations().collect::<Vec<_>>() {
        memory.release_if_idle(id, objects.index(), outputs);
    }
    let released: BTreeSet<_> = outputs.released().collect();
    for id in inherited.allocations.difference(&released) {
        if objects.index().allocation(*id).is_none() {
            outputs.push(Output::Release { allocation: *id });
        }
    }
}

/// Assigns drafts (unsealed objects) to their clients, and deletes the drafts of clients that have left. An object that is marked
/// as deleted and has no version was deleted before it was sealed, so it is a draft too.
fn recover_drafts<C: Cells>(state: &mut StoreState<C>) {
    let is_draft =
        |state, version| state == SlotState::Created || state == SlotState::Deleted && version == 0;
    let index = state.objects.index();
    let drafts = index.objects().filter(|(_, state, record)| is_draft(*state, record.version));
    let drafts: Vec<_> = drafts.map(|(id, state, record)| (id, state, record.client, record.pack)).collect();
    for (id, found, client, pack) in drafts {
        if found == SlotState::Created {
            // The previous server may have begun to seal the draft, and set its version.
            state.objects.index().set_version(id, 0);
        }
        let is_first = pack.is_none_or(|first| first == id);
        match state.sessions.user(client) {
            Some(_) if is_first => state.sessions.add_draft(client, id),
            None if found == SlotState::Created => state.retire(id),
            _ => {}
        }
    }
}
