//! The progress thread of a communicator: reads all links, forwards frames, and detects deaths of neighbours.
//!
//! It holds the rank's [`LivenessLock`](wholemem_os::robust::LivenessLock) while it runs, so that other ranks detect
//! its death before the kernel has closed the descriptors of the process, and even if another process holds its
//! sockets open. It waits in one `poll` over all links, and wakes every 10 ms to read the liveness pages of its
//! neighbours (every 40 ms in large groups, where many threads share the processors).

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_os::packet::{MAX_FDS, MAX_PACKET};
use wholemem_os::robust::{LivenessProbe, LockState, RobustGuard};
use wholemem_os::{Deadline, Error as OsError, PacketSocket, PidFd};

use crate::core::{GroupMessage, GroupPhase, RankCore, TaggedFd};
use crate::fault::GroupFault;
use crate::handshake::Acceptor;
use crate::links::{FramePacket, PathAction, RankLink, SendStatus};
use crate::machine::join::{Input, JoinProtocol, JoinRecord};
use crate::machine::stall_detector::StallDetector;
use crate::operation::Operation;
use crate::wire::Malformed;
use crate::wire::frame::{self, FrameHeader, FrameKind, decode_fault, decode_join_update, decode_ranks};
use crate::wire::nodes::{NodeReport, decode_report};
use crate::{Rank, Result};

pub(crate) mod assemble;
mod joining;
pub(crate) mod node_link;
mod nodes;

use self::joining::Joining;
use self::nodes::NodeState;

/// The interval at which the liveness pages of the neighbours are read.
const PROBE_INTERVAL: Duration = Duration::from_millis(10);
const LARGE_GROUP_PROBE_INTERVAL: Duration = Duration::from_millis(40);
const LARGE_GROUP: u32 = 64;

/// The time that a leaving rank waits for its neighbours to read its queued packets. In a usable group, these are the
/// last messages of operations that this rank has finished; in a failed group, only the report of the failure.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(10);
const FAILED_LEAVE_TIMEOUT: Duration = Duration::from_millis(200);

/// The maximum number of frames that are read from one link before the next link is read.
const MAX_FRAMES_PER_LINK: usize = 64;

/// A link to another rank, with the state of reading from it.
#[derive(Debug)]
struct LinkReader {
    link: Arc<RankLink>,
    /// True if the connection has ended. A rank whose connection has ended has not necessarily died.
    ended: bool,
    /// Incomplete messages: those of which only some frames (packets) have arrived.
    partial: HashMap<(FrameKind, u64, Rank), Vec<u8>>,
}

impl LinkReader {
    fn new(link: Arc<RankLink>) -> Self {
        Self { link, ended: false, partial: HashMap::new() }
    }

    /// Sends queued packets, and returns the link's socket for `poll`, unless the connection has ended.
    fn poll(&self) -> Option<PollFd<'_>> {
        let full = self.link.flush() == SendStatus::SocketFull;
        let flags = if full { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
        (!self.ended).then(|| PollFd::from_borrowed_fd(self.link.socket.as_fd(), flags))
    }

    /// Sends queued packets of a rank that leaves. Returns true if the link may be closed. A connection to another node is
    /// closed by the other rank first: if it were closed with unread bytes, that rank's kernel would drop what it has not
    /// read.
    fn is_finished(&self) -> bool {
        let is_sent = self.link.flush() == SendStatus::Done;
        match self.link.socket.stream() {
            None => is_sent,
            Some(stream) => {
                if is_sent {
                    stream.shut_down_sending();
                }
                self.ended
            }
        }
    }

    /// Returns true if a frame was received from another node and not read yet.
    fn has_frame(&self) -> bool {
        !self.ended && self.link.socket.stream().is_some_and(crate::links::StreamSocket::has_frame)
    }
}

/// A neighbour in the tree of ranks, with the handles that detect its death.
#[derive(Debug)]
struct Neighbour {
    probe: LivenessProbe,
    process: PidFd,
    stall: StallDetector,
}

/// The state of a communicator's progress thread.
#[derive(Debug)]
pub(crate) struct ProgressThread {
    core: Arc<RankCore>,
    began: Instant,
    timeout: Duration,
    protocol: Option<JoinProtocol>,
    joining: Joining,
    /// The connected neighbours in the tree of ranks.
    peers: BTreeMap<Rank, Neighbour>,
    /// The links to the neighbours, and direct links to other ranks.
    readers: BTreeMap<Rank, LinkReader>,
    /// While joining a split group: the original group, from which this group is split.
    split_from: Option<Arc<RankCore>>,
    /// The connections to other nodes, if the group is on several.
    nodes: Option<NodeState>,
    buffer: Vec<u8>,
    last_probe: Instant,
}

impl ProgressThread {
    pub(crate) fn new(
        core: Arc<RankCore>,
        timeout: Duration,
        acceptor: Option<Acceptor>,
        split_from: Option<Arc<RankCore>>,
    ) -> Self {
        let now = Instant::now();
        let protocol = Some(JoinProtocol::new(core.tree.position(core.tree.rank), timeout));
        let joining = Joining::new(core.tree.rank, acceptor);
        Self {
            core,
            began: now,
            timeout,
            protocol,
            joining,
            peers: BTreeMap::new(),
            readers: BTreeMap::new(),
            split_from,
            nodes: None,
            buffer: vec![0; MAX_PACKET],
            last_probe: now,
        }
    }

    /// Runs the progress thread until this rank leaves the group.
    pub(crate) fn run(mut self) {
        match self.core.liveness.acquire() {
            Ok(guard) => self.run_holding(guard),
            Err(error) => self.fail(error.into()),
        }
    }

    /// Runs the progress thread, which holds its liveness lock already.
    pub(crate) fn run_holding(mut self, guard: RobustGuard) {
        let core = Arc::clone(&self.core);
        self.protocol(Input::Tick);
        loop {
            core.liveness.add_heartbeat();
            self.wait_for_events();
            if core.state().stop {
                break;
            }
            self.join();
            self.read();
            for reader in self.readers.values() {
                reader.link.flush();
            }
            self.probe_neighbours();
            self.step_nodes();
            self.protocol(Input::Tick);
        }
        self.leave();
        drop(guard);
    }

    fn probe_interval(&self) -> Duration {
        if self.core.tree.size > LARGE_GROUP { LARGE_GROUP_PROBE_INTERVAL } else { PROBE_INTERVAL }
    }

    /// Waits until a descriptor is ready, or until it is time for the next probe of neighbours, connection attempt or
    /// protocol tick.
    fn wait_for_events(&mut self) {
        let mut wait = self.probe_interval().saturating_sub(self.last_probe.elapsed());
        if let Some(retry_in) = self.joining.retry_in() {
            wait = wait.min(retry_in);
        }
        if let Some(protocol) = &self.protocol {
            wait = wait.min(protocol.next_tick().saturating_sub(self.began.elapsed()));
        }
        if let Some(tick) = self.nodes.as_ref().and_then(NodeState::tick_within) {
            wait = wait.min(tick);
        }
        if self.nodes.is_some() && self.readers.values().any(LinkReader::has_frame) {
            wait = Duration::ZERO;
        }
        let mut polls = vec![PollFd::new(&self.core.wake, PollFlags::IN)];
        polls.extend(self.joining.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        polls.extend(self.readers.values().filter_map(LinkReader::poll));
        polls.extend(
            self.peers.values().map(|peer| PollFd::from_borrowed_fd(peer.process.as_fd(), PollFlags::IN)),
        );
        if let Some(nodes) = &self.nodes {
            polls.extend(nodes.fds().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
            polls.extend(nodes.polls());
        }
        let wait = Timespec::try_from(wait).expect("a few milliseconds");
        // An error of `poll` is ignored, since the loop checks everything after each wait.
        let _ = poll(&mut polls, Some(&wait));
        let mut woken = [0; 8];
        let _ = rustix::io::read(&self.core.wake, &mut woken);
    }

    fn read(&mut self) {
        for rank in self.readers.keys().copied().collect::<Vec<_>>() {
            self.read_from(rank, MAX_FRAMES_PER_LINK);
        }
        // An ended link to a neighbour is kept: the neighbour's liveness page decides whether it died. The death of any
        // other rank is reported by the neighbours of that rank.
        let (peers, nodes, core) = (&self.peers, &self.nodes, &self.core);
        self.readers.retain(|rank, reader| {
            let is_remote = nodes.as_ref().is_some_and(|nodes| nodes.is_connected(*rank));
            let stays = !reader.ended || is_remote || peers.contains_key(rank);
            if !stays {
                core.paths().close(*rank);
            }
            stays
        });
    }

    /// Reads and handles at most `max_frames` frames (packets) from one rank, without waiting for more.
    fn read_from(&mut self, rank: Rank, max_frames: usize) {
        let mut buffer = std::mem::take(&mut self.buffer);
        for _ in 0..max_frames {
            let Some(reader) = self.readers.get_mut(&rank).filter(|reader| !reader.ended) else { break };
            match reader.link.socket.recv_with_fds(&mut buffer, MAX_FDS) {
                Ok((len, fds)) => {
                    if let Some(nodes) = &mut self.nodes {
                        nodes.heard(rank);
                    }
                    if let Err(Malformed(violation)) = self.on_frame(rank, &buffer[..len], fds) {
                        tracing::warn!(%rank, violation, "a rank violated the protocol");
                        self.core.fail_group(GroupFault::ProtocolViolation(rank), None);
                    }
                }
                Err(OsError::TimedOut) => break,
                Err(OsError::FdsTruncated { .. }) => {
                    // The batch of descriptors is acknowledged although some were lost, because the sender waits for
                    // the acknowledgement.
                    let link = Arc::clone(&reader.link);
                    self.acknowledge(&link);
                    self.on_lost_fds(rank, &buffer);
                }
                Err(_) => reader.ended = true,
            }
        }
        self.buffer = buffer;
    }

    /// Handles a frame whose file descriptors were lost on receipt: an offer of a direct link, or a batch of
    /// descriptors.
    fn on_lost_fds(&mut self, from: Rank, buffer: &[u8]) {
        match frame::decode(&buffer[..frame::HEADER]) {
            Ok((header, [])) if header.kind == FrameKind::LinkOffer => {
                let without = FrameHeader { fds: 0, ..header }.encode(&[]);
                if let Err(Malformed(violation)) = self.on_frame(from, &without, Vec::new()) {
                    tracing::warn!(rank = %from, violation, "a rank violated the protocol");
                    self.core.fail_group(GroupFault::ProtocolViolation(from), None);
                }
            }
            _ => {
                self.core.state().fds_lost = true;
                self.core.changed.notify_all();
            }
        }
    }

    fn acknowledge(&self, link: &RankLink) {
        let header = FrameHeader::new(FrameKind::FdsAck, Operation::None, self.core.tree.rank, link.peer, 0);
        for frame in header.frames(&[]) {
            link.post_urgent(FramePacket::from(frame));
        }
    }

    /// Handles one frame (a packet) from another rank: forwards it towards its destination, or adds it to its message.
    fn on_frame(&mut self, from: Rank, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<(), Malformed> {
        let (header, payload) = frame::decode(bytes)?;
        if usize::from(header.fds) != fds.len() {
            return Err(Malformed("a frame has another number of descriptors than its header"));
        }
        if header.kind == FrameKind::LinkOffer
            && !fds.is_empty()
            && let Some(link) = self.core.link(from)
        {
            self.acknowledge(&link);
        }
        if !self.joining.has_position(header.dst) {
            return self.forward(from, header, bytes, fds);
        }
        if !header.kind.is_forwarded() && header.kind != FrameKind::RankLeft && header.src != from {
            return Err(Malformed("a frame for neighbours only was forwarded"));
        }
        if header.kind != FrameKind::Direct && !self.peers.contains_key(&from) && !self.is_remote(from) {
            return Err(Malformed("a direct link carried a frame that is not a message"));
        }
        if header.total == payload.len() as u64 {
            return self.deliver(from, header, payload.to_vec(), fds);
        }
        let Some(reader) = self.readers.get_mut(&from) else { return Ok(()) };
        let key = (header.kind, header.op, header.src);
        let partial = reader.partial.entry(key).or_default();
        if partial.len() as u64 != header.offset {
            return Err(Malformed("a frame does not continue the previous one"));
        }
        partial.extend_from_slice(payload);
        if (partial.len() as u64) < header.total {
            return Ok(());
        }
        let whole = std::mem::take(partial);
        reader.partial.remove(&key);
        self.deliver(from, header, whole, fds)
    }

    fn forward(
        &self,
        from: Rank,
        header: FrameHeader,
        bytes: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<(), Malformed> {
        if !header.kind.is_forwarded() || header.dst.0 >= self.core.tree.size {
            return Err(Malformed("a frame has a destination that it cannot be forwarded to"));
        }
        let packet = FramePacket { bytes: bytes.to_vec(), fds: fds.into_iter().map(Arc::new).collect() };
        match self.core.tree.hop_towards(header.dst) {
            Some(hop) if hop != from => {
                self.core.post_packets(hop, [packet]);
                Ok(())
            }
            _ => Err(Malformed("a frame was forwarded in the wrong direction")),
        }
    }

    fn deliver(
        &mut self,
        from: Rank,
        header: FrameHeader,
        bytes: Vec<u8>,
        fds: Vec<OwnedFd>,
    ) -> Result<(), Malformed> {
        let FrameHeader { kind, operation, src, op, .. } = header;
        let is_far = src.0 < self.core.tree.size
            && src != self.core.tree.rank
            && self.core.tree.neighbours().all(|neighbour| neighbour != src);
        match kind {
            FrameKind::LinkOffer | FrameKind::LinkAccepted | FrameKind::LinkDeclined if !is_far => {
                return Err(Malformed("a link was offered or answered by a neighbour or an unknown rank"));
            }
            FrameKind::JoinUpdate => {
                let update = decode_join_update(&bytes)?;
                self.check_ranks(update.joined.iter().chain(&update.died))?;
                self.protocol(Input::Update(update));
            }
            FrameKind::JoinDecision => {
                let fault = decode_fault(&bytes)?;
                self.check_ranks(&fault.as_ref().map(GroupFault::ranks).unwrap_or_default())?;
                if matches!(fault, Some(GroupFault::RanksDisagree(_))) {
                    return Err(Malformed("ranks disagreed before they had joined"));
                }
                self.protocol(Input::Decision(fault.map_or(Ok(()), Err)));
            }
            FrameKind::GroupFailed => {
                let fault = decode_fault(&bytes)?.ok_or(Malformed("a group failure has no fault"))?;
                self.check_ranks(&fault.ranks())?;
                self.core.fail_group(fault, Some(from));
            }
            FrameKind::RankLeft => self.core.on_rank_left(src, op, Some(from)),
            FrameKind::FdsAck => {
                if let Some(link) = self.core.link(from) {
                    link.batch_acknowledged();
                }
            }
            FrameKind::Fds => {
                let tags = decode_tags(&bytes, fds)?;
                if let Some(link) = self.core.link(from) {
                    self.acknowledge(&link);
                }
                let mut state = self.core.state();
                // Descriptors of a failed operation that arrive late are not stored, and are thus closed.
                if op > state.finished {
                    state.fds.entry((op, from)).or_default().extend(tags);
                }
                self.core.changed.notify_all();
            }
            FrameKind::LinkOffer => {
                // If the descriptor in an offer of a direct link is not a packet socket, it is treated as lost.
                let socket = fds.into_iter().next().and_then(|fd| PacketSocket::adopt(fd).ok());
                let next = self.core.paths().on_offer(src, socket);
                self.apply_path_actions(src, next);
            }
            FrameKind::LinkAccepted | FrameKind::LinkDeclined => {
                let next = self.core.paths().on_reply(src, kind == FrameKind::LinkAccepted);
                self.apply_path_actions(src, next);
            }
            FrameKind::MissingReport => {
                self.check_ranks(&decode_ranks(&bytes)?)?;
                self.store_message(op, kind, src, GroupMessage { operation, bytes });
            }
            FrameKind::Direct if src == self.core.tree.rank || src.0 >= self.core.tree.size => {
                return Err(Malformed("a message is from this rank or from an unknown rank"));
            }
            FrameKind::Vote | FrameKind::Decision | FrameKind::Direct | FrameKind::FdsLost => {
                self.store_message(op, kind, src, GroupMessage { operation, bytes });
            }
            FrameKind::Heartbeat => {}
            // The leader of a node reports a death that it has detected before it received the decision.
            FrameKind::NodeReport if self.is_remote(from) => {
                let NodeReport { update, .. } = decode_report(&bytes)?;
                self.check_ranks(update.joined.iter().chain(&update.died))?;
                if let Some(dead) = update.died.first() {
                    self.core.fail_group(GroupFault::Lost(*dead), None);
                }
            }
            FrameKind::NodeReport | FrameKind::NodeDecision => {
                return Err(Malformed("a rank sent a message of joining after it had joined"));
            }
            FrameKind::Greeting => return Err(Malformed("a rank sent a second greeting")),
        }
        Ok(())
    }

    /// Checks that all ranks named in a message are in the group.
    fn check_ranks<'r>(&self, ranks: impl IntoIterator<Item = &'r Rank>) -> Result<(), Malformed> {
        let size = self.core.tree.size;
        let are_known = ranks.into_iter().all(|rank| rank.0 < size);
        if are_known { Ok(()) } else { Err(Malformed("a frame contains a rank that is not in the group")) }
    }

    fn apply_path_actions(&mut self, peer: Rank, next: Vec<PathAction>) {
        if let Some(link) = self.core.apply_path_actions(peer, next) {
            self.readers.insert(peer, LinkReader::new(link));
        }
    }

    fn store_message(&self, op: u64, kind: FrameKind, src: Rank, message: GroupMessage) {
        let mut state = self.core.state();
        if op > state.finished {
            state.inbox.insert((op, kind, src), message);
        }
        self.core.changed.notify_all();
    }

    /// Reads the liveness pages of the neighbours, and handles neighbours that have died, left or stalled.
    fn probe_neighbours(&mut self) {
        let (mut dead, passed) = (Vec::new(), self.last_probe.elapsed());
        for (rank, peer) in &mut self.peers {
            match peer.probe.state() {
                LockState::Alive if peer.process.has_exited() != Ok(true) => {}
                _ => dead.push(*rank),
            }
            peer.stall.observe(peer.probe.heartbeats(), passed);
        }
        for rank in dead {
            self.on_peer_exit(rank);
        }
        // A neighbour that has left is not stalled, so it is not reported as missing instead of the ranks that are
        // reached through it.
        let is_stalled = |rank: &Rank| self.peers.get(rank).is_some_and(|peer| peer.stall.is_stalled());
        *self.core.stalled() = self.core.tree.neighbours().filter(is_stalled).collect();
        self.give_up_stalled();
        self.last_probe = Instant::now();
        self.check_split_from();
        self.take_vacant_positions();
        self.probe_unaccounted();
    }

    /// Handles the end of a neighbour's progress thread: the neighbour has left or died. The remaining packets from the
    /// neighbour are read first.
    fn on_peer_exit(&mut self, rank: Rank) {
        self.read_from(rank, usize::MAX);
        let Some(peer) = self.peers.remove(&rank) else { return };
        self.readers.remove(&rank);
        self.core.links().remove(&rank);
        if peer.probe.state() == LockState::Died {
            self.core.id.address(rank).remove();
        }
        if self.protocol.is_some() {
            return match JoinRecord::decode(peer.probe.status(), self.core.tree.position(rank)) {
                Ok(record) => {
                    if peer.probe.state() == LockState::Died {
                        // The dead neighbour may be a rank that had taken the position of another dead rank, so the
                        // socket of that rank is removed too.
                        self.core.id.address(record.rank).remove();
                    }
                    self.protocol(Input::Died(rank, record));
                }
                Err(Malformed(violation)) => {
                    tracing::warn!(%rank, violation, "a rank violated the protocol");
                    self.protocol(Input::Decision(Err(GroupFault::ProtocolViolation(rank))));
                }
            };
        }
        let has_left = self.core.state().group.has_left(rank);
        // If a neighbour released its liveness lock without a message that it leaves, it left a failed group, or failed
        // to join.
        if !has_left && (peer.probe.state() == LockState::Died || peer.process.has_exited() == Ok(true)) {
            self.core.fail_group(GroupFault::Lost(rank), None);
            self.report_death(rank);
        } else if !has_left {
            let after = self.core.state().begun;
            self.core.on_rank_left(rank, after, None);
        }
    }

    /// If this group is being split from another group that has failed, makes joining fail too.
    fn check_split_from(&mut self) {
        let error = self.split_from.as_ref().and_then(|group| group.state().group.error());
        if let (Some(error), Some(_)) = (error, &self.protocol) {
            // The neighbours' socket files are removed: no further rank joins this group, and a dead member cannot
            // remove its own file.
            for rank in self.core.tree.neighbours() {
                self.core.id.address(rank).remove();
            }
            self.fail(error);
        }
    }

    /// Informs the neighbours that this rank leaves the group, and waits for a limited time until they have received
    /// its packets.
    fn leave(&mut self) {
        let (is_ready, has_failed, finished) = {
            let state = self.core.state();
            (state.phase == GroupPhase::Ready, state.group.fault().is_some(), state.finished)
        };
        let rank = self.core.tree.rank;
        if is_ready && !has_failed {
            let remote = self.nodes.iter().flat_map(NodeState::ranks);
            for peer in self.peers.keys().copied().chain(remote) {
                self.core.post(
                    peer,
                    FrameHeader::new(FrameKind::RankLeft, Operation::None, rank, peer, finished),
                    &[],
                );
            }
        }
        let is_usable = is_ready && !has_failed;
        let deadline = Deadline::after(if is_usable { LEAVE_TIMEOUT } else { FAILED_LEAVE_TIMEOUT });
        loop {
            self.peers.retain(|_, peer| peer.probe.state() == LockState::Alive);
            let (peers, nodes) = (&self.peers, &self.nodes);
            let is_remote = |rank: &Rank| nodes.as_ref().is_some_and(|nodes| nodes.is_connected(*rank));
            self.readers
                .retain(|rank, reader| (peers.contains_key(rank) || is_remote(rank)) && !reader.ended);
            let all_sent = self.readers.values().all(LinkReader::is_finished);
            let has_reports = self.nodes.as_ref().is_some_and(NodeState::has_reports);
            if all_sent && !has_reports || deadline.has_passed() {
                break;
            }
            let mut polls: Vec<_> = self.readers.values().filter_map(LinkReader::poll).collect();
            let left = deadline.remaining().map_or(PROBE_INTERVAL, |left| left.min(PROBE_INTERVAL));
            let left = Timespec::try_from(left).expect("a few milliseconds");
            let _ = poll(&mut polls, Some(&left));
            self.step_nodes();
            // Packets queued after a batch of descriptors are sent when the neighbour acknowledges the batch, so links
            // must be read. Reading also lets neighbours leave that wait until their own packets are read.
            self.read();
        }
        if has_failed {
            // The kernel may have closed the sockets of a dead rank only after its death was detected.
            self.core.remove_stale_sockets();
        }
    }
}

/// Decodes the tags of a batch of file descriptors. A tag is a rank and an index, eight bytes in total.
fn decode_tags(bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Vec<TaggedFd>, Malformed> {
    let (tags, []) = bytes.as_chunks::<8>() else {
        return Err(Malformed("a batch of descriptors ends with an incomplete tag"));
    };
    if tags.len() != fds.len() {
        return Err(Malformed("a batch has different numbers of tags and descriptors"));
    }
    let number = |tag: &[u8; 8], at| u32::from_le_bytes(std::array::from_fn(|n| tag[at + n]));
    let tagged = tags.iter().zip(fds).map(|(tag, fd)| TaggedFd {
        src: Rank(number(tag, 0)),
        index: number(tag, 4),
        fd: Arc::new(fd),
    });
    Ok(tagged.collect())
}

#[cfg(test)]
mod tests;
