//! The messages between clients and server: one type of request, one type of response.
//!
//! A message is a request or a response encoded by [postcard](https://postcard.jamesmunns.com), followed by the bytes of a small
//! object where the message carries one. It is sent as one or more packets ([`frame`]), with file descriptors on the last.
//!
//! A message is at most [`MAX_MESSAGE`](frame::MAX_MESSAGE) bytes long. The receiver validates every number before it uses it. A
//! request has an id, under which the client sends it again if the server is replaced before it answers.

pub(crate) mod frame;
mod refusal;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use wholemem_os::Visible;

use crate::id::{AllocationId, ClientId, ObjectId};
use crate::index::{MAX_META, MAX_NAME};

pub use refusal::Refusal;
pub(crate) use refusal::describe_error;

/// The version of the protocol. New messages are appended to the enums, so that messages of older clients are still decoded.
pub(crate) const PROTOCOL: u32 = 5;

/// The oldest protocol version that the server supports.
pub(crate) const OLDEST_PROTOCOL: u32 = 4;

/// The maximum number of objects of a pack.
pub(crate) const MAX_MEMBERS: usize = 16 << 10;

/// Host objects shorter than this are stored in shared arenas, and their bytes are sent with the request that creates them.
pub(crate) const SMALL: u64 = 1 << 20;

/// A request of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The id of the request: never zero, and never used twice on a connection.
    pub(crate) id: u64,
    /// The number of earlier attempts, each sent to a server that was then replaced. Clients of protocol 4 always send 1: the
    /// byte was a boolean.
    pub(crate) resends: u8,
    pub(crate) kind: RequestKind,
}

/// The name and the metadata of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Label {
    pub(crate) name: String,
    pub(crate) meta: Vec<u8>,
}

/// The number of servers that may die while a request is in progress. After that, no memory is allocated, sealed or adopted for
/// the request.
const MAX_SERVER_DEATHS: u8 = 2;

impl Label {
    fn decoded_len(&self) -> u64 {
        (self.name.len() + self.meta.len()) as u64
    }
}

impl RequestKind {
    /// The heap memory of the lists and texts of a decoded request that creates an object, in bytes.
    pub(crate) fn decoded_len(&self) -> u64 {
        match self {
            Self::Create { label, members, .. } => {
                let member =
                    |member: &MemberSpec| size_of::<MemberSpec>() as u64 + member.label.decoded_len();
                label.decoded_len() + members.iter().map(member).sum::<u64>()
            }
            Self::Publish { label, .. } | Self::Adopt { label, .. } => label.decoded_len(),
            _ => 0,
        }
    }
}

impl Request {
    /// Refuses to allocate, seal or adopt memory for a request during which servers died. Requests that only wait or look
    /// something up are not checked: they are unlikely to be the cause.
    pub(crate) fn check_server_deaths(&self) -> Result<(), Refusal> {
        if self.resends < MAX_SERVER_DEATHS {
            Ok(())
        } else {
            Err(Refusal::ServersDied { servers: self.resends })
        }
    }
}

impl Label {
    /// Checks that the name and the metadata fit a record of the index.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        check_name(&self.name)?;
        let (len, limit) = (self.meta.len(), MAX_META);
        if len > limit { Err(Refusal::MetaTooLong { len, limit }) } else { Ok(()) }
    }
}

/// Checks the length of a name or of a prefix of names.
pub(crate) fn check_name(name: &str) -> Result<(), Refusal> {
    let (len, limit) = (name.len(), MAX_NAME);
    if len > limit { Err(Refusal::NameTooLong { len, limit }) } else { Ok(()) }
}

/// An object of a pack to be created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberSpec {
    pub(crate) label: Label,
    pub(crate) len: u64,
}

/// A range of bytes, relative to the beginning of some memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ByteRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl ByteRange {
    /// Checks that the range is within memory of `whole` bytes.
    pub(crate) fn check(self, whole: u64) -> Result<(), Refusal> {
        let Self { offset, len } = self;
        let is_within = offset.checked_add(len).is_some_and(|end| end <= whole);
        if is_within { Ok(()) } else { Err(Refusal::OutOfRange { offset, len, whole }) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RequestKind {
    /// The first request of a connection: the protocol version of the client.
    Hello { protocol: u32 },
    /// Creates an object of `len` bytes, or a pack of `members`, at a place (0 is the host, `n + 1` is device `n` of the server).
    /// Small host objects are sent with their bytes and sealed at once.
    Create { label: Label, len: u64, members: Vec<MemberSpec>, place: u32 },
    /// Seals the object that this client's request `create` created.
    Seal { create: u64 },
    /// Frees the unsealed object that this client's request `create` created.
    Abandon { create: u64 },
    /// Creates another object over the bytes of a sealed object, or over a range of the memory that was allocated for it.
    Publish { label: Label, object: ObjectId, part: Option<ByteRange> },
    /// Deletes an object; if it is the first of a pack, the whole pack.
    Delete { object: ObjectId },
    /// Looks up the object of a name, and waits for up to `wait` milliseconds until it exists.
    Find { name: String, wait: u64 },
    /// Requests the memory of an object.
    Fetch { object: ObjectId },
    /// A pin of a deleted object was released. Not answered.
    PinReleased { object: ObjectId },
    /// Subscribes to events of objects whose names begin with `prefix`.
    Watch { prefix: String },
    /// Requests the usage of the store.
    Status,
    /// The last message of a client that holds no object and no draft. Without it, the server waits for the exit of the client's
    /// process before it frees what the client may still write or read. Not answered.
    Goodbye,
    /// Waits for up to `wait` milliseconds until there is space for an object of `len` bytes at a place.
    AwaitSpace { len: u64, place: u32, wait: u64 },
    /// Creates an object from a range of client memory of `len` bytes at a place; the descriptor is sent along.
    Adopt { label: Label, place: u32, len: u64, part: ByteRange },
    /// The process of this client is about to fork, and the pin page of this connection is for the child. From now on the page is
    /// valid while the connection is open, even after the parent has exited.
    AwaitChild,
    /// The first request on a separate connection of a forked child: claims the pin page of `client`, whose last cell is
    /// `secret`. From now on the page is valid while the child's process lives.
    Claim { client: ClientId, secret: u64 },
}

/// A response of the server. The id is zero if it answers no request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Response {
    pub(crate) id: u64,
    pub(crate) answer: Answer,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Accepts the connection. The descriptors are the index, read-only, and the client's pin page.
    Welcome {
        client: ClientId,
        index_len: u64,
        devices: Vec<[u8; 16]>,
    },
    /// The object was created. The descriptor is its memory, writable.
    Created {
        object: ObjectId,
        memory: MemoryRef,
    },
    Sealed {
        object: ObjectId,
        version: u64,
    },
    Found {
        object: ObjectId,
    },
    /// The descriptor is the object's memory, read-only on the host.
    Fetched {
        memory: MemoryRef,
    },
    Done,
    Status(Status),
    Refused(Refusal),
    /// A new server has taken over: the client has to send unanswered requests again.
    Restarted,
    /// An event of a watched name.
    Event(Event),
}

/// An allocation, and the offset of an object in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryRef {
    pub(crate) allocation: AllocationId,
    pub(crate) allocation_len: u64,
    pub(crate) place: u32,
    pub(crate) offset: u64,
}

/// A change of the object that has a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// The name of the object.
    pub name: String,
    /// The id of the object.
    pub object: ObjectId,
    /// The kind of change of the object.
    pub kind: EventKind,
}

/// The kinds of [`Event`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum EventKind {
    /// The object was sealed and has the name now.
    Published {
        /// The version of the object among those with the same name.
        version: u64,
    },
    /// The object was deleted, or another object has its name now.
    Deleted,
}

/// The usage of a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The number of sealed objects.
    pub objects: u64,
    /// The number of objects that are being written.
    pub unsealed: u64,
    /// The number of deleted objects that are still pinned.
    pub retired: u64,
    /// The number of connected clients.
    pub clients: u64,
    /// Usage and quota of host memory.
    pub host: Usage,
    /// Usage and quota of device memory, over all devices.
    pub device: Usage,
    /// The number of servers that have been started for this store.
    pub epoch: u64,
}

/// Memory in use, and its quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Usage {
    /// Bytes in use.
    pub used: u64,
    /// The maximum number of bytes in use.
    pub quota: u64,
}

/// Checks the names, the metadata and the number of objects of a request to create. The client checks before it sends, the server
/// again.
pub(crate) fn check_labels(label: &Label, members: &[MemberSpec]) -> Result<(), Refusal> {
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

/// Computes the offsets of the objects of a pack, and the length of the pack.
///
/// Client and server both compute this, so it is part of the protocol. Each object begins at a multiple of 256 bytes, which is
/// the best alignment for loads on every device.
pub(crate) fn pack_layout(lens: impl IntoIterator<Item = u64>) -> Option<(Vec<u64>, u64)> {
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
    fn objects_of_a_pack_are_consecutive_and_aligned() {
        assert_eq!(pack_layout([]), Some((vec![], 0)));
        assert_eq!(pack_layout([1, 256, 0, 300]), Some((vec![0, 256, 512, 512], 812)));
        assert_eq!(pack_layout([u64::MAX, 1]), None);
        assert_eq!(pack_layout([u64::MAX - 100, 1]), None);
    }

    #[test]
    fn labels_longer_than_a_record_are_refused() {
        let label = |name: usize, meta: usize| Label { name: "x".repeat(name), meta: vec![0; meta] };
        assert_eq!(label(200, 216).check(), Ok(()));
        assert_eq!(label(201, 0).check(), Err(Refusal::NameTooLong { len: 201, limit: 200 }));
        assert_eq!(label(0, 217).check(), Err(Refusal::MetaTooLong { len: 217, limit: 216 }));
    }
}
