//! Messages between this process and the second one it starts: values in packets, with a file descriptor where one
//! goes along, and failures told to the other side.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, PacketSocket};

use crate::failure::{self, PeerFailed};

/// One end of the connection.
///
/// No wait here has a deadline: the other end answers or dies, and the kernel tells either.
#[derive(Debug)]
pub struct Link(PacketSocket);

/// What a packet holds.
#[derive(Debug, Serialize, Deserialize)]
enum Packet<T> {
    Said(T),
    Failed { what: String, hint: Option<String> },
}

impl Link {
    /// Two connected ends.
    ///
    /// # Errors
    /// What the system said.
    pub fn pair() -> Result<(Self, Self)> {
        let (here, there) = PacketSocket::pair()?;
        Ok((Self(here), Self(there)))
    }

    /// The end that another process has passed on.
    ///
    /// # Errors
    /// That it is not such a socket.
    pub fn adopt(fd: OwnedFd) -> Result<Self> {
        Ok(Self(PacketSocket::adopt(fd)?))
    }

    /// The socket itself, for a measurement of it.
    pub fn socket(&self) -> &PacketSocket {
        &self.0
    }

    /// Sends a value.
    ///
    /// # Errors
    /// That the other end is closed, or what the system said.
    pub fn say(&self, message: &impl Serialize) -> Result<()> {
        self.send(&Packet::Said(message), &[])
    }

    /// Sends a value and a file descriptor.
    ///
    /// # Errors
    /// As [`say`](Self::say).
    pub fn say_with_fd(&self, message: &impl Serialize, fd: BorrowedFd<'_>) -> Result<()> {
        self.send(&Packet::Said(message), &[fd])
    }

    /// Tells the other side that what it asked for went wrong.
    pub fn say_failed(&self, error: &anyhow::Error) -> Result<()> {
        let what: String = format!("{error:#}").chars().take(MAX_PACKET / 16).collect();
        self.send(&Packet::<()>::Failed { what, hint: failure::hint(error) }, &[])
    }

    /// Waits for a value.
    ///
    /// # Errors
    /// [`PeerFailed`] if the other side reports a failure; that the other end is closed, or sent another value.
    pub fn hear<T: DeserializeOwned>(&self) -> Result<T> {
        let mut buffer = vec![0; MAX_PACKET];
        let len = self.0.recv(&mut buffer, Deadline::NEVER)?;
        decode(&buffer[..len])
    }

    /// Waits for a value and a file descriptor.
    ///
    /// # Errors
    /// As [`hear`](Self::hear).
    pub fn hear_with_fd<T: DeserializeOwned>(&self) -> Result<(T, OwnedFd)> {
        let mut buffer = vec![0; MAX_PACKET];
        let (len, mut fds) = self.0.recv_with_fds(&mut buffer, 1, Deadline::NEVER)?;
        let message = decode(&buffer[..len])?;
        Ok((message, fds.pop().context("the other process sent no file descriptor")?))
    }

    fn send(&self, packet: &Packet<impl Serialize>, fds: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(self.0.send(&serde_json::to_vec(packet)?, fds, Deadline::NEVER)?)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Link> for OwnedFd {
    fn from(link: Link) -> Self {
        link.0.into()
    }
}

/// What a packet says, or the failure it tells of.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    match serde_json::from_slice(bytes).context("the other process said something unexpected")? {
        Packet::Said(message) => Ok(message),
        Packet::Failed { what, hint } => Err(PeerFailed { what, hint }.into()),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;
    use rustix::fs::fstat;

    use super::*;

    #[test]
    fn messages_and_descriptors_arrive_as_they_were_sent() {
        let (here, there) = Link::pair().unwrap();
        here.say(&(7_u32, "seven")).unwrap();
        assert_eq!(there.hear::<(u32, String)>().unwrap(), (7, "seven".to_owned()));

        let null = std::fs::File::open("/dev/null").unwrap();
        here.say_with_fd(&8_u32, null.as_fd()).unwrap();
        let (number, fd) = there.hear_with_fd::<u32>().unwrap();
        assert_eq!((number, fstat(&fd).unwrap().st_rdev), (8, fstat(&null).unwrap().st_rdev));
    }

    #[test]
    fn a_missing_descriptor_is_an_error() {
        let (here, there) = Link::pair().unwrap();
        here.say(&8_u32).unwrap();
        let error = there.hear_with_fd::<u32>().unwrap_err();
        assert_eq!(error.to_string(), "the other process sent no file descriptor");
    }

    #[test]
    fn a_failure_arrives_as_one() {
        let (here, there) = Link::pair().unwrap();
        here.say_failed(&anyhow!("root").context("top")).unwrap();
        let error = there.hear::<u32>().unwrap_err();
        let expected = PeerFailed { what: "top: root".to_owned(), hint: None };
        assert_eq!(error.downcast_ref(), Some(&expected));
    }

    #[test]
    fn something_else_than_was_expected_is_an_error() {
        let (here, there) = Link::pair().unwrap();
        here.say(&"text").unwrap();
        let error = there.hear::<u32>().unwrap_err();
        assert_eq!(error.to_string(), "the other process said something unexpected");
    }
}
