//! The event loop: one thread that waits for events, tells the machine, has the executor carry out what the machine
//! decides, and never waits for a client.
//!
//! The work of one turn is bounded, and does not grow with the number of clients: some events of each user that has any, a
//! slice of each piece of work in the background, and a few new clients.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::Timespec;
use wholemem_hal::Backend;
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{PacketSocket, heap};

use super::accept::Acceptor;
use super::clients::{Clients, Ending};
use super::connection::Received;
use super::executor::{Executor, FollowUp};
use super::heap_trim::HeapTrim;
use super::poller::ClientEvent;
use super::startup;
use crate::cells::MappedCells;
use crate::id::ClientId;
use crate::index::Geometry;
use crate::keeper::{DescriptorTable, Key, Launch, ToKeeper};
use crate::protocol::frame::Payload;
use crate::protocol::{Request, RequestKind};
use crate::server::budget::Charge;
use crate::server::machine::{Input, Output, Server, ServerSettings, StepTime};
use crate::{Refusal, Result};

/// How long one turn serves a user whose events do not end. At least one event is served.
const TURN_OF_A_USER: Duration = Duration::from_micros(20);

/// How often connections that wait for memory are looked at although nothing has happened.
const SLOT_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The time that the machine is told.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    start: Instant,
}

impl Clock {
    pub(super) fn start(start: Instant) -> Self {
        Self { start }
    }

    fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// The time of a step. A system clock before 1970 counts as 1970.
    pub(super) fn now(&self) -> StepTime {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let unix = u64::try_from(unix.as_millis()).expect("a system time fits 64 bits of milliseconds");
        StepTime { elapsed: self.elapsed(), unix }
    }
}

/// A running server.
pub(super) struct EventLoop<'a> {
    server: Server<MappedCells>,
    executor: Executor<'a>,
    acceptor: Acceptor,
    clock: Clock,
    heap: HeapTrim,
    /// A buffer for the packet that is being received.
    packet: Vec<u8>,
    is_stopping: bool,
}

/// Serves until the keeper at the other end of the socket says to stop.
pub(crate) fn run(
    socket: PacketSocket,
    settings: ServerSettings,
    geometry: Geometry,
    devices: Option<&Backend>,
    launch: &Launch<'_>,
) -> Result<()> {
    wholemem_os::descriptors::raise_limit();
    let kept = DescriptorTable::receive(&socket)?;
    let mut event_loop = startup::start(kept, socket, settings, geometry, devices, launch)?;
    event_loop.executor.keeper.tell(&ToKeeper::Ready, Vec::new());
    while !event_loop.is_stopping {
        event_loop.turn()?;
    }
    // Clients that have the index mapped would find names in it for ever.
    event_loop.server.index().supersede();
    Ok(())
}

impl<'a> EventLoop<'a> {
    pub(super) fn new(
        server: Server<MappedCells>,
        executor: Executor<'a>,
        acceptor: Acceptor,
        clock: Clock,
    ) -> Self {
        let (heap, packet) = (HeapTrim::new(clock.start), vec![0; MAX_PACKET]);
        Self { server, executor, acceptor, clock, heap, packet, is_stopping: false }
    }

    /// Waits for an event, and does what follows from it.
    fn turn(&mut self) -> Result<()> {
        let Executor { keeper, clients, .. } = &mut self.executor;
        if !keeper.flush(clients.poller()) {
            self.on_keeper_exit();
        }
        // A time that is too long for the kernel is for ever.
        let timeout = self.timeout().and_then(|left| Timespec::try_from(left).ok());
        let ready = self.executor.clients.poller().wait(timeout.as_ref())?;
        if self.executor.keeper.take_retry(Instant::now()) {
            self.executor.start_keeper(&self.acceptor);
        }
        if ready.keeper {
            self.receive_from_keeper();
        }
        for late in self.executor.keeper.take_late() {
            let follow_up = self.executor.not_parked(late);
            self.follow(follow_up);
        }
        if ready.workers {
            for done in self.executor.workers.done() {
                let follow_up = self.executor.finished(done);
                self.follow(follow_up);
            }
        }
        for user in ready.users {
            self.serve(user)?;
        }
        if ready.listener {
            self.acceptor.accept(&mut self.executor.clients);
        }
        if self.server.wake_at().is_some_and(|at| at <= self.clock.elapsed()) {
            self.step(Input::Tick);
        }
        if self.executor.clients.has_events() {
            self.deliver();
        }
        if self.executor.clients.has_waiting() {
            for client in self.executor.clients.serve_slots() {
                self.end(client, Ending::Disconnected);
            }
        }
        let now = Instant::now();
        if self.heap.update(self.executor.clients.held().bytes, now) {
            heap::trim();
        }
        let Executor { keeper, clients, .. } = &mut self.executor;
        self.acceptor.update(keeper.takes_clients(), now, clients.poller())
    }

    /// How long to wait for an event.
    fn timeout(&self) -> Option<Duration> {
        let Executor { keeper, clients, .. } = &self.executor;
        if clients.has_events() {
            return Some(Duration::ZERO);
        }
        let now = Instant::now();
        let timeouts = [
            self.server.wake_at().map(|at| at.saturating_sub(self.clock.elapsed())),
            self.acceptor.timeout(now),
            clients.has_waiting().then_some(SLOT_CHECK_INTERVAL),
            self.heap.timeout(clients.held().bytes, now),
            keeper.timeout(now),
        ];
        timeouts.into_iter().flatten().min()
    }

    /// Handles some of what is ready of a user's connections and processes.
    fn serve(&mut self, user: u32) -> Result<()> {
        let start = Instant::now();
        self.executor.clients.poller().begin_turn(user)?;
        while let Some(event) = self.executor.clients.poller().next_event(user) {
            match event {
                ClientEvent::Exited(client) => self.end(client, Ending::Gone),
                ClientEvent::Socket { client, is_readable, is_writable, is_closed } => {
                    if is_writable {
                        self.executor.clients.flush(client);
                    }
                    if is_readable {
                        self.receive(client);
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

    /// Reads from a client, and processes what it has sent.
    fn receive(&mut self, client: ClientId) {
        let mut packet = std::mem::take(&mut self.packet);
        match self.executor.clients.receive(client, &mut packet) {
            Some(Received::Request(request, payload, fd, charge)) => {
                self.process(client, request, payload, fd, charge);
            }
            Some(Received::Refused(refusal)) => self.reject(client, 0, refusal, Ending::Disconnected),
            Some(Received::Closed) => self.end(client, Ending::Closed),
            Some(_) => self.end(client, Ending::Disconnected),
            None => {}
        }
        self.packet = packet;
    }

    /// Processes a request: here if it is about processes, and otherwise by the machine.
    fn process(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        fd: Option<OwnedFd>,
        charge: Option<Charge>,
    ) {
        match request.kind {
            RequestKind::Goodbye => return self.end(client, Ending::Gone),
            RequestKind::AwaitChild => {
                let follow_up = self.executor.await_child(client, request.id);
                return self.follow(follow_up);
            }
            RequestKind::Claim { client: page, secret } => {
                let follow_up = self.executor.claim(client, request.id, page, secret);
                return self.follow(follow_up);
            }
            // The machine knows a client from its hello on.
            RequestKind::Hello { .. } => {
                if let Some(account) = self.executor.clients.account(client) {
                    self.step(Input::Joined { client, account });
                }
            }
            _ => {}
        }
        if let Err(refusal) = self.executor.admission.check_memory(&request) {
            let refusal = refusal.for_protocol(self.server.protocol(client));
            return self.executor.clients.refuse(client, request.id, refusal);
        }
        self.step_with(Input::Request { client, request, payload, charge }, fd);
    }

    fn step(&mut self, input: Input<'_>) {
        self.step_with(input, None);
    }

    /// Tells the machine of an event, and carries out what it decides. `offered` is a descriptor that came with a request.
    fn step_with(&mut self, input: Input<'_>, offered: Option<OwnedFd>) {
        let outputs = self.server.step(self.clock.now(), input, &mut self.executor.memory);
        self.execute(outputs, offered);
    }

    /// Carries out what the machine has decided.
    ///
    /// Events are sent first: where few clients watch, they have an event before the client that caused it has its answer.
    pub(super) fn execute(&mut self, outputs: Vec<Output>, mut offered: Option<OwnedFd>) {
        let mut has_events = false;
        for output in outputs {
            let is_event = matches!(output, Output::Notify(_));
            if !is_event && std::mem::take(&mut has_events) {
                self.deliver();
            }
            has_events |= is_event;
            let follow_up = self.executor.perform(output, &mut offered);
            self.follow(follow_up);
        }
        for client in self.executor.clients.take_ended() {
            self.end(client, Ending::Disconnected);
        }
    }

    fn follow(&mut self, follow_up: impl Into<Option<FollowUp>>) {
        match follow_up.into() {
            Some(FollowUp::Step(input)) => self.step(input),
            Some(FollowUp::End(client, ending)) => self.end(client, ending),
            Some(FollowUp::Reject { client, request, refusal, ending }) => {
                self.reject(client, request, refusal, ending);
            }
            None => {}
        }
    }

    /// Refuses a request in the protocol of its client, and ends the connection.
    fn reject(&mut self, client: ClientId, request: u64, refusal: Refusal, ending: Ending) {
        let refusal = refusal.for_protocol(self.server.protocol(client));
        self.executor.clients.refuse(client, request, refusal);
        self.end(client, ending);
    }

    /// Sends some events to clients that watch. Those that have missed some are disconnected.
    fn deliver(&mut self) {
        for client in self.executor.clients.deliver() {
            self.end(client, Ending::Disconnected);
        }
    }

    /// Ends a connection. What its client holds stays until the client cannot use it any more.
    fn end(&mut self, client: ClientId, ending: Ending) {
        let Executor { memory, clients, .. } = &mut self.executor;
        let holds = || self.server.has_drafts(client) || memory.has_pins(client);
        let Some(connection) = clients.get(client) else { return };
        let was_admitted = connection.admitted.is_some();
        let is_forgotten = clients.end(client, ending, holds);
        if is_forgotten {
            self.step(Input::Left { client });
        }
        match (was_admitted, is_forgotten) {
            (true, true) => self.executor.keeper.unpark(&Clients::keys(client)),
            (true, false) => self.executor.keeper.unpark(&[Key::Socket(client)]),
            (false, _) => {}
        }
    }

    fn receive_from_keeper(&mut self) {
        let messages = self.executor.keeper.receive(&mut self.packet);
        for parked in messages.parked {
            let follow_up = self.executor.parked(parked);
            self.follow(follow_up);
        }
        self.is_stopping |= messages.stop;
        if messages.is_lost {
            self.on_keeper_exit();
        }
    }

    /// The keeper has died: another one is started. Until it runs, the memory of the store is lost if this process dies.
    fn on_keeper_exit(&mut self) {
        tracing::warn!("the keeper is dead: unprotected until another one runs");
        let Executor { keeper, clients, .. } = &mut self.executor;
        for parked in keeper.on_exit(clients.poller()) {
            let follow_up = self.executor.parked(parked);
            self.follow(follow_up);
        }
        self.executor.start_keeper(&self.acceptor);
    }
}
