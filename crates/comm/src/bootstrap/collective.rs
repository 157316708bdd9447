//! Collective operations on bytes: barrier, broadcast, all_gather, all_to_all and agree.
//!
//! All except all_to_all are a convergecast of votes up the tree and a broadcast of the decision down
//! ([`converge`](crate::machine)); they differ in how votes are merged. all_to_all sends each part to its rank.

use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use wholemem_os::interrupt;

use super::OperationGuard;
use crate::core::RankState;
use crate::fault::GroupFault;
use crate::machine::converge::{Converge, Input, Merge, Output};
use crate::machine::{give_up_on_decision_at, margin};
use crate::operation::Operation;
use crate::wire::FieldReader;
use crate::wire::frame::{FrameHeader, FrameKind, decode_ranks, encode_ranks};
use crate::{Bootstrap, Error, Rank, Result};

/// The time that a waiting rank sleeps before it checks whether its neighbours run, and whether its caller was
/// interrupted.
pub(crate) const WAIT_SLICE: Duration = Duration::from_millis(100);

/// The maximum number of bytes that one rank contributes to a collective operation. Larger data belongs in shared
/// memory.
const MAX_PER_RANK: usize = 1 << 30;

/// The first byte of the vote of a broadcast's root.
const ROOT: u8 = 1;

/// The result of a vote with [`Bootstrap::agree`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VoteResult {
    /// Every rank voted in favour.
    Agreed,
    /// At least one rank voted against. Every rank gets the reason of the lowest rank that voted against.
    Refused {
        /// The lowest rank that voted against.
        rank: Rank,
        /// The reason that this rank gave for its vote against.
        reason: String,
    },
}

impl Bootstrap {
    /// Waits until every rank has called `barrier`.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Timeout`] and the other errors of a failed group.
    pub fn barrier(&self) -> Result<()> {
        self.begin(Operation::Barrier)?.converge(Vec::new(), no_bytes).map(drop)
    }

    /// Sends the bytes of rank `root` to all ranks; the bytes of the other ranks are ignored.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::TooLong`], and the errors of a failed group.
    pub fn broadcast(&self, root: Rank, bytes: &[u8]) -> Result<Vec<u8>> {
        if root.0 >= self.size() {
            return Err(Error::NoSuchRank { rank: root, size: self.size() });
        }
        check_len(bytes.len())?;
        let is_root = root == self.rank();
        // The root's message begins with the byte `ROOT`, which distinguishes an empty payload of the root from the empty
        // message of another rank.
        let vote = if is_root { [&[ROOT], bytes].concat() } else { Vec::new() };
        let decision = self.begin(Operation::Broadcast { root })?.converge(vote, root_bytes)?;
        match decision.split_first() {
            Some((&ROOT, bytes)) => Ok(bytes.to_vec()),
            _ => {
                self.core.fail_group(GroupFault::ProtocolViolation(root), None);
                Err(Error::Protocol { rank: root, what: "its bytes are missing in the result" })
            }
        }
    }

    /// Returns the bytes of all ranks on all ranks, ordered by rank. Ranks may pass different numbers of bytes.
    ///
    /// # Errors
    /// [`Error::TooLong`], and the errors of a failed group.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        check_len(bytes.len())?;
        self.begin(Operation::AllGather)?.all_gather(bytes)
    }

    /// Sends the `n`th part of `bytes` to rank `n`, and returns the parts received from all ranks. All parts of all
    /// ranks have the same length; [`all_to_allv`](Self::all_to_allv) sends parts of different lengths.
    ///
    /// # Errors
    /// [`Error::WrongCount`] if `bytes` cannot be divided into as many equal parts as there are ranks, [`Error::TooLong`],
    /// and the errors of a failed group.
    pub fn all_to_all(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        let size = self.core.tree.size as usize;
        if !bytes.len().is_multiple_of(size) {
            return Err(Error::WrongCount { count: bytes.len(), size: self.size() });
        }
        let len = bytes.len() / size;
        let parts: Vec<_> = (0..size).map(|n| &bytes[n * len..(n + 1) * len]).collect();
        check_len(len)?;
        let operation = Operation::AllToAll { part_len: len as u64 };
        let received = self.begin(operation)?.all_to_allv(&parts)?;
        let of_another_len = (0..).map(Rank).zip(&received).find(|(_, part)| part.len() != len);
        if let Some((rank, _)) = of_another_len {
            self.core.fail_group(GroupFault::ProtocolViolation(rank), None);
            return Err(Error::Protocol { rank, what: "its parts have another length" });
        }
        Ok(received.concat())
    }

    /// Sends the `n`th of `parts` to rank `n`, and returns the part received from each rank. Parts may have different
    /// lengths.
    ///
    /// # Errors
    /// [`Error::WrongCount`], [`Error::TooLong`], and the errors of a failed group.
    pub fn all_to_allv(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        if parts.len() != self.size() as usize {
            return Err(Error::WrongCount { count: parts.len(), size: self.size() });
        }
        parts.iter().try_for_each(|part| check_len(part.len()))?;
        self.begin(Operation::AllToAllV)?.all_to_allv(parts)
    }

    /// Votes on whether all ranks succeeded, for example in a step that each rank performed on its own.
    ///
    /// The result is the same on all ranks that are alive when the decision is made. If a rank dies after that, one
    /// survivor may get the result and another one the error; but then the group has failed on all of them.
    ///
    /// # Errors
    /// [`Error::TooLong`], and the errors of a failed group.
    pub fn agree(&self, vote: Result<(), &str>) -> Result<VoteResult> {
        check_len(vote.err().map_or(0, str::len))?;
        self.begin(Operation::Agree)?.agree(vote)
    }
}

impl OperationGuard<'_> {
    /// Performs one collective: sends merged votes up the tree of ranks, and the decision of rank 0 down the tree.
    pub(crate) fn converge(&self, own: Vec<u8>, merge: Merge) -> Result<Vec<u8>> {
        let core = &self.bootstrap.core;
        let (tree, timeout) = (&core.tree, self.bootstrap.timeout);
        let mut machine = Converge::new(tree.clone(), timeout, own, merge);
        let mut outputs = machine.start();
        let op = core.state().begun;
        loop {
            for output in outputs.drain(..) {
                match output {
                    Output::Up(bytes) => self.post_to_parent(FrameKind::Vote, op, &bytes),
                    Output::Report(missing) => {
                        self.post_to_parent(FrameKind::MissingReport, op, &encode_ranks(&missing))
                    }
                    Output::Down(bytes) => {
                        for child in tree.children() {
                            core.post(
                                child,
                                FrameHeader::new(FrameKind::Decision, self.operation, tree.rank, child, op),
                                &bytes,
                            );
                        }
                    }
                    Output::Done(bytes) => {
                        self.finish(op);
                        return Ok(bytes);
                    }
                    Output::Failed(missing) => {
                        core.fail_group(GroupFault::Missing(missing), None);
                        return Err(self.failure(op));
                    }
                }
            }
            let mut state = self.agreed_state(op)?;
            let mut inputs = take_inputs(&mut state, tree, op)?;
            if inputs.is_empty() {
                if state.group.check(op).is_err() {
                    drop(state);
                    return Err(self.failure(op));
                }
                let now = self.began.elapsed();
                let wait = machine.next_tick(now).saturating_sub(now).min(WAIT_SLICE);
                let waited = core.changed.wait_timeout(state, wait.max(Duration::from_micros(1)));
                drop(waited.unwrap_or_else(PoisonError::into_inner).0);
                self.abort_if_interrupted();
                inputs.push(Input::Tick { parent_runs: core.parent_runs() });
            } else {
                drop(state);
            }
            for input in inputs {
                outputs.extend(machine.step(self.began.elapsed(), input));
            }
        }
    }

    pub(crate) fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let core = &self.bootstrap.core;
        let own = entry(core.tree.rank, bytes);
        let decision = self.converge(own, all_entries)?;
        let entries = read_entries(&decision).filter(|entries| {
            entries.len() == core.tree.size as usize
                && entries.iter().enumerate().all(|(n, (rank, _))| rank.index() == n)
        });
        match entries {
            Some(entries) => Ok(entries.into_iter().map(|(_, bytes)| bytes.to_vec()).collect()),
            None => {
                core.fail_group(GroupFault::ProtocolViolation(Rank(0)), None);
                Err(Error::Protocol {
                    rank: Rank(0),
                    what: "the gathered data does not have one entry for each rank",
                })
            }
        }
    }

    pub(crate) fn agree(&self, vote: Result<(), &str>) -> Result<VoteResult> {
        let own = match vote {
            Ok(()) => Vec::new(),
            Err(reason) => [&self.bootstrap.rank().0.to_le_bytes(), reason.as_bytes()].concat(),
        };
        let decision = self.converge(own, lowest_refusal)?;
        match decision.split_first_chunk::<4>() {
            None if decision.is_empty() => Ok(VoteResult::Agreed),
            None => {
                self.bootstrap.core.fail_group(GroupFault::ProtocolViolation(Rank(0)), None);
                Err(Error::Protocol { rank: Rank(0), what: "a vote is not a rank and a reason" })
            }
            Some((rank, reason)) => Ok(VoteResult::Refused {
                rank: Rank(u32::from_le_bytes(*rank)),
                reason: String::from_utf8_lossy(reason).into_owned(),
            }),
        }
    }

    fn all_to_allv(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let core = &self.bootstrap.core;
        let (tree, timeout) = (&core.tree, self.bootstrap.timeout);
        let op = core.state().begun;
        let mut received: Vec<Option<Vec<u8>>> = vec![None; parts.len()];
        for (to, part) in (0..tree.size).map(Rank).zip(parts) {
            if to == tree.rank {
                received[to.index()] = Some(part.to_vec());
            } else {
                core.post_to_any(
                    FrameHeader::new(FrameKind::Direct, self.operation, tree.rank, to, op),
                    part,
                );
            }
        }
        loop {
            let mut state = self.agreed_state(op)?;
            for (from, slot) in (0..tree.size).map(Rank).zip(&mut received) {
                if slot.is_none()
                    && let Some(message) = state.inbox.remove(&(op, FrameKind::Direct, from))
                {
                    *slot = Some(message.bytes);
                }
            }
            if received.iter().all(Option::is_some) {
                drop(state);
                self.finish(op);
                // In all_to_all, other ranks may still need this rank to forward their parts, so no rank continues
                // before all ranks have received all parts.
                self.next_operation();
                self.converge(Vec::new(), no_bytes)?;
                return Ok(received.into_iter().flatten().collect());
            }
            if state.group.check(op).is_err() {
                drop(state);
                return Err(self.failure(op));
            }
            // Neighbours of a stalled rank give up first: a rank that is not a neighbour would also report the ranks
            // that are only reached through the stalled rank.
            let give_up = match core.stalled().is_empty() {
                false => timeout,
                true if tree.is_root() => timeout.saturating_add(margin(timeout) / 2),
                true => give_up_on_decision_at(timeout),
            };
            let left = give_up.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                drop(state);
                let missing = (0..tree.size).map(Rank).filter(|rank| received[rank.index()].is_none());
                core.fail_group(GroupFault::Missing(core.ranks_to_report(missing)), None);
                return Err(self.failure(op));
            }
            let waited = core.changed.wait_timeout(state, left.min(WAIT_SLICE));
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            self.abort_if_interrupted();
        }
    }

    /// Aborts the group if the caller of the operation is interrupted: otherwise the other ranks would wait for this
    /// rank until their timeouts expire.
    pub(crate) fn abort_if_interrupted(&self) {
        if interrupt::is_interrupted() {
            self.bootstrap.abort();
        }
    }

    fn post_to_parent(&self, kind: FrameKind, op: u64, bytes: &[u8]) {
        let core = &self.bootstrap.core;
        if let Some(parent) = core.tree.parent() {
            core.post(parent, FrameHeader::new(kind, self.operation, core.tree.rank, parent, op), bytes);
        }
    }

    pub(crate) fn finish(&self, op: u64) {
        let mut state = self.bootstrap.core.state();
        state.finished = op;
        state.inbox.retain(|(of, _, _), _| *of > op);
        state.fds.retain(|(of, _), _| *of > op);
    }

    /// Locks the state of this rank. If a message of operation number `op` shows that its sender made another call than
    /// this rank, the group fails. Every wait for messages of an operation begins with this check, so that no message of
    /// another call is taken for one of this call.
    pub(crate) fn agreed_state(&self, op: u64) -> Result<MutexGuard<'_, RankState>> {
        let core = &self.bootstrap.core;
        let state = core.state();
        match state.find_disagreement(core.tree.rank, op, self.operation) {
            None => Ok(state),
            Some(disagreement) => {
                drop(state);
                core.fail_group(GroupFault::RanksDisagree(disagreement), None);
                Err(self.failure(op))
            }
        }
    }

    /// Assigns the next operation number, for an operation that consists of several numbered steps.
    pub(crate) fn next_operation(&self) {
        self.bootstrap.core.state().begun += 1;
    }

    /// Returns the error with which operation `op` fails.
    pub(crate) fn failure(&self, op: u64) -> Error {
        let error = {
            let state = self.bootstrap.core.state();
            state.group.error_within(op, self.bootstrap.timeout).unwrap_or_else(|| {
                unreachable!("operation {op} cannot finish, and a group that has failed stays so")
            })
        };
        wait_remaining_timeout(error, self.began)
    }
}

/// Waits for the remaining part of this rank's timeout, if another rank that began earlier has ended the operation for
/// all ranks. If the remaining part is long, the function returns at once, and the error contains the time for which
/// this rank has waited.
pub(crate) fn wait_remaining_timeout(error: Error, began: Instant) -> Error {
    let Error::Timeout { missing, timeout, joining } = error else { return error };
    if timeout.saturating_sub(began.elapsed()) > margin(timeout) {
        // Rounds the waiting time in the error down to whole milliseconds.
        let waited = began.elapsed();
        let waited = Duration::new(waited.as_secs(), waited.subsec_millis() * 1_000_000);
        return Error::Timeout { missing, timeout: waited, joining };
    }
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        if left.is_zero() || interrupt::is_interrupted() {
            return Error::Timeout { missing, timeout, joining };
        }
        std::thread::sleep(left.min(WAIT_SLICE));
    }
}

/// Removes the neighbours' messages for operation `op` from the inbox, and returns them. The caller has checked that
/// they are of this rank's call.
fn take_inputs(state: &mut RankState, tree: &crate::topology::Topology, op: u64) -> Result<Vec<Input>> {
    let mut inputs = Vec::new();
    for child in tree.children() {
        if let Some(message) = state.inbox.remove(&(op, FrameKind::Vote, child)) {
            inputs.push(Input::Vote { child, vote: message.bytes });
        }
        if let Some(message) = state.inbox.remove(&(op, FrameKind::MissingReport, child)) {
            let malformed = |_| Error::Protocol { rank: child, what: "its report is malformed" };
            let missing = decode_ranks(&message.bytes).map_err(malformed)?;
            inputs.push(Input::Report { child, missing });
        }
    }
    if let Some(parent) = tree.parent()
        && let Some(message) = state.inbox.remove(&(op, FrameKind::Decision, parent))
    {
        inputs.push(Input::Decision(message.bytes));
    }
    Ok(inputs)
}

fn check_len(len: usize) -> Result<()> {
    let limit = MAX_PER_RANK;
    if len > limit { Err(Error::TooLong { len, limit }) } else { Ok(()) }
}

fn no_bytes(_: Vec<u8>, _: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    Vec::new()
}

/// Merges the votes of a broadcast: returns the vote of the root, which is the only vote that is not empty.
fn root_bytes(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    if own.is_empty() {
        children.values().find(|vote| !vote.is_empty()).cloned().unwrap_or_default()
    } else {
        own
    }
}

/// Merges the votes of `agree`: returns the vote against from the lowest rank, or an empty vote if all ranks agree. A
/// malformed vote has priority, so that every rank receives it.
fn lowest_refusal(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    let rank = |vote: &[u8]| vote.first_chunk().map(|rank| u32::from_le_bytes(*rank));
    let votes = std::iter::once(&own).chain(children.values());
    votes.filter(|vote| !vote.is_empty()).min_by_key(|vote| rank(vote)).cloned().unwrap_or_default()
}

fn entry(rank: Rank, bytes: &[u8]) -> Vec<u8> {
    [&rank.0.to_le_bytes()[..], &(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn read_entries(bytes: &[u8]) -> Option<Vec<(Rank, &[u8])>> {
    let mut reader = FieldReader(bytes);
    let mut entries = Vec::new();
    while !reader.0.is_empty() {
        let rank = Rank(reader.u32().ok()?);
        let len = usize::try_from(reader.u64().ok()?).ok()?;
        entries.push((rank, reader.bytes(len).ok()?));
    }
    Some(entries)
}

/// Merges the votes of all_gather: returns the entries of all votes, ordered by rank.
fn all_entries(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    let votes = std::iter::once(&own).chain(children.values());
    let mut entries: Vec<_> = votes.filter_map(|vote| read_entries(vote)).flatten().collect();
    entries.sort_by_key(|(rank, _)| *rank);
    let mut merged = Vec::with_capacity(votes_len(&own, children));
    for (rank, bytes) in entries {
        merged.extend_from_slice(&rank.0.to_le_bytes());
        merged.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        merged.extend_from_slice(bytes);
    }
    merged
}

fn votes_len(own: &[u8], children: &BTreeMap<Rank, Vec<u8>>) -> usize {
    own.len() + children.values().map(Vec::len).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_malformed_vote_has_priority_over_all_others() {
        let against = |rank: u32| [&rank.to_le_bytes()[..], b"no"].concat();
        let votes = BTreeMap::from([(Rank(1), against(1)), (Rank(2), vec![])]);
        assert_eq!(lowest_refusal(vec![], &votes), against(1));
        let votes = BTreeMap::from([(Rank(1), against(1)), (Rank(2), vec![7, 7])]);
        assert_eq!(lowest_refusal(vec![], &votes), [7, 7]);
    }
}
