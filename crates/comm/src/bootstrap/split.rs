//! Splits a group into smaller groups: one for each color, or one for each node.
//!
//! The id of a split group is derived from the id of the original group with a hash that only its members can
//! compute, so no secret is sent. While the members join the split group, they also watch the original group: if one
//! of them dies, the original group fails, and the error contains its rank there.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use super::OperationGuard;
use super::collective::wait_remaining_timeout;
use crate::fault::GroupFault;
use crate::network::Network;
use crate::operation::Operation;
use crate::wire::FieldReader;
use crate::{Bootstrap, Error, Rank, Result};

/// The environment variable that overrides which node this process is on, for tests of several nodes on one machine.
pub(crate) const NODE_ID: &str = "WHOLEMEM_NODE_ID";

impl Bootstrap {
    /// Splits the group: the ranks with the same color form a new group, ordered by key, and by rank if keys are equal.
    /// A rank without a color makes the call too, and gets `None`.
    ///
    /// ```
    /// use wholemem_comm::Bootstrap;
    ///
    /// let ranks = Bootstrap::local(3)?;
    /// std::thread::scope(|scope| {
    ///     for comm in &ranks {
    ///         scope.spawn(|| {
    ///             // The even ranks, in reverse order.
    ///             let rank = comm.rank().0;
    ///             let part = comm.split(rank.is_multiple_of(2).then_some(0), 10 - rank).unwrap();
    ///             let new_rank = part.map(|part| (part.rank().0, part.size()));
    ///             assert_eq!(new_rank, [Some((1, 2)), None, Some((0, 2))][comm.rank().index()]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), wholemem_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// The errors of a failed group; [`Error::Timeout`] if a member of the new group is missing, which ends the
    /// original group too. Errors contain ranks of the original group.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Self>> {
        self.split_in(&self.begin(Operation::Split)?, color, key)
    }

    fn split_in(&self, guard: &OperationGuard<'_>, color: Option<u32>, key: u32) -> Result<Option<Self>> {
        let mut vote = vec![u8::from(color.is_some())];
        vote.extend(color.unwrap_or(0).to_le_bytes());
        vote.extend(key.to_le_bytes());
        let number = self.core.state().begun;
        let votes = guard.all_gather(&vote)?;
        let mut members = Vec::new();
        let mut colors: BTreeMap<u32, Vec<(u32, Rank)>> = BTreeMap::new();
        for (rank, vote) in (0..self.size()).map(Rank).zip(&votes) {
            let malformed = |_| Error::Protocol { rank, what: "its color and key are malformed" };
            let mut reader = FieldReader(vote);
            let colored = reader.u8().map_err(malformed)?;
            let (its_color, its_key) = (reader.u32().map_err(malformed)?, reader.u32().map_err(malformed)?);
            reader.end().map_err(malformed)?;
            let its_color = match colored {
                0 => None,
                1 => Some(its_color),
                _ => return Err(Error::Protocol { rank, what: "its color and key are malformed" }),
            };
            if let Some(its_color) = its_color {
                colors.entry(its_color).or_default().push((its_key, rank));
            }
            if its_color.is_some() && its_color == color {
                members.push((its_key, rank));
            }
        }
        if self.core.tree.map().is_some() {
            let parts: Vec<_> = colors.keys().map(|color| self.core.id.split_id(number, *color)).collect();
            self.core.set_parts(&parts);
        }
        let network = self.network_of_part(guard, color, &mut colors)?;
        let Some(color) = color else { return Ok(None) };
        members.sort_unstable();
        let new_rank = (0..).map(Rank).zip(&members).find(|(_, (_, rank))| *rank == self.rank());
        let size = u32::try_from(members.len()).expect("each rank is a member at most once");
        let Some((new_rank, _)) = new_rank else {
            return Err(Error::Protocol { rank: self.rank(), what: "its vote is missing in the result" });
        };
        let id = self.core.id.split_id(number, color);
        // The new group must be complete within the remaining timeout of this split. Another member may have completed
        // the new group already, and wait for this rank in its next operation. That operation began later, so its
        // timeout expires after this rank has reported which rank is missing.
        let timeout = self.timeout.saturating_sub(guard.began.elapsed());
        let split_from = Some(Arc::clone(&self.core));
        let part = match &network {
            None => Self::create_part(&id, new_rank, size, timeout, split_from),
            Some(network) => Self::create_part_over(network, &id, new_rank, size, timeout, split_from),
        };
        match part {
            Ok(mut part) => {
                part.timeout = self.timeout;
                Ok(Some(part))
            }
            Err(error) => {
                if matches!(error, Error::PeerLost { .. }) {
                    self.wait_for_failure(guard);
                }
                // If the original group has failed, its error is returned, because all of its ranks get that error.
                if let Some(known) = self.check().err().filter(Error::poisons) {
                    let is_timeout = matches!(known, Error::Poisoned { .. });
                    return Err(if is_timeout { guard.failure(number) } else { known });
                }
                let members: Vec<_> = members.iter().map(|(_, rank)| *rank).collect();
                let mut error = error.with_ranks_of(&members);
                if let Error::PeerLost { rank } = error {
                    // The rank that left the new group is alive, or the original group would have reported its death.
                    error = Error::Timeout { missing: vec![rank], timeout: self.timeout, joining: true };
                }
                if let Error::Timeout { missing, timeout, .. } = &mut error {
                    *missing = self.core.ranks_to_report(std::mem::take(missing));
                    // The error contains the whole timeout of the split: the new group was created with the remaining
                    // part only.
                    *timeout = self.timeout;
                    // Other members may have completed the new group, and wait in the next operation: failing the
                    // original group informs them.
                    self.core.fail_group(GroupFault::Missing(missing.clone()), None);
                }
                Err(wait_remaining_timeout(error, guard.began))
            }
        }
    }

    /// Returns how the ranks of this rank's color reach each other, if they are on several nodes. If a color is on several
    /// nodes, its first rank listens at a new address, and all ranks exchange these addresses.
    fn network_of_part(
        &self,
        guard: &OperationGuard<'_>,
        color: Option<u32>,
        colors: &mut BTreeMap<u32, Vec<(u32, Rank)>>,
    ) -> Result<Option<Network>> {
        let tree = &self.core.tree;
        colors.values_mut().for_each(|members| members.sort_unstable());
        colors.retain(|_, members| {
            members.iter().any(|(_, rank)| tree.node_of(*rank) != tree.node_of(members[0].1))
        });
        let (Some(network), Some(map)) = (&self.network, tree.map().filter(|_| !colors.is_empty())) else {
            return Ok(None);
        };
        let first = color.and_then(|color| colors.get(&color)).map(|members| members[0].1);
        let listener = if first == Some(self.rank()) { Some(network.listen()) } else { None };
        let port = match &listener {
            Some(Ok(listener)) => listener.local_addr().map_or(0, |address| address.port()),
            // Port 0 informs the other ranks that this rank cannot listen.
            Some(Err(_)) | None => 0,
        };
        guard.next_operation();
        let ports = guard.all_gather(&port.to_le_bytes())?;
        let (Some(first), listener) = (first, listener.transpose()?) else { return Ok(None) };
        let what = "it cannot listen for ranks of other nodes";
        let port =
            ports.get(first.index()).and_then(|port| port[..].try_into().ok()).map_or(0, u16::from_le_bytes);
        if port == 0 {
            return Err(Error::Protocol { rank: first, what });
        }
        let ip = map.nodes()[map.node_of(first) as usize].address.ip();
        Ok(Some(network.rooted_at(SocketAddr::new(ip, port), listener)))
    }

    /// Waits until the original group fails, or the timeout of the split expires. A member that leaves the new group
    /// because the original group failed looks like a dead member, and this rank may not have received the failure yet.
    fn wait_for_failure(&self, guard: &OperationGuard<'_>) {
        let mut state = self.core.state();
        while state.group.fault().is_none() {
            let left = self.timeout.saturating_sub(guard.began.elapsed());
            if left.is_zero() {
                return;
            }
            let waited = self.core.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Splits the group by node. Ranks are on the same node if they can pass each other descriptors, and have the same
    /// value of `WHOLEMEM_NODE_ID`, or if it is not set on either of them.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn split_by_node(&self) -> Result<Self> {
        let name = std::env::var(NODE_ID).unwrap_or_default();
        self.split_by_node_named(&name)
    }

    /// Splits the group by a node name that each rank passes, for ranks that are threads of one process.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn split_by_node_named(&self, name: &str) -> Result<Self> {
        let guard = self.begin(Operation::SplitByNode)?;
        let names = guard.all_gather(name.as_bytes())?;
        guard.next_operation();
        let is_same =
            |rank: u32, other: &[u8]| other == name.as_bytes() && self.core.tree.is_here(Rank(rank));
        let color = (0..).zip(&names).find(|(rank, other)| is_same(*rank, other)).map(|(color, _)| color);
        match self.split_in(&guard, color, self.rank().0)? {
            Some(part) => Ok(part),
            None => Err(Error::Protocol { rank: self.rank(), what: "its node is missing in the result" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_member_that_leaves_a_split_group_early_is_missing_and_not_dead() {
        let mut ranks = Bootstrap::local(3).unwrap();
        let timeout = Duration::from_secs(3);
        ranks.iter_mut().for_each(|comm| comm.set_timeout(timeout));
        let ranks = &ranks[..];
        std::thread::scope(|scope| {
            let stays = scope.spawn(|| ranks[0].split(Some(0), 0).map(drop));
            for comm in &ranks[1..] {
                scope.spawn(|| {
                    // The rank does what `split` does first, with color 0 and key 0: it gathers the colors and keys of
                    // all ranks.
                    let guard = comm.begin(Operation::Split).unwrap();
                    let number = comm.core.state().begun;
                    guard.all_gather(&[1, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
                    if comm.rank() == Rank(1) {
                        // Rank 1 joins the split group, and leaves it when rank 2 does not join.
                        let id = comm.core.id.split_id(number, 0);
                        let soon = Duration::from_secs(1);
                        Bootstrap::create_part(&id, Rank(1), 3, soon, None).unwrap_err();
                    }
                });
            }
            let missing = vec![Rank(1)];
            assert_eq!(
                stays.join().unwrap(),
                Err(Error::Timeout { missing: missing.clone(), timeout, joining: true })
            );
            assert_eq!(ranks[0].check(), Err(Error::Poisoned { missing }));
        });
    }
}
