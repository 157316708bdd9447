//! The server as a machine: what happens goes in, what is to be done comes out, and nothing here waits or calls.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::ledger::{Ledger, Terms};
use super::slots::Slots;
use super::stock::Stock;
use super::waiting::Waiter;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, State};
use crate::index::Index;
use crate::protocol::frame::Payload;
use crate::protocol::{
    Answer, Ask, Event, EventKind, PROTOCOL, Refusal, Request, Response, Status, check_name,
};

/// How often all pins are looked at while something waits for them. A kick says so at once, and a death; this is for a
/// kick that was lost.
const LOOK_AT_PINS: Duration = Duration::from_secs(1);

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
pub(crate) trait Premises {
    /// Writes bytes of a small object into an arena, and says whether that could be done.
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool;
    /// Which of some objects any client has pinned. All pins are looked at once, however many objects there are.
    fn pinned(&self, objects: &BTreeSet<ObjectId>) -> BTreeSet<ObjectId>;
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
        user: u32,
    },
    Asked {
        client: ClientId,
        request: Request,
        payload: Payload<'a>,
    },
    /// The process of a client is gone, or has been disconnected; its pins are no longer looked at.
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
    Make { allocation: AllocationId, len: u64, place: u32 },
    /// Look at the memory that came along with the request, give it to the keeper, and say when both are done.
    TakeIn { allocation: AllocationId, len: u64, place: u32 },
    /// See to it that nobody can write this memory any more: where it is short and its writer is trusted, without
    /// leaving it to a worker.
    CloseForWriting { allocation: AllocationId, at_once: bool },
    /// Let this memory go, here and with the keeper.
    Release { allocation: AllocationId },
    /// Let this client go.
    Dismiss { client: ClientId },
}

/// A descriptor of an allocation that goes along with an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) allocation: AllocationId,
    pub(crate) is_writable: bool,
}

#[derive(Debug)]
pub(super) struct Client {
    pub(super) user: u32,
    pub(super) watches: Option<String>,
    has_greeted: bool,
    /// The first requests that this server has heard of it, where it had another server before: what it says before it
    /// has read that, it says again.
    heard: BTreeSet<u64>,
}

/// How many requests a client may have said before it reads that it has another server.
const MOST_HEARD: usize = 64;

/// A request to create something, while its memory is being made.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) client: ClientId,
    pub(super) request: Request,
    pub(super) payload: Payload<'static>,
}

/// The server. What it knows of objects is in the index; the rest can be found out from there again.
#[derive(Debug)]
pub(crate) struct Server<C> {
    pub(super) index: Index<C>,
    pub(super) settings: Settings,
    pub(super) ledger: Ledger,
    pub(super) slots: Slots,
    pub(super) stock: Stock,
    /// What each name means.
    pub(super) names: BTreeMap<String, ObjectId>,
    pub(super) clients: BTreeMap<ClientId, Client>,
    /// What each request of a client that is still there has made: the first object of it.
    pub(super) made: BTreeMap<(ClientId, u64), ObjectId>,
    /// The other objects of each pack, by its first.
    pub(super) members: BTreeMap<ObjectId, BTreeSet<ObjectId>>,
    /// Who waits for memory that is being made.
    pub(super) making: BTreeMap<AllocationId, Vec<Pending>>,
    /// Who waits for memory to be closed for writing: the client, the object, and its requests to seal.
    pub(super) closing: BTreeMap<AllocationId, (ClientId, ObjectId, Vec<u64>)>,
    pub(super) waiting: Vec<Waiter>,
    /// What is deleted and not yet free.
    pub(super) retired: BTreeSet<ObjectId>,
    /// When all pins were looked at last.
    pub(super) swept: Duration,
    pub(super) outputs: Vec<Output>,
    pub(super) now: Now,
}

impl<C: Cells> Server<C> {
    pub(super) fn empty(index: Index<C>, settings: Settings, ledger: Ledger, slots: Slots) -> Self {
        let stock = Stock::new(settings.ahead);
        Self {
            index,
            settings,
            ledger,
            slots,
            stock,
            names: BTreeMap::new(),
            clients: BTreeMap::new(),
            made: BTreeMap::new(),
            members: BTreeMap::new(),
            making: BTreeMap::new(),
            closing: BTreeMap::new(),
            waiting: Vec::new(),
            retired: BTreeSet::new(),
            swept: Duration::ZERO,
            outputs: Vec::new(),
            now: Now { elapsed: Duration::ZERO, unix: 0 },
        }
    }

    pub(crate) fn index(&self) -> &Index<C> {
        &self.index
    }

    /// When to step again though nothing has happened: a question has waited long enough, or pins are to be looked at.
    pub(crate) fn wake_at(&self) -> Option<Duration> {
        let look = (!self.retired.is_empty()).then(|| self.swept + LOOK_AT_PINS);
        let waits = self.waiting.iter().map(Waiter::until);
        waits.chain(look).chain(self.stock.wake_at()).min()
    }

    pub(crate) fn step(&mut self, now: Now, input: Input<'_>, premises: &mut impl Premises) -> Vec<Output> {
        self.now = now;
        match input {
            Input::Joined { client, user } => self.join(client, user, false),
            Input::Asked { client, request, payload } => self.asked(client, request, payload, premises),
            Input::Left { client } => self.left(client, premises),
            Input::Made { allocation, outcome } => self.memory_made(allocation, outcome, premises),
            Input::Closed { allocation, outcome } => self.memory_closed(allocation, outcome, premises),
            Input::Tick => self.sweep(premises),
        }
        self.trim_stock();
        self.tell_of_room();
        self.expire();
        std::mem::take(&mut self.outputs)
    }

    pub(super) fn join(&mut self, client: ClientId, user: u32, has_greeted: bool) {
        let heard = BTreeSet::new();
        self.clients.insert(client, Client { user, watches: None, has_greeted, heard });
    }

    fn asked(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        premises: &mut impl Premises,
    ) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        let (id, again) = (request.id, request.again);
        if again && known.heard.contains(&id) {
            // It is answered, or will be.
            return;
        }
        if !again && known.heard.len() < MOST_HEARD {
            known.heard.insert(id);
        }
        if !known.has_greeted && !matches!(request.ask, Ask::Hello { .. }) {
            self.outputs.push(Output::Dismiss { client });
            return;
        }
        let outcome = match request.ask {
            Ask::Hello { protocol } if protocol != PROTOCOL => {
                Err(Refusal::OtherProtocol { server: PROTOCOL, client: protocol })
            }
            Ask::Hello { .. } => {
                known.has_greeted = true;
                self.outputs.push(Output::Welcome { client, request: id });
                return;
            }
            Ask::Create { .. } => return self.create(client, request, payload, premises),
            Ask::Seal { create } => return self.seal(client, id, create, premises),
            Ask::Abandon { create } => self.abandon(client, create, premises),
            Ask::Publish { label, object, part } => {
                return self.publish(client, id, again, label, (object, part), premises);
            }
            Ask::Adopt { .. } => return self.adopt(client, request),
            Ask::Delete { object } => self.delete(client, object, again, premises),
            Ask::Find { name, wait } => match self.names.get(&name) {
                Some(object) => Ok(Answer::Found { object: *object }),
                None => match check_name(&name) {
                    Ok(()) => return self.await_name(client, id, name, wait),
                    Err(refusal) => Err(refusal),
                },
            },
            Ask::AwaitRoom { len, place, wait } => return self.await_room(client, id, len, place, wait),
            Ask::Fetch { object } => return self.fetch(client, id, object),
            Ask::Kick { object } => return self.free_unpinned(&[object], premises),
            Ask::Watch { prefix } => check_name(&prefix).map(|()| {
                known.watches = Some(prefix);
                Answer::Done
            }),
            Ask::Status => Ok(Answer::Status(self.status())),
            Ask::Goodbye => return self.left(client, premises),
        };
        self.answer(client, id, outcome);
    }

    pub(super) fn answer(&mut self, client: ClientId, id: u64, outcome: Result<Answer, Refusal>) {
        self.answer_with(client, id, outcome.unwrap_or_else(Answer::Refused), None);
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
        let watches =
            |client: &Client| client.watches.as_ref().is_some_and(|prefix| name.starts_with(prefix));
        let watchers = self.clients.iter().filter(|(_, client)| watches(client)).map(|(id, _)| *id);
        for client in watchers.collect::<Vec<_>>() {
            let event = Event { name: name.to_owned(), object, what };
            self.answer(client, 0, Ok(Answer::Event(event)));
        }
    }

    fn left(&mut self, client: ClientId, premises: &mut impl Premises) {
        self.clients.remove(&client);
        self.forget_waiting(client);
        let range = (client, 0)..=(client, u64::MAX);
        let made: Vec<_> = self.made.range(range).map(|(key, object)| (*key, *object)).collect();
        for (key, object) in made {
            if self.index.state(object) == Some(State::Created) {
                self.retire(object, premises);
            }
            self.made.remove(&key);
        }
        self.sweep(premises);
    }

    fn status(&self) -> Status {
        let (mut objects, mut unsealed) = (0, 0);
        for slot in 0..self.index.used_slots() {
            match self.index.word(slot).state {
                State::Sealed => objects += 1,
                State::Created => unsealed += 1,
                State::Free | State::Deleted => {}
            }
        }
        let (host, device) = self.ledger.usage();
        Status {
            objects,
            unsealed,
            retired: self.retired.len() as u64,
            clients: self.clients.len() as u64,
            host,
            device,
            epoch: self.index.epoch(),
        }
    }
}
