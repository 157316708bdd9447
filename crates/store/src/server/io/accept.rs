//! Accepts connections of clients, and refuses them if no file descriptor is left.
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

/// The number of file descriptors that the server needs for a client: its socket, its pidfd and its pin page, and a duplicate of
/// each that is sent to the keeper process.
const FDS_PER_CLIENT: usize = 6;

/// The number of client connections that one iteration of the event loop accepts.
const ACCEPTED_AT_ONCE: usize = 1;

/// The pause in accepting connections after the server has failed to accept one.
const PAUSE: Duration = Duration::from_millis(500);

/// The socket on which the server listens for clients, and whether connections are currently accepted.
#[derive(Debug)]
pub(super) struct ClientAcceptor {
    listener: PacketListener,
    /// A descriptor of the listening socket's file, for the keeper process, which removes the file.
    file: Option<OwnedFd>,
    /// A reserved descriptor, which is closed when no other is left, so that a connection can be accepted and refused.
    spare: Option<OwnedFd>,
    /// The maximum number of file descriptors that the server process may have open.
    limit: u64,
    /// The time at which the server accepts connections again after it has failed to accept one.
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

    /// Adds the descriptors of the listening socket to the table of descriptors that a new keeper process receives.
    pub(super) fn add_descriptors(&self, descriptors: &mut DescriptorTable) -> Result<()> {
        descriptors.insert(DescriptorKey::Listener, self.listener.share_fd()?);
        if let Some(file) = &self.file {
            descriptors.insert(DescriptorKey::SocketFile, memfd::share_fd(file.as_fd())?);
        }
        Ok(())
    }

    /// Returns the remaining time in which the server accepts no connections after a failure.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        self.paused_until.map(|until| until.saturating_duration_since(now))
    }

    /// Accepts a bounded number of the connections that wait on the listening socket.
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

    /// Starts or stops accepting connections. They are accepted if the keeper process can take more clients and no pause after a
    /// failure is in force.
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

    /// Accepts the next client that waits on the listening socket, or refuses the client if too few descriptors are left.
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

    /// Returns true if there are enough file descriptors for another client. The kernel always returns the lowest free
    /// descriptor; if its number is below half of the limit, the function assumes that enough descriptors are free. If that is
    /// wrong, the client is refused at its hello message.
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

/// Sends a refusal to a client that has connected but is not served. The client may not have sent a request yet, so the response
/// has no request id.
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
