//! How objects come about: their memory, their records, and the store that makes them everybody's.

use super::ledger::HOST;
use super::pending::{ArenaFailure, PendingRequest};
use super::server::{Closing, Output, Requester, Server, ServerMemory, Share};
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, State};
use crate::index::{Record, Region};
use crate::protocol::frame::Payload;
use crate::protocol::{Answer, Ask, Label, Member, Memory, Part, Refusal, Request, check_labels, lay_out};
use crate::server::budget::Charge;

/// Closing memory of up to this length for writing takes less than telling a worker to do it.
const CLOSED_AT_ONCE: u64 = 16 << 20;

/// What is to be created, checked.
struct Plan<'a> {
    label: &'a Label,
    members: &'a [Member],
    offsets: Vec<u64>,
    len: u64,
    place: u32,
}

impl<'a> Plan<'a> {
    fn new(ask: &'a Ask) -> Result<Self, Refusal> {
        let Ask::Create { label, len, members, place } = ask else {
            return Err(Refusal::malformed("only creation is planned"));
        };
        check_labels(label, members)?;
        let too_long = || Refusal::malformed("a pack is longer than there are numbers");
        let (offsets, total) = lay_out(members.iter().map(|member| member.len)).ok_or_else(too_long)?;
        let len = if members.is_empty() { *len } else { total };
        Ok(Self { label, members, offsets, len, place: *place })
    }
}

impl<C: Cells> Server<C> {
    /// Creates an object or a pack: at once in an arena, or as soon as there is memory for it.
    pub(super) fn create(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
        server_memory: &mut impl ServerMemory,
    ) {
        let id = request.id;
        if self.is_known(client, id, request.again != 0) {
            return;
        }
        let outcome = self.begin(client, &request, &payload, server_memory);
        let begun = match outcome {
            Ok(Begun::Done) => return,
            Err(refusal) if !self.may_find_room(&refusal) => return self.answer(client, id, Err(refusal)),
            begun => begun,
        };
        match self.pend(client, request, payload, charge) {
            Ok(pending) => self.wait_for_memory(begun, pending, true),
            // Memory that is being made for it is freed when it is there.
            Err(refusal) => self.answer(client, id, Err(refusal)),
        }
    }

    /// Whether a request that was refused may find room when the pins of deleted objects were looked for.
    fn may_find_room(&self, refusal: &Refusal) -> bool {
        let is_full = matches!(refusal, Refusal::OverQuota { .. } | Refusal::IndexFull { .. });
        is_full && self.scan.is_active()
    }

    /// Has a request wait for what it needs: memory that is being made, or the end of the search for pins of deleted objects,
    /// if it may wait for that.
    pub(super) fn wait_for_memory(
        &mut self,
        begun: Result<Begun, Refusal>,
        pending: PendingRequest,
        may_defer: bool,
    ) {
        let (client, id) = (pending.client, pending.request.id);
        let refusal = match begun {
            Ok(Begun::Done) => return,
            Ok(Begun::NeedsAllocation(allocation)) => {
                return self.pending.wait_for_allocation(allocation, pending);
            }
            Ok(Begun::NeedsArena { place, len }) => match self.have_arena_made(place, len) {
                Ok(()) => return self.pending.wait_for_arena(place, self.user_of(client), pending),
                Err(refusal) => refusal,
            },
            Err(refusal) => refusal,
        };
        if may_defer && self.may_find_room(&refusal) {
            let user = self.user_of(client);
            return self.pending.wait_for_passes(self.scan.passes_to_come(), user, pending);
        }
        self.answer(client, id, Err(refusal));
    }

    /// Whether a request that makes something was heard before: then it is answered, or will be. A client that uses an id twice
    /// for different things is refused.
    pub(super) fn is_known(&mut self, client: ClientId, id: u64, again: bool) -> bool {
        if let Some(object) = self.made.get(client, id) {
            match again {
                // Done before the server was restarted.
                true => self.answer_created(client, id, object),
                false => self.answer(
                    client,
                    id,
                    Err(Refusal::malformed("a request has an id that was used before")),
                ),
            }
            return true;
        }
        // Said again while it is being done.
        self.pending.contains(client, id)
    }

    /// Does a request, or says what memory it needs first.
    pub(super) fn begin(
        &mut self,
        client: ClientId,
        request: &Request,
        payload: &[u8],
        server_memory: &mut impl ServerMemory,
    ) -> Result<Begun, Refusal> {
        let plan = Plan::new(&request.ask)?;
        for label in plan.members.iter().map(|member| &member.label).chain([plan.label]) {
            self.check_owner(client, &label.name)?;
        }
        self.ledger.check_place(plan.place)?;
        if self.slots.left() < 1 + plan.members.len() {
            return Err(Refusal::IndexFull { slots: self.index.geometry().slots });
        }
        let is_small = plan.len < self.ledger.terms(plan.place).small;
        let brings_bytes = plan.place == HOST && is_small;
        if payload.len() as u64 != if brings_bytes { plan.len } else { 0 } {
            return Err(Refusal::malformed(
                "small host objects bring their bytes along, and others bring none",
            ));
        }
        if !is_small {
            return self.begin_large(client, request, &plan);
        }
        let Some(region) = self.ledger.carve(plan.place, plan.len) else {
            request.check_deaths()?;
            return Ok(Begun::NeedsArena { place: plan.place, len: plan.len });
        };
        if brings_bytes && !server_memory.write(region.allocation, region.offset, payload) {
            self.ledger.give_up(region);
            let reason = "the arena cannot be mapped".to_owned();
            return Err(Refusal::NoMemory { len: plan.len, reason });
        }
        let state = if brings_bytes { State::Sealed } else { State::Created };
        let object = self.write_down(client, request, &plan, region, state);
        if brings_bytes {
            self.follow(object);
        }
        self.answer_created(client, request.id, object);
        Ok(Begun::Done)
    }

    /// Creates a large object in memory that was made ahead, or has memory made for it.
    fn begin_large(
        &mut self,
        client: ClientId,
        request: &Request,
        plan: &Plan<'_>,
    ) -> Result<Begun, Refusal> {
        let Some((allocation, is_ready)) = self.take_ahead(plan.place, plan.len) else {
            request.check_deaths()?;
            let allocation = self.open_allocation(plan.place, plan.len, false)?;
            self.make(allocation, self.requester(client));
            return Ok(Begun::NeedsAllocation(allocation));
        };
        if !is_ready {
            let user = self.user_of(client);
            self.outputs.push(Output::Promote { allocation, user });
            return Ok(Begun::NeedsAllocation(allocation));
        }
        if let Some(record) = self.ledger.record(allocation) {
            self.index.add_allocation(allocation, &record);
            self.ledger.ready(allocation);
        }
        self.fill_whole(client, request, plan, allocation);
        Ok(Begun::Done)
    }

    /// Writes a large object down that has an allocation to itself.
    fn fill_whole(&mut self, client: ClientId, request: &Request, plan: &Plan<'_>, allocation: AllocationId) {
        let Some(region) = self.ledger.whole(allocation) else { return };
        let object = self.write_down(client, request, plan, region, State::Created);
        self.answer_created(client, request.id, object);
    }

    /// Has an arena made that can hold so many bytes, unless one of its place is being made.
    pub(super) fn have_arena_made(&mut self, place: u32, len: u64) -> Result<(), Refusal> {
        if self.pending.needs_arena(place) {
            let allocation = self.open_allocation(place, len, true)?;
            self.make(allocation, Requester::Everyone);
            self.pending.begin_arena(place, allocation);
        }
        Ok(())
    }

    fn make(&mut self, allocation: AllocationId, requester: Requester) {
        if let Some(record) = self.ledger.record(allocation) {
            self.outputs.push(Output::Make { allocation, len: record.len, place: record.place, requester });
        }
    }

    /// On whose behalf memory is being made; `None` where it is not made but taken in, where servers died during the request, and
    /// where its client has left.
    fn pending_requester(&self, allocation: AllocationId, is_arena: bool) -> Option<Requester> {
        if is_arena {
            return Some(Requester::Everyone);
        }
        let pending = self.pending.waits_for(allocation)?;
        let is_made =
            !matches!(pending.request.ask, Ask::Adopt { .. }) && pending.request.check_deaths().is_ok();
        is_made.then(|| self.requester(pending.client))
    }

    pub(super) fn memory_made(&mut self, allocation: AllocationId, outcome: Result<(), String>) {
        if self.made_ahead(allocation, outcome.is_ok()) {
            return;
        }
        let Some(record) = self.ledger.record(allocation) else { return };
        if let Err(reason) = outcome {
            let requester = self.pending_requester(allocation, record.is_arena);
            if let Some(requester) = requester.filter(|_| record.place == HOST && self.may_retry(allocation))
            {
                return self.make(allocation, requester);
            }
            self.prealloc.no_longer_ahead(allocation);
            self.ledger.close(allocation);
            // Whatever had been made of it is let go.
            self.outputs.push(Output::Release { allocation });
            let len = record.len;
            if record.is_arena {
                self.pending.finish_arena(record.place, Err(ArenaFailure { len, reason }));
            } else if let Some(PendingRequest { client, request, .. }) = self.pending.take(allocation) {
                let refusal = match request.ask {
                    Ask::Adopt { .. } => Refusal::CannotAdopt { len, reason },
                    _ => Refusal::NoMemory { len, reason },
                };
                self.answer(client, request.id, Err(refusal));
            }
            return;
        }
        self.prealloc.no_longer_ahead(allocation);
        self.index.add_allocation(allocation, &record);
        self.ledger.ready(allocation);
        if record.is_arena {
            // Requests that wait for it are resumed at the end of this step.
            return self.pending.finish_arena(record.place, Ok(()));
        }
        if let Some(pending) = self.pending.take(allocation) {
            if matches!(pending.request.ask, Ask::Adopt { .. }) {
                self.taken_in(&pending, allocation);
            } else if let Ok(plan) = Plan::new(&pending.request.ask) {
                if self.slots.left() < 1 + plan.members.len() {
                    let refusal = Refusal::IndexFull { slots: self.index.geometry().slots };
                    self.answer(pending.client, pending.request.id, Err(refusal));
                } else {
                    self.fill_whole(pending.client, &pending.request, &plan, allocation);
                }
            }
        }
        // Whoever wanted it may have left meanwhile.
        if self.ledger.is_idle(allocation) {
            self.close_allocation(allocation);
        }
    }

    /// Writes records for an object or a pack, and commits them in a state. The first object is the last written: it is
    /// the one that counts.
    fn write_down(
        &mut self,
        client: ClientId,
        request: &Request,
        plan: &Plan<'_>,
        region: Region,
        state: State,
    ) -> ObjectId {
        let mut take = || {
            let (slot, generation) = self.slots.take().expect("slots were counted before");
            ObjectId::new(slot, generation)
        };
        let first = take();
        let mut others: Vec<_> = plan.members.iter().map(|_| take()).collect();
        // By their slots readers tell the order of those that begin at the same place, since some have no bytes.
        others.sort_unstable_by_key(|id| id.slot());
        let record = |label: &Label, offset: u64, len: u64| Record {
            name: label.name.clone(),
            meta: label.meta.clone(),
            region,
            offset: region.offset + offset,
            len,
            version: if state == State::Sealed { self.next_version(&label.name) } else { 0 },
            created: self.now.unix,
            owner: self.user_of(client),
            client,
            request: request.id,
            pack: (!others.is_empty()).then_some(first),
        };
        let laid_out = plan.members.iter().zip(&plan.offsets);
        let records: Vec<_> =
            laid_out.map(|(member, offset)| record(&member.label, *offset, member.len)).collect();
        let whole = record(plan.label, 0, plan.len);
        for (id, record) in others.iter().zip(records) {
            self.index.fill(*id, &record);
            self.commit(*id, State::Created);
        }
        self.index.fill(first, &whole);
        self.commit(first, state);
        for _ in 0..=others.len() {
            self.ledger.hold(region, false);
        }
        if !others.is_empty() {
            self.members.insert(first, others.into_iter().collect());
        }
        self.made.insert(client, request.id, first);
        if state == State::Created
            && let Some(client) = self.clients.get_mut(&client)
        {
            client.drafts.insert(first);
        }
        first
    }

    fn answer_created(&mut self, client: ClientId, id: u64, object: ObjectId) {
        match self.index.read(object) {
            Some((State::Created, record)) => match self.memory_of(&record) {
                Some(memory) => {
                    let share = Share { allocation: memory.allocation, is_writable: true };
                    self.answer_with(client, id, Answer::Created { object, memory }, Some(share));
                }
                None => self.answer(client, id, Err(Refusal::NoSuchObject { object })),
            },
            Some((State::Sealed, record)) => {
                let answer = Answer::Sealed { object, version: record.version };
                self.answer(client, id, Ok(answer));
            }
            _ => self.answer(client, id, Err(Refusal::NoSuchObject { object })),
        }
    }

    fn memory_of(&self, record: &Record) -> Option<Memory> {
        let allocation = record.region.allocation;
        let known = self.ledger.record(allocation)?;
        Some(Memory { allocation, allocation_len: known.len, place: known.place, offset: record.offset })
    }

    pub(super) fn fetch(&mut self, client: ClientId, id: u64, object: ObjectId) {
        let Some((state, record)) = self.index.read(object) else {
            return self.answer(client, id, Err(Refusal::NoSuchObject { object }));
        };
        let is_own = self.made.get(client, record.request) == Some(object);
        // A deleted object that the client still has pinned is its to use.
        let may = state == State::Sealed || state == State::Deleted || is_own;
        match self.memory_of(&record).filter(|_| may) {
            Some(memory) => {
                let share = Share { allocation: memory.allocation, is_writable: state == State::Created };
                self.answer_with(client, id, Answer::Fetched { memory }, Some(share));
            }
            None => self.answer(client, id, Err(Refusal::NotSealed { object })),
        }
    }

    /// Seals what a request has made: when nobody can write it any more.
    pub(super) fn seal(&mut self, client: ClientId, request: &Request, create: u64) {
        let id = request.id;
        let object = self.made.get(client, create);
        let Some((object, (state, record))) =
            object.and_then(|object| Some((object, self.index.read(object)?)))
        else {
            return self.answer(client, id, Err(Refusal::NothingToSeal));
        };
        let allocation = record.region.allocation;
        let known = self.ledger.record(allocation);
        match (state, known) {
            (State::Created, Some(known)) if known.place == HOST && !known.is_arena => {
                let charge = match request.check_deaths().and_then(|()| self.charge_request(client)) {
                    Ok(charge) => charge,
                    Err(refusal) => return self.answer(client, id, Err(refusal)),
                };
                let closing = self.closing.entry(allocation);
                let seals =
                    &mut closing.or_insert_with(|| Closing { client, object, seals: Vec::new() }).seals;
                seals.push((id, charge));
                if seals.len() == 1 {
                    // Whoever keeps a hold on pages has the kernel wait for it, so others than ourselves are left to
                    // a worker.
                    let is_trusted = self
                        .clients
                        .get(&client)
                        .is_some_and(|client| client.account.uid() == self.settings.user);
                    let at_once = is_trusted && known.len <= CLOSED_AT_ONCE;
                    let requester = self.requester(client);
                    self.outputs.push(Output::CloseForWriting { allocation, at_once, requester });
                }
            }
            (State::Created, _) => {
                let outcome = self.seal_now(client, object);
                self.answer(client, id, outcome);
            }
            (State::Sealed, _) => {
                self.answer(client, id, Ok(Answer::Sealed { object, version: record.version }));
            }
            _ => self.answer(client, id, Err(Refusal::NothingToSeal)),
        }
    }

    pub(super) fn memory_closed(&mut self, allocation: AllocationId, outcome: Result<(), Refusal>) {
        let Some(Closing { client, object, seals }) = self.closing.remove(&allocation) else { return };
        // Its maker may have given it up meanwhile, or left and taken it along.
        let is_there = self.index.state(object) == Some(State::Created);
        let outcome = outcome.and(if is_there { Ok(()) } else { Err(Refusal::NothingToSeal) });
        let outcome = outcome.and_then(|()| self.seal_now(client, object));
        for (id, _charge) in seals {
            self.answer(client, id, outcome.clone());
        }
        // Not before: its writer would have to share the machine with who makes memory.
        if let Some(record) = self.ledger.record(allocation) {
            self.prealloc_next(record.place, record.len);
        }
    }

    /// The bytes of an object under one more name, or others of the region that was made for it: another record of that
    /// region, sealed from the beginning.
    pub(super) fn publish(
        &mut self,
        client: ClientId,
        id: u64,
        again: bool,
        label: Label,
        (object, part): (ObjectId, Option<Part>),
    ) {
        if self.is_known(client, id, again) {
            return;
        }
        let outcome = label.check().and_then(|()| {
            self.check_owner(client, &label.name)?;
            let record = match self.index.read(object) {
                Some((State::Sealed, record)) => record,
                Some((State::Created, _)) => return Err(Refusal::NotSealed { object }),
                _ => return Err(Refusal::NoSuchObject { object }),
            };
            let own = Part { offset: record.offset - record.region.offset, len: record.len };
            let part = part.unwrap_or(own);
            part.check(record.region.len)?;
            self.name_part(client, id, label, record.region, part)
        });
        self.answer(client, id, outcome);
    }

    /// Gives an object, or all objects of a pack, their versions, and makes them everybody's by the one store that
    /// counts. Says which version the first one is. A name may have become another's meanwhile.
    fn seal_now(&mut self, client: ClientId, first: ObjectId) -> Result<Answer, Refusal> {
        let name = |id: ObjectId| self.index.read(id).map(|(_, record)| record.name).unwrap_or_default();
        let pack: Vec<_> = self.pack(first).into_iter().map(|id| (id, name(id))).collect();
        for (_, name) in &pack {
            self.check_owner(client, name)?;
        }
        let mut version = 0;
        for (id, name) in pack {
            let next = self.next_version(&name);
            self.index.set_version(id, next);
            version = if id == first { next } else { version };
        }
        self.commit(first, State::Sealed);
        self.finish_draft(client, first);
        self.follow(first);
        Ok(Answer::Sealed { object: first, version })
    }

    /// Whether a client may make a name mean another object: that deletes the one it means now.
    pub(super) fn check_owner(&self, client: ClientId, name: &str) -> Result<(), Refusal> {
        let user = self.clients.get(&client).map(|client| client.account.uid());
        let Some(owner) = self.names.get(name).and_then(|id| self.index.owner(*id)) else { return Ok(()) };
        if user == Some(owner) || user == Some(self.settings.user) {
            return Ok(());
        }
        Err(Refusal::NameTaken { name: name.to_owned(), owner })
    }

    /// What follows when the first object of a pack, or the only one, has been sealed.
    pub(super) fn follow(&mut self, first: ObjectId) {
        let pack = self.pack(first);
        for other in pack.iter().filter(|id| **id != first) {
            self.commit(*other, State::Sealed);
        }
        for id in pack {
            let Some((_, record)) = self.index.read(id).filter(|(_, record)| !record.name.is_empty()) else {
                continue;
            };
            let before = self.names.insert(record.name.clone(), id);
            self.index.point(&record.name, before, id);
            self.announce(&record.name, id, record.version);
            if let Some(before) = before {
                self.retire(before);
            }
        }
    }

    /// An object, and the others of the pack whose first it is.
    pub(super) fn pack(&self, first: ObjectId) -> Vec<ObjectId> {
        [first].into_iter().chain(self.members.get(&first).into_iter().flatten().copied()).collect()
    }

    /// The version of the next object of a name.
    pub(super) fn next_version(&self, name: &str) -> u64 {
        let current = self.names.get(name).and_then(|current| self.index.read(*current));
        1 + current.map_or(0, |(_, record)| record.version)
    }
}

/// What came of a request to create something.
pub(super) enum Begun {
    Done,
    /// It goes on when this memory is there.
    NeedsAllocation(AllocationId),
    /// It goes on when an arena of this place has room for so many bytes.
    NeedsArena {
        place: u32,
        len: u64,
    },
}
