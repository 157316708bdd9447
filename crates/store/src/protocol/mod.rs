//! The messages between clients and the server of a store: one type of request, one type of response.
//!
//! A message is a request or a response encoded by [postcard](https://postcard.jamesmunns.com), followed by the bytes of a small
//! object where the message carries one. It is sent as one or more packets ([`frame`]), with file descriptors on the last.
//!
//! A message is at most [`MAX_MESSAGE`](frame::MAX_MESSAGE) bytes long. The receiver validates every number before it uses it. A
//! request has an id, under which the client sends it again if the server is replaced before it answers.

mod event;
pub(crate) mod frame;
mod refusal;
mod statistics;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use wholemem_os::Visible;

use crate::id::{AllocationId, ClientId, ObjectId};
use crate::index::{MAX_META, MAX_NAME};

pub(crate) use event::{Change, NameEvent, NamedVersion};
pub use event::{Event, EventKind};
pub use refusal::Refusal;
pub(crate) use refusal::describe_error;
pub use statistics::{NamedValue, RequestStatistics, Statistics};

/// The version of the protocol between clients and server. New messages are appended to the enums, so that the server still
/// decodes the messages of older clients.
pub(crate) const PROTOCOL: u32 = 6;

/// The oldest version of the client protocol that the server supports.
pub(crate) const OLDEST_PROTOCOL: u32 = 4;

/// The maximum number of objects of a pack (several objects in one memory).
pub(crate) const MAX_MEMBERS: usize = 16 << 10;

/// The maximum number of objects whose readers one request asks for.
pub(crate) const MAX_COUNTED: usize = 1024;

/// The length in bytes below which a host object is small: the object is stored in a shared arena, and its bytes are sent with
/// the request that creates it.
pub(crate) const SMALL: u64 = 1 << 20;

/// A request of a client to the server of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// The id of the request, which is never zero and never used twice on a connection.
    pub(crate) id: u64,
    /// The number of earlier attempts to send the request, each to a server that was then replaced. Clients of protocol 4 always
    /// send 1, because the byte was a boolean.
    pub(crate) resends: u8,
    pub(crate) kind: RequestKind,
}

/// The name and the metadata of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Label {
    pub(crate) name: String,
    pub(crate) meta: Vec<u8>,
}

/// The number of servers that die during one request before the next server refuses to allocate, seal or adopt memory for the
/// request.
const MAX_SERVER_DEATHS: u8 = 2;

impl Label {
    fn decoded_len(&self) -> u64 {
        (self.name.len() + self.meta.len()) as u64
    }
}

impl RequestKind {
    /// Returns the heap memory of the lists and texts in a decoded request that creates an object, in bytes; zero for other
    /// requests.
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
    /// Refuses to allocate, seal or adopt memory for a request during which two servers died. Requests that only wait or look
    /// something up are not checked, because they are unlikely to cause the deaths.
    pub(crate) fn check_server_deaths(&self) -> Result<(), Refusal> {
        if self.resends < MAX_SERVER_DEATHS {
            Ok(())
        } else {
            Err(Refusal::ServersDied { servers: self.resends })
        }
    }
}

impl Label {
    /// Checks that the name and the metadata of an object fit a record of the index.
    pub(crate) fn check(&self) -> Result<(), Refusal> {
        check_name(&self.name)?;
        let (len, limit) = (self.meta.len(), MAX_META);
        if len > limit { Err(Refusal::MetaTooLong { len, limit }) } else { Ok(()) }
    }
}

/// Checks the length of an object's name, or of a prefix of names.
pub(crate) fn check_name(name: &str) -> Result<(), Refusal> {
    let (len, limit) = (name.len(), MAX_NAME);
    if len > limit { Err(Refusal::NameTooLong { len, limit }) } else { Ok(()) }
}

/// The specification of one object of a pack (several objects in one memory) to be created.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemberSpec {
    pub(crate) label: Label,
    pub(crate) len: u64,
}

/// A range of bytes: its offset from the beginning of some memory, and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ByteRange {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl ByteRange {
    /// Checks that the range lies within memory of `whole` bytes.
    pub(crate) fn check(self, whole: u64) -> Result<(), Refusal> {
        let Self { offset, len } = self;
        let is_within = offset.checked_add(len).is_some_and(|end| end <= whole);
        if is_within { Ok(()) } else { Err(Refusal::OutOfRange { offset, len, whole }) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum RequestKind {
    /// The first request on a connection, with the protocol version of the client.
    Hello { protocol: u32 },
    /// Creates an object of `len` bytes, or a pack of the objects `members`, at a place (0 is the host, `n + 1` is device `n` of
    /// the server). The bytes of small host objects are sent with the request, and the objects are sealed at once.
    Create { label: Label, len: u64, members: Vec<MemberSpec>, place: u32 },
    /// Seals the object that this client's request with the id `create` created.
    Seal { create: u64 },
    /// Frees the unsealed object that this client's request with the id `create` created.
    Abandon { create: u64 },
    /// Creates another object over the bytes of a sealed object, or over a range of the memory that was allocated for the sealed
    /// object.
    Publish { label: Label, object: ObjectId, part: Option<ByteRange> },
    /// Deletes an object. If the object is the first of a pack, the whole pack is deleted.
    Delete { object: ObjectId },
    /// Looks up the object that has a name, and waits up to `wait` milliseconds until the object exists.
    Find { name: String, wait: u64 },
    /// Requests the descriptor of an object's memory.
    Fetch { object: ObjectId },
    /// Notifies the server that the client has released a pin of a deleted object. The server sends no answer.
    PinReleased { object: ObjectId },
    /// Subscribes to the events of objects whose names begin with `prefix`.
    Watch { prefix: String },
    /// Requests the status of the store: the number of objects and clients, and the memory usage.
    Status,
    /// Ends the connection of a client that holds no object and no draft. Without this message, the server waits for the exit of
    /// the client's process before it frees what the client may still write or read. The server sends no answer.
    Goodbye,
    /// Waits up to `wait` milliseconds until the store has space for an object of `len` bytes at a place.
    AwaitSpace { len: u64, place: u32, wait: u64 },
    /// Creates an object from the range `part` of memory that the client has already allocated. The memory has `len` bytes and is
    /// at `place` (the host or a device). Its descriptor is sent with the request.
    Adopt { label: Label, place: u32, len: u64, part: ByteRange },
    /// Announces that the client's process is about to fork, and that the pin page of this connection is for the child. From now
    /// on the page is valid while the connection is open, even after the parent has exited.
    AwaitChild,
    /// The first request of a forked child on a separate connection: claims the pin page of `client`, whose last cell is
    /// `secret`. From now on the page is valid while the child's process lives.
    Claim { client: ClientId, secret: u64 },
    /// Subscribes to the events of objects whose names begin with `prefix`, in the form since protocol 6. If `after` is given, the
    /// events behind that revision are sent first, if the server still has them.
    WatchFrom { prefix: String, after: Option<u64> },
    /// Requests the statistics of the server.
    Statistics,
    /// Requests how many clients have pinned each of these objects.
    Readers { objects: Vec<ObjectId> },
}

impl RequestKind {
    /// The names of the kinds of requests for statistics, by their numbers.
    pub(crate) const NAMES: [&str; 18] = [
        "hello",
        "create",
        "seal",
        "abandon",
        "publish",
        "delete",
        "find",
        "fetch",
        "pin_released",
        "watch",
        "status",
        "goodbye",
        "await_space",
        "adopt",
        "await_child",
        "claim",
        "statistics",
        "readers",
    ];

    /// Returns the number of the kind of request for statistics, which is an index of [`RequestKind::NAMES`].
    pub(crate) fn number(&self) -> usize {
        match self {
            Self::Hello { .. } => 0,
            Self::Create { .. } => 1,
            Self::Seal { .. } => 2,
            Self::Abandon { .. } => 3,
            Self::Publish { .. } => 4,
            Self::Delete { .. } => 5,
            Self::Find { .. } => 6,
            Self::Fetch { .. } => 7,
            Self::PinReleased { .. } => 8,
            Self::Watch { .. } | Self::WatchFrom { .. } => 9,
            Self::Status => 10,
            Self::Goodbye => 11,
            Self::AwaitSpace { .. } => 12,
            Self::Adopt { .. } => 13,
            Self::AwaitChild => 14,
            Self::Claim { .. } => 15,
            Self::Statistics => 16,
            Self::Readers { .. } => 17,
        }
    }

    /// Returns true if the server answers requests of this kind.
    pub(crate) fn is_answered(&self) -> bool {
        !matches!(self, Self::PinReleased { .. } | Self::Goodbye)
    }
}

/// A response of the server to a client. Its id is zero if the response answers no request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Response {
    pub(crate) id: u64,
    pub(crate) answer: Answer,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Accepts the connection of a client. The attached descriptors are the index (read-only) and the client's pin page.
    Welcome {
        client: ClientId,
        index_len: u64,
        devices: Vec<[u8; 16]>,
    },
    /// The object was created. The attached descriptor is the object's memory, writable.
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
    /// The attached descriptor is the memory of the requested object, read-only on the host.
    Fetched {
        memory: MemoryRef,
    },
    Done,
    Status(Status),
    Refused(Refusal),
    /// A new server has taken over: the client has to send its unanswered requests again.
    Restarted,
    /// An event of an object whose name the client watches, in the form of protocol 5.
    NameEvent(NameEvent),
    /// An event of an object whose name the client watches.
    Event(Event),
    /// The client watches names. It gets all events behind this revision. If `is_complete` is false, the server does not have all
    /// events between the requested revision and this one.
    Watching {
        revision: u64,
        is_complete: bool,
    },
    /// Boxed, because it is longer than all other answers.
    Statistics(Box<Statistics>),
    /// The number of clients that have pinned each of the requested objects, in the order of the request.
    Readers {
        counts: Vec<u32>,
    },
}

/// The memory of an object: its allocation, and the offset of the object in the allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryRef {
    pub(crate) allocation: AllocationId,
    pub(crate) allocation_len: u64,
    pub(crate) place: u32,
    pub(crate) offset: u64,
}

/// The number of objects and clients of a store, and its memory usage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The number of sealed objects in the store.
    pub objects: u64,
    /// The number of unsealed objects, which clients are still writing.
    pub unsealed: u64,
    /// The number of deleted objects that clients still use (have pinned).
    pub retired: u64,
    /// The number of clients that are connected to the store.
    pub clients: u64,
    /// The usage and the quota of the store's host memory.
    pub host: Usage,
    /// The usage and the quota of the store's device memory, over all devices.
    pub device: Usage,
    /// The number of servers that have been started for this store.
    pub epoch: u64,
}

/// The memory that a store uses, and its quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Usage {
    /// The number of bytes that the store uses.
    pub used: u64,
    /// The maximum number of bytes that the store may use.
    pub quota: u64,
}

/// Checks the names, the metadata and the number of objects of a request to create an object or a pack. The client checks the
/// request before it is sent, and the server checks it again.
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

/// Computes the offset of each object in a pack (several objects in one memory), and the length of the pack.
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
