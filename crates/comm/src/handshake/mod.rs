//! The handshake between a rank and its parent: both prove that they know the secret of the group.
//!
//! | module | description |
//! |---|---|
//! | [`accept`] | the parent's side: accepts connections and authenticates ranks |
//! | [`connect`] | the child's side: connects to the parent, and retries until the parent admits the rank |
//! | [`node_accept`], [`node_connect`] | the same between nodes, over TCP |
//!
//! After the handshake each side holds the other's liveness page and pidfd, by which it detects its death. The
//! messages are defined in [`wire::handshake`](crate::wire::handshake).

use std::os::fd::OwnedFd;

use wholemem_os::robust::LivenessLock;
use wholemem_os::{PacketSocket, PidFd};

use crate::links::StreamSocket;
use crate::{Rank, Result};

mod accept;
mod connect;
mod node_accept;
mod node_connect;

pub(crate) use accept::Acceptor;
pub(crate) use connect::{Connector, is_refusal};
pub(crate) use node_accept::NodeAcceptor;
pub(crate) use node_connect::{AttemptOutcome, NodeAttempt};

/// A rank whose handshake is complete, with its connection and the file descriptors of its liveness page and its
/// process.
#[derive(Debug)]
pub(crate) struct JoinedPeer {
    pub(crate) rank: Rank,
    pub(crate) socket: PacketSocket,
    pub(crate) fds: Vec<OwnedFd>,
}

/// An authenticated rank of another node, with its connection.
#[derive(Debug)]
pub(crate) struct NodePeer {
    pub(crate) rank: Rank,
    pub(crate) socket: StreamSocket,
}

/// Returns the file descriptors of this rank's liveness page and process, for sending to an authenticated rank.
pub(crate) fn liveness_fds(liveness: &LivenessLock) -> Result<[OwnedFd; 2]> {
    Ok([liveness.probe_fd()?, PidFd::of_self()?.into()])
}
