//! Connections between ranks that have proved themselves to each other.
//!
//! | module | what it holds |
//! |---|---|
//! | [`link`] | one connection, with the packets that wait to be sent on it |
//! | [`paths`] | connections between ranks that are not neighbours in the tree, made at first use |

mod link;
mod paths;

pub(crate) use link::{Left, Link, Packet};
pub(crate) use paths::{Next, Paths};
