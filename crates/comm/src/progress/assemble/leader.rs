//! The leader of a node other than that of rank 0, while the group is being formed.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use wholemem_os::PacketSocket;
use wholemem_os::packet::PacketListener;

use super::local::{CONNECTED, DECIDED, MemberEvent, Members, MessageReader, Received, post};
use super::{Assembler, Links, ROOT, Role, Step};
use crate::handshake::{Acceptor, AttemptOutcome, NodeAcceptor, NodeAttempt, NodePeer};
use crate::links::{LinkSocket, RankLink};
use crate::machine::assembly::{Decision, LeaderAssembly, LeaderInput, LeaderOutput};
use crate::machine::link_monitor::LinkFailure;
use crate::progress::node_link::NodeLink;
use crate::wire::frame::{FrameKind, JoinUpdate};
use crate::wire::nodes::{AssemblyReply, NodeReport, decode_reply, encode_report};
use crate::wire::session::Purpose;
use crate::{Error, Rank, Result};

/// The shortest and the longest delay before the next attempt to connect to the root.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(64));

pub(super) struct Leader {
    members: Members,
    machine: LeaderAssembly,
    /// Answers probes; other nodes send their reports to the root.
    acceptor: NodeAcceptor,
    uplink: Uplink,
    delay: Duration,
}

/// The connection of a leader to the root.
enum Uplink {
    Waiting { retry_at: Instant },
    Attempt(NodeAttempt),
    Connected(NodeLink, MessageReader),
}

impl Leader {
    pub(super) fn create(assembler: &Assembler<'_>, listener: PacketListener) -> Result<Self> {
        let request = assembler.request;
        let id = &request.id;
        let members = Members::new(Acceptor::new(listener, assembler.tree(), id.key(), id.has_secret()));
        let mut machine = LeaderAssembly::new(request.rank, ROOT, request.timeout);
        if assembler.root_was_reached {
            machine = machine.after_connected_leader();
        }
        for rank in &assembler.died {
            machine.step(Duration::ZERO, LeaderInput::Died(*rank));
        }
        let own = (request.rank, request.size);
        let acceptor = NodeAcceptor::new(request.network.listen()?, own, id.key(), request.network.silence());
        let uplink = Uplink::Waiting { retry_at: Instant::now() };
        Ok(Self { members, machine, acceptor, uplink, delay: RETRY_DELAY.0 })
    }

    pub(super) fn retry_in(&self) -> Duration {
        match &self.uplink {
            Uplink::Waiting { retry_at } => retry_at.saturating_duration_since(Instant::now()),
            Uplink::Attempt(_) => Duration::MAX,
            Uplink::Connected(uplink, _) => uplink.tick_within(),
        }
    }

    pub(super) fn polls(&self) -> Vec<PollFd<'_>> {
        let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut polls: Vec<_> = self.members.fds().chain(self.acceptor.fds()).map(read).collect();
        match &self.uplink {
            Uplink::Waiting { .. } => {}
            Uplink::Attempt(attempt) => polls.push(attempt.poll()),
            Uplink::Connected(uplink, _) => {
                polls.push(read(uplink.link.socket.as_fd()));
                polls.extend(uplink.poll_probe());
            }
        }
        polls
    }

    pub(super) fn step(mut self: Box<Self>, assembler: &mut Assembler<'_>) -> Result<Step> {
        let mut inputs: Vec<_> =
            self.members.step(assembler.liveness).into_iter().map(LeaderInput::from).collect();
        // Nodes send their reports to the root only; other authenticated connections are closed.
        drop(self.acceptor.serve());
        if self.step_uplink(assembler, &mut inputs)? {
            return Ok(Step::Seek);
        }
        inputs.push(LeaderInput::Tick);
        for input in inputs {
            for output in self.machine.step(assembler.elapsed(), input) {
                match output {
                    LeaderOutput::Report(update) => self.report(assembler, update),
                    LeaderOutput::End(decision) => return self.end(assembler, decision),
                }
            }
        }
        if let Uplink::Connected(uplink, _) = &self.uplink {
            uplink.link.flush();
        }
        Ok(Step::Continue(Role::Leader(self)))
    }

    /// Advances the connection to the root. Returns true if the root is on this node, and this rank must join it.
    fn step_uplink(&mut self, assembler: &Assembler<'_>, inputs: &mut Vec<LeaderInput>) -> Result<bool> {
        let request = assembler.request;
        // The root listens at its Unix address before it accepts connections from other nodes.
        let root_is_here = || PacketSocket::connect(&request.id.address(ROOT)).is_ok();
        match &mut self.uplink {
            Uplink::Waiting { retry_at } if *retry_at > Instant::now() => {}
            Uplink::Waiting { .. } => {
                if root_is_here() {
                    return Ok(true);
                }
                let hello = (Purpose::Report, request.rank, request.size);
                match NodeAttempt::begin(request.network.root(), hello, request.network.silence())? {
                    Ok(attempt) => self.uplink = Uplink::Attempt(attempt),
                    Err(outcome) => {
                        if matches!(outcome, AttemptOutcome::Refused) {
                            inputs.push(LeaderInput::RootRefuses);
                        }
                        self.retry_later();
                    }
                }
            }
            Uplink::Attempt(attempt) => match attempt.step(&assembler.context.key, assembler.context.silence)
            {
                AttemptOutcome::Pending => {}
                AttemptOutcome::Refused => {
                    inputs.push(LeaderInput::RootRefuses);
                    self.retry_later();
                }
                AttemptOutcome::Failed => self.retry_later(),
                AttemptOutcome::OtherSize(parent, there) => {
                    let (rank, here) = (request.rank, request.size);
                    return Err(Error::SizeDiffers { rank, parent, here, there });
                }
                AttemptOutcome::Authenticated(peer) => {
                    if root_is_here() {
                        return Ok(true);
                    }
                    let NodePeer { rank, socket } = *peer;
                    let link = Arc::new(RankLink::new(rank, LinkSocket::Stream(Box::new(socket))));
                    let uplink = NodeLink::new(&assembler.context, rank, Some(request.network.root()), link);
                    self.uplink = Uplink::Connected(uplink, MessageReader::default());
                    self.delay = RETRY_DELAY.0;
                    assembler.liveness.set_status(CONNECTED);
                    inputs.push(LeaderInput::Connected);
                }
            },
            Uplink::Connected(uplink, messages) => {
                let received = if uplink.is_closed() {
                    Received::Nothing
                } else {
                    let link = Arc::clone(&uplink.link);
                    messages.read(&link, || uplink.heard())
                };
                let mut failure = None;
                match received {
                    Received::Message(header, bytes) if header.kind == FrameKind::NodeDecision => {
                        let malformed = |_| Error::Protocol { rank: ROOT, what: "its decision is malformed" };
                        match decode_reply(&bytes).map_err(malformed)? {
                            AssemblyReply::Complete(nodes) => inputs.push(LeaderInput::Decision(Ok(nodes))),
                            AssemblyReply::Failed(fault) => inputs.push(LeaderInput::Decision(Err(fault))),
                            AssemblyReply::Taken(rank) => self.refuse(assembler, rank)?,
                        }
                        return Ok(false);
                    }
                    Received::Message(..) | Received::Nothing => {}
                    Received::Closed => {
                        inputs.push(LeaderInput::Disconnected);
                        failure = uplink.closed(&assembler.context);
                    }
                }
                match failure.or_else(|| uplink.step(&assembler.context)) {
                    None => {}
                    Some(LinkFailure::Lost { .. }) => inputs.push(LeaderInput::RootLost),
                    // The connection was interrupted, or the root is stopped: this rank connects again.
                    Some(LinkFailure::Silent) => {
                        inputs.push(LeaderInput::Disconnected);
                        self.retry_later();
                    }
                }
            }
        }
        Ok(false)
    }

    fn retry_later(&mut self) {
        self.uplink = Uplink::Waiting { retry_at: Instant::now() + self.delay };
        self.delay = (self.delay * 2).min(RETRY_DELAY.1);
    }

    /// Informs a rank of this node that another process has joined as the same rank.
    fn refuse(&mut self, assembler: &Assembler<'_>, rank: Rank) -> Result<()> {
        if rank == assembler.request.rank {
            return Err(Error::RankTaken { rank });
        }
        self.machine.step(assembler.elapsed(), LeaderInput::Left(rank));
        if let Some(peer) = self.members.peers.remove(&rank) {
            let links = Links { waiting: vec![Arc::clone(&peer.link)], ..Links::default() };
            links.inform(assembler.request.rank, &AssemblyReply::Taken(rank));
            links.finish();
        }
        Ok(())
    }

    fn report(&self, assembler: &Assembler<'_>, update: JoinUpdate) {
        let Uplink::Connected(uplink, _) = &self.uplink else { return };
        let report = NodeReport { address: self.address(uplink), update };
        post(&uplink.link, assembler.request.rank, FrameKind::NodeReport, &encode_report(&report));
    }

    /// Returns the address at which other nodes reach this rank: the local address of the connection to the root, with
    /// the port at which this rank listens.
    fn address(&self, uplink: &NodeLink) -> SocketAddr {
        let stream = uplink.link.socket.stream().map(|socket| socket.stream().local_addr());
        let listening = self.acceptor.listener().local_addr();
        match (stream, listening) {
            (Some(Ok(local)), Ok(listening)) => SocketAddr::new(local.ip(), listening.port()),
            // The connection has ended, so the report does not arrive.
            (_, _) => SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), 0),
        }
    }

    fn end(self: Box<Self>, assembler: &Assembler<'_>, decision: Decision) -> Result<Step> {
        // Published before the ranks of this node are informed: if this rank dies meanwhile, they do not look for
        // another leader.
        assembler.liveness.set_status(DECIDED);
        let Self { mut members, acceptor, uplink, .. } = *self;
        members.settle(assembler.liveness);
        let local: Vec<_> = members.peers.into_values().collect();
        let waiting = local.iter().map(|peer| Arc::clone(&peer.link)).collect();
        let remote = match uplink {
            Uplink::Connected(uplink, _) => vec![uplink],
            Uplink::Waiting { .. } | Uplink::Attempt(_) if decision.is_ok() => {
                unreachable!("the decision has arrived on the connection to the root")
            }
            Uplink::Waiting { .. } | Uplink::Attempt(_) => Vec::new(),
        };
        assembler.complete(decision, Links { local, remote, acceptor: Some(acceptor), waiting })
    }
}

impl From<MemberEvent> for LeaderInput {
    fn from(event: MemberEvent) -> Self {
        match event {
            MemberEvent::Joined(rank) => Self::Joined(rank),
            MemberEvent::Died(rank) => Self::Died(rank),
            MemberEvent::Left(rank) => Self::Left(rank),
        }
    }
}
