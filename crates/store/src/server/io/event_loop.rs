//! The event loop of the store server: one thread that waits for events, passes them to the state machine, and has the executor
//! carry out the outputs. The thread never waits for a client.
//!
//! The work of one iteration is bounded, and does not grow with the number of clients: some events of each user that has any, a
//! slice of each kind of background work, and a few new clients.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant, SystemTime};

use wholemem_hal::Backend;
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, PacketSocket, heap};

use super::accept::ClientAcceptor;
use super::clients::{Clients, EndReason};
use super::connection::ReceiveResult;
use super::executor::{Executor, FollowUp};
use super::heap_trim::HeapTrim;
use super::poller::ClientEvent;
use super::startup;
use crate::cells::MappedCells;
use crate::id::ClientId;
use crate::index::Geometry;
use crate::keeper::{DescriptorKey, DescriptorTable, Launch, ToKeeper};
use crate::protocol::frame::Payload;
use crate::protocol::{Request, RequestKind, Status};
use crate::server::budget::Charge;
use crate::server::machine::{Input, Output, Server, ServerSettings, StepTime};
use crate::{Refusal, Result};

/// The time after which one iteration of the event loop stops serving a user. At least one event of the user is served.
const USER_TIME_SLICE: Duration = Duration::from_micros(20);

/// The interval at which connections that wait for a message slot (the right to have an incomplete long message) are checked.
const SLOT_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The clock that provides the time for the server's state machine.
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

    /// Returns the current time for a step of the state machine. A system clock before 1970 counts as 1970.
    pub(super) fn now(&self) -> StepTime {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let unix = u64::try_from(unix.as_millis()).expect("a system time fits 64 bits of milliseconds");
        StepTime { elapsed: self.elapsed(), unix }
    }
}

/// A running store server: the state machine, the executor of its outputs, and the listening socket.
pub(super) struct EventLoop<'a> {
    server: Server<MappedCells>,
    executor: Executor<'a>,
    acceptor: ClientAcceptor,
    clock: Clock,
    heap: HeapTrim,
    /// The buffer into which packets of clients and of the keeper process are received.
    packet: Vec<u8>,
    is_stopping: bool,
}

/// Runs the store server until the keeper process at the other end of the socket requests a stop.
pub(crate) fn run(
    socket: PacketSocket,
    settings: ServerSettings,
    geometry: Geometry,
    devices: Option<&Backend>,
    launch: &Launch<'_>,
) -> Result<()> {
    wholemem_os::descriptors::raise_limit();
    let descriptors = DescriptorTable::receive(&socket)?;
    let mut event_loop = startup::start(descriptors, socket, settings, geometry, devices, launch)?;
    event_loop.executor.keeper.send(&ToKeeper::Ready, Vec::new());
    while !event_loop.is_stopping {
        event_loop.run_once()?;
    }
    event_loop.log_end();
    // Clients that have the index mapped would otherwise still find names in it after the server has stopped.
    event_loop.server.index().supersede();
    Ok(())
}

impl<'a> EventLoop<'a> {
    pub(super) fn new(
        server: Server<MappedCells>,
        executor: Executor<'a>,
        acceptor: ClientAcceptor,
        clock: Clock,
    ) -> Self {
        let (heap, packet) = (HeapTrim::new(clock.start), vec![0; MAX_PACKET]);
        Self { server, executor, acceptor, clock, heap, packet, is_stopping: false }
    }

    /// Returns the status of the store.
    pub(super) fn status(&self) -> Status {
        self.server.status()
    }

    /// Logs what is dropped with the end of the store.
    fn log_end(&self) {
        let Status { objects, unsealed, clients, host, device, .. } = self.status();
        let (host, device) = (host.used, device.used);
        if objects + unsealed > 0 {
            tracing::warn!(
                objects,
                unsealed,
                clients,
                host,
                device,
                "the store ends: its objects are dropped"
            );
        } else {
            tracing::info!(clients, "the store ends: it has no objects");
        }
    }

    /// Runs one iteration of the event loop: waits for events, and processes them.
    fn run_once(&mut self) -> Result<()> {
        let Executor { keeper, clients, .. } = &mut self.executor;
        if !keeper.flush(clients.poller()) {
            self.on_keeper_exit();
        }
        let deadline = self.timeout().map_or(Deadline::NEVER, Deadline::after);
        let ready = self.executor.clients.poller().wait(deadline)?;
        if self.executor.keeper.take_retry(Instant::now()) {
            self.executor.start_keeper(&self.acceptor);
        }
        if ready.keeper {
            self.receive_from_keeper();
        }
        for late in self.executor.keeper.take_late() {
            let follow_up = self.executor.parking_failed(late);
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
                self.end(client, EndReason::Disconnected);
            }
        }
        let now = Instant::now();
        if self.heap.update(self.executor.clients.held().bytes, now) {
            heap::trim();
        }
        let Executor { keeper, clients, .. } = &mut self.executor;
        self.acceptor.update(keeper.accepts_clients(), now, clients.poller())
    }

    /// Returns how long the event loop may wait for the next event; `None` means without limit.
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

    /// Processes some of the pending events of a user's connections and client processes.
    fn serve(&mut self, user: u32) -> Result<()> {
        let start = Instant::now();
        let mut now = start;
        self.executor.clients.poller().fetch_events(user)?;
        while let Some(event) = self.executor.clients.poller().next_event(user) {
            match event {
                ClientEvent::Exited(client) => self.end(client, EndReason::Left),
                ClientEvent::Socket { client, is_readable, is_writable, is_closed } => {
                    if is_writable {
                        self.executor.clients.flush(client);
                    }
                    if is_readable {
                        self.receive(client, now);
                    } else if is_closed {
                        self.end(client, EndReason::Closed);
                    }
                }
            }
            now = Instant::now();
            self.executor.clients.end_processing(now);
            if now.duration_since(start) >= USER_TIME_SLICE {
                break;
            }
        }
        Ok(())
    }

    /// Reads from a client's socket, and processes the request if it is complete. `now` is a time shortly before the call.
    fn receive(&mut self, client: ClientId, now: Instant) {
        let mut packet = std::mem::take(&mut self.packet);
        match self.executor.clients.receive(client, &mut packet) {
            Some(ReceiveResult::Request(request, payload, fd, charge)) => {
                self.executor.clients.begin_request(client, &request, now);
                self.process(client, request, payload, fd, charge);
            }
            Some(ReceiveResult::Refused(refusal)) => self.reject(client, 0, refusal, EndReason::Disconnected),
            Some(ReceiveResult::Closed) => self.end(client, EndReason::Closed),
            Some(_) => self.end(client, EndReason::Disconnected),
            None => {}
        }
        self.packet = packet;
    }

    /// Handles a request of a client. The event loop handles requests about client processes, and the state machine all others.
    fn process(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        fd: Option<OwnedFd>,
        charge: Option<Charge>,
    ) {
        match request.kind {
            RequestKind::Goodbye => return self.end(client, EndReason::Left),
            RequestKind::AwaitChild => {
                let follow_up = self.executor.await_child(client, request.id);
                return self.follow(follow_up);
            }
            RequestKind::Claim { client: page, secret } => {
                let follow_up = self.executor.claim(client, request.id, page, secret);
                return self.follow(follow_up);
            }
            // The state machine is notified of a client when the client sends its hello message.
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

    /// Passes an input to the state machine, and carries out the resulting outputs. `offered` is the descriptor that was sent
    /// with a request.
    fn step_with(&mut self, input: Input<'_>, offered: Option<OwnedFd>) {
        let outputs = self.server.step(self.clock.now(), input, &mut self.executor.memory);
        self.execute(outputs, offered);
    }

    /// Carries out the outputs of the state machine.
    ///
    /// Events are sent first: if few clients watch, they receive an event before the client that caused it is answered.
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
            self.end(client, EndReason::Disconnected);
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

    /// Refuses a request in the protocol version of its client, and ends the connection.
    fn reject(&mut self, client: ClientId, request: u64, refusal: Refusal, ending: EndReason) {
        let refusal = refusal.for_protocol(self.server.protocol(client));
        self.executor.clients.refuse(client, request, refusal);
        self.end(client, ending);
    }

    /// Sends some events to clients that watch names. Clients that have missed events are disconnected.
    fn deliver(&mut self) {
        for client in self.executor.clients.deliver() {
            self.end(client, EndReason::Disconnected);
        }
    }

    /// Ends a client's connection. The client's resources are retained until the client cannot use them any more.
    fn end(&mut self, client: ClientId, ending: EndReason) {
        let Executor { memory, clients, .. } = &mut self.executor;
        let holds = || self.server.has_drafts(client) || memory.has_pins(client);
        let Some(connection) = clients.get(client) else { return };
        let was_admitted = connection.admitted.is_some();
        let is_removed = clients.end(client, ending, holds);
        if is_removed {
            self.step(Input::Left { client });
        }
        match (was_admitted, is_removed) {
            (true, true) => self.executor.keeper.unpark(&Clients::keys(client)),
            (true, false) => self.executor.keeper.unpark(&[DescriptorKey::Socket(client)]),
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

    /// Starts another keeper process after the keeper has exited. Until the new keeper runs, the store is lost if the server
    /// dies.
    fn on_keeper_exit(&mut self) {
        tracing::warn!("the keeper has exited: the store is unprotected until another keeper runs");
        let Executor { keeper, clients, .. } = &mut self.executor;
        for parked in keeper.on_exit(clients.poller()) {
            let follow_up = self.executor.parked(parked);
            self.follow(follow_up);
        }
        self.executor.start_keeper(&self.acceptor);
    }
}
