//! Errors of communication between ranks, with the ranks that caused them.

use std::fmt;
use std::time::Duration;

use crate::Rank;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of communication between ranks.
///
/// An error that [poisons](Error::poisons) the communicator is permanent: every later operation fails with it on
/// every surviving rank. The survivors can create a new communicator.
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
    #[error("no answer from {} within {timeout:?}{}", RankList(missing), hint(*.joining))]
    Timeout {
        /// Ranks known to be missing. Ranks that can be reached only through one of them are not listed.
        missing: Vec<Rank>,
        /// How long this rank waited: its own timeout, or less if another rank, which began earlier or has a shorter
        /// timeout, has ended the wait for all.
        timeout: Duration,
        /// Whether the group was still being formed.
        joining: bool,
    },

    /// A rank called [`abort`](crate::Bootstrap::abort).
    #[error("rank {by} aborted the communicator")]
    Aborted {
        /// The rank that called it.
        by: Rank,
    },

    /// A rank has closed its communicator, and takes part in no further operation.
    #[error("rank {rank} has closed the communicator")]
    PeerLeft {
        /// The rank that closed it.
        rank: Rank,
    },

    /// This rank has closed the communicator.
    #[error("the communicator is closed")]
    Closed,

    /// An earlier operation timed out, so the ranks are no longer synchronised.
    #[error("the communicator is unusable: an earlier operation timed out waiting for {}", RankList(missing))]
    Poisoned {
        /// The ranks that were missing in that operation.
        missing: Vec<Rank>,
    },

    /// Ranks are in different operations: every rank must call the same operations in the same order.
    #[error("rank {rank} called `{there}` while this rank called `{here}`")]
    Mismatch {
        /// The other rank.
        rank: Rank,
        /// The operation of this rank.
        here: &'static str,
        /// The operation of the other rank.
        there: &'static str,
    },

    /// A rank violated the protocol, or runs another version.
    #[error("rank {rank} violated the protocol: {what}")]
    Protocol {
        /// The rank that violated it.
        rank: Rank,
        /// The violation.
        what: &'static str,
    },

    /// Another process has joined with this rank already.
    #[error("rank {rank} is already taken by another process")]
    RankTaken {
        /// The requested rank.
        rank: Rank,
    },

    /// The ranks were started with different group sizes.
    #[error("rank {rank} was started for {here} ranks, and rank {parent} for {there}")]
    SizeDiffers {
        /// This rank.
        rank: Rank,
        /// The parent that it joins.
        parent: Rank,
        /// The group size of this rank.
        here: u32,
        /// The group size of the parent.
        there: u32,
    },

    /// This process is in another network namespace than the process that created the id, and the id contains no
    /// socket directory.
    #[error(
        "rank {rank} is in another network namespace than rank 0: set `WHOLEMEM_SOCKET_DIR` to a directory that all \
         ranks see, and that belongs to their user with mode 0700"
    )]
    OtherNamespace {
        /// This rank.
        rank: Rank,
    },

    /// The directory for sockets is not secure.
    #[error("cannot use `{path}` for sockets: it {problem}")]
    SocketDir {
        /// The directory.
        path: String,
        /// What is wrong with the directory, as the rest of a sentence.
        problem: &'static str,
    },

    /// The rank is not in the group.
    #[error("rank {rank} does not exist: the group has {size} ranks")]
    NoSuchRank {
        /// The requested rank.
        rank: Rank,
        /// The number of ranks in the group.
        size: u32,
    },

    /// The requested group is too large.
    #[error("a group has at most {limit} ranks, not {size}")]
    TooManyRanks {
        /// The requested number of ranks.
        size: u32,
        /// The maximum number of ranks.
        limit: u32,
    },

    /// A list does not have one entry for each rank.
    #[error("got {count} entries for {size} ranks")]
    WrongCount {
        /// The number of entries.
        count: usize,
        /// The number of ranks.
        size: u32,
    },

    /// A payload is too long for one operation.
    #[error("cannot send {len} bytes in one operation: the limit is {limit}")]
    TooLong {
        /// The length of the payload.
        len: usize,
        /// The maximum length.
        limit: usize,
    },

    /// Another thread is in an operation of this communicator.
    #[error("another thread of this process is in an operation of this communicator")]
    Busy,

    /// This process is a forked child, in which inherited communicators are unusable.
    #[error("a communicator cannot be used in a forked child")]
    Forked,

    /// A text is not a valid unique id.
    #[error("the {part} of the unique id is missing or malformed")]
    BadId {
        /// The part of the id that is wrong.
        part: &'static str,
    },

    /// An environment variable is missing, malformed, or contradicts another.
    #[error("`{name}` {problem}")]
    Environment {
        /// The name of the variable.
        name: &'static str,
        /// What is wrong with its value, as the rest of a sentence.
        problem: &'static str,
    },

    /// A launcher started the ranks on several nodes.
    #[error(
        "`{name}` is `{value}` for {size} ranks: they are on several nodes, which is not supported yet; start all ranks on \
         one node"
    )]
    SeveralNodes {
        /// The variable that shows it.
        name: &'static str,
        /// Its value.
        value: String,
        /// The number of ranks.
        size: u32,
    },

    /// A rank could not receive the file descriptors of an operation.
    #[error("rank {rank} could not receive all file descriptors: {reason}")]
    Descriptors {
        /// The lowest rank that failed.
        rank: Rank,
        /// The reason that the rank reported.
        reason: String,
    },

    /// A system call failed.
    #[error("{0}")]
    Os(#[from] wholemem_os::Error),
}

impl Error {
    /// Converts an error of a split group to ranks of the group it was split from: rank `n` of the split group is
    /// `members[n]`.
    pub(crate) fn with_ranks_of(self, members: &[Rank]) -> Self {
        // Ranks in messages of other ranks are checked on receipt.
        let named = |rank: Rank| *members.get(rank.index()).expect("a rank of the split group");
        match self {
            Self::PeerLost { rank } => Self::PeerLost { rank: named(rank) },
            Self::PeerLeft { rank } => Self::PeerLeft { rank: named(rank) },
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
            Self::Timeout { .. } => "timeout",
            Self::Aborted { .. } => "aborted",
            Self::PeerLeft { .. } => "peer-left",
            Self::Closed => "closed",
            Self::Poisoned { .. } => "poisoned",
            Self::Mismatch { .. } => "mismatch",
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
            Self::SeveralNodes { .. } => "several-nodes",
            Self::Descriptors { .. } => "descriptors",
            Self::Os(_) => "os",
        }
    }

    /// Returns whether the error is permanent for the communicator that returned it.
    #[must_use]
    pub fn poisons(&self) -> bool {
        matches!(
            self,
            Self::PeerLost { .. }
                | Self::Timeout { .. }
                | Self::Aborted { .. }
                | Self::PeerLeft { .. }
                | Self::Closed
                | Self::Poisoned { .. }
                | Self::Mismatch { .. }
                | Self::Protocol { .. }
        )
    }
}

fn hint(joining: bool) -> &'static str {
    if joining { "; ranks in other network namespaces need a shared `WHOLEMEM_SOCKET_DIR`" } else { "" }
}

/// Displays a list of ranks, shortened to the first eight and the number of the others.
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
        let nodes = Error::SeveralNodes { name: "LOCAL_WORLD_SIZE", value: "4".to_owned(), size: 8 };
        assert_eq!(
            nodes.to_string(),
            "`LOCAL_WORLD_SIZE` is `4` for 8 ranks: they are on several nodes, which is not supported yet; start all \
             ranks on one node"
        );
    }

    #[test]
    fn errors_of_the_caller_do_not_poison_the_communicator() {
        assert!(Error::PeerLost { rank: Rank(0) }.poisons());
        assert!(!Error::Busy.poisons());
        assert!(!Error::WrongCount { count: 1, size: 2 }.poisons());
    }
}
