//! Handshakes between a rank and its parent: both prove that they know the secret of the group.
//!
//! | module | what it does |
//! |---|---|
//! | [`accept`] | the parent's side: accepts connections and authenticates ranks |
//! | [`connect`] | the child's side: connects to the parent, and repeats it until the parent has admitted the rank |
//!
//! After a handshake, each of the two holds the other's liveness page and process, so that it notices its death. The messages are
//! those of [`wire::hello`](crate::wire::hello).

use std::os::fd::OwnedFd;

use wholemem_os::robust::LivenessLock;
use wholemem_os::{PacketSocket, PidFd};

use crate::{Rank, Result};

mod accept;
mod connect;

pub(crate) use accept::Acceptor;
pub(crate) use connect::{Connector, is_refusal};

/// A rank with which the handshake is complete: its connection, and the descriptors of its liveness page and process.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) rank: Rank,
    pub(crate) socket: PacketSocket,
    pub(crate) fds: Vec<OwnedFd>,
}

/// The descriptors of this rank's liveness page and process, for a rank that has proved itself.
pub(crate) fn own_fds(heart: &LivenessLock) -> Result<[OwnedFd; 2]> {
    Ok([heart.probe_fd()?, PidFd::of_self()?.into()])
}
