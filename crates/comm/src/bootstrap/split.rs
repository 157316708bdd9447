//! Splits a group into groups of the ranks with one colour, or on one node.
//!
//! A part has its own id, which is derived from that of the whole group by a hash that only members can compute, so that no secret
//! is sent. While the members join the part, they also watch the whole group: if one dies, the whole group fails, and the error names
//! its rank there.

use std::sync::{Arc, PoisonError};

use super::Turn;
use super::collective::wait_out;
use crate::fault::Fault;
use crate::wire::Reader;
use crate::wire::frame::What;
use crate::{Bootstrap, Error, Rank, Result};

/// Names the node this process is on, where that is not the machine: for tests of several nodes on one machine.
pub(crate) const NODE_ID: &str = "WHOLEMEM_NODE_ID";

impl Bootstrap {
    /// Divides the group: ranks that give the same color become one, ordered by their keys, and by rank where keys are
    /// equal. A rank that gives none gets none, but takes part.
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
    ///             let place = part.map(|part| (part.rank().0, part.size()));
    ///             assert_eq!(place, [Some((1, 2)), None, Some((0, 2))][comm.rank().index()]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), wholemem_comm::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of a group that has fallen; [`Error::Timeout`] when a member of the part does not come, which ends the whole
    /// too. Ranks are those of the whole.
    pub fn split(&self, color: Option<u32>, key: u32) -> Result<Option<Self>> {
        self.split_in(&self.begin()?, color, key)
    }

    fn split_in(&self, turn: &Turn<'_>, color: Option<u32>, key: u32) -> Result<Option<Self>> {
        let mut vote = vec![u8::from(color.is_some())];
        vote.extend(color.unwrap_or(0).to_le_bytes());
        vote.extend(key.to_le_bytes());
        let number = self.core.state().begun;
        let votes = turn.all_gather(What::Split, &vote)?;
        let mut members = Vec::new();
        for (rank, vote) in (0..self.size()).map(Rank).zip(&votes) {
            let malformed = |_| Error::Protocol { rank, what: "its color and key are malformed" };
            let mut reader = Reader(vote);
            let colored = reader.u8().map_err(malformed)?;
            let (its_color, its_key) = (reader.u32().map_err(malformed)?, reader.u32().map_err(malformed)?);
            reader.end().map_err(malformed)?;
            let its_color = match colored {
                0 => None,
                1 => Some(its_color),
                _ => return Err(Error::Protocol { rank, what: "its color and key are malformed" }),
            };
            if its_color.is_some() && its_color == color {
                members.push((its_key, rank));
            }
        }
        let Some(color) = color else { return Ok(None) };
        members.sort_unstable();
        let place = (0..).map(Rank).zip(&members).find(|(_, (_, rank))| *rank == self.rank());
        let size = u32::try_from(members.len()).expect("each rank is a member at most once");
        let Some((place, _)) = place else {
            return Err(Error::Protocol { rank: self.rank(), what: "its vote has not come back to it" });
        };
        let id = self.core.id.part(number, color);
        // Other ranks may have their part before this rank, and wait for it in their next operation, which began later:
        // they give up after this rank has informed them which rank it misses.
        let timeout = self.timeout.saturating_sub(turn.began.elapsed());
        match Self::create_part(&id, place, size, timeout, Some(Arc::clone(&self.core))) {
            Ok(mut part) => {
                part.timeout = self.timeout;
                Ok(Some(part))
            }
            Err(error) => {
                if matches!(error, Error::PeerLost { .. }) {
                    self.wait_for_fall(turn);
                }
                // What the whole knows of it, all ranks know.
                if let Some(known) = self.check().err().filter(Error::poisons) {
                    let is_timeout = matches!(known, Error::Poisoned { .. });
                    return Err(if is_timeout { turn.fallen(number) } else { known });
                }
                let members: Vec<_> = members.iter().map(|(_, rank)| *rank).collect();
                let mut error = error.in_the_whole(&members);
                if let Error::PeerLost { rank } = error {
                    // It lives, or the whole would have lost it.
                    error = Error::Timeout { missing: vec![rank], timeout: self.timeout, joining: true };
                }
                if let Error::Timeout { missing, timeout, .. } = &mut error {
                    *missing = self.core.blamed(std::mem::take(missing));
                    // The part had what was left of the timeout of this operation.
                    *timeout = self.timeout;
                    // Others may have their part and wait in the next operation: they are told why nobody comes.
                    self.core.fall(Fault::Missing(missing.clone()), None);
                }
                Err(wait_out(error, turn.began))
            }
        }
    }

    /// Waits until this group has fallen, or the time of the operation is over: a member that leaves a part because the
    /// whole has fallen is gone from the part as one that died is, and may be so before the word has come here.
    fn wait_for_fall(&self, turn: &Turn<'_>) {
        let mut state = self.core.state();
        while state.group.fault().is_none() {
            let left = self.timeout.saturating_sub(turn.began.elapsed());
            if left.is_zero() {
                return;
            }
            let waited = self.core.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The ranks of this node as a group. A node is a machine, or where `WHOLEMEM_NODE_ID` is set, all ranks that have
    /// the same text there.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn split_by_node(&self) -> Result<Self> {
        let name = std::env::var(NODE_ID).unwrap_or_default();
        self.split_by_node_named(&name)
    }

    /// The ranks that call this with the same name, as a group: for ranks that are threads of one process.
    ///
    /// # Errors
    /// As [`split`](Self::split).
    pub fn split_by_node_named(&self, name: &str) -> Result<Self> {
        let turn = self.begin()?;
        let names = turn.all_gather(What::AllGather, name.as_bytes())?;
        turn.next();
        // All ranks of a group have passed each other descriptors, so they are on one machine.
        let color = (0..).zip(&names).find(|(_, other)| *other == name.as_bytes()).map(|(color, _)| color);
        match self.split_in(&turn, color, self.rank().0)? {
            Some(part) => Ok(part),
            None => Err(Error::Protocol { rank: self.rank(), what: "its node has not come back to it" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_member_that_gives_its_part_up_is_missing_and_not_dead() {
        let mut ranks = Bootstrap::local(3).unwrap();
        let timeout = Duration::from_secs(3);
        ranks.iter_mut().for_each(|comm| comm.set_timeout(timeout));
        let ranks = &ranks[..];
        std::thread::scope(|scope| {
            let stays = scope.spawn(|| ranks[0].split(Some(0), 0).map(drop));
            for comm in &ranks[1..] {
                scope.spawn(|| {
                    // As `split` begins, with color 0 and key 0.
                    let turn = comm.begin().unwrap();
                    let number = comm.core.state().begun;
                    turn.all_gather(What::Split, &[1, 0, 0, 0, 0, 0, 0, 0, 0]).unwrap();
                    if comm.rank() == Rank(1) {
                        // It joins, and leaves before rank 2, which never comes.
                        let id = comm.core.id.part(number, 0);
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
