//! Accepts connections of clients, and refuses them if no descriptor is left.
//!
//! A client that is not accepted would wait without knowing why. So one descriptor is reserved: if there is none left, it is
//! closed, and a connection is accepted in its place, refused with the reason, and closed.
//!
//! No connection is accepted while the keeper does not read, and for some time after one could not be accepted.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use wholemem_os::packet::PacketListener;
use wholemem_os::{Deadline, PacketSocket, memfd};

use super::clients::Clients;
use super::poller::{FixedSource, Interest, Poller};
use crate::Result;
use crate::keeper::{DescriptorKey, DescriptorTable};
use crate::protocol::frame;
use crate::protocol::{Answer, OLDEST_PROTOCOL, Refusal, Response};

/// The number of descriptors of a client: its connection, its process and its pins, here and on their way to the keeper.
const FDS_PER_CLIENT: usize = 6;

/// The number of connections that one iteration accepts.
const ACCEPTED_AT_ONCE: usize = 1;

/// How long no connection is accepted after a failure.
const PAUSE: Duration = Duration::from_millis(500);

/// The listening socket, and whether connections are accepted now.
#[derive(Debug)]
pub(super) struct ClientAcceptor {
    listener: PacketListener,
    /// The file of the listening socket, for the keeper, which removes it.
    file: Option<OwnedFd>,
    /// A descriptor that is closed in order to refuse a connection.
    spare: Option<OwnedFd>,
    /// The descriptor limit of this process.
    limit: u64,
    /// The end of a pause in accepting connections, after a failure.
    paused_until: Option<Instant>,
    is_accepting: bool,
}

impl ClientAcceptor {
    pub(super) fn new(listener: PacketListener, file: Option<OwnedFd>) -> Self {
        let (spare, limit) = (spare(), wholemem_os::descriptors::limit());
        Self { listener, file, spare, limit, paused_until: None, is_accepting: true }
    }

    /// Registers the listening socket with the poller.
    pub(super) fn register(&self, poller: &mut Poller) -> Result<()> {
        poller.add_fixed(FixedSource::Listener, self, Interest { read: true, write: false })
    }

    /// Adds the descriptors for another keeper.
    pub(super) fn add_descriptors(&self, descriptors: &mut DescriptorTable) -> Result<()> {
        descriptors.insert(DescriptorKey::Listener, self.listener.share_fd()?);
        if let Some(file) = &self.file {
            descriptors.insert(DescriptorKey::SocketFile, memfd::share_fd(file.as_fd())?);
        }
        Ok(())
    }

    /// The remaining time of a pause in accepting connections.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.paused_until.map(|until| until.saturating_duration_since(now))
    }

    /// Accepts some waiting connections.
    pub(super) fn accept(&mut self, clients: &mut Clients) {
        if !self.is_accepting {
            return;
        }
        for _ in 0..ACCEPTED_AT_ONCE {
            let accepted = match self.next() {
                Ok(None) => return,
                Ok(Some(socket)) => clients.accept(socket),
                Err(error) => Err(error),
            };
            if let Err(error) = accepted {
                tracing::warn!(%error, "cannot accept a client");
                self.paused_until = Some(Instant::now() + PAUSE);
                return;
            }
        }
    }

    /// Accepts connections if the keeper can take more clients and no pause is in force.
    pub(super) fn update(&mut self, keeper_accepts: bool, now: Instant, poller: &mut Poller) -> Result<()> {
        self.paused_until.take_if(|until| *until <= now);
        let is_accepting = keeper_accepts && self.paused_until.is_none();
        if is_accepting != self.is_accepting {
            self.is_accepting = is_accepting;
            let interest = Interest { read: is_accepting, write: false };
            poller.set_fixed(FixedSource::Listener, &*self, interest)?;
        }
        Ok(())
    }

    /// Accepts the next waiting connection; refuses it if too few descriptors are left.
    fn next(&mut self) -> Result<Option<PacketSocket>> {
        if self.has_descriptors() {
            return Ok(self.listener.accept()?);
        }
        self.spare = None;
        let accepted = self.listener.accept();
        if let Ok(Some(socket)) = &accepted {
            tracing::warn!("no descriptor is left for another client");
            refuse_connection(socket, Refusal::NoDescriptors);
        }
        drop(accepted?);
        self.spare = spare();
        Ok(None)
    }

    /// Whether there are enough descriptors for another client. The kernel returns the lowest free number: if that is below half
    /// of the limit, this is assumed. If all numbers above are in use nevertheless, the client is refused at its hello.
    fn has_descriptors(&self) -> bool {
        let Ok(first) = self.listener.share_fd() else { return false };
        if u64::try_from(first.as_raw_fd()).is_ok_and(|number| number < self.limit / 2) {
            return true;
        }
        let others: Result<Vec<_>, _> = (1..FDS_PER_CLIENT).map(|_| self.listener.share_fd()).collect();
        others.is_ok()
    }
}

impl AsFd for ClientAcceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

fn spare() -> Option<OwnedFd> {
    File::open("/dev/null").map(OwnedFd::from).ok()
}

/// Sends a refusal to a client that is not served. The client may not have sent a request yet, so the response has no request id.
pub(super) fn refuse_connection(socket: &PacketSocket, refusal: Refusal) {
    let _ = socket.recv(&mut [0; 64], Deadline::NOW);
    let answer = Answer::Refused(refusal.for_protocol(OLDEST_PROTOCOL));
    let _ = frame::send_message(socket, &Response { id: 0, answer }, &[], &[], Deadline::NOW);
}

#[cfg(test)]
mod tests {
    use wholemem_os::packet::Address;

    use super::*;
    use crate::server::budget::tests::unlimited;

    struct AcceptSetup {
        acceptor: ClientAcceptor,
        clients: Clients,
        address: Address,
        _folder: tempfile::TempDir,
    }

    fn setup() -> AcceptSetup {
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let address = Address::Path(folder.path().join("socket"));
        let acceptor = ClientAcceptor::new(PacketListener::bind(&address).unwrap(), None);
        let mut clients = Clients::new(0, unlimited()).unwrap();
        acceptor.register(clients.poller()).unwrap();
        AcceptSetup { acceptor, clients, address, _folder: folder }
    }

    fn connect(setup: &AcceptSetup) -> PacketSocket {
        PacketSocket::connect(&setup.address).unwrap()
    }

    #[test]
    fn connections_are_accepted_only_while_the_keeper_reads() {
        let mut setup = setup();
        let _clients = [connect(&setup), connect(&setup)];
        let now = Instant::now();
        let AcceptSetup { acceptor, clients, .. } = &mut setup;
        acceptor.update(false, now, clients.poller()).unwrap();
        acceptor.accept(clients);
        assert_eq!(clients.iter().count(), 0);
        acceptor.update(true, now, clients.poller()).unwrap();
        acceptor.accept(clients);
        assert_eq!(clients.iter().count(), ACCEPTED_AT_ONCE);
    }

    #[test]
    fn no_connection_is_accepted_during_a_pause() {
        let mut setup = setup();
        let _client = connect(&setup);
        let now = Instant::now();
        let AcceptSetup { acceptor, clients, .. } = &mut setup;
        acceptor.paused_until = Some(now + PAUSE);
        acceptor.update(true, now, clients.poller()).unwrap();
        assert_eq!((acceptor.is_accepting, acceptor.timeout(now)), (false, Some(PAUSE)));
        acceptor.update(true, now + PAUSE, clients.poller()).unwrap();
        assert_eq!((acceptor.is_accepting, acceptor.timeout(now)), (true, None));
    }

    #[test]
    fn a_client_is_refused_with_the_reason_if_no_descriptor_is_left() {
        let mut setup = setup();
        let client = connect(&setup);
        let _armed = wholemem_os::fault::arm(1, wholemem_os::Errno::MFILE);
        setup.acceptor.accept(&mut setup.clients);
        assert_eq!(setup.clients.iter().count(), 0);
        let mut packet = [0; 200];
        let len = client.recv(&mut packet, Deadline::NEVER).unwrap();
        let mut assembler = frame::MessageAssembler::default();
        let message = assembler.push(&packet[..len]).unwrap().unwrap();
        let (response, _) = frame::decode::<Response>(&message).unwrap();
        assert_eq!(response, Response { id: 0, answer: Answer::Refused(Refusal::NoDescriptors) });
        assert!(setup.acceptor.spare.is_some(), "a spare descriptor for the next refusal");
    }
}
