//! The server's loop: one thread that reads, steps, and does what the machine says, and never waits for a client.
//!
//! The work of one turn is bounded, and does not grow with the number of clients: some events of each user that has any, a
//! slice of each piece of work that goes on in the background, and a few new clients.

mod keeper_events;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::Timespec;
use wholemem_hal::Backend;
use wholemem_os::meminfo::MemoryProbe;
use wholemem_os::packet::{MAX_PACKET, PacketListener};
use wholemem_os::time_slice::Yielder;
use wholemem_os::{Memfd, PacketSocket, heap, memfd};

use super::accept::Acceptor;
use super::clients::{Clients, Ending};
use super::connection::Heard;
use super::headroom::{Headroom, Purpose, bookkeeping};
use super::index_memory::{make_index, open_index};
use super::keeper_link::{KeeperLink, Parking};
use super::memory_table::{Closing, MemoryTable};
use super::poller::{ClientEvent, Fixed, Interest};
use super::workers::{Done, Job, Workers};
use crate::cells::MappedCells;
use crate::id::{AllocationId, ClientId};
use crate::index::Geometry;
use crate::keeper::{Kept, Key, Launch, ToKeeper};
use crate::protocol::{Answer, Ask, Request, Response};
use crate::server::budget::{Budget, Limits};
use crate::server::machine::Survivors;
use crate::server::machine::{Input, Now, Output, Server, Settings};
use crate::{Error, Refusal, Result};

/// How long a server without a keeper waits before it tries again to start one, and one without a free descriptor
/// before it looks for clients again.
const RETRY: Duration = Duration::from_millis(500);

/// How many clients are taken in in one turn.
const ACCEPTED_AT_ONCE: usize = 1;

/// How long one turn serves a user whose events do not end. At least one event is served.
const TURN_OF_A_USER: Duration = Duration::from_micros(20);

/// How often connections that wait for memory are looked at though nothing has happened.
const LOOK_AT_SLOTS: Duration = Duration::from_millis(100);

/// When what clients hold has fallen by this, the memory is given back to the system.
const TRIM: u64 = 1 << 20;

/// How often memory is given back at most.
const TRIM_EVERY: Duration = Duration::from_secs(1);

/// Everything a running server has.
struct EventLoop<'a> {
    server: Server<MappedCells>,
    index: Memfd,
    /// The index as clients get it: for reading alone.
    index_reader: Rc<OwnedFd>,
    devices: Vec<[u8; 16]>,
    memory: MemoryTable,
    clients: Clients,
    /// Room for what is being received.
    packet: Vec<u8>,
    acceptor: Acceptor,
    keeper: KeeperLink<'a>,
    places: BTreeMap<AllocationId, u32>,
    /// The descriptor that came along with what was heard last.
    offered: Option<OwnedFd>,
    headroom: Arc<Headroom>,
    workers: Workers,
    start: Instant,
    /// When to try again what could not be done for want of a keeper or of descriptors.
    retry_at: Option<Instant>,
    /// Until when no client is taken in, because one could not be.
    accept_at: Option<Instant>,
    is_accepting: bool,
    is_stopping: bool,
    yielder: Yielder,
    /// The most that clients held since memory was given back, and when that was.
    peak: u64,
    trimmed: Instant,
}

/// Serves until the keeper at the other end of the socket says to stop.
pub(crate) fn run(
    socket: PacketSocket,
    settings: Settings,
    geometry: Geometry,
    devices: Option<&Backend>,
    launch: &Launch<'_>,
) -> Result<()> {
    wholemem_os::descriptors::raise_limit();
    let kept = Kept::receive(&socket)?;
    let mut running = EventLoop::take_over(kept, socket, settings, geometry, devices, launch)?;
    running.keeper.tell(&ToKeeper::Ready, Vec::new());
    while !running.is_stopping {
        running.turn()?;
    }
    // Whoever has it mapped would find names in it for ever.
    running.server.index().supersede();
    Ok(())
}

impl<'a> EventLoop<'a> {
    fn take_over(
        mut kept: Kept,
        socket: PacketSocket,
        mut settings: Settings,
        geometry: Geometry,
        devices: Option<&Backend>,
        launch: &'a Launch<'a>,
    ) -> Result<Self> {
        let listener = kept.take(Key::Listener).ok_or(Error::Incomplete { what: "the listening socket" })?;
        let acceptor = Acceptor::new(PacketListener::adopt(listener, None)?, kept.take(Key::SocketFile));
        let (index, cells) = match kept.take(Key::Index) {
            Some(fd) => open_index(fd)?,
            None => make_index(geometry, settings.host.quota, &socket)?,
        };
        // What is available is less now than it was for the first server, by what objects have taken.
        settings.limit_host(cells.quota());
        let limits = Limits::of_server(settings.host.quota, wholemem_os::descriptors::limit());
        let mut clients = Clients::new(settings.user, Budget::new(settings.user, limits))?;
        let mut memory = MemoryTable::default();
        let (mut allocations, mut known) = (BTreeMap::new(), BTreeSet::new());
        let mut rest = Kept::default();
        for (key, fd) in kept.into_iter() {
            match key {
                Key::Allocation(allocation) => drop(allocations.insert(allocation, fd)),
                Key::Socket(client) | Key::Pins(client) | Key::Process(client) => {
                    known.insert(client);
                    rest.insert(key, fd);
                }
                Key::Index | Key::Listener | Key::SocketFile | Key::Server => {}
            }
        }
        for client in known {
            let taken = clients.take_over(client, &mut rest).and_then(|connection| {
                let admitted = connection.and_then(|connection| connection.admitted.as_ref());
                admitted.map(|admitted| memory.add_pins(client, &admitted.pins)).transpose()
            });
            if let Err(error) = taken {
                // Whatever is wrong with one client is no reason to serve none.
                tracing::error!(%client, %error, "a client cannot be taken over");
                clients.end(client, Ending::Gone, || false);
            }
        }
        let survivors = Survivors {
            allocations: allocations.keys().copied().collect(),
            clients: clients
                .iter()
                .map(|(client, connection)| (client, connection.account.clone()))
                .collect(),
        };
        for (allocation, fd) in allocations {
            let record = cells.allocation(allocation);
            let added = memory.add(allocation, fd, record.is_none_or(|record| record.place == 0));
            let is_arena = record.is_some_and(|record| record.is_arena);
            let mut opened = || if is_arena { memory.open_for_reading(allocation) } else { Ok(()) };
            if let Err(error) = added.and_then(|()| opened()) {
                tracing::error!(%allocation, %error, "memory cannot be opened for reading yet");
            }
        }
        let device_ids = settings.devices.clone();
        let start = Instant::now();
        let (server, outputs) = Server::recover(cells, &settings, &survivors, now(start), &mut memory);
        clients.begin_ids(server.index().epoch() << 32);
        let headroom = Arc::new(Headroom::new(MemoryProbe::open()?));
        let workers = Workers::start(devices, &headroom)?;
        let read = Interest { read: true, write: false };
        clients.poller.add_fixed(Fixed::Workers, workers.bell(), read)?;
        clients.poller.add_fixed(Fixed::Listener, &acceptor, read)?;
        let mut running = Self {
            server,
            index_reader: Rc::new(index.read_only_fd()?),
            index,
            devices: device_ids,
            memory,
            keeper: KeeperLink::new(socket, launch, &mut clients.poller)?,
            clients,
            packet: vec![0; MAX_PACKET],
            acceptor,
            places: BTreeMap::new(),
            offered: None,
            headroom,
            workers,
            start,
            retry_at: None,
            accept_at: None,
            is_accepting: true,
            is_stopping: false,
            yielder: Yielder::new(),
            peak: 0,
            trimmed: start,
        };
        running.act(outputs);
        Ok(running)
    }

    /// Waits for something to happen, and does what follows from it.
    fn turn(&mut self) -> Result<()> {
        if !self.keeper.flush(&mut self.clients.poller) {
            self.lose_keeper();
        }
        let timeout = self.timeout().and_then(|left| Timespec::try_from(left).ok());
        let ready = self.yielder.wait(|| self.clients.poller.wait(timeout.as_ref()))?;
        if self.retry_at.is_some_and(|at| at <= Instant::now()) {
            self.retry_at = None;
            if !self.keeper.is_there() {
                self.start_keeper();
            }
        }
        if ready.keeper {
            self.hear_keeper();
        }
        for late in self.keeper.take_late() {
            self.give_up_parking(late);
        }
        if ready.workers {
            self.collect();
        }
        for user in ready.users {
            self.serve(user)?;
        }
        if ready.listener && self.is_accepting {
            self.accept();
        }
        if self.server.wake_at().is_some_and(|at| at <= self.start.elapsed()) {
            self.step(Input::Tick);
        }
        if self.clients.has_events() {
            self.deliver();
        }
        if self.clients.has_waiting() {
            let ended = self.clients.serve_slots();
            ended.into_iter().for_each(|client| self.end(client, Ending::Dismissed));
        }
        self.trim();
        self.set_accepting()
    }

    /// How long to wait for something to happen.
    fn timeout(&self) -> Option<Duration> {
        if self.clients.has_events() {
            return Some(Duration::ZERO);
        }
        let wake = self.server.wake_at().map(|at| at.saturating_sub(self.start.elapsed()));
        let left = |at: Instant| at.saturating_duration_since(Instant::now());
        let retry = [self.retry_at, self.accept_at].into_iter().flatten().map(left).min();
        let slots = self.clients.has_waiting().then_some(LOOK_AT_SLOTS);
        let is_lower = self.clients.held().bytes.saturating_add(TRIM) <= self.peak;
        let trim = is_lower.then(|| TRIM_EVERY.saturating_sub(self.trimmed.elapsed()));
        [wake, retry, slots, trim, self.keeper.left()].into_iter().flatten().min()
    }

    /// Gives memory back that clients do not need any more.
    fn trim(&mut self) {
        let held = self.clients.held().bytes;
        self.peak = self.peak.max(held);
        if held.saturating_add(TRIM) <= self.peak && self.trimmed.elapsed() >= TRIM_EVERY {
            heap::trim();
            (self.peak, self.trimmed) = (held, Instant::now());
        }
    }

    /// Stops taking in clients while there is no descriptor left, or the keeper is far behind.
    fn set_accepting(&mut self) -> Result<()> {
        let is_held_back =
            self.accept_at.take_if(|at| *at <= Instant::now()).is_none() && self.accept_at.is_some();
        let is_accepting = self.retry_at.is_none_or(|_| self.keeper.is_there());
        let is_accepting = is_accepting && !is_held_back && !self.keeper.is_full();
        if is_accepting != self.is_accepting {
            self.is_accepting = is_accepting;
            let interest = Interest { read: is_accepting, write: false };
            self.clients.poller.set_fixed(Fixed::Listener, &self.acceptor, interest)?;
        }
        Ok(())
    }

    /// Handles some of what is ready of a user's connections and processes.
    fn serve(&mut self, user: u32) -> Result<()> {
        let start = Instant::now();
        self.clients.poller.begin_turn(user)?;
        while let Some(event) = self.clients.poller.next_event(user) {
            match event {
                ClientEvent::Exited(client) => self.end(client, Ending::Gone),
                ClientEvent::Socket { client, is_readable, is_writable, is_closed } => {
                    if is_writable {
                        self.clients.flush(client);
                    }
                    if is_readable {
                        self.hear(client);
                    } else if is_closed {
                        self.end(client, Ending::Closed);
                    }
                }
            }
            if start.elapsed() >= TURN_OF_A_USER {
                break;
            }
        }
        Ok(())
    }

    fn step(&mut self, input: Input<'_>) {
        let outputs = self.server.step(now(self.start), input, &mut self.memory);
        self.act(outputs);
    }

    /// Does what the machine says.
    ///
    /// Events are sent first: where few clients watch, they have an event before the one that caused it has its answer.
    fn act(&mut self, outputs: Vec<Output>) {
        let mut has_events = false;
        for output in outputs {
            if !matches!(output, Output::Notify(_)) && std::mem::take(&mut has_events) {
                self.deliver();
            }
            match output {
                Output::Respond { client, response, share } => {
                    let shared = share.map(|share| self.memory.share(share)).transpose();
                    match shared {
                        Ok(fd) => self.clients.say(client, &response, fd.flatten().into_iter().collect()),
                        Err(refusal) => self.clients.refuse(client, response.id, refusal),
                    }
                }
                Output::Admit { client, request } => self.admit(client, request),
                Output::Allocate { allocation, len, place, requester } => {
                    self.places.insert(allocation, place);
                    self.workers.add(requester, Job::Make { allocation, len, place });
                }
                Output::Promote { allocation, user } => self.workers.promote(allocation, user),
                Output::Import { allocation, len, place, requester } => {
                    self.places.insert(allocation, place);
                    self.workers
                        .add(requester, Job::LookAt { allocation, len, place, fd: self.offered.take() });
                }
                Output::CloseForWriting { allocation, at_once, requester } => {
                    match self.memory.close(allocation, at_once) {
                        Closing::Over(outcome) => self.step(Input::ClosedForWriting { allocation, outcome }),
                        Closing::Takes(fd) => self.workers.add(requester, Job::Close { allocation, fd }),
                    }
                }
                Output::Reclaim { allocation } => {
                    if let Err(error) = self.memory.discard(allocation) {
                        tracing::warn!(%allocation, %error, "memory is free only when the keeper has closed it");
                    }
                    self.release(allocation);
                }
                Output::Release { allocation } => self.release(allocation),
                Output::Disconnect { client } => self.end(client, Ending::Dismissed),
                Output::Watch { client, prefix } => {
                    if let Err(refusal) = self.clients.watch(client, prefix) {
                        let refusal = refusal.for_protocol(self.server.protocol(client));
                        self.clients.refuse(client, 0, refusal);
                        self.end(client, Ending::Dismissed);
                    }
                }
                Output::Notify(event) => {
                    self.clients.announce(event);
                    has_events = true;
                }
            }
        }
        for client in self.clients.take_ended() {
            self.end(client, Ending::Dismissed);
        }
    }

    fn release(&mut self, allocation: AllocationId) {
        self.memory.remove(allocation);
        self.places.remove(&allocation);
        self.keeper.unpark(&[Key::Allocation(allocation)]);
    }

    /// Sends some events to clients that watch. Those that have missed some are let go.
    fn deliver(&mut self) {
        for client in self.clients.deliver() {
            self.end(client, Ending::Dismissed);
        }
    }

    /// A client has said hello: the keeper is given its descriptors, and then it is welcome.
    fn admit(&mut self, client: ClientId, request: u64) {
        let admitted = match self.clients.admit(client, request, &self.headroom) {
            Ok(Ok(())) => self.park_client(client),
            Ok(Err(refusal)) => Err(refusal),
            Err(error) => Err(Refusal::of_admission(&error)),
        };
        if let Err(refusal) = admitted {
            let refusal = refusal.for_protocol(self.server.protocol(client));
            self.clients.refuse(client, request, refusal);
            self.end(client, Ending::Gone);
        }
    }

    fn park_client(&mut self, client: ClientId) -> Result<(), Refusal> {
        let Some(connection) = self.clients.get(client) else { return Ok(()) };
        let fds = connection.park(client).and_then(|fds| {
            if let Some(admitted) = &connection.admitted {
                self.memory.add_pins(client, &admitted.pins)?;
            }
            Ok(fds)
        });
        let fds = fds.map_err(|error| Refusal::of_admission(&error))?;
        if let Some(parked) = self.keeper.park(Parking::Client(client), fds) {
            self.parked(parked);
        }
        Ok(())
    }

    fn welcome(&mut self, client: ClientId) {
        let Some(id) = self.clients.open(client) else { return };
        let pins = self.clients.get(client).and_then(|connection| connection.admitted.as_ref());
        let Some(pins) = pins.map(|admitted| admitted.pins.share_fd()) else { return };
        let Ok(pins) = pins else { return self.end(client, Ending::Gone) };
        let (index_len, devices) = (self.index.len() as u64, self.devices.clone());
        let answer = Answer::Welcome { client, index_len, devices };
        self.clients.say(
            client,
            &Response { id, answer },
            vec![Rc::clone(&self.index_reader), Rc::new(pins)],
        );
    }

    fn hear(&mut self, client: ClientId) {
        let mut packet = std::mem::take(&mut self.packet);
        match self.clients.hear(client, &mut packet) {
            Some(Heard::Request(request, ..)) if request.ask == Ask::Goodbye => {
                self.end(client, Ending::Gone)
            }
            Some(Heard::Request(Request { id, ask: Ask::AwaitChild, .. }, ..)) => {
                let kept = self.clients.await_child(client);
                self.keeper.unpark(&[Key::Process(client)]);
                self.park_process(client, id, kept);
            }
            Some(Heard::Request(Request { id, ask: Ask::Claim { client: of, secret }, .. }, ..)) => {
                let is_known = self.memory.secret(of) == Some(secret);
                let claimed = if is_known { self.clients.claim(client, of) } else { Err(not_known()) };
                self.park_process(client, id, claimed);
            }
            Some(Heard::Request(request, payload, fd, charge)) => {
                // The machine knows of a client from its first request on.
                if matches!(request.ask, Ask::Hello { .. })
                    && let Some(account) = self.clients.account(client)
                {
                    self.step(Input::Joined { client, account });
                }
                let needed = bookkeeping(&request);
                if needed > 0
                    && let Err(shortage) = self.headroom.claim(needed, Purpose::Bookkeeping)
                {
                    let refusal = shortage.refusal(needed).for_protocol(self.server.protocol(client));
                    self.clients.refuse(client, request.id, refusal);
                    self.packet = packet;
                    return;
                }
                self.offered = fd;
                self.step(Input::Request { client, request, payload, charge });
                self.offered = None;
            }
            Some(Heard::Refused(refusal)) => {
                let refusal = refusal.for_protocol(self.server.protocol(client));
                self.clients.refuse(client, 0, refusal);
                self.end(client, Ending::Dismissed);
            }
            Some(Heard::Closed) => self.end(client, Ending::Closed),
            Some(_) => self.end(client, Ending::Dismissed),
            None => {}
        }
        self.packet = packet;
    }

    /// Takes in some of the clients that wait.
    fn accept(&mut self) {
        for _ in 0..ACCEPTED_AT_ONCE {
            let accepted = match self.acceptor.next() {
                Ok(None) => return,
                Ok(Some(socket)) => self.clients.accept(socket),
                Err(error) => Err(error),
            };
            if let Err(error) = accepted {
                tracing::warn!(%error, "cannot take in a client");
                self.accept_at = Some(Instant::now() + RETRY);
                return;
            }
        }
    }

    /// Ends a connection. What its client holds stays until it cannot use that any more.
    fn end(&mut self, client: ClientId, ending: Ending) {
        let (server, memory) = (&self.server, &self.memory);
        let holds = || server.has_drafts(client) || memory.has_pins(client);
        let Some(was_admitted) = self.clients.get(client).map(|connection| connection.admitted.is_some())
        else {
            return;
        };
        let is_forgotten = self.clients.end(client, ending, holds);
        if is_forgotten {
            self.step(Input::Left { client });
        }
        match (was_admitted, is_forgotten) {
            (true, true) => self.keeper.unpark(&Clients::keys(client)),
            (true, false) => self.keeper.unpark(&[Key::Socket(client)]),
            (false, _) => {}
        }
    }

    /// What the workers have done.
    fn collect(&mut self) {
        for done in self.workers.done() {
            match done {
                Done::Closed { allocation, outcome } => {
                    if outcome.is_ok() {
                        self.memory.closed(allocation);
                    }
                    self.step(Input::ClosedForWriting { allocation, outcome });
                }
                Done::Made { allocation, outcome: Err(reason) } => {
                    self.step(Input::Allocated { allocation, outcome: Err(reason) });
                }
                Done::Made { allocation, outcome: Ok(fd) } => {
                    let is_host = self.places.remove(&allocation) == Some(0);
                    let parked = memfd::share_fd(fd.as_fd());
                    match parked.and_then(|parked| self.memory.add(allocation, fd, is_host).map(|()| parked))
                    {
                        Ok(parked) => {
                            let fds = vec![(Key::Allocation(allocation), parked)];
                            if let Some(parked) = self.keeper.park(Parking::Memory(allocation), fds) {
                                self.parked(parked);
                            }
                        }
                        Err(error) => {
                            self.step(Input::Allocated { allocation, outcome: Err(error.to_string()) });
                        }
                    }
                }
            }
        }
    }
}

fn not_known() -> Refusal {
    Refusal::malformed("a claim with a wrong secret")
}

fn now(start: Instant) -> Now {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Now { elapsed: start.elapsed(), unix: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX) }
}
