//! A client of the store server: its connection, its process and its pin page, in which it marks objects in use.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Instant;

use wholemem_os::{Deadline, Error as OsError, Memfd, PacketSocket, PidFd, memfd};

use super::headroom::{Headroom, MemoryPurpose};
use super::packet_queue::{FlushResult, PacketQueue};
use super::poller::Interest;
use crate::id::ClientId;
use crate::keeper::{DescriptorKey, DescriptorTable};
use crate::pin::PINS_LEN;
use crate::protocol::frame::{self, MAX_MESSAGE, MessageAssembler, Payload};
use crate::protocol::{Request, RequestKind, Response};
use crate::server::budget::{Account, Amount, CONNECTION, Charge};
use crate::{Error, Refusal, Result};

/// The number of packets of one message that the server reads before it serves other connections.
const PACKETS_AT_ONCE: usize = 4;

/// The maximum length of the first packet that a client sends on its connection. A hello message is shorter.
const MAX_HELLO: usize = 64;

/// The number of bytes that the kernel may queue for a client that does not read and runs as another user than the server. The
/// kernel doubles this value for its own bookkeeping.
const SOCKET_BUFFER: usize = 16 << 10;

/// The cost of a client that has sent its hello message: the pin page, the kernel's socket queue, and two descriptors.
const ADMISSION: Amount = Amount { bytes: (PINS_LEN + 2 * SOCKET_BUFFER) as u64, descriptors: 2 };

/// The number of bytes of a pin page (in which a client marks objects in use) that are allocated when the page is created.
const PREALLOCATED_PINS: usize = 4 << 10;

/// The amount that is charged for an incomplete message of several packets, whose length is not known yet.
const SLOT: Amount = Amount::bytes(MAX_MESSAGE as u64);

/// The user to whom a pin page (in which a client marks objects in use) is charged if the client's process has exited and its
/// connection is closed. No process runs as this user, which is the `-1` of `chown(2)`.
const UNKNOWN_USER: u32 = u32::MAX;

const EARLY_DESCRIPTOR: frame::MalformedMessage =
    frame::MalformedMessage("a descriptor is not on the last packet of its message");
const UNEXPECTED_DESCRIPTOR: frame::MalformedMessage =
    frame::MalformedMessage("the request must not have a descriptor");
const NO_HELLO: frame::MalformedMessage =
    frame::MalformedMessage("the first message of a connection must be a hello of one short packet");

/// The state of a client's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionPhase {
    /// The client has not sent its hello message. The server holds almost nothing for the client.
    AwaitingHello,
    /// The client's descriptors are being sent to the keeper process. When the keeper has them, the server answers the hello
    /// message, which has this request id.
    Admitting(u64),
    Open,
    /// The server has ended the connection. The client may not have noticed, and may still write pins: the server waits until the
    /// client closes its end, or until its process exits.
    Disconnected,
}

/// The resources that the server holds for a client that has sent its hello message.
#[derive(Debug)]
pub(super) struct AdmittedClient {
    /// A pidfd of the client's process. If it is `None` because the kernel cannot provide one, the end of the connection counts
    /// as the exit of the process.
    pub(super) process: Option<PidFd>,
    pub(super) pins: Memfd,
    _charge: Charge,
}

#[derive(Debug)]
pub(super) struct ClientConnection {
    /// The socket of the connection; `None` if the client has closed the connection and the server only waits for the client's
    /// process to exit.
    pub(super) socket: Option<PacketSocket>,
    pub(super) admitted: Option<AdmittedClient>,
    pub(super) account: Account,
    pub(super) phase: ConnectionPhase,
    /// True if a previous server has admitted the client. That server may have died before it answered the hello message.
    pub(super) is_inherited: bool,
    /// The events that the poller currently waits for on the client's socket.
    pub(super) interest: Interest,
    packet_queue: PacketQueue,
    /// True if the client has closed its end of the connection.
    is_peer_closed: bool,
    assembler: MessageAssembler,
    /// The charge of a message of several packets that is not complete yet.
    message: Option<Charge>,
    /// True if only the first packet of a long message is charged, and the connection waits for a message slot (the right to have
    /// an incomplete long message).
    needs_slot: bool,
    /// The time at which the last packet of the client was received.
    pub(super) last_packet: Instant,
    _charge: Charge,
}

/// The result of reading from a client's socket.
#[derive(Debug)]
pub(super) enum ReceiveResult<'a> {
    /// A complete request, its payload, the descriptor that was sent with the request, and the charge of the payload if the
    /// payload has memory of its own.
    Request(Request, Payload<'a>, Option<OwnedFd>, Option<Charge>),
    /// No complete message has been received yet.
    Nothing,
    /// The first packet of a long message was received, and the memory of the whole message is charged.
    TookSlot,
    /// The first packet of a long message was received, but the memory of the other packets cannot be charged yet.
    NeedsSlot,
    /// The client has closed the connection.
    Closed,
    /// The client violated the protocol.
    Broken,
    /// Not even the first packet of a client's message can be charged, so the message is refused.
    Refused(Refusal),
}

impl ClientConnection {
    /// Creates the state of a client that has just connected. The kernel's queue of unread packets is limited if the client runs
    /// as another user than the server.
    pub(super) fn accept(socket: PacketSocket, account: Account, charge: Charge, is_own: bool) -> Self {
        if !is_own && let Err(error) = socket.limit_unreceived(SOCKET_BUFFER) {
            tracing::warn!(%error, "cannot limit the kernel's queue for a client");
        }
        Self::new(Some(socket), None, account, ConnectionPhase::AwaitingHello, charge)
    }

    /// Takes over a client of the previous server from the keeper's descriptors; returns `None` if they include no pin page of
    /// this client.
    pub(super) fn take_over(
        client: ClientId,
        descriptors: &mut DescriptorTable,
        open: impl FnOnce(u32) -> Account,
    ) -> Result<Option<Self>> {
        let socket = descriptors.take(DescriptorKey::Socket(client)).map(PacketSocket::adopt).transpose()?;
        let process = descriptors.take(DescriptorKey::Process(client)).map(PidFd::adopt).transpose()?;
        let Some(pins) = descriptors.take(DescriptorKey::Pins(client)) else { return Ok(None) };
        let pins = Memfd::import(pins, PINS_LEN)?;
        // A pin page that a forked child has claimed may have no connection. Its user is then the user of the child's process.
        let user = match &socket {
            Some(socket) => Some(socket.peer_uid()?),
            None => process.as_ref().and_then(PidFd::uid),
        };
        let account = open(user.unwrap_or(UNKNOWN_USER));
        let charge = account.charge_held(CONNECTION);
        let admitted = AdmittedClient { process, pins, _charge: account.charge_held(ADMISSION) };
        let mut connection = Self::new(socket, Some(admitted), account, ConnectionPhase::Open, charge);
        connection.assembler = MessageAssembler::inherited();
        connection.is_inherited = true;
        Ok(Some(connection))
    }

    /// Returns true if the client has closed the connection, which the event loop may not have processed yet.
    pub(super) fn has_peer_closed(&self) -> bool {
        self.socket.as_ref().is_some_and(|socket| socket.is_closed() == Ok(true))
    }

    fn new(
        socket: Option<PacketSocket>,
        admitted: Option<AdmittedClient>,
        account: Account,
        phase: ConnectionPhase,
        charge: Charge,
    ) -> Self {
        Self {
            socket,
            admitted,
            account,
            phase,
            is_inherited: false,
            interest: Interest::default(),
            packet_queue: PacketQueue::default(),
            is_peer_closed: false,
            assembler: MessageAssembler::default(),
            message: None,
            needs_slot: false,
            last_packet: Instant::now(),
            _charge: charge,
        }
    }

    /// Starts to admit a client that has sent its hello message: creates its pin page, and opens a pidfd of its process.
    pub(super) fn admit(&mut self, request: u64, headroom: &Headroom) -> Result<&AdmittedClient, Refusal> {
        let charge = self.account.charge_connection(ADMISSION)?;
        let claim = headroom.claim(PINS_LEN, MemoryPurpose::Bookkeeping);
        let _claim = claim.map_err(|shortage| shortage.refusal(PINS_LEN))?;
        // Few clients have many pins, so only the first memory page of the pin page is allocated now. The server reads the first
        // memory page of every client, and the others only if the client uses them.
        let pins = Memfd::create_partly_filled("wholemem-pins", PINS_LEN, PREALLOCATED_PINS)
            .map_err(|error| admission_refusal(&error.into()))?;
        let process = match self.socket.as_ref().map(PacketSocket::peer_pidfd) {
            Some(Err(error)) if error.is_no_descriptor_left() => {
                return Err(admission_refusal(&error.into()));
            }
            process => process.and_then(Result::ok),
        };
        self.phase = ConnectionPhase::Admitting(request);
        Ok(self.admitted.insert(AdmittedClient { process, pins, _charge: charge }))
    }

    /// Returns duplicates of the client's descriptors for the keeper process.
    pub(super) fn park(&self, client: ClientId) -> Result<Vec<(DescriptorKey, OwnedFd)>> {
        let Some(admitted) = &self.admitted else { return Ok(Vec::new()) };
        let mut fds = vec![(DescriptorKey::Pins(client), admitted.pins.share_fd()?)];
        if let Some(socket) = self.socket.as_ref().filter(|_| self.phase != ConnectionPhase::Disconnected) {
            fds.push((DescriptorKey::Socket(client), memfd::share_fd(socket.as_fd())?));
        }
        if let Some(process) = &admitted.process {
            fds.push((DescriptorKey::Process(client), memfd::share_fd(process.as_fd())?));
        }
        Ok(fds)
    }

    /// Returns a duplicate of the pidfd of the client's process for the keeper process.
    pub(super) fn park_process(&self, client: ClientId) -> Result<Vec<(DescriptorKey, OwnedFd)>> {
        let process = self.admitted.as_ref().and_then(|admitted| admitted.process.as_ref());
        process
            .map(|process| Ok((DescriptorKey::Process(client), memfd::share_fd(process.as_fd())?)))
            .into_iter()
            .collect()
    }

    /// Returns the events that the poller has to wait for on the client's socket.
    pub(super) fn wanted(&self) -> Interest {
        let is_read = matches!(self.phase, ConnectionPhase::AwaitingHello | ConnectionPhase::Open);
        Interest {
            read: is_read && !self.needs_slot,
            write: !self.packet_queue.is_empty()
                && !self.is_peer_closed
                && self.phase != ConnectionPhase::Disconnected,
        }
    }

    /// Drops all queued and incomplete messages of the connection.
    pub(super) fn drop_messages(&mut self) {
        self.packet_queue = PacketQueue::default();
        self.assembler = MessageAssembler::default();
        self.message = None;
        self.needs_slot = false;
    }

    /// Shuts down the sending half of the client's connection, and drops all queued and incomplete messages.
    pub(super) fn disconnect(&mut self) {
        self.flush();
        self.drop_messages();
        self.phase = ConnectionPhase::Disconnected;
        if let Some(socket) = &self.socket {
            // An error is ignored: the client may have closed its end already.
            let _ = socket.shut_down_sending();
        }
    }

    /// Returns true if no packet is queued for the client.
    pub(super) fn has_sent_all(&self) -> bool {
        self.packet_queue.is_empty()
    }

    /// Sends a response to the client, either at once or when the client reads. Returns a refusal if too much is queued for the
    /// client.
    pub(super) fn send(&mut self, response: &Response, fds: Vec<Rc<OwnedFd>>) -> Result<(), Refusal> {
        if self.is_peer_closed || self.socket.is_none() || self.phase == ConnectionPhase::Disconnected {
            return Ok(());
        }
        match frame::encode(response, &[]) {
            Ok(packets) => {
                let charge = self.account.charge(PacketQueue::cost(&packets, &fds))?;
                self.packet_queue.push(packets, fds, Some(charge));
            }
            Err(malformed) => tracing::error!(%malformed, "cannot encode a response"),
        }
        self.flush();
        Ok(())
    }

    /// Sends packets of an event without queueing them, if no other packet is queued. Returns false if packets are queued or the
    /// socket is full.
    pub(super) fn try_send_packets(&mut self, packets: &[Vec<u8>]) -> bool {
        let Some(socket) = self.socket.as_ref().filter(|_| self.packet_queue.is_empty()) else {
            return false;
        };
        let mut sent = packets.iter().map(|packet| socket.send(packet, &[], Deadline::NOW));
        match sent.find_map(Result::err) {
            None => true,
            Some(OsError::TimedOut) => false,
            Some(_) => {
                self.is_peer_closed = true;
                true
            }
        }
    }

    /// Sends queued packets as far as the client's socket accepts them. If the client has closed its end, nothing more is sent,
    /// but earlier messages of the client, such as a goodbye, are still read.
    pub(super) fn flush(&mut self) {
        if let Some(socket) = &self.socket
            && self.packet_queue.flush(socket) == FlushResult::Broken
        {
            self.is_peer_closed = true;
            self.packet_queue = PacketQueue::default();
        }
    }

    /// Charges the memory of the other packets of a long message, of which only the first packet is charged.
    pub(super) fn charge_slot(&mut self) -> Result<(), Refusal> {
        if let Some(charge) = self.message.as_mut().filter(|_| self.needs_slot) {
            charge.grow(Amount::bytes(SLOT.bytes - self.assembler.len() as u64))?;
            self.needs_slot = false;
        }
        Ok(())
    }

    /// Returns true if a message of several packets has begun and is not complete.
    pub(super) fn is_within_message(&self) -> bool {
        self.message.is_some()
    }

    /// Reads the next message of a client if it has arrived, or a few packets of the message. `packet` is a buffer for one
    /// packet. Clients of the user `trusted` may send one descriptor with a message.
    pub(super) fn receive<'a>(&mut self, packet: &'a mut [u8], trusted: u32) -> ReceiveResult<'a> {
        let max_fds = usize::from(self.account.uid() == trusted);
        let mut read = 0;
        let (len, fd) = loop {
            if read == PACKETS_AT_ONCE {
                return ReceiveResult::Nothing;
            }
            read += 1;
            let Some(socket) = &self.socket else { return ReceiveResult::Closed };
            let (len, mut fds) = match socket.recv_with_fds(packet, max_fds, Deadline::NOW) {
                Ok(received) => received,
                Err(OsError::TimedOut) => return ReceiveResult::Nothing,
                Err(OsError::Closed) => return ReceiveResult::Closed,
                Err(error) => {
                    tracing::warn!(user = self.account.uid(), %error, "cannot receive from a client");
                    return ReceiveResult::Broken;
                }
            };
            let is_last = frame::is_last(&packet[..len]);
            if self.phase == ConnectionPhase::AwaitingHello && (!is_last || len > MAX_HELLO) {
                return self.broken(NO_HELLO);
            }
            // The loop ends with the last packet of a message, because this packet stays in `packet` and may have a descriptor.
            if is_last {
                break (len, fds.pop());
            }
            if !fds.is_empty() {
                return self.broken(EARLY_DESCRIPTOR);
            }
            self.last_packet = Instant::now();
            match self.push_fragment(&packet[..len]) {
                Ok(None) => {}
                Ok(Some(received)) => return received,
                Err(malformed) => return self.broken(malformed),
            }
        };
        let message = self.assembler.push(&packet[..len]);
        let charge = self.message.take();
        match message.map(|message| message.map(Payload::split::<Request>)) {
            Ok(None) => ReceiveResult::Nothing,
            Ok(Some(Ok((request, payload)))) => {
                let is_wanted = matches!(request.kind, RequestKind::Adopt { .. });
                if fd.is_some() && !is_wanted {
                    return self.broken(UNEXPECTED_DESCRIPTOR);
                }
                // The message is complete, so its exact length is known and replaces the maximum length in the charge.
                let charge = charge.map(|mut charge| {
                    charge.shrink_to(Amount::bytes(payload.len() as u64));
                    charge
                });
                ReceiveResult::Request(request, payload, fd, charge)
            }
            Ok(Some(Err(malformed))) | Err(malformed) => self.broken(malformed),
        }
    }

    /// Adds a packet to an incomplete message, of which it is not the last packet. Returns a result if reading has to stop.
    fn push_fragment(
        &mut self,
        packet: &[u8],
    ) -> Result<Option<ReceiveResult<'static>>, frame::MalformedMessage> {
        self.assembler.push(packet)?;
        if self.is_within_message() || self.assembler.len() == 0 {
            return Ok(None);
        }
        if let Ok(charge) = self.account.charge(SLOT) {
            self.message = Some(charge);
            return Ok(Some(ReceiveResult::TookSlot));
        }
        match self.account.charge(Amount::bytes(self.assembler.len() as u64)) {
            Ok(charge) => {
                (self.message, self.needs_slot) = (Some(charge), true);
                Ok(Some(ReceiveResult::NeedsSlot))
            }
            Err(refusal) => Ok(Some(ReceiveResult::Refused(refusal))),
        }
    }

    fn broken(&self, malformed: frame::MalformedMessage) -> ReceiveResult<'static> {
        tracing::warn!(user = self.account.uid(), %malformed, "a client violated the protocol");
        ReceiveResult::Broken
    }
}

/// Returns the refusal of a client that cannot be admitted, because no descriptor is left or there is no memory for its pin page.
pub(super) fn admission_refusal(error: &Error) -> Refusal {
    match error {
        Error::Os(error) if error.is_no_descriptor_left() => Refusal::NoDescriptors,
        Error::Os(error) => Refusal::of_memory(PINS_LEN as u64, error),
        error => Refusal::NoMemory { len: PINS_LEN as u64, reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::super::headroom::tests::TestMachine;
    use super::*;
    use crate::protocol::{Answer, PROTOCOL};
    use crate::server::budget::{Budget, BudgetLimits, tests::unlimited};

    fn connection_in(budget: &mut Budget) -> (ClientConnection, PacketSocket) {
        let (local, peer) = PacketSocket::pair().unwrap();
        let account = budget.open(7);
        let charge = account.charge(CONNECTION).unwrap();
        (ClientConnection::accept(local, account, charge, false), peer)
    }

    fn admitted(budget: &mut Budget) -> (ClientConnection, PacketSocket) {
        let (mut connection, peer) = connection_in(budget);
        connection.admit(1, &Headroom::new(TestMachine::with(1 << 30))).unwrap();
        connection.phase = ConnectionPhase::Open;
        (connection, peer)
    }

    #[test]
    fn a_client_without_a_free_descriptor_is_refused_with_that_reason() {
        let refused = |errno| {
            let error = OsError::Call { call: "memfd_create", errno };
            admission_refusal(&error.into()).code()
        };
        assert_eq!(refused(wholemem_os::Errno::MFILE), "no-descriptors");
        assert_eq!(refused(wholemem_os::Errno::NOMEM), "no-memory");
    }

    #[test]
    fn a_client_is_refused_if_there_is_no_memory_for_its_pins() {
        let mut budget = unlimited();
        let (mut connection, _peer) = connection_in(&mut budget);
        let refused = connection.admit(1, &Headroom::new(TestMachine::with(2 << 20))).unwrap_err();
        let reason = "only 2 MiB are available on this machine, of which 2 MiB are reserved".to_owned();
        assert_eq!(refused, Refusal::NoMemory { len: PINS_LEN as u64, reason });
        assert_eq!((budget.held(), connection.phase), (CONNECTION, ConnectionPhase::AwaitingHello));
    }

    #[test]
    fn a_page_without_a_connection_is_charged_to_the_user_of_its_process() {
        let mut budget = unlimited();
        let client = ClientId(1);
        let pins = Memfd::create("pins", PINS_LEN).unwrap();
        let mut descriptors = DescriptorTable::default();
        descriptors.insert(DescriptorKey::Pins(client), pins.share_fd().unwrap());
        descriptors.insert(DescriptorKey::Process(client), PidFd::of_self().unwrap().into());
        let inherited =
            ClientConnection::take_over(client, &mut descriptors, |user| budget.open(user)).unwrap().unwrap();
        assert_eq!(inherited.account.uid(), rustix::process::getuid().as_raw());
    }

    const BEGIN_MORE: u8 = 3;
    const MORE: u8 = 1;

    fn send(peer: &PacketSocket, kind: u8, len: usize) {
        peer.send(&[&[kind][..], &vec![0; len]].concat(), &[], Deadline::NOW).unwrap();
    }

    #[test]
    fn a_connection_before_its_hello_holds_almost_nothing() {
        let mut budget = unlimited();
        let (mut connection, peer) = connection_in(&mut budget);
        assert_eq!(budget.held(), CONNECTION);
        send(&peer, BEGIN_MORE, 10);
        assert!(
            matches!(connection.receive(&mut [0; 2000], 0), ReceiveResult::Broken),
            "a hello is one packet"
        );
        assert_eq!((budget.held(), connection.assembler.len()), (CONNECTION, 0));
        let (mut connection, peer) = connection_in(&mut budget);
        send(&peer, 2, MAX_HELLO);
        assert!(matches!(connection.receive(&mut [0; 2000], 0), ReceiveResult::Broken), "a hello is short");
        let (mut connection, peer) = connection_in(&mut budget);
        let hello = Request { id: 1, resends: 0, kind: RequestKind::Hello { protocol: PROTOCOL } };
        frame::send_message(&peer, &hello, &[], &[], Deadline::NOW).unwrap().unwrap();
        assert!(
            matches!(connection.receive(&mut [0; 2000], 0), ReceiveResult::Request(request, ..) if request == hello)
        );
    }

    #[test]
    fn an_incomplete_message_is_charged_at_the_maximum_length() {
        let mut budget = unlimited();
        let (mut connection, peer) = admitted(&mut budget);
        let before = budget.held();
        let label = crate::protocol::Label { name: "x".to_owned(), meta: Vec::new() };
        let kind = RequestKind::Create { label, len: 150_000, members: Vec::new(), place: 0 };
        let packets = frame::encode(&Request { id: 9, resends: 0, kind }, &[5; 150_000]).unwrap();
        peer.send(&packets[0], &[], Deadline::NOW).unwrap();
        let mut packet = vec![0; wholemem_os::packet::MAX_PACKET];
        assert!(matches!(connection.receive(&mut packet, 0), ReceiveResult::TookSlot));
        assert_eq!(budget.held().bytes - before.bytes, SLOT.bytes);
        packets[1..].iter().for_each(|packet| peer.send(packet, &[], Deadline::NOW).unwrap());
        let received = connection.receive(&mut packet, 0);
        let ReceiveResult::Request(request, payload, _, charge) = received else { panic!("{received:?}") };
        assert_eq!((request.id, payload.len()), (9, 150_000));
        assert_eq!(budget.held().bytes - before.bytes, 150_000);
        drop(charge);
        assert_eq!(budget.held(), before);
    }

    #[test]
    fn a_connection_is_not_read_until_its_long_message_can_be_charged() {
        let others = Amount { bytes: 2 * (MAX_MESSAGE as u64 + (1 << 20)), descriptors: 100 };
        let mut budget = Budget::new(0, BudgetLimits { own: others, others });
        let [(mut first, one), (mut second, two)] = [admitted(&mut budget), admitted(&mut budget)];
        let mut packet = [0; 2000];
        [&one, &two].into_iter().for_each(|peer| send(peer, BEGIN_MORE, 1000));
        assert!(matches!(first.receive(&mut packet, 0), ReceiveResult::TookSlot));
        assert!(matches!(second.receive(&mut packet, 0), ReceiveResult::NeedsSlot));
        assert_eq!((first.wanted().read, second.wanted().read), (true, false));
        assert!(second.charge_slot().is_err());
        first.drop_messages();
        second.charge_slot().unwrap();
        assert!(second.wanted().read);
    }

    #[test]
    fn nothing_is_held_for_a_connection_that_was_ended() {
        let mut budget = unlimited();
        let (mut connection, peer) = admitted(&mut budget);
        let before = budget.held();
        let done = Response { id: 1, answer: Answer::Done };
        // Sends responses, which the client does not read, until some are queued. The client has begun to send a long message.
        while connection.has_sent_all() {
            connection.send(&done, Vec::new()).unwrap();
        }
        send(&peer, BEGIN_MORE, 1000);
        assert!(matches!(connection.receive(&mut [0; 2000], 0), ReceiveResult::TookSlot));
        connection.disconnect();
        assert_eq!(budget.held(), before);
        connection.send(&done, Vec::new()).unwrap();
        assert_eq!((budget.held(), connection.wanted()), (before, Interest::default()));
    }

    #[test]
    fn a_client_that_does_not_read_is_refused_before_resources_run_out() {
        let mut budget = Budget::new(0, BudgetLimits::of_server(1 << 30, 1000));
        let (mut connection, _peer) = admitted(&mut budget);
        let done = Response { id: 1, answer: Answer::Done };
        let refused = (0..10_000_000).find_map(|_| connection.send(&done, Vec::new()).err());
        assert!(matches!(refused, Some(Refusal::ClientLimit { user: 7, .. })), "{refused:?}");
        assert!(budget.held().bytes <= 2 * MAX_MESSAGE as u64);
        let (mut connection, _peer) = admitted(&mut budget);
        let fd = Rc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        let refused = (0..1000).find_map(|_| connection.send(&done, vec![Rc::clone(&fd)]).err());
        let Some(Refusal::ClientLimit { what, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(what, "descriptors");
        connection.disconnect();
        assert_eq!(Rc::strong_count(&fd), 1);
    }

    #[test]
    fn a_connection_with_endless_packets_does_not_starve_others() {
        let mut budget = unlimited();
        let (mut connection, peer) = admitted(&mut budget);
        // The previous server has read the first packet of a message, so any number of packets of this message may follow.
        connection.assembler = MessageAssembler::inherited();
        (0..20).for_each(|_| send(&peer, MORE, 0));
        assert!(matches!(connection.receive(&mut [0; 8], 0), ReceiveResult::Nothing));
        let socket = connection.socket.as_ref().unwrap();
        let left = std::iter::from_fn(|| socket.recv(&mut [0; 8], Deadline::NOW).ok()).count();
        assert_eq!(left, 20 - PACKETS_AT_ONCE);
    }
}
