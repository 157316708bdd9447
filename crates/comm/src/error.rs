//! What can go wrong between ranks, with the ranks it went wrong with.

use std::fmt;
use std::time::Duration;

use crate::Rank;

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong between ranks.
///
/// An error that [poisons](Error::poisons) is the last answer a communicator gives: every later operation returns it
/// again, on every rank that lives. A new communicator among the survivors goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank died.
    #[error("rank {rank} died")]
    PeerLost {
        /// Which one, in the numbering of this communicator.
        rank: Rank,
    },

    /// The deadline came before all ranks did. They may be stopped, slow, elsewhere in their program, or not started.
    #[error("no answer from {} within {timeout:?}{}", Ranks(missing), hint(*.joining))]
    Timeout {
        /// Those known to be missing, at least: ranks that are reached only through one of them are not named.
        missing: Vec<Rank>,
        /// How long this rank waited: its own timeout, or less where another rank, which began earlier or has a shorter
        /// timeout, has given up for all.
        timeout: Duration,
        /// Whether the group was still coming together.
        joining: bool,
    },

    /// A rank called [`abort`](crate::Bootstrap::abort).
    #[error("rank {by} aborted the communicator")]
    Aborted {
        /// Who called it.
        by: Rank,
    },

    /// A rank has closed its communicator, and takes part in nothing any more.
    #[error("rank {rank} has closed the communicator")]
    PeerLeft {
        /// Which one.
        rank: Rank,
    },

    /// This rank has left the group.
    #[error("the communicator is closed")]
    Closed,

    /// An earlier operation timed out, so that the ranks are no longer in step.
    #[error("the communicator is unusable: an operation timed out for want of {}", Ranks(missing))]
    Poisoned {
        /// Whom that operation missed.
        missing: Vec<Rank>,
    },

    /// Another rank is at another operation: the program does not call the same ones in the same order everywhere.
    #[error("rank {rank} is at `{there}` while this rank is at `{here}`")]
    Mismatch {
        /// The other rank.
        rank: Rank,
        /// What this rank called.
        here: &'static str,
        /// What the other one called.
        there: &'static str,
    },

    /// A rank broke the protocol between ranks, or runs another version.
    #[error("rank {rank} broke the protocol: {what}")]
    Protocol {
        /// Which one.
        rank: Rank,
        /// The rule it broke.
        what: &'static str,
    },

    /// Another process has this rank already.
    #[error("rank {rank} is taken by another process")]
    RankTaken {
        /// The rank that was asked for.
        rank: Rank,
    },

    /// The group was made with another size.
    #[error("rank {rank} believes in {here} ranks, and rank {parent} in {there}")]
    SizeDiffers {
        /// This rank.
        rank: Rank,
        /// The rank it joined.
        parent: Rank,
        /// How many ranks were asked for here.
        here: u32,
        /// How many were asked for there.
        there: u32,
    },

    /// This process is in another network namespace than the one that made the id, which names no folder.
    #[error(
        "rank {rank} is in another network namespace than rank 0: set `WHOLEMEM_SOCKET_DIR` to a folder that all \
         ranks see, and that belongs to their user with mode 0700"
    )]
    OtherNamespace {
        /// This rank.
        rank: Rank,
    },

    /// The folder for sockets is not one to trust.
    #[error("cannot use `{path}` for sockets: it {problem}")]
    SocketDir {
        /// The folder.
        path: String,
        /// What is wrong with it.
        problem: &'static str,
    },

    /// A rank that is not in the group.
    #[error("there is no rank {rank} among {size}")]
    NoSuchRank {
        /// The rank asked for.
        rank: Rank,
        /// How many there are.
        size: u32,
    },

    /// A group that is larger than any may be.
    #[error("a group has at most {limit} ranks, not {size}")]
    TooManyRanks {
        /// How many were asked for.
        size: u32,
        /// How many there may be.
        limit: u32,
    },

    /// A list that must have an entry for each rank has not.
    #[error("{count} entries were given for {size} ranks")]
    WrongCount {
        /// How many were given.
        count: usize,
        /// How many there must be.
        size: u32,
    },

    /// A payload that is longer than one operation carries.
    #[error("cannot pass {len} bytes in one operation: the limit is {limit}")]
    TooLong {
        /// How long it was.
        len: usize,
        /// How long it may be.
        limit: usize,
    },

    /// Another thread is in an operation of this communicator.
    #[error("another operation of this communicator is under way in this process")]
    Busy,

    /// This process is a forked child, where inherited communicators do nothing.
    #[error("a communicator cannot be used in a forked child")]
    Forked,

    /// A text is no unique id.
    #[error("`{what}` is missing or malformed in the unique id")]
    BadId {
        /// The part.
        what: &'static str,
    },

    /// An environment variable is missing, malformed, or contradicts another.
    #[error("`{name}` {problem}")]
    Environment {
        /// Its name.
        name: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },

    /// A launcher has started the ranks on several nodes.
    #[error(
        "`{name}` is `{value}` for {size} ranks: they are on several nodes, which is not supported yet; start all ranks on \
         one node"
    )]
    SeveralNodes {
        /// The variable that tells.
        name: &'static str,
        /// Its value.
        value: String,
        /// How many ranks there are.
        size: u32,
    },

    /// A rank could not receive the file descriptors of an operation.
    #[error("rank {rank} could not take part in passing file descriptors: {why}")]
    Descriptors {
        /// The lowest rank that could not.
        rank: Rank,
        /// What it said.
        why: String,
    },

    /// The kernel refused something.
    #[error("{0}")]
    Os(#[from] wholemem_os::Error),
}

impl Error {
    /// The same error of a part of a group, with ranks of the whole: rank `n` of the part is `members[n]` there.
    pub(crate) fn in_the_whole(self, members: &[Rank]) -> Self {
        // Ranks that other ranks name are checked when they are received.
        let named = |rank: Rank| *members.get(rank.index()).expect("a rank of the part");
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

    /// A name for the kind of error that stays the same between versions, for programs.
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

    /// Whether the communicator that answered this is of no more use.
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

/// Ranks as people read them: some of them, and how many more there are.
struct Ranks<'a>(&'a [Rank]);

impl fmt::Display for Ranks<'_> {
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
    fn what_a_caller_did_wrong_poisons_nothing() {
        assert!(Error::PeerLost { rank: Rank(0) }.poisons());
        assert!(!Error::Busy.poisons());
        assert!(!Error::WrongCount { count: 1, size: 2 }.poisons());
    }
}
