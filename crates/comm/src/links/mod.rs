//! Connections between authenticated ranks.
//!
//! | module | description |
//! |---|---|
//! | [`link`] | one connection, with the queue of packets to send |
//! | [`stream`] | a TCP connection to a rank of another node |
//! | [`paths`] | direct connections between ranks that are not neighbours in the tree, created on first use |

mod link;
mod paths;
mod stream;

pub(crate) use link::{FramePacket, LinkSocket, RankLink, SendStatus};
pub(crate) use paths::{PathAction, Paths};
pub(crate) use stream::{Closing, StreamSocket};
