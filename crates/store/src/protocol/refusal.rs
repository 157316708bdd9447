//! The reasons for which the server refuses a request.

use serde::{Deserialize, Serialize};
use wholemem_os::{Errno, Error as OsError, Size, Visible, descriptors};

use crate::ObjectId;
use crate::convert::to_usize;

/// The reason for which the server of a store refused a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No object of the store has this id, or the object was deleted.
    #[error("the store has no object with the id {object}")]
    NoSuchObject {
        /// The requested object id.
        object: ObjectId,
    },
    /// No object had the requested name before the timeout.
    #[error("there is no object named `{shown}`", shown = Visible(.name))]
    NoSuchName {
        /// The requested name of an object.
        name: String,
    },
    /// The object is not sealed yet: its creator may still write it.
    #[error("object {object} is not sealed yet: its creator may still write it")]
    NotSealed {
        /// The id of the unsealed object.
        object: ObjectId,
    },
    /// The object was created by another user, so this client may not delete it.
    #[error("cannot delete object {object}, which belongs to user {owner}")]
    NotYours {
        /// The id of the object, which another user created.
        object: ObjectId,
        /// The user who created the object.
        owner: u32,
    },
    /// The client has no unsealed object that the given request created.
    #[error("the given request has created no object of this client that is not sealed yet")]
    NothingToSeal,
    /// The object is still mapped for writing, by this process or by another one that received the object's memory.
    #[error("the memory of the object is still mapped for writing; unmap it before sealing")]
    StillMapped,
    /// The name of an object, or a prefix of names, exceeds the maximum length.
    #[error("an object name of {len} bytes is too long: the limit is {limit}")]
    NameTooLong {
        /// The length of the name or prefix, in bytes.
        len: usize,
        /// The maximum length of a name, in bytes.
        limit: usize,
    },
    /// The metadata of an object exceeds the maximum length.
    #[error("object metadata of {len} bytes is too long: the limit is {limit}")]
    MetaTooLong {
        /// The length of the metadata, in bytes.
        len: usize,
        /// The maximum length of an object's metadata, in bytes.
        limit: usize,
    },
    /// A pack (several objects in one memory) has too many objects.
    #[error("a pack of {count} objects is too large: the limit is {limit}")]
    TooManyMembers {
        /// The number of objects of the pack.
        count: usize,
        /// The maximum number of objects of a pack.
        limit: usize,
    },
    /// The requested memory would exceed the memory quota of the store.
    #[error(
        "cannot allocate {size}: {used_size} of {limit} are in use; delete objects, or serve with a larger `--size`",
        size = Size(to_usize(*.wanted)), used_size = Size(to_usize(*.used)), limit = Size(to_usize(*.quota))
    )]
    OverQuota {
        /// The number of bytes that the request needs.
        wanted: u64,
        /// The number of bytes that the store uses.
        used: u64,
        /// The memory quota of the store, in bytes.
        quota: u64,
    },
    /// The index (the table of all objects) has no free slot for another object or another allocation.
    #[error(
        "the index of the store is full: it has {slots} slots; delete objects, or serve with more `--objects`"
    )]
    IndexFull {
        /// The number of slots of the index for objects, or for allocations.
        slots: usize,
    },
    /// The server of the store has no device with the requested number.
    #[error("the server of the store has no device {device}")]
    NoSuchDevice {
        /// The number of the requested device.
        device: u32,
    },
    /// The memory of an object could not be allocated, sealed or opened.
    #[error("cannot allocate, seal or open memory of {size}: {reason}", size = Size(to_usize(*.len)))]
    NoMemory {
        /// The length of the memory, in bytes.
        len: u64,
        /// The text of the error that prevented the operation.
        reason: String,
    },
    /// The server cannot create an object from the existing memory that a client offers.
    #[error("the store cannot use {size} of this client's memory as an object: {reason}", size = Size(to_usize(*.len)))]
    CannotAdopt {
        /// The length of the offered memory according to the client, in bytes.
        len: u64,
        /// The reason for which the offered memory cannot be used for an object.
        reason: String,
    },
    /// The server adopts memory (uses it for an object) only from clients of the server's own user.
    #[error(
        "only user {user}, who serves the store, may share memory with the store; copy the bytes with `put`"
    )]
    NotTrusted {
        /// The user id of the store's server.
        user: u32,
    },
    /// A range of bytes exceeds the memory that the request refers to.
    #[error(
        "a range of {len} bytes at offset {offset} exceeds the requested memory, which has {whole} bytes"
    )]
    OutOfRange {
        /// The offset of the range in the memory, in bytes.
        offset: u64,
        /// The length of the range, in bytes.
        len: u64,
        /// The length of the whole memory, in bytes.
        whole: u64,
    },
    /// The client has too many requests that the server has not answered.
    #[error("the client has too many unanswered requests: the limit is {limit}")]
    TooManyWaiting {
        /// The maximum number of unanswered requests of a client.
        limit: usize,
    },
    /// The protocol version of the client is not supported by the server.
    #[error(
        "the server of the store uses protocol version {server}, which does not match version {client} of this client"
    )]
    OtherProtocol {
        /// The protocol version that the server uses.
        server: u32,
        /// The protocol version that the client uses.
        client: u32,
    },
    /// The server has reached its limit of open file descriptors.
    #[error(
        "the server has no descriptor left for another client; raise its limit (`ulimit -n`), or delete objects"
    )]
    NoDescriptors,
    /// An object of another user already has the requested name.
    #[error(
        "`{shown}` is already the name of an object of user {owner}; use another name, or have that object deleted",
        shown = Visible(.name)
    )]
    NameTaken {
        /// The name that was requested for an object.
        name: String,
        /// The user who created the object with this name.
        owner: u32,
    },
    /// The request of a client violates the protocol.
    #[error("the request to the store violates the protocol: {rule}")]
    Malformed {
        /// The rule of the protocol that the request violates.
        rule: String,
    },
    /// The request would exceed the limit on memory or descriptors that the server holds for one client or for one user.
    #[error(
        "the server cannot hold {wanted} more {what} for clients of user {user}: {held} of {limit} are in use; close \
         connections, or have fewer requests in progress"
    )]
    ClientLimit {
        /// The user id of the client.
        user: u32,
        /// The resource that is limited: bytes or descriptors.
        what: String,
        /// The amount of the resource that the request requires.
        wanted: u64,
        /// The amount of the resource that is in use.
        held: u64,
        /// The maximum amount of the resource.
        limit: u64,
    },
    /// Servers died while the request was in progress, so the current server does not execute the request.
    #[error(
        "{servers} servers died while this request was in progress, so it is not retried; request less memory, \
         or give the server more, and try again"
    )]
    ServersDied {
        /// The number of servers that died during the request.
        servers: u8,
    },
}

/// The protocol version that introduced [`Refusal::ClientLimit`] and the variants after it.
const CLIENT_LIMIT_PROTOCOL: u32 = 5;

impl Refusal {
    pub(crate) fn malformed(rule: &str) -> Self {
        Self::Malformed { rule: rule.to_owned() }
    }

    /// Creates the refusal for memory of `len` bytes that cannot be allocated, sealed or opened because of `error`.
    pub(crate) fn of_memory(len: u64, error: &OsError) -> Self {
        Self::NoMemory { len, reason: describe_error(error) }
    }

    /// Converts a refusal that clients of an older protocol cannot decode to an older kind of refusal with the same text.
    pub(crate) fn for_protocol(self, protocol: u32) -> Self {
        match self {
            Self::ClientLimit { wanted, .. } if protocol < CLIENT_LIMIT_PROTOCOL => {
                Self::NoMemory { len: wanted, reason: self.to_string() }
            }
            // Clients of older protocols do not count the servers that died, and cannot decode this refusal.
            Self::ServersDied { .. } if protocol < CLIENT_LIMIT_PROTOCOL => {
                Self::Malformed { rule: self.to_string() }
            }
            refusal => refusal,
        }
    }

    /// Returns a stable identifier of the kind of refusal, for programs.
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

    /// Returns the stable number of the kind of refusal, which C programs see as a status.
    #[must_use]
    pub fn number(&self) -> u32 {
        match self {
            Self::NoSuchObject { .. } => 2100,
            Self::NoSuchName { .. } => 2101,
            Self::NotSealed { .. } => 2102,
            Self::NotYours { .. } => 2103,
            Self::NothingToSeal => 2104,
            Self::StillMapped => 2105,
            Self::NameTooLong { .. } => 2106,
            Self::MetaTooLong { .. } => 2107,
            Self::TooManyMembers { .. } => 2108,
            Self::OverQuota { .. } => 2109,
            Self::IndexFull { .. } => 2110,
            Self::NoSuchDevice { .. } => 2111,
            Self::NoMemory { .. } => 2112,
            Self::CannotAdopt { .. } => 2113,
            Self::NotTrusted { .. } => 2114,
            Self::OutOfRange { .. } => 2115,
            Self::TooManyWaiting { .. } => 2116,
            Self::OtherProtocol { .. } => 2117,
            Self::NoDescriptors => 2118,
            Self::NameTaken { .. } => 2119,
            Self::Malformed { .. } => 2120,
            Self::ClientLimit { .. } => 2121,
            Self::ServersDied { .. } => 2122,
        }
    }
}

/// Returns the text of an error. If the server has reached its limit of open descriptors, the text contains the limit.
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
