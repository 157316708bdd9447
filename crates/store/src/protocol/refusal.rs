//! Why a server does not do what a client wants.

use serde::{Deserialize, Serialize};
use wholemem_os::{Errno, Error as OsError, Size, Visible, descriptors};

use crate::ObjectId;
use crate::convert::to_usize;

/// Why a server did not do what was asked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// There is no such object, or no longer.
    #[error("there is no object {object}")]
    NoSuchObject {
        /// The id that was asked for.
        object: ObjectId,
    },
    /// No object had the name in time.
    #[error("there is no object named `{}`", Visible(.name))]
    NoSuchName {
        /// The name that was asked for.
        name: String,
    },
    /// The object is not sealed yet.
    #[error("object {object} is not sealed yet")]
    NotSealed {
        /// Which one.
        object: ObjectId,
    },
    /// Another user made the object.
    #[error("object {object} belongs to user {owner}")]
    NotYours {
        /// Which one.
        object: ObjectId,
        /// Who made it.
        owner: u32,
    },
    /// This client has made nothing by that request that could still be sealed.
    #[error("there is nothing to be sealed")]
    NothingToSeal,
    /// Somebody can still write the object: it is mapped for writing, here or in a process that got it from here.
    #[error("the memory of the object is still mapped for writing; unmap it before sealing")]
    StillMapped,
    /// A name is longer than the index has room for.
    #[error("a name of {len} bytes is too long: the limit is {limit}")]
    NameTooLong {
        /// How long it is.
        len: usize,
        /// How long it may be.
        limit: usize,
    },
    /// A description is longer than the index has room for.
    #[error("a description of {len} bytes is too long: the limit is {limit}")]
    MetaTooLong {
        /// How long it is.
        len: usize,
        /// How long it may be.
        limit: usize,
    },
    /// More objects in one pack than a pack may have.
    #[error("a pack of {count} objects is too large: the limit is {limit}")]
    TooManyMembers {
        /// How many there were.
        count: usize,
        /// How many there may be.
        limit: usize,
    },
    /// The quota does not allow it.
    #[error(
        "cannot take {} more: {} of {} are taken; delete something, or serve with a larger `--size`",
        Size(to_usize(*.wanted)), Size(to_usize(*.used)), Size(to_usize(*.quota))
    )]
    OverQuota {
        /// How much was asked for.
        wanted: u64,
        /// How much is taken.
        used: u64,
        /// How much may be.
        quota: u64,
    },
    /// The index has no free slot: for one more object, or for memory of its own.
    #[error("the index is full, with room for {slots}; delete something, or serve with more `--objects`")]
    IndexFull {
        /// How many objects, or pieces of memory, it has room for.
        slots: usize,
    },
    /// The server has no such place.
    #[error("the server has no device {device}")]
    NoSuchDevice {
        /// The number that was asked for.
        device: u32,
    },
    /// The machine refused the memory.
    #[error("cannot make {} of memory: {reason}", Size(to_usize(*.len)))]
    NoMemory {
        /// How much was asked for.
        len: u64,
        /// What it said.
        reason: String,
    },
    /// The memory that came along cannot be an object's.
    #[error("cannot take in {} of memory: {reason}", Size(to_usize(*.len)))]
    CannotAdopt {
        /// How much it is said to be.
        len: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// Memory is taken from the server's own user only.
    #[error("only user {user}, who serves the store, may give it memory; put the bytes instead")]
    NotTrusted {
        /// Who serves the store.
        user: u32,
    },
    /// More was named than there is.
    #[error("{len} bytes from {offset} on are not within the {whole} bytes of the memory")]
    OutOfRange {
        /// Where it would begin.
        offset: u64,
        /// How long it would be.
        len: u64,
        /// How much there is.
        whole: u64,
    },
    /// Too many questions of one client are waiting for their answers.
    #[error("too many requests are waiting: the limit is {limit}")]
    TooManyWaiting {
        /// How many may wait.
        limit: usize,
    },
    /// The client speaks another protocol than the server.
    #[error("the server speaks protocol {server}, and this client protocol {client}")]
    OtherProtocol {
        /// The server's.
        server: u32,
        /// The client's.
        client: u32,
    },
    /// The server has as many descriptors open as it may.
    #[error(
        "the server has no descriptor left for one more client; raise its limit (`ulimit -n`), or delete something"
    )]
    NoDescriptors,
    /// Another user's object has the name.
    #[error("`{}` is the name of an object of user {owner}; take another, or have it deleted", Visible(.name))]
    NameTaken {
        /// The name.
        name: String,
        /// Who made the object that has it.
        owner: u32,
    },
    /// The client did not keep to the protocol.
    #[error("the request breaks the protocol: {rule}")]
    Malformed {
        /// The rule it broke.
        rule: String,
    },
    /// The client, or all clients of its user, would make the server hold more than they may.
    #[error(
        "clients of user {user} cannot make the server hold {wanted} {what} more: {held} of {limit} are held; close \
         connections, or wait for fewer things at a time"
    )]
    ClientLimit {
        /// Whose client it is.
        user: u32,
        /// What is counted: bytes or descriptors.
        what: String,
        /// How much was needed.
        wanted: u64,
        /// How much is held.
        held: u64,
        /// How much may be.
        limit: u64,
    },
    /// Servers died while the request was in progress. The one that serves now does not try it again.
    #[error(
        "{servers} servers died while this request was in progress, and it is not tried again; ask for less memory, \
         or give the server more, before the next request"
    )]
    ServersDied {
        /// How many died.
        servers: u8,
    },
}

/// The version of the protocol that knows [`Refusal::ClientLimit`] and what comes behind it.
const EXTENDED: u32 = 5;

impl Refusal {
    pub(crate) fn malformed(rule: &str) -> Self {
        Self::Malformed { rule: rule.to_owned() }
    }

    /// That memory of a length cannot be made, closed or opened, and which limit was met.
    pub(crate) fn of_memory(len: u64, error: &OsError) -> Self {
        Self::NoMemory { len, reason: limit_met(error) }
    }

    /// The same for a client of an older protocol, in words that it understands.
    pub(crate) fn for_protocol(self, protocol: u32) -> Self {
        match self {
            Self::ClientLimit { wanted, .. } if protocol < EXTENDED => {
                Self::NoMemory { len: wanted, reason: self.to_string() }
            }
            // Clients of older protocols do not count servers.
            Self::ServersDied { .. } if protocol < EXTENDED => Self::Malformed { rule: self.to_string() },
            refusal => refusal,
        }
    }

    /// A name for the kind of refusal that stays the same between versions, for programs.
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

/// What the kernel said, and if it was a limit, which one.
pub(crate) fn limit_met(error: &OsError) -> String {
    match error {
        OsError::Call { errno: Errno::MFILE, .. } => {
            let limit = descriptors::limit();
            format!("the server has as many descriptors open as it may: the limit is {limit} (`ulimit -n`)")
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_quota_names_what_is_taken_and_what_to_do() {
        let refusal = Refusal::OverQuota { wanted: 1 << 30, used: 3 << 20, quota: 4 << 20 };
        assert_eq!(
            refusal.to_string(),
            "cannot take 1 GiB more: 3 MiB of 4 MiB are taken; delete something, or serve with a larger `--size`"
        );
        assert_eq!(refusal.code(), "over-quota");
    }
}
