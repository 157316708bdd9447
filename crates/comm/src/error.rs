//! Errors of communication between ranks. They contain the ranks that caused them.

use std::fmt;
use std::time::Duration;

use crate::Rank;
use crate::discovery::DiscoveryError;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of communication between ranks.
///
/// An error that [poisons](Error::poisons) the communicator is permanent: every later operation fails too, on every
/// surviving rank. The survivors can create a new communicator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank died: its process exited, or its progress thread ended, without closing the communicator.
    #[error("rank {rank} died")]
    PeerLost {
        /// The rank that died, in the numbering of this communicator.
        rank: Rank,
    },

    /// The timeout expired before all ranks took part. The missing ranks may be stopped, slow, in another part of
    /// their program, or not started.
    #[error("no answer from {ranks} within {timeout:?}{advice}", ranks = RankList(missing), advice = hint(*.joining))]
    Timeout {
        /// The ranks known to be missing. Ranks that can be reached only through one of them are not listed.
        missing: Vec<Rank>,
        /// The time for which this rank waited: its own timeout, or less if another rank, which began earlier or has a
        /// shorter timeout, has ended the operation for all ranks.
        timeout: Duration,
        /// True if the timeout expired while the ranks were still joining the group.
        joining: bool,
    },

    /// Ranks of a node did not answer: they are stopped, the node is down, or the network between the nodes is interrupted.
    #[error("no answer from node {node} ({}) within {timeout:?}", RankList(ranks))]
    NodeTimeout {
        /// The number of the node; [`Bootstrap::node_of`](crate::Bootstrap::node_of) returns that of a rank.
        node: u32,
        /// The ranks of the node that could not be reached.
        ranks: Vec<Rank>,
        /// The time for which nothing was heard from the node; see [`Network::with_silence`](crate::Network::with_silence).
        timeout: Duration,
    },

    /// A rank called [`abort`](crate::Bootstrap::abort).
    #[error("rank {by} aborted the communicator")]
    Aborted {
        /// The rank that called `abort`.
        by: Rank,
    },

    /// A rank has closed its communicator, and takes part in no later operation.
    #[error("rank {rank} has closed the communicator")]
    PeerLeft {
        /// The rank that closed its communicator.
        rank: Rank,
    },

    /// This rank has closed the communicator.
    #[error("the communicator is closed")]
    Closed,

    /// An earlier operation timed out, so the ranks are no longer synchronised and the communicator is unusable.
    #[error(
        "the communicator is unusable: an earlier operation timed out waiting for {ranks}",
        ranks = RankList(missing)
    )]
    Poisoned {
        /// The ranks that were missing in the operation that timed out.
        missing: Vec<Rank>,
    },

    /// Two ranks made different calls: all ranks must call the same operations in the same order, with arguments that
    /// agree. Every rank of the group gets this error, also if it has made the same call as most others.
    #[error("rank {rank} called `{there}` while this rank called `{here}`")]
    RanksDisagree {
        /// A rank that made another call than this rank.
        rank: Rank,
        /// The call of this rank, with the arguments that must be equal on all ranks. If this rank has not made its call, the
        /// text is `nothing`, followed by another rank and its call.
        here: String,
        /// The call of `rank`, with the arguments that must be equal on all ranks.
        there: String,
    },

    /// A rank violated the protocol between ranks, or runs another version of wholemem.
    #[error("rank {rank} violated the protocol: {what}")]
    Protocol {
        /// The rank that violated the protocol.
        rank: Rank,
        /// A description of the protocol violation.
        what: &'static str,
    },

    /// Another process has already joined the group as this rank.
    #[error("rank {rank} is already taken by another process")]
    RankTaken {
        /// The rank that this process requested.
        rank: Rank,
    },

    /// The ranks were started with different group sizes.
    #[error(
        "rank {rank} was started in a group of {here} ranks, but rank {parent} in a group of {there} ranks"
    )]
    SizeDiffers {
        /// The rank of this process.
        rank: Rank,
        /// The rank that was started for another group size: the parent of this rank in the tree of ranks.
        parent: Rank,
        /// The group size that was passed to this rank.
        here: u32,
        /// The group size that was passed to the parent.
        there: u32,
    },

    /// This process is in another network namespace than the process that created the unique id, and the unique id
    /// contains no socket directory.
    #[error(
        "rank {rank} is in another network namespace than rank 0: set `WHOLEMEM_SOCKET_DIR` to a directory that all \
         ranks see, and that belongs to their user with mode 0700"
    )]
    OtherNamespace {
        /// The rank of this process.
        rank: Rank,
    },

    /// The directory for sockets does not exist, has an unusable path, or is accessible to other users.
    #[error("cannot use the directory `{path}` for sockets: it {problem}")]
    SocketDir {
        /// The path of the directory for sockets.
        path: String,
        /// The problem with the directory for sockets, as the rest of a sentence.
        problem: &'static str,
    },

    /// The requested rank is not less than the number of ranks in the group.
    #[error("rank {rank} does not exist: the group has {size} ranks")]
    NoSuchRank {
        /// The rank that was requested.
        rank: Rank,
        /// The number of ranks in the group.
        size: u32,
    },

    /// The requested group has too many ranks.
    #[error("a group has at most {limit} ranks, not {size}")]
    TooManyRanks {
        /// The requested number of ranks.
        size: u32,
        /// The maximum number of ranks in a group.
        limit: u32,
    },

    /// The number of bytes or parts passed to an all-to-all operation does not fit the number of ranks: `all_to_all` needs the
    /// same number of bytes for each rank, `all_to_allv` one part for each rank.
    #[error(
        "an all-to-all operation of {size} ranks got {count} bytes or parts: `all_to_all` needs a multiple of {size} bytes, `all_to_allv` {size} parts"
    )]
    WrongCount {
        /// The number of bytes that the caller passed to `all_to_all`, or of parts that the caller passed to `all_to_allv`.
        count: usize,
        /// The number of ranks in the group.
        size: u32,
    },

    /// A payload is too long for one collective operation.
    #[error(
        "cannot send {len} bytes in one collective operation: the limit for the payload of a rank is {limit} bytes"
    )]
    TooLong {
        /// The length of the payload in bytes.
        len: usize,
        /// The maximum length of a payload in bytes.
        limit: usize,
    },

    /// Another thread of this process is running an operation of the communicator.
    #[error("another thread of this process is running an operation of this communicator")]
    Busy,

    /// This process is a forked child, which cannot use the communicators of its parent process.
    #[error("a communicator cannot be used in a forked child")]
    Forked,

    /// A text is not a valid unique id.
    #[error("the {part} of the unique id is missing or malformed")]
    BadId {
        /// The part of the unique id that is missing or malformed.
        part: &'static str,
    },

    /// An environment variable is missing, malformed, or contradicts another variable.
    #[error("`{name}` {problem}")]
    Environment {
        /// The name of the environment variable.
        name: &'static str,
        /// The problem with the environment variable, as the rest of a sentence.
        problem: &'static str,
    },

    /// The ranks are on several nodes, and the environment does not tell how they reach each other.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),

    /// The ranks are on several nodes, and the operation needs memory or file descriptors that only processes of one node
    /// can share.
    #[error(
        "cannot {what} over {nodes} nodes: only ranks of one node can; `split_by_node` gives each node a group"
    )]
    AcrossNodes {
        /// What cannot be done, as the rest of a sentence.
        what: &'static str,
        /// The number of nodes of the group.
        nodes: u32,
    },

    /// The unique id has no secret, which ranks on several nodes need to authenticate each other.
    #[error(
        "ranks on several nodes need a secret: set `WHOLEMEM_SECRET`, or `WHOLEMEM_SECRET_FILE` to a file that only \
         their user can read, or pass the unique id"
    )]
    NoSecret,

    /// A rank could not receive all file descriptors in an exchange of descriptors.
    #[error("rank {rank} could not receive all file descriptors: {reason}")]
    Descriptors {
        /// The lowest rank that could not receive all file descriptors.
        rank: Rank,
        /// The reason that this rank reported.
        reason: String,
    },

    /// A system call failed.
    #[error("{0}")]
    Os(#[from] wholemem_os::Error),
}

impl Error {
    /// Converts the ranks in an error of a split group to ranks of the original group: rank `n` of the split group is
    /// rank `members[n]` of the original group.
    pub(crate) fn with_ranks_of(self, members: &[Rank]) -> Self {
        // The index is valid: ranks in messages from other ranks are checked on receipt.
        let named = |rank: Rank| *members.get(rank.index()).expect("a rank of the split group");
        match self {
            Self::PeerLost { rank } => Self::PeerLost { rank: named(rank) },
            Self::PeerLeft { rank } => Self::PeerLeft { rank: named(rank) },
            Self::NodeTimeout { node, ranks, timeout } => {
                Self::NodeTimeout { node, ranks: ranks.into_iter().map(named).collect(), timeout }
            }
            Self::Aborted { by } => Self::Aborted { by: named(by) },
            Self::Protocol { rank, what } => Self::Protocol { rank: named(rank), what },
            Self::RankTaken { rank } => Self::RankTaken { rank: named(rank) },
            Self::Timeout { missing, timeout, joining } => {
                Self::Timeout { missing: missing.into_iter().map(named).collect(), timeout, joining }
            }
            other => other,
        }
    }

    /// Returns a stable, machine-readable name for the kind of error.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::PeerLost { .. } => "peer-lost",
            Self::Timeout { .. } | Self::NodeTimeout { .. } => "timeout",
            Self::Aborted { .. } => "aborted",
            Self::PeerLeft { .. } => "peer-left",
            Self::Closed => "closed",
            Self::Poisoned { .. } => "poisoned",
            Self::RanksDisagree { .. } => "mismatch",
            Self::Protocol { .. } => "protocol",
            Self::RankTaken { .. } => "rank-taken",
            Self::SizeDiffers { .. } => "size-differs",
            Self::OtherNamespace { .. } => "other-namespace",
            Self::SocketDir { .. } => "socket-dir",
            Self::NoSuchRank { .. } => "no-such-rank",
            Self::TooManyRanks { .. } => "too-many-ranks",
            Self::WrongCount { .. } => "wrong-count",
            Self::TooLong { .. } => "too-long",
            Self::Busy => "busy",
            Self::Forked => "forked",
            Self::BadId { .. } => "bad-id",
            Self::Environment { .. } => "environment",
            Self::Discovery(_) => "discovery",
            Self::AcrossNodes { .. } => "across-nodes",
            Self::NoSecret => "no-secret",
            Self::Descriptors { .. } => "descriptors",
            Self::Os(_) => "os",
        }
    }

    /// Returns the stable number of the kind of error, which C programs see as a status. An error that other crates have too has the
    /// same number there: the numbers of [`wholemem_hal::Error`](https://docs.rs/wholemem-hal) are below 1000, those of `wholemem`
    /// begin at 1000, and those of errors that only ranks have at 1100.
    #[must_use]
    pub fn number(&self) -> u32 {
        match self {
            Self::PeerLost { .. } => 1100,
            Self::Timeout { .. } => 1101,
            Self::Aborted { .. } => 1102,
            Self::PeerLeft { .. } => 1103,
            Self::Closed => 1104,
            Self::Poisoned { .. } => 1105,
            Self::RanksDisagree { .. } => 1001,
            Self::Protocol { .. } => 1106,
            Self::RankTaken { .. } => 1107,
            Self::SizeDiffers { .. } => 1108,
            Self::OtherNamespace { .. } => 1109,
            Self::SocketDir { .. } => 1110,
            Self::NoSuchRank { .. } => 1111,
            Self::TooManyRanks { .. } => 1112,
            Self::WrongCount { .. } => 1113,
            Self::TooLong { .. } => 1114,
            Self::Busy => 1115,
            Self::Forked => 18,
            Self::BadId { .. } => 1116,
            Self::Environment { .. } => 1027,
            Self::Discovery(_) => 1117,
            Self::Descriptors { .. } => 1118,
            Self::AcrossNodes { .. } => 1119,
            Self::NoSecret => 1120,
            Self::NodeTimeout { .. } => 1121,
            Self::Os(_) => 1030,
        }
    }

    /// Returns true if the error is permanent: every later operation of the communicator that returned it fails too.
    #[must_use]
    pub fn poisons(&self) -> bool {
        matches!(
            self,
            Self::PeerLost { .. }
                | Self::Timeout { .. }
                | Self::NodeTimeout { .. }
                | Self::Aborted { .. }
                | Self::PeerLeft { .. }
                | Self::Closed
                | Self::Poisoned { .. }
                | Self::RanksDisagree { .. }
                | Self::Protocol { .. }
        )
    }
}

fn hint(joining: bool) -> &'static str {
    if joining { "; ranks in other network namespaces need a shared `WHOLEMEM_SOCKET_DIR`" } else { "" }
}

/// Displays a list of ranks: the first eight, and the number of the remaining ones.
struct RankList<'a>(&'a [Rank]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        for (index, rank) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{rank}", if index == 0 { "" } else { ", " })?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeout(missing: impl IntoIterator<Item = u32>, joining: bool) -> String {
        let missing = missing.into_iter().map(Rank).collect();
        Error::Timeout { missing, timeout: Duration::from_secs(2), joining }.to_string()
    }

    #[test]
    fn messages_name_the_ranks_and_shorten_long_lists() {
        assert_eq!(timeout([3], false), "no answer from rank 3 within 2s");
        assert_eq!(
            timeout(1..20, true),
            "no answer from ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more within 2s; ranks in other network \
             namespaces need a shared `WHOLEMEM_SOCKET_DIR`"
        );
        assert_eq!(Error::PeerLost { rank: Rank(7) }.to_string(), "rank 7 died");
    }

    #[test]
    fn errors_of_the_caller_do_not_poison_the_communicator() {
        assert!(Error::PeerLost { rank: Rank(0) }.poisons());
        assert!(!Error::Busy.poisons());
        assert!(!Error::WrongCount { count: 1, size: 2 }.poisons());
    }
}
