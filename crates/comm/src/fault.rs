//! The reasons why a group fails, as ranks send them to each other, and their conversion to errors.

use std::time::Duration;

use crate::{Error, Rank};

/// The reason why a group failed: a lost, aborting, missing or violating rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupFault {
    Lost(Rank),
    Aborted(Rank),
    Missing(Vec<Rank>),
    /// The given rank violated the protocol or called another operation than the rank that reported it.
    ProtocolViolation(Rank),
}

impl GroupFault {
    /// Returns the ranks that caused the failure of the group.
    pub(crate) fn ranks(&self) -> &[Rank] {
        match self {
            Self::Lost(rank) | Self::Aborted(rank) | Self::ProtocolViolation(rank) => {
                std::slice::from_ref(rank)
            }
            Self::Missing(missing) => missing,
        }
    }

    /// Returns the error of every operation after the operation in which the group failed.
    pub(crate) fn error(&self) -> Error {
        match self {
            Self::Lost(rank) => Error::PeerLost { rank: *rank },
            Self::Aborted(by) => Error::Aborted { by: *by },
            Self::Missing(missing) => Error::Poisoned { missing: missing.clone() },
            Self::ProtocolViolation(rank) => {
                Error::Protocol { rank: *rank, what: "another rank reported an invalid message from it" }
            }
        }
    }

    /// Returns the error of the operation in which the group failed.
    pub(crate) fn error_within(&self, timeout: Duration, joining: bool) -> Error {
        match self {
            Self::Missing(missing) => Error::Timeout { missing: missing.clone(), timeout, joining },
            other => other.error(),
        }
    }
}
