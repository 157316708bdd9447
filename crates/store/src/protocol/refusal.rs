//! The reasons for which the server refuses a request.

use serde::{Deserialize, Serialize};
use wholemem_os::{Errno, Error as OsError, Size, Visible, descriptors};

use crate::ObjectId;
use crate::convert::to_usize;

/// The reason for which the server refused a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No object has this id, or it was deleted.
    #[error("there is no object {object}")]
    NoSuchObject {
        /// The requested id.
        object: ObjectId,
    },
    /// No object had the name before the timeout.
    #[error("there is no object named `{}`", Visible(.name))]
    NoSuchName {
        /// The requested name.
        name: String,
    },
    /// The object is not sealed yet.
    #[error("object {object} is not sealed yet")]
    NotSealed {
        /// The id of the object.
        object: ObjectId,
    },
    /// The object was created by another user.
    #[error("object {object} belongs to user {owner}")]
    NotYours {
        /// The id of the object.
        object: ObjectId,
        /// The user who created the object.
        owner: u32,
    },
    /// The client has no unsealed object of that request.
    #[error("there is no unsealed object of this request")]
    NothingToSeal,
    /// The object is still mapped for writing, by this process or by another one that received its memory.
    #[error("the memory of the object is still mapped for writing; unmap it before sealing")]
    StillMapped,
    /// A name exceeds the maximum length.
    #[error("a name of {len} bytes is too long: the limit is {limit}")]
    NameTooLong {
        /// The length of the name, in bytes.
        len: usize,
        /// The maximum length, in bytes.
        limit: usize,
    },
    /// The metadata exceeds the maximum length.
    #[error("metadata of {len} bytes is too long: the limit is {limit}")]
    MetaTooLong {
        /// The length of the metadata, in bytes.
        len: usize,
        /// The maximum length, in bytes.
        limit: usize,
    },
    /// A pack has too many objects.
    #[error("a pack of {count} objects is too large: the limit is {limit}")]
    TooManyMembers {
        /// The number of objects of the pack.
        count: usize,
        /// The maximum number of objects.
        limit: usize,
    },
    /// The memory exceeds the quota.
    #[error(
        "cannot allocate {}: {} of {} are in use; delete objects, or serve with a larger `--size`",
        Size(to_usize(*.wanted)), Size(to_usize(*.used)), Size(to_usize(*.quota))
    )]
    OverQuota {
        /// The number of requested bytes.
        wanted: u64,
        /// The number of bytes in use.
        used: u64,
        /// The quota, in bytes.
        quota: u64,
    },
    /// The index has no free slot for another object or another allocation.
    #[error("the index is full: it has {slots} slots; delete objects, or serve with more `--objects`")]
    IndexFull {
        /// The number of slots for objects, or for allocations.
        slots: usize,
    },
    /// The server has no such device.
    #[error("the server has no device {device}")]
    NoSuchDevice {
        /// The requested device.
        device: u32,
    },
    /// The memory could not be allocated.
    #[error("cannot allocate {}: {reason}", Size(to_usize(*.len)))]
    NoMemory {
        /// The number of requested bytes.
        len: u64,
        /// The error of the allocation.
        reason: String,
    },
    /// The memory of an adopt request cannot be used for an object.
    #[error("cannot adopt {} of memory: {reason}", Size(to_usize(*.len)))]
    CannotAdopt {
        /// The length of the memory according to the client, in bytes.
        len: u64,
        /// The reason for which the memory cannot be adopted.
        reason: String,
    },
    /// Memory is only adopted from clients of the server's own user.
    #[error("only user {user}, who serves the store, may share memory with it; put the bytes instead")]
    NotTrusted {
        /// The user who serves the store.
        user: u32,
    },
    /// A range exceeds the memory.
    #[error("{len} bytes at offset {offset} exceed the memory, which has {whole} bytes")]
    OutOfRange {
        /// The offset of the range, in bytes.
        offset: u64,
        /// The length of the range, in bytes.
        len: u64,
        /// The length of the memory, in bytes.
        whole: u64,
    },
    /// The client has too many unanswered requests.
    #[error("too many requests are waiting: the limit is {limit}")]
    TooManyWaiting {
        /// The maximum number of unanswered requests.
        limit: usize,
    },
    /// The protocol version of the client is not supported by the server.
    #[error("the server uses protocol {server}, this client protocol {client}")]
    OtherProtocol {
        /// The protocol version of the server.
        server: u32,
        /// The protocol version of the client.
        client: u32,
    },
    /// The server has reached its limit of open descriptors.
    #[error(
        "the server has no descriptor left for another client; raise its limit (`ulimit -n`), or delete objects"
    )]
    NoDescriptors,
    /// An object of another user has the name.
    #[error("`{}` is the name of an object of user {owner}; use another name, or have it deleted", Visible(.name))]
    NameTaken {
        /// The name that was requested.
        name: String,
        /// The user who created the object with this name.
        owner: u32,
    },
    /// The request violates the protocol.
    #[error("the request violates the protocol: {rule}")]
    Malformed {
        /// The rule of the protocol that was violated.
        rule: String,
    },
    /// The request would exceed the resources that the server holds for this client or for its user.
    #[error(
        "the server cannot hold {wanted} more {what} for clients of user {user}: {held} of {limit} are in use; close \
         connections, or have fewer requests in progress"
    )]
    ClientLimit {
        /// The user of the client.
        user: u32,
        /// The resource: bytes or descriptors.
        what: String,
        /// The amount that the request requires.
        wanted: u64,
        /// The amount of the resource in use.
        held: u64,
        /// The limit of the resource.
        limit: u64,
    },
    /// Servers died while the request was in progress. The current server does not try it again.
    #[error(
        "{servers} servers died while this request was in progress, so it is not retried; request less memory, \
         or give the server more, and try again"
    )]
    ServersDied {
        /// The number of servers that died.
        servers: u8,
    },
}

/// The protocol version that introduced [`Refusal::ClientLimit`] and the variants after it.
const CLIENT_LIMIT_PROTOCOL: u32 = 5;

impl Refusal {
    pub(crate) fn malformed(rule: &str) -> Self {
        Self::Malformed { rule: rule.to_owned() }
    }

    /// A refusal for memory that cannot be allocated, sealed or opened; names the limit that was reached.
    pub(crate) fn of_memory(len: u64, error: &OsError) -> Self {
        Self::NoMemory { len, reason: describe_error(error) }
    }

    /// Replaces a refusal that clients of an older protocol cannot decode by an older one with the same text.
    pub(crate) fn for_protocol(self, protocol: u32) -> Self {
        match self {
            Self::ClientLimit { wanted, .. } if protocol < CLIENT_LIMIT_PROTOCOL => {
                Self::NoMemory { len: wanted, reason: self.to_string() }
            }
            // Clients of older protocols do not count the servers.
            Self::ServersDied { .. } if protocol < CLIENT_LIMIT_PROTOCOL => {
                Self::Malformed { rule: self.to_string() }
            }
            refusal => refusal,
        }
    }

    /// A stable identifier of the kind of refusal, for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoSuchObject { .. } => "no-such-object",
            Self::NoSuchName { .. } => "no-such-name",
            Self::NotSealed { .. } => "not-sealed",
            Self::NotYours { .. } => "not-yours",
            Self::NothingToSeal => "nothing-to-seal",
            Self::StillMapped => "still-mapped",
            Self::NameTooLong { .. } => "name-too-long",
            Self::MetaTooLong { .. } => "meta-too-long",
            Self::TooManyMembers { .. } => "too-many-members",
            Self::OverQuota { .. } => "over-quota",
            Self::IndexFull { .. } => "index-full",
            Self::NoSuchDevice { .. } => "no-such-device",
            Self::NoMemory { .. } => "no-memory",
            Self::CannotAdopt { .. } => "cannot-adopt",
            Self::NotTrusted { .. } => "not-trusted",
            Self::OutOfRange { .. } => "out-of-range",
            Self::TooManyWaiting { .. } => "too-many-waiting",
            Self::OtherProtocol { .. } => "other-protocol",
            Self::NoDescriptors => "no-descriptors",
            Self::NameTaken { .. } => "name-taken",
            Self::Malformed { .. } => "malformed",
            Self::ClientLimit { .. } => "client-limit",
            Self::ServersDied { .. } => "servers-died",
        }
    }
}

/// The text of an error; for a limit on descriptors, with its value.
pub(crate) fn describe_error(error: &OsError) -> String {
    match error {
        OsError::Call { errno: Errno::MFILE, .. } => {
            let limit = descriptors::limit();
            format!("the server has reached its limit of {limit} open descriptors (`ulimit -n`)")
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_full_quota_has_usage_quota_and_a_hint() {
        let refusal = Refusal::OverQuota { wanted: 1 << 30, used: 3 << 20, quota: 4 << 20 };
        assert_eq!(
            refusal.to_string(),
            "cannot allocate 1 GiB: 3 MiB of 4 MiB are in use; delete objects, or serve with a larger `--size`"
        );
        assert_eq!(refusal.code(), "over-quota");
    }
}
