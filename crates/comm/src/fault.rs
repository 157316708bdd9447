//! Why a group has failed, as ranks tell each other and as callers get it.

use std::time::Duration;

use crate::{Error, Rank};

/// Why a group has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    Lost(Rank),
    Aborted(Rank),
    Missing(Vec<Rank>),
    /// A rank broke the protocol, or is at another operation, as another rank saw it.
    Broke(Rank),
}

impl Fault {
    /// The ranks at fault.
    pub(crate) fn ranks(&self) -> &[Rank] {
        match self {
            Self::Lost(rank) | Self::Aborted(rank) | Self::Broke(rank) => std::slice::from_ref(rank),
            Self::Missing(missing) => missing,
        }
    }

    /// The error of a later operation.
    pub(crate) fn error(&self) -> Error {
        match self {
            Self::Lost(rank) => Error::PeerLost { rank: *rank },
            Self::Aborted(by) => Error::Aborted { by: *by },
            Self::Missing(missing) => Error::Poisoned { missing: missing.clone() },
            Self::Broke(rank) => {
                Error::Protocol { rank: *rank, what: "another rank did not understand what it sent" }
            }
        }
    }

    /// The error of the operation during which it happened.
    pub(crate) fn error_within(&self, timeout: Duration, joining: bool) -> Error {
        match self {
            Self::Missing(missing) => Error::Timeout { missing: missing.clone(), timeout, joining },
            other => other.error(),
        }
    }
}
