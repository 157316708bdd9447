//! Messages between this process and a second process that it started: serialized values, file descriptors and errors.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, PacketSocket};

use crate::failure::{self, PeerFailed};

/// One end of the connection between a process and a second process that it started.
///
/// The calls have no timeout: the other process sends a packet or exits, and the kernel closes the socket of an exited process.
#[derive(Debug)]
pub struct PeerLink(PacketSocket);

/// The content of a packet between two processes: a message, or the error of the process that sent the packet.
#[derive(Debug, Serialize, Deserialize)]
enum LinkPacket<T> {
    Message(T),
    Failed { message: String, hint: Option<String> },
}

impl PeerLink {
    /// Creates the two connected ends of a link between processes.
    ///
    /// # Errors
    /// The error of `socketpair`.
    pub fn pair() -> Result<(Self, Self)> {
        let (here, there) = PacketSocket::pair()?;
        Ok((Self(here), Self(there)))
    }

    /// Wraps the socket that this process inherited from the process that started it.
    ///
    /// # Errors
    /// If the descriptor is not a packet socket.
    pub fn adopt(fd: OwnedFd) -> Result<Self> {
        Ok(Self(PacketSocket::adopt(fd)?))
    }

    /// Returns the socket of the connection, for measurements without serialization.
    pub fn socket(&self) -> &PacketSocket {
        &self.0
    }

    /// Sends a message to the other process.
    ///
    /// # Errors
    /// If the other end is closed, or the error of `sendmsg`.
    pub fn send(&self, message: &impl Serialize) -> Result<()> {
        self.send_packet(&LinkPacket::Message(message), &[])
    }

    /// Sends a message and a file descriptor to the other process.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_with_fd(&self, message: &impl Serialize, fd: BorrowedFd<'_>) -> Result<()> {
        self.send_packet(&LinkPacket::Message(message), &[fd])
    }

    /// Sends an error in place of a message. The other process receives it as [`PeerFailed`].
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_error(&self, error: &anyhow::Error) -> Result<()> {
        let message: String = format!("{error:#}").chars().take(MAX_PACKET / 16).collect();
        self.send_packet(&LinkPacket::<()>::Failed { message, hint: failure::hint(error) }, &[])
    }

    /// Waits for a message from the other process.
    ///
    /// # Errors
    /// [`PeerFailed`] if the other process sent an error; otherwise if the other end is closed or sent another type.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        let mut buffer = vec![0; MAX_PACKET];
        let len = self.0.recv(&mut buffer, Deadline::NEVER)?;
        decode(&buffer[..len])
    }

    /// Waits for a message and a file descriptor from the other process.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn receive_with_fd<T: DeserializeOwned>(&self) -> Result<(T, OwnedFd)> {
        let mut buffer = vec![0; MAX_PACKET];
        let (len, mut fds) = self.0.recv_with_fds(&mut buffer, 1, Deadline::NEVER)?;
        let message = decode(&buffer[..len])?;
        Ok((message, fds.pop().context("the other process sent no file descriptor")?))
    }

    fn send_packet(&self, packet: &LinkPacket<impl Serialize>, fds: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(self.0.send(&serde_json::to_vec(packet)?, fds, Deadline::NEVER)?)
    }
}

impl AsFd for PeerLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<PeerLink> for OwnedFd {
    fn from(link: PeerLink) -> Self {
        link.0.into()
    }
}

/// Decodes a packet from the other process. Returns its message, or the failure that the packet reports as an error.
///
/// # Errors
/// As [`PeerLink::receive`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    match serde_json::from_slice(bytes).context("the other process sent an unexpected message")? {
        LinkPacket::Message(message) => Ok(message),
        LinkPacket::Failed { message, hint } => Err(PeerFailed { message, hint }.into()),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use rustix::fs::fstat;

    use super::*;

    #[test]
    fn messages_and_descriptors_arrive_unchanged() {
        let (here, there) = PeerLink::pair().unwrap();
        here.send(&(7_u32, "seven")).unwrap();
        assert_eq!(there.receive::<(u32, String)>().unwrap(), (7, "seven".to_owned()));

        let null = std::fs::File::open("/dev/null").unwrap();
        here.send_with_fd(&8_u32, null.as_fd()).unwrap();
        let (number, fd) = there.receive_with_fd::<u32>().unwrap();
        assert_eq!((number, fstat(&fd).unwrap().st_rdev), (8, fstat(&null).unwrap().st_rdev));
    }

    #[test]
    fn a_missing_descriptor_is_an_error() {
        let (here, there) = PeerLink::pair().unwrap();
        here.send(&8_u32).unwrap();
        let error = there.receive_with_fd::<u32>().unwrap_err();
        assert_eq!(error.to_string(), "the other process sent no file descriptor");
    }

    #[test]
    fn a_sent_error_arrives_as_peer_failed() {
        let (here, there) = PeerLink::pair().unwrap();
        here.send_error(&anyhow!("root").context("top")).unwrap();
        let error = there.receive::<u32>().unwrap_err();
        let expected = PeerFailed { message: "top: root".to_owned(), hint: None };
        assert_eq!(error.downcast_ref(), Some(&expected));
    }

    #[test]
    fn a_message_of_another_type_is_an_error() {
        let (here, there) = PeerLink::pair().unwrap();
        here.send(&"text").unwrap();
        let error = there.receive::<u32>().unwrap_err();
        assert_eq!(error.to_string(), "the other process sent an unexpected message");
    }
}
