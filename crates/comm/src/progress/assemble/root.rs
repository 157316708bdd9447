//! Rank 0 while a group of several nodes is being formed: collects the reports of all leaders, and decides.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use wholemem_os::packet::PacketListener;
use wholemem_os::{Errno, Error as OsError};

use super::local::{DECIDED, MemberEvent, Members, MessageReader, Received, post};
use super::{Assembler, Links, ROOT, Role, Step};
use crate::handshake::{Acceptor, NodeAcceptor, NodePeer};
use crate::links::{LinkSocket, RankLink};
use crate::machine::assembly::{Decision, LinkNumber, RootAssembly, RootInput, RootOutput};
use crate::machine::link_monitor::LinkFailure;
use crate::progress::node_link::NodeLink;
use crate::wire::frame::FrameKind;
use crate::wire::nodes::{AssemblyReply, decode_report, encode_reply};
use crate::{Error, Result};

pub(super) struct Root {
    members: Members,
    machine: RootAssembly,
    acceptor: NodeAcceptor,
    links: BTreeMap<LinkNumber, (NodeLink, MessageReader)>,
    next_link: LinkNumber,
}

impl Root {
    pub(super) fn create(assembler: &Assembler<'_>) -> Result<Self> {
        let request = assembler.request;
        let (id, silence) = (&request.id, request.network.silence());
        // The Unix socket comes first: the leaders of other nodes check that it is not reachable for them.
        let listener = match PacketListener::bind(&id.address(ROOT)) {
            Err(OsError::Call { errno: Errno::ADDRINUSE, .. }) => {
                return Err(Error::RankTaken { rank: ROOT });
            }
            outcome => outcome?,
        };
        let members = Members::new(Acceptor::new(listener, assembler.tree(), id.key(), id.has_secret()));
        let listener = request.network.listen_as_root()?;
        let acceptor = NodeAcceptor::new(listener, (ROOT, request.size), id.key(), silence);
        let address = request.network.root();
        let machine = RootAssembly::new(ROOT, request.size, address, request.timeout, silence);
        Ok(Self { members, machine, acceptor, links: BTreeMap::new(), next_link: 0 })
    }

    pub(super) fn polls(&self) -> Vec<PollFd<'_>> {
        let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let links = self.links.values().map(|(node, _)| node);
        let open = links.clone().filter(|node| !node.is_closed()).map(|node| node.link.socket.as_fd());
        let mut polls: Vec<_> = self.members.fds().chain(self.acceptor.fds()).chain(open).map(read).collect();
        polls.extend(links.filter_map(NodeLink::poll_probe));
        polls
    }

    pub(super) fn step(mut self: Box<Self>, assembler: &mut Assembler<'_>) -> Result<Step> {
        let mut inputs: Vec<_> =
            self.members.step(assembler.liveness).into_iter().map(RootInput::from).collect();
        for NodePeer { rank, socket } in self.acceptor.serve() {
            let link = Arc::new(RankLink::new(rank, LinkSocket::Stream(Box::new(socket))));
            let node = NodeLink::new(&assembler.context, rank, None, link);
            self.links.insert(self.next_link, (node, MessageReader::default()));
            self.next_link += 1;
        }
        self.step_links(assembler, &mut inputs);
        inputs.push(RootInput::Tick);
        for input in inputs {
            for output in self.machine.step(assembler.elapsed(), input) {
                match output {
                    RootOutput::Taken(link, rank) => {
                        if let Some((node, _)) = self.links.get(&link) {
                            let reply = encode_reply(&AssemblyReply::Taken(rank));
                            post(&node.link, ROOT, FrameKind::NodeDecision, &reply);
                        }
                    }
                    RootOutput::End(decision) => return self.end(assembler, decision),
                }
            }
        }
        Ok(Step::Continue(Role::Root(self)))
    }

    fn step_links(&mut self, assembler: &Assembler<'_>, inputs: &mut Vec<RootInput>) {
        let mut ended = Vec::new();
        for (number, (node, messages)) in &mut self.links {
            let mut failure = None;
            let link = Arc::clone(&node.link);
            while !node.is_closed() {
                match messages.read(&link, || node.heard()) {
                    Received::Message(header, bytes) if header.kind == FrameKind::NodeReport => {
                        let Ok(report) = decode_report(&bytes) else {
                            tracing::warn!(rank = %node.rank, "the report of a node is malformed");
                            ended.push(*number);
                            break;
                        };
                        node.address = Some(report.address);
                        let (leader, address, update) = (node.rank, report.address, report.update);
                        inputs.push(RootInput::Report { link: *number, leader, address, update });
                    }
                    Received::Message(..) => {}
                    Received::Nothing => break,
                    Received::Closed => {
                        inputs.push(RootInput::Disconnected(*number));
                        failure = node.closed(&assembler.context);
                    }
                }
            }
            link.flush();
            match failure.or_else(|| node.step(&assembler.context)) {
                None => {}
                Some(failure) => {
                    inputs.push(RootInput::Disconnected(*number));
                    if matches!(failure, LinkFailure::Lost { .. }) {
                        inputs.push(RootInput::LeaderDied(*number, node.rank));
                    }
                    ended.push(*number);
                }
            }
        }
        for number in ended {
            self.links.remove(&number);
            inputs.push(RootInput::Disconnected(number));
        }
    }

    fn end(self: Box<Self>, assembler: &Assembler<'_>, decision: Decision) -> Result<Step> {
        assembler.liveness.set_status(DECIDED);
        let Self { mut members, acceptor, links, .. } = *self;
        members.settle(assembler.liveness);
        let local: Vec<_> = members.peers.into_values().collect();
        let mut remote: Vec<_> = links.into_values().map(|(node, _)| node).collect();
        let waiting = local
            .iter()
            .map(|peer| &peer.link)
            .chain(remote.iter().map(|node| &node.link))
            .cloned()
            .collect();
        if let Ok(nodes) = &decision {
            // Of two connections of one leader, the one with the address in the decision is used: the other has ended.
            remote.retain(|node| {
                nodes.iter().any(|other| other.leader == node.rank && Some(other.address) == node.address)
            });
        }
        assembler.complete(decision, Links { local, remote, acceptor: Some(acceptor), waiting })
    }
}

impl From<MemberEvent> for RootInput {
    fn from(event: MemberEvent) -> Self {
        match event {
            MemberEvent::Joined(rank) => Self::Joined(rank),
            MemberEvent::Died(rank) => Self::Died(rank),
            MemberEvent::Left(rank) => Self::Left(rank),
        }
    }
}
