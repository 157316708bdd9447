//! The progress thread of a communicator: reads from all links, forwards frames, and detects deaths of neighbours.
//!
//! It holds the lock of the rank's [`LivenessLock`](wholemem_os::robust::LivenessLock) while it runs, so that others see its death before the
//! kernel has closed the descriptors of the process, and also if another process keeps its sockets open. It waits in one `poll` over
//! all links, and wakes every 10 ms to read the liveness pages of its neighbours (every 40 ms in large groups, where many
//! threads share the processors).

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_os::packet::{MAX_FDS, MAX_PACKET};
use wholemem_os::robust::{LockState, LivenessProbe};
use wholemem_os::{Deadline, Error as OsError, PacketSocket, PidFd};

use crate::core::{Core, Message, Phase, Tagged};
use crate::fault::Fault;
use crate::handshake::Acceptor;
use crate::links::{Left, Link, Next, Packet};
use crate::machine::join::{Input, JoinProtocol, JoinRecord};
use crate::machine::stall_detector::StallDetector;
use crate::rank::Tree;
use crate::wire::Malformed;
use crate::wire::frame::{self, Header, Kind, What, decode_fault, decode_news, decode_ranks};
use crate::{Rank, Result};

mod joining;

use self::joining::Joining;

/// How often to look at the pulses of the neighbours.
const LOOK: Duration = Duration::from_millis(10);
const LOOK_IN_LARGE_GROUPS: Duration = Duration::from_millis(40);
const LARGE: u32 = 64;

/// How long neighbours may take to read what this rank has still to send when it leaves: in a group that stands, the
/// end of operations that are done here and not yet there; in one that has fallen, only the word of it.
const LAST_WORDS: Duration = Duration::from_secs(10);
const LAST_WORDS_OF_THE_FALLEN: Duration = Duration::from_millis(200);

/// How many frames of one link are read before the others have their turn.
const TURN: usize = 64;

/// A link as the thread reads it.
#[derive(Debug)]
struct Reading {
    link: Arc<Link>,
    /// The connection has ended. That says nothing by itself.
    ended: bool,
    /// Messages of which a part has come.
    partial: HashMap<(Kind, u64, Rank), Vec<u8>>,
}

impl Reading {
    fn new(link: Arc<Link>) -> Self {
        Self { link, ended: false, partial: HashMap::new() }
    }

    /// What to wait for on this link.
    fn poll(&self) -> Option<PollFd<'_>> {
        let full = self.link.flush() == Left::Full;
        let flags = if full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        (!self.ended).then(|| PollFd::from_borrowed_fd(self.link.socket.as_fd(), flags))
    }
}

/// A neighbour, as the thread watches it.
#[derive(Debug)]
struct Peer {
    pulse: LivenessProbe,
    process: PidFd,
    stall: StallDetector,
}

#[derive(Debug)]
pub(crate) struct Progress {
    core: Arc<Core>,
    began: Instant,
    timeout: Duration,
    protocol: Option<JoinProtocol>,
    joining: Joining,
    /// The neighbours in the tree.
    peers: BTreeMap<Rank, Peer>,
    /// The links to them, and to others that have one.
    readings: BTreeMap<Rank, Reading>,
    /// The group that this one is a part of, while this one comes together.
    whole: Option<Arc<Core>>,
    buffer: Vec<u8>,
    looked: Instant,
}

impl Progress {
    pub(crate) fn new(
        core: Arc<Core>,
        timeout: Duration,
        acceptor: Option<Acceptor>,
        whole: Option<Arc<Core>>,
    ) -> Self {
        let now = Instant::now();
        let protocol = Some(JoinProtocol::new(core.tree, timeout));
        let joining = Joining::new(core.tree.rank, acceptor);
        Self {
            core,
            began: now,
            timeout,
            protocol,
            joining,
            peers: BTreeMap::new(),
            readings: BTreeMap::new(),
            whole,
            buffer: vec![0; MAX_PACKET],
            looked: now,
        }
    }

    /// Runs until the communicator is dropped.
    pub(crate) fn run(mut self) {
        let core = Arc::clone(&self.core);
        let hold = match core.heart.acquire() {
            Ok(hold) => hold,
            Err(error) => return self.fail(error.into()),
        };
        self.protocol(Input::Tick);
        loop {
            core.heart.add_heartbeat();
            self.sleep();
            if core.state().stop {
                break;
            }
            self.join();
            self.read();
            for reading in self.readings.values() {
                reading.link.flush();
            }
            self.look();
            self.protocol(Input::Tick);
        }
        self.say_goodbye();
        drop(hold);
    }

    fn look_every(&self) -> Duration {
        if self.core.tree.size > LARGE { LOOK_IN_LARGE_GROUPS } else { LOOK }
    }

    /// Waits until something can be read or sent, or it is time to look.
    fn sleep(&mut self) {
        let mut wait = self.look_every().saturating_sub(self.looked.elapsed());
        if let Some(again) = self.joining.again() {
            wait = wait.min(again);
        }
        if let Some(protocol) = &self.protocol {
            wait = wait.min(protocol.next_tick().saturating_sub(self.began.elapsed()));
        }
        let mut polls = vec![PollFd::new(&self.core.wake, PollFlags::IN)];
        polls.extend(self.joining.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        polls.extend(self.readings.values().filter_map(Reading::poll));
        polls.extend(
            self.peers.values().map(|peer| PollFd::from_borrowed_fd(peer.process.as_fd(), PollFlags::IN)),
        );
        let wait = Timespec::try_from(wait).expect("some milliseconds");
        // An interruption, or too many descriptors: the next round looks at everything anyway.
        let _ = poll(&mut polls, Some(&wait));
        let mut woken = [0; 8];
        let _ = rustix::io::read(&self.core.wake, &mut woken);
    }

    fn read(&mut self) {
        for rank in self.readings.keys().copied().collect::<Vec<_>>() {
            self.read_from(rank, TURN);
        }
        // Of a neighbour, its pulse decides; of the others, the neighbours of theirs tell.
        let (peers, core) = (&self.peers, &self.core);
        self.readings.retain(|rank, reading| {
            let stays = !reading.ended || peers.contains_key(rank);
            if !stays {
                core.paths().close(*rank);
            }
            stays
        });
    }

    /// Reads at most `most` frames of one rank.
    fn read_from(&mut self, rank: Rank, most: usize) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..most {
            let Some(reading) = self.readings.get_mut(&rank).filter(|reading| !reading.ended) else { break };
            match reading.link.socket.recv_with_fds(&mut buffer, MAX_FDS, Deadline::NOW) {
                Ok((len, fds)) => {
                    if let Err(Malformed(what)) = self.take(rank, &buffer[..len], fds) {
                        tracing::warn!(%rank, what, "a rank broke the protocol");
                        self.core.fall(Fault::Broke(rank), None);
                    }
                }
                Err(OsError::TimedOut) => break,
                Err(OsError::FdsTruncated { .. }) => {
                    // Its sender waits for the word that it was taken.
                    let link = Arc::clone(&reading.link);
                    self.acknowledge(&link);
                    self.lose(rank, &buffer);
                }
                Err(_) => reading.ended = true,
            }
        }
        self.buffer = buffer;
    }

    /// Descriptors of a frame are lost, its bytes are not: it was an offer, or else a batch.
    fn lose(&mut self, from: Rank, buffer: &[u8]) {
        match frame::decode(&buffer[..frame::HEADER]) {
            Ok((header, [])) if header.kind == Kind::Offer => {
                let without = Header { fds: 0, ..header }.encode(&[]);
                if let Err(Malformed(what)) = self.take(from, &without, Vec::new()) {
                    tracing::warn!(rank = %from, what, "a rank broke the protocol");
                    self.core.fall(Fault::Broke(from), None);
                }
            }
            _ => {
                self.core.state().fds_lost = true;
                self.core.changed.notify_all();
            }
        }
    }

    fn acknowledge(&self, link: &Link) {
        let header = Header::new(Kind::FdsTaken, What::Nothing, self.core.tree.rank, link.peer, 0);
        for frame in header.frames(&[]) {
            link.post_urgent(Packet::from(frame));
        }
    }

    /// Takes one frame of a neighbour: passes it on, or puts it with the rest of its message.
    fn take(&mut self, from: Rank, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Malformed> {
        let (header, payload) = frame::decode(bytes)?;
        if usize::from(header.fds) != fds.len() {
            return Err(Malformed("a frame has another number of descriptors than it says"));
        }
        if header.kind == Kind::Offer
            && !fds.is_empty()
            && let Some(link) = self.core.link(from)
        {
            self.acknowledge(&link);
        }
        if !self.joining.has_place(header.dst) {
            return self.pass_on(from, header, bytes, fds);
        }
        if !header.kind.travels() && header.kind != Kind::Left && header.src != from {
            return Err(Malformed("a frame was passed on that is for neighbours only"));
        }
        if header.kind != Kind::Direct && !self.peers.contains_key(&from) {
            return Err(Malformed("a frame came by a link that is for messages only"));
        }
        if header.total == payload.len() as u64 {
            return self.deliver(from, header, payload.to_vec(), fds);
        }
        let Some(reading) = self.readings.get_mut(&from) else { return Ok(()) };
        let key = (header.kind, header.op, header.src);
        let partial = reading.partial.entry(key).or_default();
        if partial.len() as u64 != header.offset {
            return Err(Malformed("a frame does not follow the one before it"));
        }
        partial.extend_from_slice(payload);
        if (partial.len() as u64) < header.total {
            return Ok(());
        }
        let whole = std::mem::take(partial);
        reading.partial.remove(&key);
        self.deliver(from, header, whole, fds)
    }

    fn pass_on(&self, from: Rank, header: Header, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Malformed> {
        if !header.kind.travels() || header.dst.0 >= self.core.tree.size {
            return Err(Malformed("a frame is for somebody else"));
        }
        let packet = Packet { bytes: bytes.to_vec(), fds: fds.into_iter().map(Arc::new).collect() };
        match self.core.tree.hop_towards(header.dst) {
            Some(hop) if hop != from => {
                self.core.post_packets(hop, [packet]);
                Ok(())
            }
            _ => Err(Malformed("a frame came the wrong way")),
        }
    }

    fn deliver(
        &mut self,
        from: Rank,
        header: Header,
        bytes: Vec<u8>,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Malformed> {
        let Header { kind, what, src, op, .. } = header;
        let is_far = src.0 < self.core.tree.size
            && src != self.core.tree.rank
            && self.core.tree.neighbours().all(|neighbour| neighbour != src);
        match kind {
            Kind::Offer | Kind::Accepted | Kind::Declined if !is_far => {
                return Err(Malformed("a link is offered or answered by a rank that needs none"));
            }
            Kind::News => {
                let news = decode_news(&bytes)?;
                self.check_ranks(news.joined.iter().chain(&news.died))?;
                self.protocol(Input::News(news));
            }
            Kind::Decision => {
                let fault = decode_fault(&bytes)?;
                self.check_ranks(fault.iter().flat_map(Fault::ranks))?;
                self.protocol(Input::Decision(fault.map_or(Ok(()), Err)));
            }
            Kind::Fall => {
                let fault = decode_fault(&bytes)?.ok_or(Malformed("a fall has no fault"))?;
                self.check_ranks(fault.ranks())?;
                self.core.fall(fault, Some(from));
            }
            Kind::Left => self.core.leave(src, op, Some(from)),
            Kind::FdsTaken => {
                if let Some(link) = self.core.link(from) {
                    link.taken();
                }
            }
            Kind::Fds => {
                let tags = decode_tags(&bytes, fds)?;
                if let Some(link) = self.core.link(from) {
                    self.acknowledge(&link);
                }
                let mut state = self.core.state();
                // Late ones of an operation that failed are closed here.
                if op > state.finished {
                    state.fds.entry((op, from)).or_default().extend(tags);
                }
                self.core.changed.notify_all();
            }
            Kind::Offer => {
                // What is no packet socket is as good as lost.
                let socket = fds.into_iter().next().and_then(|fd| PacketSocket::adopt(fd).ok());
                let next = self.core.paths().offered(src, socket);
                self.follow(src, next);
            }
            Kind::Accepted | Kind::Declined => {
                let next = self.core.paths().answered(src, kind == Kind::Accepted);
                self.follow(src, next);
            }
            Kind::Report => {
                self.check_ranks(&decode_ranks(&bytes)?)?;
                self.put(op, kind, src, Message { what, bytes });
            }
            Kind::Up | Kind::Down | Kind::Direct | Kind::FdsLost => {
                self.put(op, kind, src, Message { what, bytes });
            }
            Kind::Greeting => return Err(Malformed("a rank greeted twice")),
        }
        Ok(())
    }

    /// A neighbour names ranks of the group only.
    fn check_ranks<'r>(&self, ranks: impl IntoIterator<Item = &'r Rank>) -> Result<(), Malformed> {
        let size = self.core.tree.size;
        let are_known = ranks.into_iter().all(|rank| rank.0 < size);
        if are_known { Ok(()) } else { Err(Malformed("a frame names a rank that is not in the group")) }
    }

    fn follow(&mut self, peer: Rank, next: Vec<Next>) {
        if let Some(link) = self.core.follow(peer, next) {
            self.readings.insert(peer, Reading::new(link));
        }
    }

    fn put(&self, op: u64, kind: Kind, src: Rank, message: Message) {
        let mut state = self.core.state();
        if op > state.finished {
            state.inbox.insert((op, kind, src), message);
        }
        self.core.changed.notify_all();
    }

    /// Looks who of the neighbours still lives.
    fn look(&mut self) {
        let (mut dead, passed) = (Vec::new(), self.looked.elapsed());
        for (rank, peer) in &mut self.peers {
            match peer.pulse.state() {
                LockState::Alive if peer.process.has_exited() != Ok(true) => {}
                _ => dead.push(*rank),
            }
            peer.stall.observe(peer.pulse.heartbeats(), passed);
        }
        for rank in dead {
            self.on_peer_exit(rank);
        }
        // Who is not there, because it has left, does not stand still: it is not to be named for those behind it.
        let is_still = |rank: &Rank| self.peers.get(rank).is_some_and(|peer| peer.stall.is_stalled());
        *self.core.still() = self.core.tree.neighbours().filter(is_still).collect();
        self.looked = Instant::now();
        self.look_at_the_whole();
        self.take_vacant_places();
        self.probe_unaccounted();
    }

    /// Handles that the thread of a neighbour has ended: it has left, or died. What it had sent before is read first.
    fn on_peer_exit(&mut self, rank: Rank) {
        self.read_from(rank, usize::MAX);
        let Some(peer) = self.peers.remove(&rank) else { return };
        self.readings.remove(&rank);
        self.core.links().remove(&rank);
        if peer.pulse.state() == LockState::Died {
            self.core.id.address(rank).remove();
        }
        if self.protocol.is_some() {
            return match JoinRecord::decode(peer.pulse.status(), Tree { rank, ..self.core.tree }) {
                Ok(record) => {
                    if peer.pulse.state() == LockState::Died {
                        // The rank that died may have been in the place of another.
                        self.core.id.address(record.rank).remove();
                    }
                    self.protocol(Input::Died(rank, record));
                }
                Err(Malformed(what)) => {
                    tracing::warn!(%rank, what, "a rank broke the protocol");
                    self.protocol(Input::Decision(Err(Fault::Broke(rank))));
                }
            };
        }
        let has_left = self.core.state().group.has_left(rank);
        // Free without a word is a rank whose group had fallen already, or whose joining failed.
        if !has_left && (peer.pulse.state() == LockState::Died || peer.process.has_exited() == Ok(true)) {
            self.core.fall(Fault::Lost(rank), None);
        } else if !has_left {
            let after = self.core.state().begun;
            self.core.leave(rank, after, None);
        }
    }

    /// A part of a group cannot come together when the whole has fallen.
    fn look_at_the_whole(&mut self) {
        let fallen = self.whole.as_ref().and_then(|whole| whole.state().group.fault().cloned());
        if let (Some(fault), Some(_)) = (fallen, &self.protocol) {
            // Nobody will join this part any more, and one of its members can no longer clear up behind itself.
            for rank in self.core.tree.neighbours() {
                self.core.id.address(rank).remove();
            }
            self.fail(fault.error());
        }
    }

    /// Tells the neighbours that this rank leaves, and waits a little until they have taken it.
    fn say_goodbye(&mut self) {
        let (is_up, has_fallen, finished) = {
            let state = self.core.state();
            (state.phase == Phase::Up, state.group.fault().is_some(), state.finished)
        };
        let rank = self.core.tree.rank;
        if is_up && !has_fallen {
            for peer in self.peers.keys() {
                self.core.post(*peer, Header::new(Kind::Left, What::Nothing, rank, *peer, finished), &[]);
            }
        }
        let stands = is_up && !has_fallen;
        let deadline = Deadline::after(if stands { LAST_WORDS } else { LAST_WORDS_OF_THE_FALLEN });
        loop {
            self.peers.retain(|_, peer| peer.pulse.state() == LockState::Alive);
            let peers = &self.peers;
            self.readings.retain(|rank, reading| peers.contains_key(rank) && !reading.ended);
            let all_said = self.readings.values().all(|reading| reading.link.flush() == Left::Nothing);
            if all_said || deadline.has_passed() {
                break;
            }
            let mut polls: Vec<_> = self.readings.values().filter_map(Reading::poll).collect();
            let left = deadline.remaining().map_or(LOOK, |left| left.min(LOOK));
            let left = Timespec::try_from(left).expect("some milliseconds");
            let _ = poll(&mut polls, Some(&left));
            // Words that wait behind a batch of descriptors go when the neighbour says that it has taken it. Nor do we
            // keep those waiting who leave too.
            self.read();
        }
    }
}

/// Who each descriptor of a batch is from: a rank and an index, eight bytes each.
fn decode_tags(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<Tagged>, Malformed> {
    let (tags, []) = bytes.as_chunks::<8>() else {
        return Err(Malformed("a batch of descriptors does not end with a tag"));
    };
    if tags.len() != fds.len() {
        return Err(Malformed("a batch has another number of tags than of descriptors"));
    }
    let number = |tag: &[u8; 8], at| u32::from_le_bytes(std::array::from_fn(|n| tag[at + n]));
    let tagged = tags.iter().zip(fds).map(|(tag, fd)| Tagged {
        src: Rank(number(tag, 0)),
        index: number(tag, 4),
        fd: Arc::new(fd),
    });
    Ok(tagged.collect())
}

#[cfg(test)]
mod tests;
