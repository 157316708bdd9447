//! What clients and server say to each other: one kind of request, one kind of response.
//!
//! A message is a request or a response in [postcard](https://postcard.jamesmunns.com), and behind it the bytes of a small
//! object where it carries one. It travels as one packet or several ([`frame`]), with file descriptors on the last.
//!
//! What it keeps true: a message is at most [`MAX_MESSAGE`](frame::MAX_MESSAGE) bytes; every number in it is checked by
//! whoever acts on it; a request has an id, under which its client says it again if the server was restarted before the
//! answer came.

pub(crate) mod frame;
mod refusal;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use wholemem_os::Visible;

use crate::id::{AllocationId, ClientId, ObjectId};
use crate::index::{MAX_META, MAX_NAME};

pub use refusal::Refusal;
pub(crate) use refusal::limit_met;

/// Changes when any message does. New messages come behind the others, so that clients of an older version are understood.
pub(crate) const PROTOCOL: u32 = 5;

/// The oldest version that a server understands.
pub(crate) const OLDEST_PROTOCOL: u32 = 4;

/// The most objects of one pack.
pub(crate) const MAX_MEMBERS: usize = 16 << 10;

/// Host objects shorter than this bring their bytes along, and share arenas.
pub(crate) const SMALL: u64 = 1 << 20;

/// What a client wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Never zero, and never used twice by a client.
    pub(crate) id: u64,
    /// How many times it was said before, each time to a server that was then replaced. Clients of protocol 4 say 1 for
    /// any number: the byte was a truth value.
    pub(crate) again: u8,
    pub(crate) ask: Ask,
}

/// Name and description of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Label {
    pub(crate) name: String,
    pub(crate) meta: Vec<u8>,
}

/// So many servers may die while a request is in progress: then no memory is made, closed or taken in for it.
const FATAL: u8 = 2;

impl Label {
    fn decoded_len(&self) -> u64 {
        (self.name.len() + self.meta.len()) as u64
    }
}

impl Ask {
    /// How many bytes the lists and texts of a request take that makes something, once it is decoded.
    pub(crate) fn decoded_len(&self) -> u64 {
        match self {
            Self::Create { label, members, .. } => {
                let member = |member: &Member| size_of::<Member>() as u64 + member.label.decoded_len();
                label.decoded_len() + members.iter().map(member).sum::<u64>()
            }
            Self::Publish { label, .. } | Self::Adopt { label, .. } => label.decoded_len(),
            _ => 0,
        }
    }
}

impl Request {
    /// Refuses work on memory for a request during which servers died. Requests that wait for something else to happen, or find
    /// what they need, are not asked: that servers died meanwhile says nothing about them.
    pub(crate) fn check_deaths(&self) -> Result<(), Refusal> {
        if self.again < FATAL { Ok(()) } else { Err(Refusal::ServersDied { servers: self.again }) }
    }
}

impl Label {
    /// Whether the index has room for it.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        check_name(&self.name)?;
        let (len, limit) = (self.meta.len(), MAX_META);
        if len > limit { Err(Refusal::MetaTooLong { len, limit }) } else { Ok(()) }
    }
}

/// Whether any object could have this name, or one that begins so.
pub(crate) fn check_name(name: &str) -> Result<(), Refusal> {
    let (len, limit) = (name.len(), MAX_NAME);
    if len > limit { Err(Refusal::NameTooLong { len, limit }) } else { Ok(()) }
}

/// An object of a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    pub(crate) label: Label,
    pub(crate) len: u64,
}

/// Some bytes of a piece of memory, counted from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Part {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Part {
    /// Whether memory of so many bytes has it.
    pub(crate) fn check(self, whole: u64) -> Result<(), Refusal> {
        let Self { offset, len } = self;
        let is_within = offset.checked_add(len).is_some_and(|end| end <= whole);
        if is_within { Ok(()) } else { Err(Refusal::OutOfRange { offset, len, whole }) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// The first of all: which protocol this client speaks.
    Hello { protocol: u32 },
    /// A new object of `len` bytes, or a pack of `members`, at a place (0 is the host, `n + 1` the server's device
    /// `n`). Small host objects bring their bytes along and are sealed at once.
    Create { label: Label, len: u64, members: Vec<Member>, place: u32 },
    /// What was made by this client's request `create` is complete.
    Seal { create: u64 },
    /// What was made by this client's request `create` is not wanted any more.
    Abandon { create: u64 },
    /// The bytes of a sealed object under one more name, or others of the memory that was made for it.
    Publish { label: Label, object: ObjectId, part: Option<Part> },
    /// An object is not wanted any more, and if it is the first of a pack, none of the pack is.
    Delete { object: ObjectId },
    /// Which object has a name, now or within so many milliseconds.
    Find { name: String, wait: u64 },
    /// The memory of an object.
    Fetch { object: ObjectId },
    /// A pin of a deleted object was let go.
    Kick { object: ObjectId },
    /// From now on, tell of objects whose names begin so.
    Watch { prefix: String },
    /// How full the store is.
    Status,
    /// The last of all: this client holds nothing any more. One that just closes its connection may still write what it
    /// had begun, and is waited for to end.
    Goodbye,
    /// Whether there is room for an object of `len` bytes at a place, now or within so many milliseconds.
    AwaitRoom { len: u64, place: u32, wait: u64 },
    /// A part of memory of `len` bytes at a place, whose descriptor comes along, is an object from now on.
    Adopt { label: Label, place: u32, len: u64, part: Part },
    /// The process of this client is about to fork, and the page of pins is for the child: from now on it is held while the
    /// connection is open, whatever becomes of the process that made it.
    AwaitChild,
    /// Said first on a connection of its own by a forked child: the page of pins of `client`, which ends with this `secret`, is
    /// held while the child's process lives.
    Claim { client: ClientId, secret: u64 },
}

/// What the server says. An id of zero answers no request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Response {
    pub(crate) id: u64,
    pub(crate) answer: Answer,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// With the index, for reading, and the client's page of pins.
    Welcome {
        client: ClientId,
        index_len: u64,
        devices: Vec<[u8; 16]>,
    },
    /// With the memory, for writing.
    Created {
        object: ObjectId,
        memory: Memory,
    },
    Sealed {
        object: ObjectId,
        version: u64,
    },
    Found {
        object: ObjectId,
    },
    /// With the memory, for reading on the host.
    Fetched {
        memory: Memory,
    },
    Done,
    Status(Status),
    Refused(Refusal),
    /// Another server has taken over: what is not answered has to be asked again.
    Restarted,
    /// Something happened to an object that is watched for.
    Event(Event),
}

/// An allocation, and where in it an object lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Memory {
    pub(crate) allocation: AllocationId,
    pub(crate) allocation_len: u64,
    pub(crate) place: u32,
    pub(crate) offset: u64,
}

/// What happened to an object with a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The name.
    pub name: String,
    /// The object.
    pub object: ObjectId,
    /// What happened.
    pub what: EventKind,
}

/// The things that can happen to an object with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EventKind {
    /// It has become what its name means.
    Published {
        /// Which object of that name it is.
        version: u64,
    },
    /// It was deleted, or another object has taken its name.
    Deleted,
}

/// How full a store is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// Sealed objects.
    pub objects: u64,
    /// Objects that are being written.
    pub unsealed: u64,
    /// Deleted objects that somebody still has pinned.
    pub retired: u64,
    /// Connected clients.
    pub clients: u64,
    /// Bytes of host memory that are taken, and those that may be.
    pub host: Usage,
    /// The same of device memory, over all devices.
    pub device: Usage,
    /// How often a server has been started for this store.
    pub epoch: u64,
}

/// A quota, and what is taken of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes that are taken.
    pub used: u64,
    /// Bytes that may be taken.
    pub quota: u64,
}

/// Whether there can be an object with this label, or a pack of these members: both sides look, the client before anything is
/// written.
pub(crate) fn check_labels(label: &Label, members: &[Member]) -> Result<(), Refusal> {
    let (count, limit) = (members.len(), MAX_MEMBERS);
    if count > limit {
        return Err(Refusal::TooManyMembers { count, limit });
    }
    let mut names = BTreeSet::new();
    for label in members.iter().map(|member| &member.label).chain([label]) {
        label.check()?;
        if !label.name.is_empty() && !names.insert(&label.name) {
            return Err(Refusal::malformed(&format!(
                "two objects of a pack are named `{}`",
                Visible(&label.name)
            )));
        }
    }
    Ok(())
}

/// Where the objects of a pack lie in it, and how long it is altogether.
///
/// Both sides compute it, so it is part of the protocol: each object begins at a multiple of 256 bytes, which every
/// device can load from at its best.
pub(crate) fn lay_out(lens: impl IntoIterator<Item = u64>) -> Option<(Vec<u64>, u64)> {
    const ALIGN: u64 = 256;
    let mut end: u64 = 0;
    let mut offsets = Vec::new();
    for len in lens {
        let offset = end.checked_next_multiple_of(ALIGN)?;
        end = offset.checked_add(len)?;
        offsets.push(offset);
    }
    Some((offsets, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_of_a_pack_follow_each_other_aligned() {
        assert_eq!(lay_out([]), Some((vec![], 0)));
        assert_eq!(lay_out([1, 256, 0, 300]), Some((vec![0, 256, 512, 512], 812)));
        assert_eq!(lay_out([u64::MAX, 1]), None);
        assert_eq!(lay_out([u64::MAX - 100, 1]), None);
    }

    #[test]
    fn a_label_longer_than_its_record_is_refused() {
        let label = |name: usize, meta: usize| Label { name: "x".repeat(name), meta: vec![0; meta] };
        assert_eq!(label(200, 216).check(), Ok(()));
        assert_eq!(label(201, 0).check(), Err(Refusal::NameTooLong { len: 201, limit: 200 }));
        assert_eq!(label(0, 217).check(), Err(Refusal::MetaTooLong { len: 217, limit: 216 }));
    }
}
