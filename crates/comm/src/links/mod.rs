//! Connections between authenticated ranks.
//!
//! | module | description |
//! |---|---|
//! | [`link`] | one connection, with the queue of packets to send |
//! | [`paths`] | direct connections between ranks that are not neighbours in the tree, created on first use |

mod link;
mod paths;

pub(crate) use link::{FramePacket, RankLink, SendStatus};
pub(crate) use paths::{PathAction, Paths};
