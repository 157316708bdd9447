//! [`NodePlan`]: the ranks to start on one node, with their environment.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The ranks of one node, and what they have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NodePlan {
    /// The lowest rank of the node.
    pub(super) first_rank: u32,
    /// The number of ranks on the node.
    pub(super) ranks: u32,
    /// The number of ranks on all nodes.
    pub(super) size: u32,
    /// The number of the node.
    pub(super) node: u32,
    /// The number of nodes.
    pub(super) nodes: u32,
    /// The host in the prefix of the ranks' output, if the launcher runs on another one.
    pub(super) host: Option<String>,
    /// Environment variables of all ranks.
    pub(super) variables: Vec<(String, String)>,
    /// The command that every rank runs, and its arguments.
    pub(super) command: Vec<ByteText>,
    /// The folder for the output of each rank.
    pub(super) log_dir: Option<ByteText>,
}

/// A text that is not always UTF-8, such as a path, which is encoded as bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ByteText(Vec<u8>);

impl ByteText {
    pub(super) fn new(text: impl Into<OsString>) -> Self {
        Self(text.into().into_vec())
    }

    pub(super) fn to_os_string(&self) -> OsString {
        OsString::from_vec(self.0.clone())
    }

    pub(super) fn to_path(&self) -> PathBuf {
        self.to_os_string().into()
    }
}

impl NodePlan {
    /// Returns the rank of the group that has a local rank on this node.
    pub(super) fn rank(&self, local_rank: u32) -> u32 {
        self.first_rank + local_rank
    }

    /// Returns the number of digits of the highest rank.
    fn width(&self) -> usize {
        (self.size - 1).to_string().len()
    }

    /// Returns the prefix of a rank's output lines.
    pub(super) fn prefix(&self, rank: u32) -> String {
        let width = self.width();
        match &self.host {
            Some(host) => format!("[{rank:width$} {host}] "),
            None => format!("[{rank:width$}] "),
        }
    }

    /// Returns the name of a rank's log file, with the extension `out` or `err`.
    pub(super) fn log_name(&self, rank: u32, extension: &str) -> String {
        format!("rank-{rank:0width$}.{extension}", width = self.width())
    }

    /// Returns the environment variables that differ between the ranks, as torchrun sets them.
    pub(super) fn rank_variables(&self, local_rank: u32) -> Vec<(&'static str, String)> {
        let mut variables = vec![
            ("RANK", self.rank(local_rank).to_string()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("GROUP_RANK", self.node.to_string()),
            ("WORLD_SIZE", self.size.to_string()),
            ("LOCAL_WORLD_SIZE", self.ranks.to_string()),
        ];
        if self.nodes > 1 {
            variables.push(("GROUP_WORLD_SIZE", self.nodes.to_string()));
        }
        variables
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_node_are_numbered_from_its_first_rank() {
        let plan = NodePlan {
            first_rank: 9,
            ranks: 2,
            size: 11,
            node: 1,
            nodes: 2,
            host: Some("n1".to_owned()),
            variables: Vec::new(),
            command: vec![ByteText::new("true")],
            log_dir: None,
        };
        assert_eq!((plan.prefix(9), plan.prefix(10)), ("[ 9 n1] ".to_owned(), "[10 n1] ".to_owned()));
        assert_eq!(plan.log_name(9, "out"), "rank-09.out");
        let variables = plan.rank_variables(1);
        for (name, value) in [
            ("RANK", "10"),
            ("LOCAL_RANK", "1"),
            ("GROUP_RANK", "1"),
            ("WORLD_SIZE", "11"),
            ("GROUP_WORLD_SIZE", "2"),
        ] {
            assert!(variables.contains(&(name, value.to_owned())), "{variables:?}");
        }
        assert_eq!(NodePlan { host: None, ..plan }.prefix(9), "[ 9] ");
    }
}
