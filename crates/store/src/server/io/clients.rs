//! The connections of a store server to its clients: accepts connections, reads from them fairly among users, sends to them, and
//! ends them.
//!
//! Makes no decisions about objects: received requests are returned to the event loop, and responses are passed to
//! [`Clients::send`].

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use wholemem_os::PacketSocket;

use super::accept::refuse_connection;
use super::connection::{ClientConnection, ConnectionPhase, ReceiveResult, admission_refusal};
use super::headroom::Headroom;
use super::message_slots::{MessageSlots, SlotAction};
use super::poller::Poller;
use super::request_times::RequestTimes;
use super::watchers::{EventWatchers, LoggedEvent, SendResult};
use crate::id::ClientId;
use crate::keeper::{DescriptorKey, DescriptorTable};
use crate::protocol::{Answer, Change, NamedValue, Request, RequestStatistics, Response};
use crate::server::budget::{Account, Amount, Budget, CONNECTION};
use crate::server::machine::WatchStart;
use crate::{Refusal, Result};

/// The number of bytes that the server uses for a client's watch of names, besides the watched prefix.
const WATCH_COST: u64 = 256;

/// The interval in which the refusal of one client is logged.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// The reason why a client's connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndReason {
    /// The client has closed the connection.
    Closed,
    /// The process of the client has exited, or the client has sent a goodbye message. The client does not use any object any
    /// more.
    Left,
    /// The server disconnects the client.
    Disconnected,
}

/// The connections of all clients of a store server.
#[derive(Debug)]
pub(super) struct Clients {
    connections: BTreeMap<ClientId, ClientConnection>,
    poller: Poller,
    budget: Budget,
    watchers: EventWatchers,
    /// The watches of clients that use protocol 5 or older.
    name_watchers: EventWatchers,
    slots: MessageSlots,
    times: RequestTimes,
    /// The number of clients that were accepted, and of those that were refused when they connected.
    connected: [u64; 2],
    /// The time at which the refusal of a client was logged last.
    refusal_logged: Option<Instant>,
    /// The user that the server runs as. Only clients of this user may send descriptors with their requests.
    user: u32,
    next: u64,
    /// Clients whose connections have to end because a response could not be queued.
    ended: Vec<ClientId>,
}

impl Clients {
    pub(super) fn new(user: u32, budget: Budget) -> Result<Self> {
        Ok(Self {
            connections: BTreeMap::new(),
            poller: Poller::create()?,
            budget,
            watchers: EventWatchers::with_history(1),
            name_watchers: EventWatchers::default(),
            slots: MessageSlots::default(),
            times: RequestTimes::default(),
            connected: [0, 0],
            refusal_logged: None,
            user,
            next: 0,
            ended: Vec::new(),
        })
    }

    /// Returns the poller of the clients' sockets and processes, and of the other event sources of the event loop.
    pub(super) fn poller(&mut self) -> &mut Poller {
        &mut self.poller
    }

    /// Sets the id of the next client that connects, and the number before the first event.
    pub(super) fn begin_ids(&mut self, first: u64) {
        self.next = first;
        self.watchers = EventWatchers::with_history(first + 1);
    }

    /// Takes over the connection of a client of the previous server; returns `None` if the keeper process has no pin page of this
    /// client (in which it marks objects in use).
    pub(super) fn take_over(
        &mut self,
        client: ClientId,
        descriptors: &mut DescriptorTable,
    ) -> Result<Option<&ClientConnection>> {
        let budget = &mut self.budget;
        let Some(connection) = ClientConnection::take_over(client, descriptors, |user| budget.open(user))?
        else {
            return Ok(None);
        };
        self.register(client, connection)?;
        Ok(self.connections.get(&client))
    }

    /// Adds a client that has just connected, or refuses the client.
    pub(super) fn accept(&mut self, socket: PacketSocket) -> Result<()> {
        let user = socket.peer_uid()?;
        let account = self.budget.open(user);
        match account.charge_connection(CONNECTION) {
            Ok(charge) => {
                self.next += 1;
                self.connected[0] += 1;
                let connection = ClientConnection::accept(socket, account, charge, user == self.user);
                self.register(ClientId(self.next - 1), connection)
            }
            Err(refusal) => {
                self.connected[1] += 1;
                self.log_refusal(user, &refusal);
                refuse_connection(&socket, refusal);
                Ok(())
            }
        }
    }

    /// Logs that a client was refused, at most once in a second, since clients can connect again at once.
    fn log_refusal(&mut self, user: u32, refusal: &Refusal) {
        let now = Instant::now();
        if self.refusal_logged.is_none_or(|at| now.duration_since(at) >= REFUSAL_LOG_INTERVAL) {
            self.refusal_logged = Some(now);
            tracing::warn!(user, %refusal, refused = self.connected[1], "a client was refused");
        }
    }

    fn register(&mut self, client: ClientId, mut connection: ClientConnection) -> Result<()> {
        let user = connection.account.uid();
        if let Some(socket) = &connection.socket {
            connection.interest = connection.wanted();
            self.poller.add_socket(user, client, socket, connection.interest)?;
        }
        self.connections.insert(client, connection);
        self.watch_process(client)
    }

    fn watch_process(&mut self, client: ClientId) -> Result<()> {
        let Some(connection) = self.connections.get(&client) else { return Ok(()) };
        let process = connection.admitted.as_ref().and_then(|admitted| admitted.process.as_ref());
        match process {
            Some(process) => self.poller.add_process(connection.account.uid(), client, process),
            None => Ok(()),
        }
    }

    /// Starts to admit a client that has sent its hello message. No further requests of the client are read until the keeper
    /// process has the client's descriptors.
    pub(super) fn admit(
        &mut self,
        client: ClientId,
        request: u64,
        headroom: &Headroom,
    ) -> Result<Result<(), Refusal>> {
        let Some(connection) = self.connections.get_mut(&client) else { return Ok(Ok(())) };
        if connection.phase != ConnectionPhase::AwaitingHello {
            return Ok(Err(Refusal::malformed("a second hello")));
        }
        if let Err(refusal) = connection.admit(request, headroom) {
            return Ok(Err(refusal));
        }
        self.update(client);
        self.watch_process(client)?;
        Ok(Ok(()))
    }

    /// Starts to read the requests of a client whose descriptors the keeper process holds. Returns the request id of the client's
    /// hello message.
    pub(super) fn open(&mut self, client: ClientId) -> Option<u64> {
        let connection = self.connections.get_mut(&client)?;
        let ConnectionPhase::Admitting(request) = connection.phase else { return None };
        connection.phase = ConnectionPhase::Open;
        self.update(client);
        Some(request)
    }

    /// Reserves the pin page of a client (in which it marks objects in use) for a forked child: the server stops watching the
    /// client's process, and the page stays valid while the connection is open. Returns the descriptors for the keeper process.
    pub(super) fn await_child(&mut self, client: ClientId) -> Result<Vec<(DescriptorKey, OwnedFd)>, Refusal> {
        let connection =
            self.connections.get_mut(&client).filter(|connection| connection.phase == ConnectionPhase::Open);
        let connection = connection.ok_or_else(|| Refusal::malformed("a fork before the hello"))?;
        if let Some(process) = connection.admitted.as_mut().and_then(|admitted| admitted.process.take()) {
            self.poller.remove(connection.account.uid(), &process);
        }
        connection.park(client).map_err(|error| admission_refusal(&error))
    }

    /// Assigns the pin page of another client of the same user (in which objects in use are marked) to a forked child, whose
    /// connection is `claimer`. The page stays valid while the child's process lives. Returns the descriptors for the keeper
    /// process.
    pub(super) fn claim(
        &mut self,
        claimer: ClientId,
        client: ClientId,
    ) -> Result<Vec<(DescriptorKey, OwnedFd)>, Refusal> {
        let refused = || Refusal::malformed("the claimed pin page does not exist");
        let child =
            self.connections.get(&claimer).filter(|child| child.phase == ConnectionPhase::AwaitingHello);
        let child = child.ok_or_else(refused)?;
        let (user, process) = (child.account.uid(), child.socket.as_ref().map(PacketSocket::peer_pidfd));
        let process = process.ok_or_else(refused)?;
        let process = process.map_err(|error| admission_refusal(&error.into()))?;
        let connection = self.connections.get_mut(&client).filter(|found| found.account.uid() == user);
        let admitted = connection.and_then(|connection| connection.admitted.as_mut()).ok_or_else(refused)?;
        // A forked child repeats its claim of a pin page if the server was replaced before it answered the claim.
        if let Some(before) = admitted.process.replace(process) {
            self.poller.remove(user, &before);
        }
        let parked = self.connections.get(&client).ok_or_else(refused)?.park_process(client);
        let watched = parked.and_then(|fds| self.watch_process(client).map(|()| fds));
        if watched.is_err()
            && let Some(connection) = self.connections.get_mut(&client)
        {
            // If the claimed pin page depended on a process that the server does not watch, the page would never be released.
            connection.admitted.as_mut().map(|admitted| admitted.process.take());
        }
        watched.map_err(|error| admission_refusal(&error))
    }

    pub(super) fn get(&self, client: ClientId) -> Option<&ClientConnection> {
        self.connections.get(&client)
    }

    /// Iterates over the connections of all clients.
    pub(super) fn iter(&self) -> impl Iterator<Item = (ClientId, &ClientConnection)> {
        self.connections.iter().map(|(client, connection)| (*client, connection))
    }

    pub(super) fn account(&self, client: ClientId) -> Option<Account> {
        self.connections.get(&client).map(|connection| connection.account.clone())
    }

    /// Returns the total memory and descriptors that are charged to clients.
    pub(super) fn held(&self) -> Amount {
        self.budget.held()
    }

    /// Reads from a client's socket. Returns `None` if the event loop has nothing to do, because no complete request has arrived.
    pub(super) fn receive<'a>(
        &mut self,
        client: ClientId,
        packet: &'a mut [u8],
    ) -> Option<ReceiveResult<'a>> {
        let connection = self.connections.get_mut(&client)?;
        let user = connection.account.uid();
        let was_long = connection.is_within_message();
        let received = connection.receive(packet, self.user);
        match &received {
            ReceiveResult::TookSlot => self.slots.assign(user, client),
            ReceiveResult::NeedsSlot => self.slots.wait(user, client, Instant::now()),
            ReceiveResult::Request(..) if was_long => self.slots.remove(user, client),
            _ => {}
        }
        self.update(client);
        match received {
            ReceiveResult::Nothing | ReceiveResult::TookSlot | ReceiveResult::NeedsSlot => None,
            received => Some(received),
        }
    }

    /// Assigns message slots (the right to have an incomplete long message) to waiting connections. Returns the clients whose
    /// connections have to end.
    pub(super) fn serve_slots(&mut self) -> Vec<ClientId> {
        let now = Instant::now();
        let mut ended = Vec::new();
        for next in self.slots.next(now) {
            let (client, is_late) = match next {
                SlotAction::Try(client) => (client, false),
                SlotAction::TimeOut(client) => (client, true),
            };
            let Some(connection) = self.connections.get_mut(&client) else { continue };
            let user = connection.account.uid();
            match connection.charge_slot() {
                Ok(()) => {
                    self.slots.assign(user, client);
                    self.update(client);
                }
                Err(refusal) if is_late => {
                    self.refuse(client, 0, refusal);
                    ended.push(client);
                }
                Err(_) => {
                    let connections = &self.connections;
                    let last_packet =
                        |client| connections.get(&client).map(|connection| connection.last_packet);
                    ended.extend(self.slots.stalled(user, now, last_packet));
                }
            }
        }
        ended
    }

    /// Returns true if a connection waits for a message slot (the right to have an incomplete long message).
    pub(super) fn has_waiting(&self) -> bool {
        self.slots.has_waiting()
    }

    /// Records that a client's request was received. The event loop began to read it at the time `since`.
    pub(super) fn begin_request(&mut self, client: ClientId, request: &Request, since: Instant) {
        self.times.begin(client, request, since);
    }

    /// Records that the event loop has processed what it has received from a client.
    pub(super) fn end_processing(&mut self, now: Instant) {
        self.times.processed(now);
    }

    /// Returns what the clients of this server have done: counters by name, and their requests.
    pub(super) fn statistics(&self) -> (Vec<NamedValue>, Vec<RequestStatistics>) {
        let [accepted, refused] = self.connected;
        let values = [
            ("clients_accepted", accepted),
            ("clients_refused", refused),
            ("events", self.watchers.notified()),
        ];
        let values = values.map(|(name, value)| NamedValue::new(name, value));
        (values.to_vec(), self.times.report())
    }

    /// Sends a response to a client. If too much is queued for the client already, its connection is marked to end.
    pub(super) fn send(&mut self, client: ClientId, response: &Response, fds: Vec<Rc<OwnedFd>>) {
        self.times.end(client, response);
        let Some(connection) = self.connections.get_mut(&client) else { return };
        if let Err(refusal) = connection.send(response, fds) {
            tracing::warn!(user = connection.account.uid(), %refusal, "cannot queue a response: the client does not read");
            self.ended.push(client);
        }
        self.update(client);
    }

    pub(super) fn refuse(&mut self, client: ClientId, id: u64, refusal: Refusal) {
        self.send(client, &Response { id, answer: Answer::Refused(refusal) }, Vec::new());
    }

    /// Removes and returns the clients whose connections have to end because a response could not be queued.
    pub(super) fn take_ended(&mut self) -> Vec<ClientId> {
        std::mem::take(&mut self.ended)
    }

    /// Sends queued packets to a client whose socket has become writable.
    pub(super) fn flush(&mut self, client: ClientId) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        connection.flush();
        if connection.has_sent_all() {
            self.watchers.unblock(client);
            self.name_watchers.unblock(client);
        }
        self.update(client);
    }

    /// Updates the events that the poller waits for on a client's socket.
    fn update(&mut self, client: ClientId) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let mut wanted = connection.wanted();
        wanted.write |= self.watchers.is_blocked(client) || self.name_watchers.is_blocked(client);
        if let Some(socket) = &connection.socket
            && wanted != connection.interest
        {
            let user = connection.account.uid();
            match self.poller.set_interest(user, client, socket, wanted) {
                Ok(()) => connection.interest = wanted,
                Err(error) => tracing::error!(%client, %error, "cannot wait for a client"),
            }
        }
    }

    /// Registers a client's watch of all names with a prefix. Returns the answer for a client that asks where the watch starts.
    pub(super) fn watch(
        &mut self,
        client: ClientId,
        prefix: String,
        start: WatchStart,
    ) -> Result<Option<Response>, Refusal> {
        let Some(connection) = self.connections.get(&client) else { return Ok(None) };
        let charge = connection.account.charge(Amount::bytes(WATCH_COST + prefix.len() as u64))?;
        let user = connection.account.uid();
        match start {
            WatchStart::NameEvents => {
                self.watchers.remove(client);
                self.name_watchers.add(client, user, prefix, None, charge);
                Ok(None)
            }
            WatchStart::After { request, revision } => {
                self.name_watchers.remove(client);
                let (revision, is_complete) = self.watchers.add(client, user, prefix, revision, charge);
                Ok(Some(Response { id: request, answer: Answer::Watching { revision, is_complete } }))
            }
        }
    }

    /// Appends the events of a change to the logs for the clients that watch names.
    pub(super) fn notify(&mut self, change: Change) {
        if self.name_watchers.has_watchers() {
            for event in change.name_events() {
                self.name_watchers.notify(LoggedEvent::NameEvent(event), Vec::new());
            }
        }
        change.for_each_event(|event, names| self.watchers.notify(LoggedEvent::Event(event), names));
    }

    /// Returns true if there are events to send to clients that watch names.
    pub(super) fn has_events(&self) -> bool {
        self.watchers.has_work() || self.name_watchers.has_work()
    }

    /// Sends some events to clients that watch names. Returns the clients whose connections have to end because they have missed
    /// events.
    pub(super) fn deliver(&mut self) -> Vec<ClientId> {
        if !self.has_events() {
            return Vec::new();
        }
        let connections = &mut self.connections;
        let mut full = Vec::new();
        let mut send = |client, packets: &[Vec<u8>]| {
            let is_sent =
                connections.get_mut(&client).is_none_or(|connection| connection.try_send_packets(packets));
            if is_sent {
                return SendResult::Yes;
            }
            full.push(client);
            SendResult::Full
        };
        let mut lost = self.watchers.deliver(&mut send);
        lost.extend(self.name_watchers.deliver(&mut send));
        full.into_iter().for_each(|client| self.update(client));
        lost
    }

    /// Ends a client's connection. Returns true if the client is removed now; otherwise, the server waits until the client's
    /// process exits or the client closes its end. `holds` returns true if the client has drafts (unsealed objects) or pins,
    /// which are retained until its process exits.
    pub(super) fn end(&mut self, client: ClientId, ending: EndReason, holds: impl FnOnce() -> bool) -> bool {
        let Some(connection) = self.connections.get_mut(&client) else { return false };
        let user = connection.account.uid();
        if connection.is_within_message() {
            self.slots.remove(user, client);
        }
        self.watchers.remove(client);
        self.name_watchers.remove(client);
        self.times.forget(client);
        let has_process = connection.admitted.as_ref().is_some_and(|admitted| admitted.process.is_some());
        let is_removed = match ending {
            EndReason::Left => true,
            _ if connection.admitted.is_none() || connection.socket.is_none() => true,
            EndReason::Closed => !has_process || !holds(),
            EndReason::Disconnected => false,
        };
        match ending {
            _ if is_removed => self.remove(client),
            EndReason::Disconnected => {
                connection.disconnect();
                self.update(client);
            }
            _ => {
                connection.drop_messages();
                if let Some(socket) = connection.socket.take() {
                    self.poller.remove(user, &socket);
                }
            }
        }
        is_removed
    }

    fn remove(&mut self, client: ClientId) {
        let Some(mut connection) = self.connections.remove(&client) else { return };
        // The socket is closed next, so queued responses are sent now, as far as the socket accepts them.
        connection.flush();
        let user = connection.account.uid();
        if let Some(socket) = &connection.socket {
            self.poller.remove(user, socket);
        }
        if let Some(process) = connection.admitted.as_ref().and_then(|admitted| admitted.process.as_ref()) {
            self.poller.remove(user, process);
        }
    }

    /// Returns the keys under which the keeper process holds a client's descriptors.
    pub(super) fn keys(client: ClientId) -> [DescriptorKey; 3] {
        [DescriptorKey::Socket(client), DescriptorKey::Pins(client), DescriptorKey::Process(client)]
    }
}

#[cfg(test)]
mod tests {
    use super::super::headroom::tests::TestMachine;
    use super::*;
    use crate::server::budget::tests::unlimited;

    /// Creates a connection for each of these users. The client of the first connection has sent its hello message.
    fn clients(users: &[u32]) -> (Clients, Vec<PacketSocket>) {
        let mut clients = Clients::new(0, unlimited()).unwrap();
        let mut ends = Vec::new();
        for (number, user) in users.iter().enumerate() {
            let (local, peer) = PacketSocket::pair().unwrap();
            let account = clients.budget.open(*user);
            let charge = account.charge(CONNECTION).unwrap();
            let connection = ClientConnection::accept(local, account, charge, false);
            clients.register(ClientId(number as u64), connection).unwrap();
            ends.push(peer);
        }
        let headroom = Headroom::new(TestMachine::with(1 << 30));
        clients.admit(ClientId(0), 1, &headroom).unwrap().unwrap();
        (clients, ends)
    }

    fn has_process(clients: &Clients) -> bool {
        clients.connections[&ClientId(0)].admitted.as_ref().unwrap().process.is_some()
    }

    fn keys(fds: Vec<(DescriptorKey, OwnedFd)>) -> Vec<DescriptorKey> {
        fds.into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn a_pin_page_is_claimed_by_its_own_user_only() {
        let (mut clients, _ends) = clients(&[7, 8, 7]);
        let [page, stranger, child] = [0, 1, 2].map(ClientId);
        assert_eq!(clients.open(page), Some(1));
        assert_eq!(
            keys(clients.await_child(page).unwrap()),
            [DescriptorKey::Pins(page), DescriptorKey::Socket(page)]
        );
        assert!(!has_process(&clients), "the page does not depend on the process that created it");
        let refused = || Refusal::malformed("the claimed pin page does not exist");
        assert_eq!(clients.claim(stranger, page).unwrap_err(), refused());
        assert_eq!(clients.claim(child, stranger).unwrap_err(), refused());
        assert_eq!(clients.claim(child, ClientId(9)).unwrap_err(), refused());
        assert_eq!(clients.claim(page, page).unwrap_err(), refused(), "the claimer has sent a hello");
        assert!(!has_process(&clients));
        for _ in 0..2 {
            assert_eq!(keys(clients.claim(child, page).unwrap()), [DescriptorKey::Process(page)]);
            assert!(has_process(&clients));
        }
        // A process has claimed the page: if it has drafts or pins, the server waits until the process exits.
        assert!(!clients.end(page, EndReason::Closed, || true));
        assert!(clients.end(page, EndReason::Left, || true));
    }

    #[test]
    fn an_unclaimed_page_is_released_with_its_connection() {
        let (mut clients, _ends) = clients(&[7]);
        let page = ClientId(0);
        let early = Refusal::malformed("a fork before the hello");
        assert_eq!(clients.await_child(page).unwrap_err(), early);
        clients.open(page);
        clients.await_child(page).unwrap();
        assert!(clients.end(page, EndReason::Closed, || true));
    }
}
