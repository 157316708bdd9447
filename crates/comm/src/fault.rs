//! Why a group failed: the form that ranks send each other, and its conversion to errors.

use std::time::Duration;

use crate::{Error, Rank};

/// Why a group failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum GroupFault {
    Lost(Rank),
    Aborted(Rank),
    Missing(Vec<Rank>),
    /// Another rank reported that this rank violated the protocol or called another operation.
    ProtocolViolation(Rank),
}

impl GroupFault {
    /// Returns the ranks that caused the failure.
    pub(crate) fn ranks(&self) -> &[Rank] {
        match self {
            Self::Lost(rank) | Self::Aborted(rank) | Self::ProtocolViolation(rank) => {
                std::slice::from_ref(rank)
            }
            Self::Missing(missing) => missing,
        }
    }

    /// Returns the error of operations after the one that failed.
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

    /// Returns the error of the operation during which the group failed.
    pub(crate) fn error_within(&self, timeout: Duration, joining: bool) -> Error {
        match self {
            Self::Missing(missing) => Error::Timeout { missing: missing.clone(), timeout, joining },
            other => other.error(),
        }
    }
}
