//! The acceptor at which clients come: they are let in, or told that there is no descriptor left for them.
//!
//! Whoever is not accepted waits, and does not know for what. So one descriptor is kept for turning people away: it is
//! given up, somebody is accepted in its place, told why not, and let go.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use wholemem_os::packet::PacketListener;
use wholemem_os::{Deadline, PacketSocket, memfd};

use crate::Result;
use crate::keeper::{Kept, Key};
use crate::protocol::frame;
use crate::protocol::{Answer, OLDEST_PROTOCOL, Refusal, Response};

/// How many descriptors a client takes: its connection, its process and its pins, here and on their way to the keeper.
const FOR_A_CLIENT: usize = 6;

#[derive(Debug)]
pub(super) struct Acceptor {
    listener: PacketListener,
    /// The listener's file, for the keeper, which removes it.
    file: Option<OwnedFd>,
    /// Given up to turn somebody away.
    spare: Option<OwnedFd>,
    /// How many descriptors this process may have.
    limit: u64,
}

impl Acceptor {
    pub(super) fn new(listener: PacketListener, file: Option<OwnedFd>) -> Self {
        Self { listener, file, spare: spare(), limit: wholemem_os::descriptors::limit() }
    }

    /// Adds the descriptors that another keeper has to have.
    pub(super) fn keep(&self, kept: &mut Kept) -> Result<()> {
        kept.insert(Key::Listener, self.listener.share_fd()?);
        if let Some(file) = &self.file {
            kept.insert(Key::SocketFile, memfd::share_fd(file.as_fd())?);
        }
        Ok(())
    }

    /// Accepts the next connection, if one waits and there is room. If there is none, one connection is refused.
    pub(super) fn next(&mut self) -> Result<Option<PacketSocket>> {
        if self.has_room() {
            return Ok(self.listener.accept()?);
        }
        self.spare = None;
        let accepted = self.listener.accept();
        if let Ok(Some(socket)) = &accepted {
            tracing::warn!("no descriptor is left for one more client");
            refuse_connection(socket, Refusal::NoDescriptors);
        }
        drop(accepted?);
        self.spare = spare();
        Ok(None)
    }

    /// Whether a client finds the descriptors it takes. The kernel hands out the lowest number that is free: while that is below
    /// half of the limit, one is looked for. Should all the numbers above be taken, the client is refused at its hello.
    fn has_room(&self) -> bool {
        let Ok(first) = self.listener.share_fd() else { return false };
        if u64::try_from(first.as_raw_fd()).is_ok_and(|number| number < self.limit / 2) {
            return true;
        }
        let others: Result<Vec<_>, _> = (1..FOR_A_CLIENT).map(|_| self.listener.share_fd()).collect();
        others.is_ok()
    }
}

impl AsFd for Acceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

fn spare() -> Option<OwnedFd> {
    File::open("/dev/null").map(OwnedFd::from).ok()
}

/// Tells a client why it is not served. It may not have said anything yet, so that this answers nothing in particular.
pub(super) fn refuse_connection(socket: &PacketSocket, refusal: Refusal) {
    let _ = socket.recv(&mut [0; 64], Deadline::NOW);
    let answer = Answer::Refused(refusal.for_protocol(OLDEST_PROTOCOL));
    let _ = frame::send_message(socket, &Response { id: 0, answer }, &[], &[], Deadline::NOW);
}
