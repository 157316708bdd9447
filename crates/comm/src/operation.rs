//! The collective operations, with the arguments that must be equal on all ranks.
//!
//! A frame contains the code of the operation and the argument; [`frame`](crate::wire::frame) has their places.

use std::fmt;

use crate::Rank;

/// The collective operation that a rank has called, with the argument that must be equal on all ranks. Arguments that
/// may differ, such as the number of bytes in `all_gather`, are not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    /// The operation of messages that belong to no collective operation.
    None,
    Barrier,
    Broadcast {
        root: Rank,
    },
    AllGather,
    AllToAll {
        part_len: u64,
    },
    AllGatherFds,
    Agree,
    Split,
    AllToAllV,
    SplitByNode,
}

impl Operation {
    /// Returns the code of the operation, and its argument or 0.
    pub(crate) fn encode(self) -> (u8, u64) {
        match self {
            Self::None => (0, 0),
            Self::Barrier => (1, 0),
            Self::Broadcast { root } => (2, root.0.into()),
            Self::AllGather => (3, 0),
            Self::AllToAll { part_len } => (4, part_len),
            Self::AllGatherFds => (5, 0),
            Self::Agree => (6, 0),
            Self::Split => (7, 0),
            Self::AllToAllV => (8, 0),
            Self::SplitByNode => (9, 0),
        }
    }

    /// Decodes the code of an operation and its argument.
    ///
    /// # Errors
    /// The rule that the code or the argument violates.
    pub(crate) fn decode(code: u8, argument: u64) -> Result<Self, &'static str> {
        let operation = match code {
            0 => Self::None,
            1 => Self::Barrier,
            2 => {
                let root = u32::try_from(argument).map_err(|_| "a root is not a rank")?;
                Self::Broadcast { root: Rank(root) }
            }
            3 => Self::AllGather,
            4 => Self::AllToAll { part_len: argument },
            5 => Self::AllGatherFds,
            6 => Self::Agree,
            7 => Self::Split,
            8 => Self::AllToAllV,
            9 => Self::SplitByNode,
            _ => return Err("a frame has an unknown operation"),
        };
        if operation.encode() == (code, argument) {
            Ok(operation)
        } else {
            Err("an operation without an argument has one")
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "nothing",
            Self::Barrier => "barrier",
            Self::Broadcast { root } => return write!(f, "broadcast(root = {root})"),
            Self::AllGather => "all_gather",
            Self::AllToAll { part_len } => return write!(f, "all_to_all(part_len = {part_len})"),
            Self::AllGatherFds => "all_gather_fds",
            Self::Agree => "agree",
            Self::Split => "split",
            Self::AllToAllV => "all_to_allv",
            Self::SplitByNode => "split_by_node",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_has_one_encoding() {
        for code in 0..=9 {
            let argument = if matches!(code, 2 | 4) { 7 } else { 0 };
            assert_eq!(Operation::decode(code, argument).map(Operation::encode), Ok((code, argument)));
            let needless = Err("an operation without an argument has one");
            if argument == 0 {
                assert_eq!(Operation::decode(code, 1), needless, "{code}");
            }
        }
        assert_eq!(Operation::decode(10, 0), Err("a frame has an unknown operation"));
        assert_eq!(Operation::decode(2, 1 << 32), Err("a root is not a rank"));
    }

    #[test]
    fn texts_contain_the_arguments() {
        let texts =
            [Operation::Broadcast { root: Rank(2) }, Operation::AllToAll { part_len: 8 }, Operation::Agree]
                .map(|operation| operation.to_string());
        assert_eq!(texts, ["broadcast(root = 2)", "all_to_all(part_len = 8)", "agree"]);
    }
}
