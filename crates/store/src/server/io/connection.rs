//! One client of the server: its connection, its process and its page of pins.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Instant;

use wholemem_os::{Deadline, Error as OsError, Memfd, PacketSocket, PidFd, memfd};

use super::headroom::{Headroom, Purpose};
use super::outbox::{Flushed, Outbox};
use super::poller::Interest;
use crate::id::ClientId;
use crate::keeper::{DescriptorTable, Key};
use crate::pin::PINS_LEN;
use crate::protocol::frame::{self, MAX_MESSAGE, MessageAssembler, Payload};
use crate::protocol::{Request, RequestKind, Response};
use crate::server::budget::{Account, Amount, CONNECTION, Charge};
use crate::{Error, Refusal, Result};

/// How many packets of one message are read before other connections are served.
const PACKETS_AT_ONCE: usize = 4;

/// The longest first packet of a connection. A hello is shorter.
const LONGEST_HELLO: usize = 64;

/// How many bytes the kernel may hold for a client of another user that does not read. The kernel doubles this for its
/// own bookkeeping.
const UNRECEIVED: usize = 16 << 10;

/// What a client costs from its hello on: the page of pins, what the kernel holds for it, and two descriptors.
const ADMISSION: Amount = Amount { bytes: (PINS_LEN + 2 * UNRECEIVED) as u64, descriptors: 2 };

/// How much of a page of pins is allocated from the beginning.
const FILLED_PINS: usize = 4 << 10;

/// What a message of several packets costs until its end is known.
const SLOT: Amount = Amount::bytes(MAX_MESSAGE as u64);

/// The user to whom a page of pins is charged whose process has exited and whose connection is closed. No process runs as this
/// user: it is the `-1` of `chown(2)`.
const UNKNOWN_USER: u32 = u32::MAX;

const EARLY: frame::Malformed =
    frame::Malformed("a descriptor that is not on the last packet of its message");
const UNWANTED: frame::Malformed = frame::Malformed("a descriptor that nobody has asked for");
const NO_HELLO: frame::Malformed = frame::Malformed("a connection begins with a hello of one short packet");

/// The state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// The client has not sent its hello. The server holds almost nothing for it.
    AwaitingHello,
    /// The keeper is given the client's descriptors; then the hello, which has this id, is answered.
    Admitting(u64),
    Open,
    /// The server ended the connection. The client may not have noticed, and may still write pins: the server waits
    /// until it closes its end, or until its process exits.
    Disconnected,
}

/// What a client has from its hello on.
#[derive(Debug)]
pub(super) struct Admitted {
    /// `None` if the kernel cannot provide it: then the end of the connection counts as the exit of the process.
    pub(super) process: Option<PidFd>,
    pub(super) pins: Memfd,
    _charge: Charge,
}

#[derive(Debug)]
pub(super) struct Connection {
    /// `None` when the client has closed it, and the server waits for its process only.
    pub(super) socket: Option<PacketSocket>,
    pub(super) admitted: Option<Admitted>,
    pub(super) account: Account,
    pub(super) phase: Phase,
    /// What the poller was told.
    pub(super) interest: Interest,
    outbox: Outbox,
    /// Whether it has closed its end.
    is_peer_closed: bool,
    assembler: MessageAssembler,
    /// For a message of several packets that is being put together.
    message: Option<Charge>,
    /// Whether that covers the beginning of the message only, and the connection waits for a slot.
    needs_slot: bool,
    /// When the last packet was received.
    pub(super) last_packet: Instant,
    _charge: Charge,
}

/// What was received from a client.
#[derive(Debug)]
pub(super) enum Received<'a> {
    /// A request, its payload, a descriptor that came with it, and the charge for the payload if that has memory of its own.
    Request(Request, Payload<'a>, Option<OwnedFd>, Option<Charge>),
    /// Nothing more for now.
    Nothing,
    /// A long message has begun, and has its memory.
    TookSlot,
    /// A long message has begun, and there is no memory for the rest of it.
    NeedsSlot,
    /// The other end has closed the connection.
    Closed,
    /// The client broke the protocol.
    Broken,
    /// Not even the beginning of a message can be held.
    Refused(Refusal),
}

impl Connection {
    /// A client that has just connected. The kernel holds little for clients of other users than the server's.
    pub(super) fn accept(socket: PacketSocket, account: Account, charge: Charge, is_own: bool) -> Self {
        if !is_own && let Err(error) = socket.limit_unreceived(UNRECEIVED) {
            tracing::warn!(%error, "cannot limit what the kernel holds for a client");
        }
        Self::new(Some(socket), None, account, Phase::AwaitingHello, charge)
    }

    /// A client of a server that died.
    pub(super) fn take_over(
        client: ClientId,
        kept: &mut DescriptorTable,
        open: impl FnOnce(u32) -> Account,
    ) -> Result<Option<Self>> {
        let socket = kept.take(Key::Socket(client)).map(PacketSocket::adopt).transpose()?;
        let process = kept.take(Key::Process(client)).map(PidFd::adopt).transpose()?;
        let Some(pins) = kept.take(Key::Pins(client)) else { return Ok(None) };
        let pins = Memfd::import(pins, PINS_LEN)?;
        // A page that a forked child has claimed has no connection.
        let user = match &socket {
            Some(socket) => Some(socket.peer_uid()?),
            None => process.as_ref().and_then(PidFd::uid),
        };
        let account = open(user.unwrap_or(UNKNOWN_USER));
        let charge = account.charge_held(CONNECTION);
        let admitted = Admitted { process, pins, _charge: account.charge_held(ADMISSION) };
        let mut connection = Self::new(socket, Some(admitted), account, Phase::Open, charge);
        connection.assembler = MessageAssembler::inherited();
        Ok(Some(connection))
    }

    fn new(
        socket: Option<PacketSocket>,
        admitted: Option<Admitted>,
        account: Account,
        phase: Phase,
        charge: Charge,
    ) -> Self {
        Self {
            socket,
            admitted,
            account,
            phase,
            interest: Interest::default(),
            outbox: Outbox::default(),
            is_peer_closed: false,
            assembler: MessageAssembler::default(),
            message: None,
            needs_slot: false,
            last_packet: Instant::now(),
            _charge: charge,
        }
    }

    /// The client has sent its hello: creates its page of pins, and opens a descriptor of its process.
    pub(super) fn admit(&mut self, request: u64, headroom: &Headroom) -> Result<&Admitted, Refusal> {
        let charge = self.account.charge_connection(ADMISSION)?;
        let claim = headroom.claim(PINS_LEN, Purpose::Bookkeeping);
        let _claim = claim.map_err(|shortage| shortage.refusal(PINS_LEN))?;
        // Few clients have many pins. The server reads the first memory page of every client, and the others if the client uses them.
        let pins = Memfd::create_partly_filled("wholemem-pins", PINS_LEN, FILLED_PINS)
            .map_err(|error| admission_refusal(&error.into()))?;
        let process = match self.socket.as_ref().map(PacketSocket::peer_pidfd) {
            Some(Err(error)) if error.is_no_descriptor_left() => {
                return Err(admission_refusal(&error.into()));
            }
            process => process.and_then(Result::ok),
        };
        self.phase = Phase::Admitting(request);
        Ok(self.admitted.insert(Admitted { process, pins, _charge: charge }))
    }

    /// Descriptors for the keeper.
    pub(super) fn park(&self, client: ClientId) -> Result<Vec<(Key, OwnedFd)>> {
        let Some(admitted) = &self.admitted else { return Ok(Vec::new()) };
        let mut fds = vec![(Key::Pins(client), admitted.pins.share_fd()?)];
        if let Some(socket) = self.socket.as_ref().filter(|_| self.phase != Phase::Disconnected) {
            fds.push((Key::Socket(client), memfd::share_fd(socket.as_fd())?));
        }
        if let Some(process) = &admitted.process {
            fds.push((Key::Process(client), memfd::share_fd(process.as_fd())?));
        }
        Ok(fds)
    }

    /// The descriptor of its process for the keeper.
    pub(super) fn park_process(&self, client: ClientId) -> Result<Vec<(Key, OwnedFd)>> {
        let process = self.admitted.as_ref().and_then(|admitted| admitted.process.as_ref());
        process
            .map(|process| Ok((Key::Process(client), memfd::share_fd(process.as_fd())?)))
            .into_iter()
            .collect()
    }

    /// What the poller is to wait for on the socket.
    pub(super) fn wanted(&self) -> Interest {
        let is_read = matches!(self.phase, Phase::AwaitingHello | Phase::Open);
        Interest {
            read: is_read && !self.needs_slot,
            write: !self.outbox.is_empty() && !self.is_peer_closed && self.phase != Phase::Disconnected,
        }
    }

    /// Drops all messages that are queued or being received.
    pub(super) fn drop_messages(&mut self) {
        self.outbox = Outbox::default();
        self.assembler = MessageAssembler::default();
        self.message = None;
        self.needs_slot = false;
    }

    /// Shuts down the sending half of the connection, and drops all messages.
    pub(super) fn disconnect(&mut self) {
        self.flush();
        self.drop_messages();
        self.phase = Phase::Disconnected;
        if let Some(socket) = &self.socket {
            // The other end may be closed already.
            let _ = socket.shut_down_sending();
        }
    }

    /// Whether nothing waits to be sent.
    pub(super) fn has_sent_all(&self) -> bool {
        self.outbox.is_empty()
    }

    /// Sends a response, now or when the client reads. Refused if too much is queued for the client.
    pub(super) fn send(&mut self, response: &Response, fds: Vec<Rc<OwnedFd>>) -> Result<(), Refusal> {
        if self.is_peer_closed || self.socket.is_none() || self.phase == Phase::Disconnected {
            return Ok(());
        }
        match frame::encode(response, &[]) {
            Ok(packets) => {
                let charge = self.account.charge(Outbox::cost(&packets, &fds))?;
                self.outbox.push(packets, fds, Some(charge));
            }
            Err(malformed) => tracing::error!(%malformed, "an answer cannot be said"),
        }
        self.flush();
        Ok(())
    }

    /// Sends packets that are stored elsewhere, if nothing is queued and the socket takes them. Returns whether it did.
    pub(super) fn try_send_packets(&mut self, packets: &[Vec<u8>]) -> bool {
        let Some(socket) = self.socket.as_ref().filter(|_| self.outbox.is_empty()) else { return false };
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

    /// Sends what the socket takes now. If the client has closed its end, nothing more is sent, but what it sent before,
    /// such as a goodbye, is still read.
    pub(super) fn flush(&mut self) {
        if let Some(socket) = &self.socket
            && self.outbox.flush(socket) == Flushed::Broken
        {
            self.is_peer_closed = true;
            self.outbox = Outbox::default();
        }
    }

    /// Charges the rest of a message that has begun.
    pub(super) fn take_slot(&mut self) -> Result<(), Refusal> {
        if let Some(charge) = self.message.as_mut().filter(|_| self.needs_slot) {
            charge.grow(Amount::bytes(SLOT.bytes - self.assembler.len() as u64))?;
            self.needs_slot = false;
        }
        Ok(())
    }

    /// Whether a message is being put together.
    pub(super) fn is_within_message(&self) -> bool {
        self.message.is_some()
    }

    /// Reads the next message, if it has come, or a few packets of it. `packet` is room for one. One descriptor is
    /// accepted with a message of the trusted user.
    pub(super) fn receive<'a>(&mut self, packet: &'a mut [u8], trusted: u32) -> Received<'a> {
        let room = usize::from(self.account.uid() == trusted);
        let mut read = 0;
        let (len, fd) = loop {
            if read == PACKETS_AT_ONCE {
                return Received::Nothing;
            }
            read += 1;
            let Some(socket) = &self.socket else { return Received::Closed };
            let (len, mut fds) = match socket.recv_with_fds(packet, room, Deadline::NOW) {
                Ok(received) => received,
                Err(OsError::TimedOut) => return Received::Nothing,
                Err(OsError::Closed) => return Received::Closed,
                Err(error) => {
                    tracing::warn!(user = self.account.uid(), %error, "cannot receive from a client");
                    return Received::Broken;
                }
            };
            let is_last = frame::is_last(&packet[..len]);
            if self.phase == Phase::AwaitingHello && (!is_last || len > LONGEST_HELLO) {
                return self.broken(NO_HELLO);
            }
            // Only the last packet of a message can be one that the next is not read over, or bring something along.
            if is_last {
                break (len, fds.pop());
            }
            if !fds.is_empty() {
                return self.broken(EARLY);
            }
            self.last_packet = Instant::now();
            match self.push_part(&packet[..len]) {
                Ok(None) => {}
                Ok(Some(received)) => return received,
                Err(malformed) => return self.broken(malformed),
            }
        };
        let message = self.assembler.push(&packet[..len]);
        let charge = self.message.take();
        match message.map(|message| message.map(Payload::split::<Request>)) {
            Ok(None) => Received::Nothing,
            Ok(Some(Ok((request, payload)))) => {
                let is_wanted = matches!(request.kind, RequestKind::Adopt { .. });
                if fd.is_some() && !is_wanted {
                    return self.broken(UNWANTED);
                }
                // The message is complete: its memory is as long as what it holds.
                let charge = charge.map(|mut charge| {
                    charge.shrink_to(Amount::bytes(payload.len() as u64));
                    charge
                });
                Received::Request(request, payload, fd, charge)
            }
            Ok(Some(Err(malformed))) | Err(malformed) => self.broken(malformed),
        }
    }

    /// Takes in a packet that is not the last of its message. Says if reading has to stop.
    fn push_part(&mut self, packet: &[u8]) -> Result<Option<Received<'static>>, frame::Malformed> {
        self.assembler.push(packet)?;
        if self.is_within_message() || self.assembler.len() == 0 {
            return Ok(None);
        }
        if let Ok(charge) = self.account.charge(SLOT) {
            self.message = Some(charge);
            return Ok(Some(Received::TookSlot));
        }
        match self.account.charge(Amount::bytes(self.assembler.len() as u64)) {
            Ok(charge) => {
                (self.message, self.needs_slot) = (Some(charge), true);
                Ok(Some(Received::NeedsSlot))
            }
            Err(refusal) => Ok(Some(Received::Refused(refusal))),
        }
    }

    fn broken(&self, malformed: frame::Malformed) -> Received<'static> {
        tracing::warn!(user = self.account.uid(), %malformed, "a client broke the protocol");
        Received::Broken
    }
}

/// The reason that a client which cannot be admitted is given: no descriptor is left for it, or no memory for its page of pins.
pub(super) fn admission_refusal(error: &Error) -> Refusal {
    match error {
        Error::Os(error) if error.is_no_descriptor_left() => Refusal::NoDescriptors,
        Error::Os(error) => Refusal::of_memory(PINS_LEN as u64, error),
        error => Refusal::NoMemory { len: PINS_LEN as u64, reason: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::super::headroom::tests::Machine;
    use super::*;
    use crate::protocol::{Answer, PROTOCOL};
    use crate::server::budget::{Budget, BudgetLimits, tests::unlimited};

    fn connection_in(budget: &mut Budget) -> (Connection, PacketSocket) {
        let (here, there) = PacketSocket::pair().unwrap();
        let account = budget.open(7);
        let charge = account.charge(CONNECTION).unwrap();
        (Connection::accept(here, account, charge, false), there)
    }

    fn admitted(budget: &mut Budget) -> (Connection, PacketSocket) {
        let (mut connection, there) = connection_in(budget);
        connection.admit(1, &Headroom::new(Machine::with(1 << 30))).unwrap();
        connection.phase = Phase::Open;
        (connection, there)
    }

    #[test]
    fn a_client_without_a_descriptor_is_refused_for_that() {
        let refused = |errno| {
            let error = OsError::Call { call: "memfd_create", errno };
            admission_refusal(&error.into()).code()
        };
        assert_eq!(refused(wholemem_os::Errno::MFILE), "no-descriptors");
        assert_eq!(refused(wholemem_os::Errno::NOMEM), "no-memory");
    }

    #[test]
    fn a_client_for_whose_pins_there_is_no_memory_is_refused() {
        let mut budget = unlimited();
        let (mut connection, _there) = connection_in(&mut budget);
        let refused = connection.admit(1, &Headroom::new(Machine::with(2 << 20))).unwrap_err();
        let reason = "only 2 MiB are available on this machine, and 2 MiB stay free".to_owned();
        assert_eq!(refused, Refusal::NoMemory { len: PINS_LEN as u64, reason });
        assert_eq!((budget.held(), connection.phase), (CONNECTION, Phase::AwaitingHello));
    }

    #[test]
    fn a_page_without_a_connection_is_charged_to_the_user_of_its_process() {
        let mut budget = unlimited();
        let client = ClientId(1);
        let pins = Memfd::create("pins", PINS_LEN).unwrap();
        let mut kept = DescriptorTable::default();
        kept.insert(Key::Pins(client), pins.share_fd().unwrap());
        kept.insert(Key::Process(client), PidFd::of_self().unwrap().into());
        let taken = Connection::take_over(client, &mut kept, |user| budget.open(user)).unwrap().unwrap();
        assert_eq!(taken.account.uid(), rustix::process::getuid().as_raw());
    }

    const BEGIN_MORE: u8 = 3;
    const MORE: u8 = 1;

    fn send(there: &PacketSocket, kind: u8, len: usize) {
        there.send(&[&[kind][..], &vec![0; len]].concat(), &[], Deadline::NOW).unwrap();
    }

    #[test]
    fn before_the_hello_almost_nothing_is_held() {
        let mut budget = unlimited();
        let (mut connection, there) = connection_in(&mut budget);
        assert_eq!(budget.held(), CONNECTION);
        send(&there, BEGIN_MORE, 10);
        assert!(matches!(connection.receive(&mut [0; 2000], 0), Received::Broken), "a hello is one packet");
        assert_eq!((budget.held(), connection.assembler.len()), (CONNECTION, 0));
        let (mut connection, there) = connection_in(&mut budget);
        send(&there, 2, LONGEST_HELLO);
        assert!(matches!(connection.receive(&mut [0; 2000], 0), Received::Broken), "and a short one");
        let (mut connection, there) = connection_in(&mut budget);
        let hello = Request { id: 1, resends: 0, kind: RequestKind::Hello { protocol: PROTOCOL } };
        frame::send_message(&there, &hello, &[], &[], Deadline::NOW).unwrap().unwrap();
        assert!(
            matches!(connection.receive(&mut [0; 2000], 0), Received::Request(request, ..) if request == hello)
        );
    }

    #[test]
    fn a_long_message_is_charged_as_the_longest_until_it_is_complete() {
        let mut budget = unlimited();
        let (mut connection, there) = admitted(&mut budget);
        let before = budget.held();
        let label = crate::protocol::Label { name: "x".to_owned(), meta: Vec::new() };
        let kind = RequestKind::Create { label, len: 150_000, members: Vec::new(), place: 0 };
        let packets = frame::encode(&Request { id: 9, resends: 0, kind }, &[5; 150_000]).unwrap();
        there.send(&packets[0], &[], Deadline::NOW).unwrap();
        let mut packet = vec![0; wholemem_os::packet::MAX_PACKET];
        assert!(matches!(connection.receive(&mut packet, 0), Received::TookSlot));
        assert_eq!(budget.held().bytes - before.bytes, SLOT.bytes);
        packets[1..].iter().for_each(|packet| there.send(packet, &[], Deadline::NOW).unwrap());
        let received = connection.receive(&mut packet, 0);
        let Received::Request(request, payload, _, charge) = received else { panic!("{received:?}") };
        assert_eq!((request.id, payload.len()), (9, 150_000));
        assert_eq!(budget.held().bytes - before.bytes, 150_000);
        drop(charge);
        assert_eq!(budget.held(), before);
    }

    #[test]
    fn a_connection_without_room_for_a_long_message_is_not_read_until_there_is_some() {
        let others = Amount { bytes: 2 * (MAX_MESSAGE as u64 + (1 << 20)), descriptors: 100 };
        let mut budget = Budget::new(0, BudgetLimits { own: others, others });
        let [(mut first, one), (mut second, two)] = [admitted(&mut budget), admitted(&mut budget)];
        let mut packet = [0; 2000];
        [&one, &two].into_iter().for_each(|there| send(there, BEGIN_MORE, 1000));
        assert!(matches!(first.receive(&mut packet, 0), Received::TookSlot));
        assert!(matches!(second.receive(&mut packet, 0), Received::NeedsSlot));
        assert_eq!((first.wanted().read, second.wanted().read), (true, false));
        assert!(second.take_slot().is_err());
        first.drop_messages();
        second.take_slot().unwrap();
        assert!(second.wanted().read);
    }

    #[test]
    fn nothing_is_kept_for_a_connection_that_was_ended() {
        let mut budget = unlimited();
        let (mut connection, there) = admitted(&mut budget);
        let before = budget.held();
        let done = Response { id: 1, answer: Answer::Done };
        // It does not read, and has begun to send something long.
        while connection.has_sent_all() {
            connection.send(&done, Vec::new()).unwrap();
        }
        send(&there, BEGIN_MORE, 1000);
        assert!(matches!(connection.receive(&mut [0; 2000], 0), Received::TookSlot));
        connection.disconnect();
        assert_eq!(budget.held(), before);
        connection.send(&done, Vec::new()).unwrap();
        assert_eq!((budget.held(), connection.wanted()), (before, Interest::default()));
    }

    #[test]
    fn a_client_that_does_not_read_is_refused_before_the_server_has_no_memory_or_descriptors_left() {
        let mut budget = Budget::new(0, BudgetLimits::of_server(1 << 30, 1000));
        let (mut connection, _there) = admitted(&mut budget);
        let done = Response { id: 1, answer: Answer::Done };
        let refused = (0..10_000_000).find_map(|_| connection.send(&done, Vec::new()).err());
        assert!(matches!(refused, Some(Refusal::ClientLimit { user: 7, .. })), "{refused:?}");
        assert!(budget.held().bytes <= 2 * MAX_MESSAGE as u64);
        let (mut connection, _there) = admitted(&mut budget);
        let fd = Rc::new(OwnedFd::from(std::fs::File::open("/dev/zero").unwrap()));
        let refused = (0..1000).find_map(|_| connection.send(&done, vec![Rc::clone(&fd)]).err());
        let Some(Refusal::ClientLimit { what, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(what, "descriptors");
        connection.disconnect();
        assert_eq!(Rc::strong_count(&fd), 1);
    }

    #[test]
    fn a_connection_that_never_comes_to_an_end_is_read_in_turn_with_others() {
        let mut budget = unlimited();
        let (mut connection, there) = admitted(&mut budget);
        // Behind a message whose beginning another server has read, any number of packets may be.
        connection.assembler = MessageAssembler::inherited();
        (0..20).for_each(|_| send(&there, MORE, 0));
        assert!(matches!(connection.receive(&mut [0; 8], 0), Received::Nothing));
        let socket = connection.socket.as_ref().unwrap();
        let left = std::iter::from_fn(|| socket.recv(&mut [0; 8], Deadline::NOW).ok()).count();
        assert_eq!(left, 20 - PACKETS_AT_ONCE);
    }
}
