//! The server as a machine: what happens goes in, what is to be done comes out, and nothing here waits or calls.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::ledger::{Ledger, Terms};
use super::made::Made;
use super::pending::{PendingMemory, PendingRequest};
use super::pin_scan::{PinPosition, PinScan};
use super::prealloc::Prealloc;
use super::slots::Slots;
use super::waiting::Waiting;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, State};
use crate::index::Index;
use crate::protocol::frame::Payload;
use crate::protocol::{
    Answer, Ask, Event, EventKind, OLDEST_PROTOCOL, PROTOCOL, Refusal, Request, Response, Status, check_name,
};
use crate::server::budget::{Account, Amount, Charge};

/// How many entries of what clients that left have made one step drops.
const DROPPED_AT_ONCE: usize = 128;

/// How many requests of clients that left, with the bytes they brought, one step drops.
const PENDING_DROPPED_AT_ONCE: usize = 8;

/// What a request takes that waits for memory, besides its payload.
const PENDING_COST: u64 = 512;

/// The version of the protocol from which on clients count the servers that died while a request was in progress.
const COUNTS_SERVERS: u32 = 5;

/// What a server is told to keep to.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) host: Terms,
    pub(crate) device: Terms,
    /// The devices whose memory it hands out.
    pub(crate) devices: Vec<[u8; 16]>,
    /// Its own user, who may delete everything.
    pub(crate) user: u32,
    /// How many bytes of host memory may be made ahead.
    pub(crate) ahead: u64,
}

impl Settings {
    /// Hands out so much host memory, and makes an eighth of that ahead at most.
    pub(crate) fn limit_host(&mut self, quota: u64) {
        self.host.quota = quota;
        self.ahead = quota / 8;
    }
}

/// The memory that a step may touch: the index is the machine's own, and this is the rest.
pub(crate) trait ServerMemory {
    /// Writes bytes of a small object into an arena, and says whether that could be done.
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool;
    /// Reads pins in the order of clients' ids, from a position on, until the work is used up or a page has been read: `visit`
    /// says how much work a pin was. Returns where to go on; `None` after the last page.
    fn read_pins(
        &self,
        from: PinPosition,
        work: &mut usize,
        visit: &mut dyn FnMut(u64) -> usize,
    ) -> Option<PinPosition>;
    /// The pins of a client that holds nothing any more. They are not read from now on.
    fn take_pins(&mut self, client: ClientId) -> Vec<u64>;
}

/// The time of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    /// Since some moment of this process.
    pub(crate) elapsed: Duration,
    /// Milliseconds of the Unix epoch, for people.
    pub(crate) unix: u64,
}

/// What happens.
#[derive(Debug)]
pub(crate) enum Input<'a> {
    Joined {
        client: ClientId,
        account: Account,
    },
    Asked {
        client: ClientId,
        request: Request,
        payload: Payload<'a>,
        /// For the payload, where it has memory of its own.
        charge: Option<Charge>,
    },
    /// A client holds nothing any more.
    Left {
        client: ClientId,
    },
    /// Memory that was to be made is there, and the keeper has it; or why not.
    Made {
        allocation: AllocationId,
        outcome: Result<(), String>,
    },
    /// Memory that was to be closed for writing is; or it is still mapped.
    Closed {
        allocation: AllocationId,
        outcome: Result<(), Refusal>,
    },
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Say this, with the memory where there is some.
    Say { client: ClientId, response: Response, share: Option<Share> },
    /// Say welcome, with the index and a page of pins.
    Welcome { client: ClientId, request: u64 },
    /// Make memory, give it to the keeper, and say when both are done.
    Make { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// A request of this user waits for memory that is being made ahead: it is to be made in the user's turn.
    Promote { allocation: AllocationId, user: u32 },
    /// Look at the memory that came along with the request, give it to the keeper, and say when both are done.
    TakeIn { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// See to it that nobody can write this memory any more: where it is short and its writer is trusted, without
    /// leaving it to a worker.
    CloseForWriting { allocation: AllocationId, at_once: bool, requester: Requester },
    /// Let this memory go, here and with the keeper.
    Release { allocation: AllocationId },
    /// The same, and give its pages back first: other memory is to be made of them.
    Reclaim { allocation: AllocationId },
    /// Let this client go.
    Dismiss { client: ClientId },
    /// Tell this client of what happens to objects whose names begin so, from now on.
    Watch { client: ClientId, prefix: String },
    /// Something happened to an object: clients that watch for it are told.
    Announce(Event),
}

/// On whose behalf memory is made or closed for writing. Workers take turns between requesters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Requester {
    /// A user, for a request of one of its clients.
    User(u32),
    /// All users: an arena, for which requests of several users may wait.
    Everyone,
    /// The server, for memory that is made ahead: when there is nothing else to do.
    Server,
}

/// A descriptor of an allocation that goes along with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) allocation: AllocationId,
    pub(crate) is_writable: bool,
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) account: Account,
    /// The version of the protocol it speaks, once it has said hello.
    protocol: Option<u32>,
    /// Where it had another server before: the first requests that this one has heard of it. What it says before it has read
    /// that the server is another one, it says again.
    heard: Option<BTreeSet<u64>>,
    /// What it has created and not sealed: single objects, and packs by their first.
    pub(super) drafts: BTreeSet<ObjectId>,
}

/// How many requests a client may have said before it reads that it has another server.
const MOST_HEARD: usize = 64;

/// A draft whose memory is being closed for writing.
#[derive(Debug)]
pub(super) struct Closing {
    pub(super) client: ClientId,
    pub(super) object: ObjectId,
    /// Requests to seal it.
    pub(super) seals: Vec<(u64, Charge)>,
}

/// How many objects there are.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Census {
    sealed: u64,
    created: u64,
}

impl Census {
    fn of(&mut self, state: State) -> Option<&mut u64> {
        match state {
            State::Sealed => Some(&mut self.sealed),
            State::Created => Some(&mut self.created),
            State::Free | State::Deleted => None,
        }
    }
}

/// The server. What it knows of objects is in the index; the rest can be found out from there again.
#[derive(Debug)]
pub(crate) struct Server<C> {
    pub(super) index: Index<C>,
    pub(super) settings: Settings,
    pub(super) ledger: Ledger,
    pub(super) slots: Slots,
    pub(super) prealloc: Prealloc,
    /// What each name means.
    pub(super) names: BTreeMap<String, ObjectId>,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) made: Made,
    /// The other objects of each pack, by its first.
    pub(super) members: BTreeMap<ObjectId, BTreeSet<ObjectId>>,
    pub(super) pending: PendingMemory,
    pub(super) closing: BTreeMap<AllocationId, Closing>,
    pub(super) waiting: Waiting,
    pub(super) scan: PinScan,
    census: Census,
    pub(super) outputs: Vec<Output>,
    pub(super) now: Now,
}

impl<C: Cells> Server<C> {
    pub(super) fn empty(index: Index<C>, settings: Settings, ledger: Ledger, slots: Slots) -> Self {
        let (prealloc, scan) = (Prealloc::new(settings.ahead), PinScan::new(index.geometry().slots));
        Self {
            index,
            settings,
            ledger,
            slots,
            prealloc,
            names: BTreeMap::new(),
            clients: BTreeMap::new(),
            made: Made::default(),
            members: BTreeMap::new(),
            pending: PendingMemory::default(),
            closing: BTreeMap::new(),
            waiting: Waiting::default(),
            scan,
            census: Census::default(),
            outputs: Vec::new(),
            now: Now { elapsed: Duration::ZERO, unix: 0 },
        }
    }

    pub(crate) fn index(&self) -> &Index<C> {
        &self.index
    }

    /// When to step again though nothing has happened. Zero: there is work that was left for the next step.
    pub(crate) fn wake_at(&self) -> Option<Duration> {
        let is_resumed = self.pending.is_ready() || self.pending.has_scanned(self.scan.passes());
        if is_resumed || self.made.has_dropped() || self.pending.has_abandoned() {
            return Some(Duration::ZERO);
        }
        let wakes = [self.waiting.wake_at(), self.scan.wake_at(), self.prealloc.wake_at()];
        wakes.into_iter().flatten().min()
    }

    pub(crate) fn step(
        &mut self,
        now: Now,
        input: Input<'_>,
        server_memory: &mut impl ServerMemory,
    ) -> Vec<Output> {
        self.now = now;
        match input {
            Input::Joined { client, account } => self.join(client, account),
            Input::Asked { client, request, payload, charge } => {
                self.asked(client, request, payload, charge, server_memory);
            }
            Input::Left { client } => self.left(client, server_memory),
            Input::Made { allocation, outcome } => self.memory_made(allocation, outcome),
            Input::Closed { allocation, outcome } => self.memory_closed(allocation, outcome),
            Input::Tick => {}
        }
        self.scan_pins(server_memory);
        self.retry_deferred(server_memory);
        self.resume_small_creates(server_memory);
        self.trim_prealloc();
        self.answer_waiting();
        self.made.trim(DROPPED_AT_ONCE);
        self.pending.trim(PENDING_DROPPED_AT_ONCE);
        std::mem::take(&mut self.outputs)
    }

    /// The protocol that a client is answered in.
    pub(crate) fn protocol(&self, client: ClientId) -> u32 {
        self.clients.get(&client).and_then(|client| client.protocol).unwrap_or(OLDEST_PROTOCOL)
    }

    /// Whether a client has begun something that it may still write.
    pub(crate) fn has_drafts(&self, client: ClientId) -> bool {
        let drafts = self.clients.get(&client).map(|client| &client.drafts);
        drafts.is_some_and(|drafts| !drafts.is_empty())
    }

    fn join(&mut self, client: ClientId, account: Account) {
        let drafts = BTreeSet::new();
        self.clients.insert(client, Client { account, protocol: None, heard: None, drafts });
    }

    /// A client of the server before this one. It has said hello; which protocol it speaks is not known any more.
    pub(super) fn take_over(&mut self, client: ClientId, account: Account) {
        let (protocol, heard) = (Some(OLDEST_PROTOCOL), Some(BTreeSet::new()));
        self.clients.insert(client, Client { account, protocol, heard, drafts: BTreeSet::new() });
    }

    /// Changes the state of an object.
    pub(super) fn commit(&mut self, id: ObjectId, state: State) {
        if let Some(count) = self.index.state(id).and_then(|before| self.census.of(before)) {
            *count -= 1;
        }
        if let Some(count) = self.census.of(state) {
            *count += 1;
        }
        self.index.commit(id, state);
    }

    /// Counts the objects of an index that was taken over.
    pub(super) fn count_objects(&mut self) {
        self.census = Census::default();
        for slot in 0..self.index.used_slots() {
            if let Some(count) = self.census.of(self.index.word(slot).state) {
                *count += 1;
            }
        }
    }

    /// Charges a client for a request that waits.
    pub(super) fn charge_request(&self, client: ClientId) -> Result<Charge, Refusal> {
        let known = self.clients.get(&client).ok_or_else(|| Refusal::malformed("a client that has left"))?;
        known.account.charge(Amount::bytes(PENDING_COST))
    }

    /// A request that waits for memory. Its payload is charged to its client.
    pub(super) fn pend(
        &self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
    ) -> Result<PendingRequest, Refusal> {
        let mut held = self.charge_request(client)?;
        held.grow(Amount::bytes(request.ask.decoded_len()))?;
        // The memory of a long message is charged already: for its payload, which it is kept for.
        let charge = match charge {
            Some(mut charge) => {
                charge.absorb(held);
                charge
            }
            None => {
                held.grow(Amount::bytes(payload.len() as u64))?;
                held
            }
        };
        Ok(PendingRequest { client, request, payload: payload.into_owned(), _charge: charge })
    }

    fn asked(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
        server_memory: &mut impl ServerMemory,
    ) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        let (id, again) = (request.id, request.again != 0);
        if request.again > 1 && known.heard.is_some() {
            // Clients of older protocols do not count.
            known.protocol = known.protocol.max(Some(COUNTS_SERVERS));
        }
        if let Some(heard) = &mut known.heard {
            if again && heard.contains(&id) {
                // It is answered, or will be.
                return;
            }
            if !again && heard.len() < MOST_HEARD {
                heard.insert(id);
            }
        }
        if known.protocol.is_none() && !matches!(request.ask, Ask::Hello { .. }) {
            self.outputs.push(Output::Dismiss { client });
            return;
        }
        let outcome = match request.ask {
            Ask::Hello { protocol } if !(OLDEST_PROTOCOL..=PROTOCOL).contains(&protocol) => {
                Err(Refusal::OtherProtocol { server: PROTOCOL, client: protocol })
            }
            Ask::Hello { protocol } => {
                if let Some(known) = self.clients.get_mut(&client) {
                    known.protocol = Some(protocol);
                }
                self.outputs.push(Output::Welcome { client, request: id });
                return;
            }
            Ask::Create { .. } => return self.create(client, request, payload, charge, server_memory),
            Ask::Seal { create } => return self.seal(client, &request, create),
            Ask::Abandon { create } => self.abandon(client, create),
            Ask::Publish { label, object, part } => {
                return self.publish(client, id, again, label, (object, part));
            }
            Ask::Adopt { .. } => return self.adopt(client, request),
            Ask::Delete { object } => self.delete(client, object, again),
            Ask::Find { name, wait } => match self.names.get(&name) {
                Some(object) => Ok(Answer::Found { object: *object }),
                None => match check_name(&name) {
                    Ok(()) => return self.await_name(client, id, name, wait),
                    Err(refusal) => Err(refusal),
                },
            },
            Ask::AwaitRoom { len, place, wait } => return self.await_room(client, id, len, place, wait),
            Ask::Fetch { object } => return self.fetch(client, id, object),
            Ask::Kick { object } => return self.kicked(object),
            Ask::Watch { prefix } => check_name(&prefix).map(|()| {
                self.outputs.push(Output::Watch { client, prefix });
                Answer::Done
            }),
            Ask::Status => Ok(Answer::Status(self.status())),
            Ask::Goodbye => return self.left(client, server_memory),
            // Both are about processes, of which the machine knows nothing: they do not come this far.
            Ask::AwaitChild | Ask::Claim { .. } => Err(Refusal::malformed("a request about a process")),
        };
        self.answer(client, id, outcome);
    }

    /// The user of a client; of one that has left, the server's own.
    pub(super) fn user_of(&self, client: ClientId) -> u32 {
        self.clients.get(&client).map_or(self.settings.user, |client| client.account.uid())
    }

    /// The requester of what a client asks for.
    pub(super) fn requester(&self, client: ClientId) -> Requester {
        Requester::User(self.user_of(client))
    }

    pub(super) fn answer(&mut self, client: ClientId, id: u64, outcome: Result<Answer, Refusal>) {
        let protocol = self.protocol(client);
        let refused = |refusal: Refusal| Answer::Refused(refusal.for_protocol(protocol));
        self.answer_with(client, id, outcome.unwrap_or_else(refused), None);
    }

    pub(super) fn answer_with(&mut self, client: ClientId, id: u64, answer: Answer, share: Option<Share>) {
        self.outputs.push(Output::Say { client, response: Response { id, answer }, share });
    }

    /// An object has become what its name means: whoever waited for that is told.
    pub(super) fn announce(&mut self, name: &str, object: ObjectId, version: u64) {
        self.tell_of_name(name, object);
        self.tell(name, object, EventKind::Published { version });
    }

    /// Tells those who watch for a name.
    pub(super) fn tell(&mut self, name: &str, object: ObjectId, what: EventKind) {
        self.outputs.push(Output::Announce(Event { name: name.to_owned(), object, what }));
    }

    fn left(&mut self, client: ClientId, server_memory: &mut impl ServerMemory) {
        let drafts = self.clients.remove(&client).map(|client| client.drafts).unwrap_or_default();
        self.forget_waiting(client);
        self.pending.forget_client(client);
        for object in drafts {
            if self.index.state(object) == Some(State::Created) {
                self.retire(object);
            } else {
                // Deleted by another, and kept while its writer was there.
                self.look_for(object);
            }
        }
        self.made.forget(client);
        for pin in server_memory.take_pins(client) {
            self.kicked_by_pin(pin);
        }
    }

    fn status(&self) -> Status {
        let (host, device) = self.ledger.usage();
        Status {
            objects: self.census.sealed,
            unsealed: self.census.created,
            retired: self.scan.count() as u64,
            clients: self.clients.len() as u64,
            host,
            device,
            epoch: self.index.epoch(),
        }
    }
}
