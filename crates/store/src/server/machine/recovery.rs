//! A server that takes over from one that died: the state is derived from the index, and unfinished operations are
//! completed or undone.
//!
//! Every operation has one store that commits it. Where that store was made, what follows from it is done now; where it was
//! not, what came before it is undone. Recovery may be interrupted at any store and begun again.

use std::collections::{BTreeMap, BTreeSet};

use super::interface::{Now, Output, ServerMemory, Settings};
use super::server::Server;
use super::state::StoreState;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, SlotState};
use crate::index::{Index, ObjectRecord};
use crate::protocol::Answer;
use crate::server::budget::Account;

/// What the keeper had, besides the index.
#[derive(Debug, Default)]
pub(crate) struct Survivors {
    /// Memory.
    pub(crate) allocations: BTreeSet<AllocationId>,
    /// Clients, with their accounts.
    pub(crate) clients: BTreeMap<ClientId, Account>,
}

impl<C: Cells> Server<C> {
    /// Takes over an index, which may be new. Returns the server, and what is to be done.
    pub(crate) fn recover(
        index: Index<C>,
        settings: &Settings,
        survivors: &Survivors,
        now: Now,
        server_memory: &mut impl ServerMemory,
    ) -> (Self, Vec<Output>) {
        index.begin_epoch();
        let mut state = StoreState::new(index, settings, now);
        let is_there = |id| survivors.allocations.contains(&id);
        state.memory.recover(state.objects.index(), is_there);
        recover_objects(&mut state, survivors);
        for replaced in state.objects.recover_names() {
            state.retire(replaced);
        }
        release_idle(&mut state, survivors);
        for (client, account) in &survivors.clients {
            state.sessions.take_over(*client, account.clone());
            state.answer(*client, 0, Ok(Answer::Restarted));
        }
        recover_drafts(&mut state);
        state.scan_pins(server_memory);
        let outputs = state.outputs.take();
        (Self::new(state), outputs)
    }
}

/// Enters every object that can be kept, in the state that its pack has.
fn recover_objects<C: Cells>(state: &mut StoreState<C>, survivors: &Survivors) {
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
    state.history.retain(|client| survivors.clients.contains_key(&client));
}

/// Enters an object in the state that its pack has. Returns whether it can be kept.
fn recover_object<C: Cells>(
    state: &mut StoreState<C>,
    id: ObjectId,
    found: SlotState,
    record: &ObjectRecord,
) -> bool {
    let first = record.pack.filter(|first| *first != id);
    let recovered = match first.map(|first| state.objects.state(first)) {
        // The pack was never committed.
        Some(None) => return false,
        Some(Some(SlotState::Deleted)) if found != SlotState::Deleted => SlotState::Deleted,
        Some(Some(SlotState::Sealed)) if found == SlotState::Created => SlotState::Sealed,
        _ => found,
    };
    if !state.memory.recover_region(record.region) {
        tracing::error!(%id, name = record.name, "an object is lost with its memory");
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

/// Releases memory in which no object lies, and memory that the index does not list.
fn release_idle<C: Cells>(state: &mut StoreState<C>, survivors: &Survivors) {
    let StoreState { objects, memory, outputs, .. } = state;
    for id in memory.ledger().allocations().collect::<Vec<_>>() {
        memory.release_if_idle(id, objects.index(), outputs);
    }
    let released: BTreeSet<_> = outputs.released().collect();
    for id in survivors.allocations.difference(&released) {
        if objects.index().allocation(*id).is_none() {
            outputs.push(Output::Release { allocation: *id });
        }
    }
}

/// Gives drafts back to their clients, and deletes those whose clients have left. An object that was deleted before it was
/// sealed is a draft too: it has no version.
fn recover_drafts<C: Cells>(state: &mut StoreState<C>) {
    let is_draft =
        |state, version| state == SlotState::Created || state == SlotState::Deleted && version == 0;
    let index = state.objects.index();
    let drafts = index.objects().filter(|(_, state, record)| is_draft(*state, record.version));
    let drafts: Vec<_> = drafts.map(|(id, state, record)| (id, state, record.client, record.pack)).collect();
    for (id, found, client, pack) in drafts {
        if found == SlotState::Created {
            // The server before may have begun to seal it.
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
