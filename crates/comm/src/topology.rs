//! The tree along which the messages of a group travel, seen from one rank: on one node or over several nodes.
//!
//! ```text
//!   one node: the tree of ranks (see `rank`)     several nodes: every rank is connected to the leader of its node by a
//!                                                Unix socket, and the leaders to the leader of node 0 by TCP
//!            0                                        node 0        node 1      node 2
//!         /  |  \                                       0 ----TCP---- 2 ---+
//!        1   2   3 ...                                  | \---TCP-----|----|----- 5
//!     /  |                                              1             3    4
//!    5   6 ...
//! ```
//!
//! The operations need only the parent, the children and the way to another rank, so they are the same on one node and
//! over several. The tree over several nodes is at most two levels deep. The leader of a node forwards the messages of
//! its ranks, and has as many connections as its node has ranks; the leader of node 0 also has one for each node.

use std::net::SocketAddr;
use std::sync::Arc;

use crate::Rank;
use crate::rank::Tree;

/// The ranks of one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeRanks {
    /// The rank that is connected to other nodes.
    pub(crate) leader: Rank,
    /// The address at which the leader accepts connections from other nodes.
    pub(crate) address: SocketAddr,
    /// The ranks of the node in ascending order, including the leader.
    pub(crate) ranks: Vec<Rank>,
}

/// Which rank is on which node, with the leader and the address of each node. Equal on all ranks of a group.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NodeMap {
    nodes: Vec<NodeRanks>,
    /// The node of each rank.
    node_of: Vec<u32>,
}

impl NodeMap {
    /// Creates a map of `size` ranks; returns `None` unless every rank is on exactly one node, and every leader is a
    /// rank of its node.
    pub(crate) fn new(nodes: Vec<NodeRanks>, size: u32) -> Option<Self> {
        let mut node_of = vec![None; size as usize];
        for (number, node) in (0u32..).zip(&nodes) {
            if !node.ranks.contains(&node.leader) || !node.ranks.is_sorted() {
                return None;
            }
            for rank in &node.ranks {
                if node_of.get_mut(rank.index())?.replace(number).is_some() {
                    return None;
                }
            }
        }
        Some(Self { nodes, node_of: node_of.into_iter().collect::<Option<_>>()? })
    }

    pub(crate) fn nodes(&self) -> &[NodeRanks] {
        &self.nodes
    }

    /// Returns the number of the node of a rank of the group.
    pub(crate) fn node_of(&self, rank: Rank) -> u32 {
        self.node_of[rank.index()]
    }

    fn leader_of(&self, rank: Rank) -> Rank {
        self.nodes[self.node_of(rank) as usize].leader
    }
}

/// The tree of a group's ranks, seen from one of them.
#[derive(Debug, Clone)]
pub(crate) struct Topology {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    /// `None` if the ranks form the tree of one node.
    map: Option<Arc<NodeMap>>,
}

impl From<Tree> for Topology {
    fn from(Tree { rank, size }: Tree) -> Self {
        Self { rank, size, map: None }
    }
}

impl Topology {
    pub(crate) fn over_nodes(rank: Rank, map: Arc<NodeMap>) -> Self {
        let size =
            u32::try_from(map.node_of.len()).expect("the map was made for a number of ranks that is a u32");
        Self { rank, size, map: Some(map) }
    }

    pub(crate) fn map(&self) -> Option<&Arc<NodeMap>> {
        self.map.as_ref()
    }

    /// Returns the number of nodes.
    pub(crate) fn nodes(&self) -> u32 {
        let count = self.map.as_ref().map_or(1, |map| map.nodes.len());
        u32::try_from(count).expect("there are at most as many nodes as ranks")
    }

    /// Returns the number of the node of a rank of the group.
    pub(crate) fn node_of(&self, rank: Rank) -> u32 {
        self.map.as_ref().map_or(0, |map| map.node_of(rank))
    }

    /// Returns true if the other rank is on the node of this rank.
    pub(crate) fn is_here(&self, other: Rank) -> bool {
        self.node_of(other) == self.node_of(self.rank)
    }

    /// Returns the same tree seen from another rank.
    pub(crate) fn at(&self, rank: Rank) -> Self {
        Self { rank, ..self.clone() }
    }

    /// Returns a position in the tree of one node. Joining on one node needs it, because a rank may take the positions of
    /// dead ranks.
    pub(crate) fn position(&self, rank: Rank) -> Tree {
        Tree { rank, size: self.size }
    }

    pub(crate) fn parent(&self) -> Option<Rank> {
        self.parent_of(self.rank)
    }

    fn parent_of(&self, rank: Rank) -> Option<Rank> {
        let Some(map) = &self.map else { return self.position(rank).parent() };
        let (leader, root) = (map.leader_of(rank), map.nodes[0].leader);
        let above = if rank == leader { root } else { leader };
        (above != rank).then_some(above)
    }

    pub(crate) fn is_root(&self) -> bool {
        self.parent().is_none()
    }

    pub(crate) fn children(&self) -> impl Iterator<Item = Rank> + use<> {
        let here = self.map.is_none().then(|| self.position(self.rank).children());
        let over_nodes = self.map.as_ref().map(|map| {
            let own = map.node_of(self.rank) as usize;
            let is_leader = map.nodes[own].leader == self.rank;
            let here = map.nodes[own].ranks.iter().filter(|rank| is_leader && **rank != self.rank);
            let leaders = map.nodes.iter().skip(1).map(|node| &node.leader).filter(|_| self.is_root());
            here.chain(leaders).copied().collect::<Vec<_>>()
        });
        here.into_iter().flatten().chain(over_nodes.into_iter().flatten())
    }

    /// Returns the parent and the children of this rank: the ranks to which it is always connected.
    pub(crate) fn neighbours(&self) -> impl Iterator<Item = Rank> + use<> {
        self.parent().into_iter().chain(self.children())
    }

    /// Returns the number of hops in the tree from this rank to the root.
    pub(crate) fn depth(&self) -> u32 {
        let above = std::iter::successors(self.parent(), |rank| self.parent_of(*rank));
        above.fold(0, |depth, _| depth + 1)
    }

    /// Returns the number of hops in the tree from the deepest rank to the root.
    pub(crate) fn height(&self) -> u32 {
        match &self.map {
            None => self.position(self.rank).height(),
            Some(map) => match &map.nodes[..] {
                [node] => u32::from(node.ranks.len() > 1),
                [_, others @ ..] => 1 + u32::from(others.iter().any(|node| node.ranks.len() > 1)),
                [] => unreachable!("a map has the node of rank 0"),
            },
        }
    }

    /// Returns the child whose subtree contains `rank`, or `None` if `rank` is this rank or outside of its subtree.
    pub(crate) fn child_towards(&self, rank: Rank) -> Option<Rank> {
        let mut at = rank;
        while let Some(parent) = self.parent_of(at) {
            if parent == self.rank {
                return Some(at);
            }
            at = parent;
        }
        None
    }

    /// Returns the neighbour on the path in the tree to another rank.
    pub(crate) fn hop_towards(&self, rank: Rank) -> Option<Rank> {
        match &self.map {
            None => self.position(self.rank).hop_towards(rank),
            Some(_) => self.child_towards(rank).or_else(|| self.parent()),
        }
    }

    /// Returns true if `rank` is in the subtree of this rank, or is this rank itself.
    pub(crate) fn is_below(&self, rank: Rank) -> bool {
        rank == self.rank || self.child_towards(rank).is_some()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a map of nodes with these ranks; the first rank of each is the leader.
    pub(crate) fn map(nodes: &[&[u32]]) -> Arc<NodeMap> {
        let size = nodes.iter().map(|ranks| ranks.len()).sum::<usize>();
        let node = |ranks: &&[u32]| {
            let mut all: Vec<_> = ranks.iter().copied().map(Rank).collect();
            all.sort_unstable();
            NodeRanks { leader: Rank(ranks[0]), address: ([127, 0, 0, 1], 1).into(), ranks: all }
        };
        let nodes = nodes.iter().map(node).collect();
        Arc::new(NodeMap::new(nodes, u32::try_from(size).unwrap()).unwrap())
    }

    fn seen_from(rank: u32, nodes: &[&[u32]]) -> Topology {
        Topology::over_nodes(Rank(rank), map(nodes))
    }

    #[test]
    fn leaders_are_below_the_leader_of_node_0_and_ranks_below_their_leader() {
        let nodes: &[&[u32]] = &[&[0, 1], &[4, 2, 3], &[5]];
        let of = |rank| seen_from(rank, nodes);
        assert_eq!(of(0).children().collect::<Vec<_>>(), [1, 4, 5].map(Rank));
        assert_eq!(of(4).children().collect::<Vec<_>>(), [2, 3].map(Rank));
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|rank| of(rank).parent()),
            [None, Some(0), Some(4), Some(4), Some(0), Some(0)].map(|rank| rank.map(Rank))
        );
        assert_eq!([0, 1, 2, 4].map(|rank| of(rank).depth()), [0, 1, 2, 1]);
        assert_eq!((of(3).height(), of(3).nodes(), of(3).node_of(Rank(5))), (2, 3, 2));
        assert!(of(3).is_here(Rank(4)) && !of(3).is_here(Rank(1)));
        assert_eq!(seen_from(0, &[&[0], &[1]]).height(), 1);
        assert_eq!(seen_from(0, &[&[0]]).height(), 0);
    }

    #[test]
    fn a_map_has_every_rank_once() {
        let node = |leader, ranks: &[u32]| {
            let ranks = ranks.iter().copied().map(Rank).collect();
            NodeRanks { leader: Rank(leader), address: ([127, 0, 0, 1], 1).into(), ranks }
        };
        assert!(NodeMap::new(vec![node(0, &[0]), node(1, &[1, 2])], 3).is_some());
        for nodes in [
            vec![node(0, &[0]), node(1, &[1])],
            vec![node(0, &[0, 1]), node(1, &[1, 2])],
            vec![node(0, &[0, 1]), node(1, &[2])],
            vec![node(0, &[0, 1]), node(2, &[2, 3])],
        ] {
            assert_eq!(NodeMap::new(nodes.clone(), 3), None, "{nodes:?}");
        }
    }

    proptest! {
        #[test]
        fn every_rank_is_reached_and_parents_and_children_agree(nodes in prop::collection::vec(1usize..6, 1..6), seed: u64) {
            let size: usize = nodes.iter().sum();
            // The ranks are distributed over the nodes in an order that depends on the seed; rank 0 is on node 0.
            let mut ranks: Vec<u32> = (1..u32::try_from(size).unwrap()).collect();
            ranks.sort_by_key(|rank| u64::from(*rank + 1).wrapping_mul(seed | 1));
            ranks.insert(0, 0);
            let mut rest = &ranks[..];
            let mut parts = Vec::new();
            for count in nodes {
                let (part, others) = rest.split_at(count);
                parts.push(part);
                rest = others;
            }
            let map = map(&parts);
            for from in (0..ranks.len()).map(|rank| Rank(u32::try_from(rank).unwrap())) {
                let tree = Topology::over_nodes(from, Arc::clone(&map));
                prop_assert!(tree.depth() <= tree.height());
                for child in tree.children() {
                    prop_assert_eq!(tree.at(child).parent(), Some(from));
                }
                for to in ranks.iter().copied().map(Rank).filter(|to| *to != from) {
                    let (mut at, mut hops) = (from, 0);
                    while at != to {
                        at = tree.at(at).hop_towards(to).expect("another rank");
                        hops += 1;
                    }
                    prop_assert!(hops <= 4);
                }
            }
        }
    }
}
