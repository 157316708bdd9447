//! The collectives of bytes: barrier, broadcast, all_gather, all_to_all and agree.
//!
//! All but all_to_all are one pass of votes up the tree and of the decision down ([`converge`](crate::machine)). They differ in how
//! votes are merged. all_to_all sends each part to its rank.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use wholemem_os::interrupt;

use super::Turn;
use crate::core::{Message, State};
use crate::fault::Fault;
use crate::machine::converge::{Converge, Input, Merge, Output};
use crate::machine::{give_up_on_word_at, margin};
use crate::wire::Reader;
use crate::wire::frame::{Header, Kind, What, decode_ranks, encode_ranks};
use crate::{Bootstrap, Error, Rank, Result};

/// How often a waiting rank checks whether its neighbours run, and whether it is interrupted.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);

/// The most that one rank gives to an operation, in bytes. More is for shared memory.
const MAX_PER_RANK: usize = 1 << 30;

/// What the ranks have agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// All were for it.
    Agreed,
    /// At least one was against it; this is the lowest of them, and the same on every rank.
    Refused {
        /// Which rank.
        rank: Rank,
        /// What it said.
        why: String,
    },
}

impl Bootstrap {
    /// Waits until every rank is here.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Timeout`] and the other errors of a group that has fallen.
    pub fn barrier(&self) -> Result<()> {
        self.begin()?.converge(What::Barrier, Vec::new(), nothing).map(drop)
    }

    /// Gives all ranks the bytes of rank `root`; those of the others are not looked at.
    ///
    /// # Errors
    /// [`Error::NoSuchRank`], [`Error::TooLong`], and those of a group that has fallen.
    pub fn broadcast(&self, root: Rank, bytes: &[u8]) -> Result<Vec<u8>> {
        if root.0 >= self.size() {
            return Err(Error::NoSuchRank { rank: root, size: self.size() });
        }
        check_len(bytes.len())?;
        // Everybody's vote is who they think it is from, so that a difference is noticed and no wrong bytes passed.
        let mut vote = root.0.to_le_bytes().to_vec();
        if root == self.rank() {
            vote.push(1);
            vote.extend(bytes);
        }
        let decision = self.begin()?.converge(What::Broadcast, vote, whoever_has_it)?;
        match decision.split_at_checked(5) {
            Some((front, bytes)) if front[..4] == root.0.to_le_bytes() => Ok(bytes.to_vec()),
            _ => {
                self.core.fall(Fault::Broke(root), None);
                Err(Error::Mismatch { rank: root, here: "broadcast", there: "broadcast of another rank" })
            }
        }
    }

    /// Gives all ranks the bytes of all ranks, in the order of their ranks. They may be of different lengths.
    ///
    /// # Errors
    /// [`Error::TooLong`], and those of a group that has fallen.
    pub fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        check_len(bytes.len())?;
        self.begin()?.all_gather(What::AllGather, bytes)
    }

    /// Sends the `n`th part to rank `n`, and returns what each rank has sent here. All parts of all ranks are of the same
    /// length; with different ones, use [`all_to_allv`](Self::all_to_allv).
    ///
    /// # Errors
    /// [`Error::WrongCount`] when `bytes` cannot be cut into as many equal parts as there are ranks, and those of a
    /// group that has fallen.
    pub fn all_to_all(&self, bytes: &[u8]) -> Result<Vec<u8>> {
        let size = self.core.tree.size as usize;
        if !bytes.len().is_multiple_of(size) {
            return Err(Error::WrongCount { count: bytes.len(), size: self.size() });
        }
        let len = bytes.len() / size;
        let parts: Vec<_> = (0..size).map(|n| &bytes[n * len..(n + 1) * len]).collect();
        let received = self.all_to_allv(&parts)?;
        let of_another_len = (0..).map(Rank).zip(&received).find(|(_, part)| part.len() != len);
        if let Some((rank, _)) = of_another_len {
            self.core.fall(Fault::Broke(rank), None);
            return Err(Error::Protocol { rank, what: "its parts are of another length" });
        }
        Ok(received.concat())
    }

    /// Sends the `n`th part to rank `n`, and returns what each rank has sent here.
    ///
    /// # Errors
    /// [`Error::WrongCount`], [`Error::TooLong`], and those of a group that has fallen.
    pub fn all_to_allv(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        if parts.len() != self.size() as usize {
            return Err(Error::WrongCount { count: parts.len(), size: self.size() });
        }
        parts.iter().try_for_each(|part| check_len(part.len()))?;
        self.begin()?.all_to_allv(parts)
    }

    /// Finds out whether all ranks are for something: the outcome of a step that each has tried for itself, for one.
    ///
    /// The verdict is the same on all ranks that live when it is made. If one dies after that, a survivor may get it and
    /// another the error; but then the group has fallen on all of them.
    ///
    /// # Errors
    /// [`Error::TooLong`], and those of a group that has fallen.
    pub fn agree(&self, vote: Result<(), &str>) -> Result<Verdict> {
        check_len(vote.err().map_or(0, str::len))?;
        self.begin()?.agree(vote)
    }
}

impl Turn<'_> {
    /// One pass up and down the tree.
    pub(crate) fn converge(&self, what: What, own: Vec<u8>, merge: Merge) -> Result<Vec<u8>> {
        let core = &self.bootstrap.core;
        let (tree, timeout) = (core.tree, self.bootstrap.timeout);
        let mut machine = Converge::new(tree, timeout, own, merge);
        let mut outputs = machine.start();
        let op = core.state().begun;
        loop {
            for output in outputs.drain(..) {
                match output {
                    Output::Up(bytes) => self.tell_parent(Kind::Up, what, op, &bytes),
                    Output::Report(missing) => {
                        self.tell_parent(Kind::Report, what, op, &encode_ranks(&missing))
                    }
                    Output::Down(bytes) => {
                        for child in tree.children() {
                            core.post(child, Header::new(Kind::Down, what, tree.rank, child, op), &bytes);
                        }
                    }
                    Output::Done(bytes) => {
                        self.finish(op);
                        return Ok(bytes);
                    }
                    Output::Failed(missing) => {
                        core.fall(Fault::Missing(missing), None);
                        return Err(self.fallen(op));
                    }
                }
            }
            let mut state = core.state();
            let mut inputs = match take_inputs(&mut state, tree, op, what) {
                Ok(inputs) => inputs,
                Err(error) => {
                    drop(state);
                    return Err(self.out_of_step(error));
                }
            };
            if inputs.is_empty() {
                if state.group.check(op).is_err() {
                    drop(state);
                    return Err(self.fallen(op));
                }
                let now = self.began.elapsed();
                let wait = machine.next_tick(now).saturating_sub(now).min(GLANCE);
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

    pub(crate) fn all_gather(&self, what: What, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let core = &self.bootstrap.core;
        let own = entry(core.tree.rank, bytes);
        let decision = self.converge(what, own, all_entries)?;
        let entries = read_entries(&decision).filter(|entries| {
            entries.len() == core.tree.size as usize
                && entries.iter().enumerate().all(|(n, (rank, _))| rank.index() == n)
        });
        match entries {
            Some(entries) => Ok(entries.into_iter().map(|(_, bytes)| bytes.to_vec()).collect()),
            None => {
                core.fall(Fault::Broke(Rank(0)), None);
                Err(Error::Protocol { rank: Rank(0), what: "what was gathered is not one entry a rank" })
            }
        }
    }

    pub(crate) fn agree(&self, vote: Result<(), &str>) -> Result<Verdict> {
        let own = match vote {
            Ok(()) => Vec::new(),
            Err(why) => [&self.bootstrap.rank().0.to_le_bytes(), why.as_bytes()].concat(),
        };
        let decision = self.converge(What::Agree, own, lowest)?;
        match decision.split_first_chunk::<4>() {
            None if decision.is_empty() => Ok(Verdict::Agreed),
            None => {
                self.bootstrap.core.fall(Fault::Broke(Rank(0)), None);
                Err(Error::Protocol { rank: Rank(0), what: "a vote is no rank and reason" })
            }
            Some((rank, why)) => Ok(Verdict::Refused {
                rank: Rank(u32::from_le_bytes(*rank)),
                why: String::from_utf8_lossy(why).into_owned(),
            }),
        }
    }

    fn all_to_allv(&self, parts: &[&[u8]]) -> Result<Vec<Vec<u8>>> {
        let core = &self.bootstrap.core;
        let (tree, timeout) = (core.tree, self.bootstrap.timeout);
        let op = core.state().begun;
        let mut received: Vec<Option<Vec<u8>>> = vec![None; parts.len()];
        for (to, part) in (0..tree.size).map(Rank).zip(parts) {
            if to == tree.rank {
                received[to.index()] = Some(part.to_vec());
            } else {
                core.post_far(Header::new(Kind::Direct, What::AllToAll, tree.rank, to, op), part);
            }
        }
        let mut state = core.state();
        loop {
            for (from, slot) in (0..tree.size).map(Rank).zip(&mut received) {
                if slot.is_none()
                    && let Some(message) = state.inbox.remove(&(op, Kind::Direct, from))
                {
                    match matching(message, What::AllToAll, from) {
                        Ok(bytes) => *slot = Some(bytes),
                        Err(error) => {
                            drop(state);
                            return Err(self.out_of_step(error));
                        }
                    }
                }
            }
            if received.iter().all(Option::is_some) {
                drop(state);
                self.finish(op);
                // Others may still need us to pass their parts on: nobody goes before all have theirs.
                self.next();
                self.converge(What::AllToAll, Vec::new(), nothing)?;
                return Ok(received.into_iter().flatten().collect());
            }
            if state.group.check(op).is_err() {
                drop(state);
                return Err(self.fallen(op));
            }
            // Those next to a rank that stands still go first: the others would name those behind it too.
            let give_up = match core.still().is_empty() {
                false => timeout,
                true if tree.is_root() => timeout.saturating_add(margin(timeout) / 2),
                true => give_up_on_word_at(timeout),
            };
            let left = give_up.saturating_sub(self.began.elapsed());
            if left.is_zero() {
                drop(state);
                let missing = (0..tree.size).map(Rank).filter(|rank| received[rank.index()].is_none());
                core.fall(Fault::Missing(core.blamed(missing)), None);
                return Err(self.fallen(op));
            }
            let waited = core.changed.wait_timeout(state, left.min(GLANCE));
            drop(waited.unwrap_or_else(PoisonError::into_inner).0);
            self.abort_if_interrupted();
            state = core.state();
        }
    }

    /// Ends the group where whoever called the operation has to go on with something else: the others would wait for
    /// this rank in vain.
    pub(crate) fn abort_if_interrupted(&self) {
        if interrupt::is_interrupted() {
            self.bootstrap.abort();
        }
    }

    fn tell_parent(&self, kind: Kind, what: What, op: u64, bytes: &[u8]) {
        let core = &self.bootstrap.core;
        if let Some(parent) = core.tree.parent() {
            core.post(parent, Header::new(kind, what, core.tree.rank, parent, op), bytes);
        }
    }

    pub(crate) fn finish(&self, op: u64) {
        let mut state = self.bootstrap.core.state();
        state.finished = op;
        state.inbox.retain(|(of, _, _), _| *of > op);
        state.fds.retain(|(of, _), _| *of > op);
    }

    /// Tells the others that the ranks are at different operations.
    fn out_of_step(&self, error: Error) -> Error {
        if let Error::Mismatch { rank, .. } = &error {
            self.bootstrap.core.fall(Fault::Broke(*rank), None);
        }
        error
    }

    /// The next number, for an operation that is made of several.
    pub(crate) fn next(&self) {
        self.bootstrap.core.state().begun += 1;
    }

    /// Why operation `op` cannot finish.
    pub(crate) fn fallen(&self, op: u64) -> Error {
        let error = {
            let state = self.bootstrap.core.state();
            match state.group.fault() {
                Some(fault) => fault.error_within(self.bootstrap.timeout, false),
                None => match state.group.check(op) {
                    Err(error) => error,
                    Ok(()) => {
                        unreachable!("operation {op} cannot finish, and a group that has failed stays so")
                    }
                },
            }
        };
        wait_out(error, self.began)
    }
}

/// Makes the text of a timeout agree with the time that this rank has waited, if another rank, which began earlier, has
/// given up for all. If the rest of this rank's own timeout is short, it passes here; if not, the error tells how long
/// this rank has waited.
pub(crate) fn wait_out(error: Error, began: Instant) -> Error {
    let Error::Timeout { missing, timeout, joining } = error else { return error };
    if timeout.saturating_sub(began.elapsed()) > margin(timeout) {
        // In whole milliseconds.
        let waited = began.elapsed();
        let waited = Duration::new(waited.as_secs(), waited.subsec_millis() * 1_000_000);
        return Error::Timeout { missing, timeout: waited, joining };
    }
    loop {
        let left = timeout.saturating_sub(began.elapsed());
        if left.is_zero() || interrupt::is_interrupted() {
            return Error::Timeout { missing, timeout, joining };
        }
        std::thread::sleep(left.min(GLANCE));
    }
}

/// What has come for this operation from the neighbours.
fn take_inputs(state: &mut State, tree: crate::rank::Tree, op: u64, what: What) -> Result<Vec<Input>> {
    let mut inputs = Vec::new();
    for child in tree.children() {
        if let Some(message) = state.inbox.remove(&(op, Kind::Up, child)) {
            inputs.push(Input::Vote { child, vote: matching(message, what, child)? });
        }
        if let Some(message) = state.inbox.remove(&(op, Kind::Report, child)) {
            let malformed = |_| Error::Protocol { rank: child, what: "its report is malformed" };
            let missing = decode_ranks(&message.bytes).map_err(malformed)?;
            inputs.push(Input::Report { child, missing });
        }
    }
    if let Some(parent) = tree.parent()
        && let Some(message) = state.inbox.remove(&(op, Kind::Down, parent))
    {
        inputs.push(Input::Decision(matching(message, what, parent)?));
    }
    Ok(inputs)
}

fn matching(message: Message, what: What, rank: Rank) -> Result<Vec<u8>> {
    if message.what == what {
        Ok(message.bytes)
    } else {
        Err(Error::Mismatch { rank, here: what.name(), there: message.what.name() })
    }
}

fn check_len(len: usize) -> Result<()> {
    let limit = MAX_PER_RANK;
    if len > limit { Err(Error::TooLong { len, limit }) } else { Ok(()) }
}

fn nothing(_: Vec<u8>, _: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    Vec::new()
}

/// The vote that has the bytes, if one of them does.
fn whoever_has_it(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    const HEAD: usize = 4;
    if own.len() > HEAD {
        return own;
    }
    children.values().find(|vote| vote.len() > HEAD).cloned().unwrap_or(own)
}

/// The vote against of the lowest rank, if there is one. A malformed vote comes before all, so that every rank gets it.
fn lowest(own: Vec<u8>, children: &BTreeMap<Rank, Vec<u8>>) -> Vec<u8> {
    let rank = |vote: &[u8]| vote.first_chunk().map(|rank| u32::from_le_bytes(*rank));
    let votes = std::iter::once(&own).chain(children.values());
    votes.filter(|vote| !vote.is_empty()).min_by_key(|vote| rank(vote)).cloned().unwrap_or_default()
}

fn entry(rank: Rank, bytes: &[u8]) -> Vec<u8> {
    [&rank.0.to_le_bytes()[..], &(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn read_entries(bytes: &[u8]) -> Option<Vec<(Rank, &[u8])>> {
    let mut reader = Reader(bytes);
    let mut entries = Vec::new();
    while !reader.0.is_empty() {
        let rank = Rank(reader.u32().ok()?);
        let len = usize::try_from(reader.u64().ok()?).ok()?;
        entries.push((rank, reader.bytes(len).ok()?));
    }
    Some(entries)
}

/// All entries of all votes, by rank.
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
    fn a_malformed_vote_is_passed_on_before_all_others() {
        let against = |rank: u32| [&rank.to_le_bytes()[..], b"no"].concat();
        let votes = BTreeMap::from([(Rank(1), against(1)), (Rank(2), vec![])]);
        assert_eq!(lowest(vec![], &votes), against(1));
        let votes = BTreeMap::from([(Rank(1), against(1)), (Rank(2), vec![7, 7])]);
        assert_eq!(lowest(vec![], &votes), [7, 7]);
    }
}
