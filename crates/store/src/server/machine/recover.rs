//! A server that takes over from one that died: what the index says is made true again.
//!
//! Every operation has one store that counts. Where that was made, what follows from it is done now; where it was not,
//! what came before it is undone. Both may be interrupted and begun again.

use std::collections::{BTreeMap, BTreeSet};

use super::ledger::Ledger;
use super::server::{Now, Output, Server, ServerMemory, Settings};
use super::slots::Slots;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, State};
use crate::index::{Index, Record};
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
    /// Takes over an index, which may be new, and says what is to be done about it.
    pub(crate) fn recover(
        index: Index<C>,
        settings: Settings,
        survivors: &Survivors,
        now: Now,
        server_memory: &mut impl ServerMemory,
    ) -> (Self, Vec<Output>) {
        index.begin_epoch();
        let slots = Slots::used_up_to(index.geometry().slots, index.used_slots());
        let used = (0..index.geometry().allocations)
            .rfind(|slot| index.allocation_word(*slot).encode() != 0)
            .map_or(0, |last| last + 1);
        let allocation_slots = Slots::used_up_to(index.geometry().allocations, used);
        let devices = u32::try_from(settings.devices.len()).unwrap_or(u32::MAX);
        let ledger = Ledger::new(settings.host, settings.device, devices, allocation_slots);
        let mut server = Self::empty(index, settings, ledger, slots);
        server.now = now;
        server.recover_allocations(used, survivors);
        server.recover_objects(survivors);
        server.count_objects();
        server.recover_names();
        server.release_idle(survivors);
        for (client, account) in &survivors.clients {
            server.take_over(*client, account.clone());
            server.answer(*client, 0, Ok(Answer::Restarted));
        }
        server.recover_drafts();
        server.scan_pins(server_memory);
        let outputs = std::mem::take(&mut server.outputs);
        (server, outputs)
    }

    fn recover_allocations(&mut self, used: usize, survivors: &Survivors) {
        for (id, record) in self.index.allocations().collect::<Vec<_>>() {
            if survivors.allocations.contains(&id) {
                self.ledger.recover(id, record);
            } else {
                tracing::error!(%id, len = record.len, "memory is lost that the index knows of");
                self.index.remove_allocation(id);
            }
        }
        for slot in 0..used {
            let word = self.index.allocation_word(slot);
            if word.state == State::Free {
                self.ledger.recover_slot(slot, word.generation);
            }
        }
    }

    /// Finishes what was begun with packs, and takes in every object that stands.
    fn recover_objects(&mut self, survivors: &Survivors) {
        for slot in 0..self.index.used_slots() {
            let word = self.index.word(slot);
            if word.state == State::Free {
                self.slots.give_back(slot, word.generation);
            } else {
                let id = ObjectId::new(slot, word.generation);
                let stands =
                    self.index.read(id).is_some_and(|(state, record)| self.take_in(id, state, &record));
                if !stands {
                    self.index.commit(id, State::Free);
                    self.slots.give_back(slot, id.generation() + 1);
                }
            }
        }
        self.made.retain(|client| survivors.clients.contains_key(&client));
    }

    /// Whether an object stands. Its state is made what that of its pack says.
    fn take_in(&mut self, id: ObjectId, state: State, record: &Record) -> bool {
        let first = record.pack.filter(|first| *first != id);
        let state = match first.map(|first| self.index.state(first)) {
            // The pack never came about.
            Some(None) => return false,
            Some(Some(State::Deleted)) if state != State::Deleted => State::Deleted,
            Some(Some(State::Sealed)) if state == State::Created => State::Sealed,
            _ => state,
        };
        if !self.ledger.hold(record.region, true) {
            tracing::error!(%id, name = record.name, "an object is lost with its memory");
            return false;
        }
        if self.index.state(id) != Some(state) {
            self.index.commit(id, state);
        }
        match first {
            Some(first) => drop(self.members.entry(first).or_default().insert(id)),
            None => self.made.insert(record.client, record.request, id),
        }
        if state == State::Deleted && !self.is_of_a_pack_that_stays(id, record) {
            self.scan.add(id);
            self.scan.look_for(record.pack.unwrap_or(id));
        }
        true
    }

    /// The newest object of each name has it; those before it were replaced.
    fn recover_names(&mut self) {
        let mut replaced = Vec::new();
        let mut newest: BTreeMap<String, (u64, ObjectId)> = BTreeMap::new();
        let sealed = self.index.objects().filter(|(_, state, _)| *state == State::Sealed);
        for (id, _, record) in sealed.filter(|(_, _, record)| !record.name.is_empty()) {
            let entry = newest.entry(record.name).or_insert((record.version, id));
            if *entry != (record.version, id) {
                let older = (*entry).min((record.version, id));
                *entry = (*entry).max((record.version, id));
                replaced.push(older.1);
            }
        }
        self.index.clear_names();
        for (name, (_, id)) in newest {
            self.index.point(&name, None, id);
            self.names.insert(name, id);
        }
        for id in replaced {
            self.retire(id);
        }
    }

    /// Lets go what no object lies in, and what the index does not know.
    fn release_idle(&mut self, survivors: &Survivors) {
        for id in self.ledger.allocations().collect::<Vec<_>>() {
            if self.ledger.is_idle(id) {
                self.close_allocation(id);
            }
        }
        let released = self.outputs.iter().filter_map(|output| match output {
            Output::Release { allocation } => Some(*allocation),
            _ => None,
        });
        let released: BTreeSet<_> = released.collect();
        for id in survivors.allocations.difference(&released) {
            if self.index.allocation(*id).is_none() {
                self.outputs.push(Output::Release { allocation: *id });
            }
        }
    }

    /// What was being written belongs to its client, and is deleted where that is gone. So does what was deleted before it was
    /// sealed: such an object has no version.
    fn recover_drafts(&mut self) {
        let is_draft = |state, version| state == State::Created || state == State::Deleted && version == 0;
        let drafts = self.index.objects().filter(|(_, state, record)| is_draft(*state, record.version));
        let drafts: Vec<_> =
            drafts.map(|(id, state, record)| (id, state, record.client, record.pack)).collect();
        for (id, state, client, pack) in drafts {
            if state == State::Created {
                // It may have been about to be sealed.
                self.index.set_version(id, 0);
            }
            match self.clients.get_mut(&client) {
                Some(client) if pack.is_none_or(|first| first == id) => drop(client.drafts.insert(id)),
                None if state == State::Created => self.retire(id),
                _ => {}
            }
        }
    }
}
