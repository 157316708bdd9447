//! Joins a group of several nodes: finds the leader of this node or becomes it, connects the leaders, and waits for the
//! decision of the root. Runs the state machines of [`assembly`](crate::machine::assembly).
//!
//! ```text
//!             the root's socket answers                      the leader's socket answers
//!   member <---------------------------- seeking a leader ----------------------------> member
//!                                             | neither: binds the leader's address
//!                                             v
//!                                          leader --- the root's socket answers: gives the address up, seeks again
//! ```
//!
//! | module | description |
//! |---|---|
//! | [`local`] | the ranks of this node |
//! | [`leader`] | the leader of another node than that of rank 0 |
//! | [`root`] | rank 0, which decides when the group is complete |

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_os::packet::{MAX_PACKET, PacketListener};
use wholemem_os::robust::LivenessLock;
use wholemem_os::{Deadline, Error as OsError};

use self::leader::Leader;
use self::local::{CONNECTED, DECIDED, LocalPeer};
use self::root::Root;
use super::node_link::{NodeContext, NodeLink};
use crate::fault::GroupFault;
use crate::handshake::{Connector, NodeAcceptor};
use crate::links::{RankLink, SendStatus};
use crate::machine::assembly::{Decision, node_map};
use crate::machine::give_up_on_joining_at;
use crate::network::Network;
use crate::rank::Tree;
use crate::topology::Topology;
use crate::wire::frame::{FrameKind, JoinUpdate, encode_join_update};
use crate::wire::nodes::{AssemblyReply, decode_reply, encode_reply};
use crate::{Error, Rank, Result, UniqueId};

mod leader;
mod local;
mod root;

pub(super) use local::{MessageReader, Received, post};

/// The longest wait for an event: deaths are looked for at least as often.
const WAIT: Duration = Duration::from_millis(10);

/// The time in which the reason of a failure is sent to the other ranks.
const FAREWELL: Duration = Duration::from_millis(500);

/// The rank that decides when the group is complete. It is the leader of its node.
const ROOT: Rank = Rank(0);

/// The result of joining: the ranks of all nodes, and the connections of this rank to its neighbours.
#[derive(Debug)]
pub(crate) struct Assembled {
    pub(crate) topology: Topology,
    pub(crate) context: NodeContext,
    /// The neighbours on this node.
    pub(crate) local: Vec<LocalPeer>,
    /// The neighbours on other nodes.
    pub(crate) remote: Vec<NodeLink>,
    /// The socket at which a leader accepts connections from other nodes.
    pub(crate) acceptor: Option<NodeAcceptor>,
}

/// What a rank needs to join.
#[derive(Debug)]
pub(crate) struct JoinRequest {
    pub(crate) id: UniqueId,
    pub(crate) network: Network,
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) timeout: Duration,
}

enum Role {
    Seeking { root: Box<Connector>, leader: Box<Connector> },
    Member(Box<LocalPeer>),
    Leader(Box<Leader>),
    Root(Box<Root>),
}

/// What a step of a role led to.
enum Step {
    Continue(Role),
    /// This rank must look for the leader of its node again.
    Seek,
    Done(Box<Assembled>),
}

struct Assembler<'a> {
    request: &'a JoinRequest,
    context: NodeContext,
    liveness: &'a LivenessLock,
    began: Instant,
    /// The ranks of this node that are known to have died.
    died: BTreeSet<Rank>,
    /// True if a leader of this node that has died was connected to the root.
    root_was_reached: bool,
}

/// Joins a group of several nodes. `check` is called regularly, and ends joining with its error.
///
/// # Errors
/// [`Error::Timeout`] with the missing ranks, [`Error::PeerLost`], [`Error::RankTaken`], [`Error::SizeDiffers`], the
/// error of `check`, and those of system calls.
pub(crate) fn assemble(
    request: &JoinRequest,
    liveness: &LivenessLock,
    stop: &AtomicBool,
    check: impl Fn() -> Result<()>,
) -> Result<Assembled> {
    let key = request.id.key();
    let context =
        NodeContext { rank: request.rank, size: request.size, key, silence: request.network.silence() };
    let mut assembler = Assembler {
        request,
        context,
        liveness,
        began: Instant::now(),
        died: BTreeSet::new(),
        root_was_reached: false,
    };
    let outcome = assembler.run(stop, check);
    if outcome.is_err() {
        // A rank of this node may have died before another rank was connected to it.
        for address in [request.id.leader_address(), request.id.address(ROOT)] {
            address.remove_stale();
        }
    }
    outcome
}

impl Assembler<'_> {
    fn run(&mut self, stop: &AtomicBool, check: impl Fn() -> Result<()>) -> Result<Assembled> {
        let mut role = self.first_role()?;
        while !stop.load(Ordering::Relaxed) {
            self.liveness.add_heartbeat();
            check()?;
            role = match self.step(role)? {
                Step::Continue(role) => role,
                Step::Seek => self.seek(),
                Step::Done(assembled) => return Ok(*assembled),
            };
            role.wait();
        }
        Err(Error::Aborted { by: self.request.rank })
    }

    fn tree(&self) -> Tree {
        Tree::new(self.request.rank, self.request.size)
    }

    fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    fn first_role(&self) -> Result<Role> {
        if self.request.rank == ROOT {
            Root::create(self).map(|root| Role::Root(Box::new(root)))
        } else {
            Ok(self.seek())
        }
    }

    fn seek(&self) -> Role {
        let (id, tree) = (&self.request.id, self.tree());
        let connector = |address| {
            Box::new(
                Connector::new(address, ROOT, tree, id.key(), id.has_secret())
                    .with_any_parent()
                    .for_dead_rank(),
            )
        };
        Role::Seeking { root: connector(id.address(ROOT)), leader: connector(id.leader_address()) }
    }

    fn step(&mut self, role: Role) -> Result<Step> {
        match role {
            Role::Seeking { root, leader } => self.step_seeking(root, leader),
            Role::Member(leader) => self.step_member(leader),
            Role::Leader(leader) => leader.step(self),
            Role::Root(root) => root.step(self),
        }
    }

    fn step_seeking(&mut self, mut root: Box<Connector>, mut leader: Box<Connector>) -> Result<Step> {
        let mut is_refused = true;
        for connector in [&mut root, &mut leader] {
            if let Some(peer) = connector.step(self.liveness)?.and_then(LocalPeer::new) {
                if !self.died.is_empty() {
                    let died = self.died.iter().copied().collect();
                    let update = encode_join_update(&JoinUpdate { joined: vec![], died });
                    post(&peer.link, self.request.rank, FrameKind::JoinUpdate, &update);
                }
                return Ok(Step::Continue(Role::Member(Box::new(peer))));
            }
            is_refused &= connector.is_refused();
            if !is_refused {
                break;
            }
        }
        if !is_refused {
            self.check_time()?;
            return Ok(Step::Continue(Role::Seeking { root, leader }));
        }
        // No rank leads this node yet. Binding fails if another rank does so at the same time: this rank then joins it.
        match PacketListener::bind(&self.request.id.leader_address()) {
            Ok(listener) => {
                let leader = Leader::create(self, listener)?;
                Ok(Step::Continue(Role::Leader(Box::new(leader))))
            }
            Err(_) => {
                self.check_time()?;
                Ok(Step::Continue(Role::Seeking { root, leader }))
            }
        }
    }

    /// Returns an error if this rank has waited for too long without a leader, or for a decision.
    fn check_time(&self) -> Result<()> {
        if self.elapsed() < give_up_on_joining_at(self.request.timeout) {
            return Ok(());
        }
        let missing = || GroupFault::Missing(vec![ROOT]);
        Err(self.error(self.died.first().map_or_else(missing, |rank| GroupFault::Lost(*rank))))
    }

    fn error(&self, fault: GroupFault) -> Error {
        fault.error_within(None, self.request.timeout, true)
    }

    fn step_member(&mut self, mut leader: Box<LocalPeer>) -> Result<Step> {
        // The state is read before the last messages, so that none of them is missed.
        let has_exited = leader.has_exited();
        leader.link.flush();
        match leader.read() {
            Received::Message(header, bytes) if header.kind == FrameKind::NodeDecision => {
                let rank = leader.rank;
                let malformed = |_| Error::Protocol { rank, what: "its decision is malformed" };
                match decode_reply(&bytes).map_err(malformed)? {
                    AssemblyReply::Complete(nodes) => {
                        self.complete(Ok(nodes), Links { local: vec![*leader], ..Links::default() })
                    }
                    AssemblyReply::Failed(fault) => Err(self.error(fault)),
                    AssemblyReply::Taken(_) => Err(Error::RankTaken { rank: self.request.rank }),
                }
            }
            Received::Message(..) => Ok(Step::Continue(Role::Member(leader))),
            Received::Nothing if !has_exited => {
                self.check_time()?;
                Ok(Step::Continue(Role::Member(leader)))
            }
            Received::Nothing | Received::Closed => {
                let id = &self.request.id;
                // A leader that has ended joining has left the root, or has informed the ranks that it knew.
                self.root_was_reached |= matches!(leader.probe.status(), CONNECTED | DECIDED);
                if leader.has_died() {
                    self.died.insert(leader.rank);
                    // The kernel may not have closed the dead rank's socket yet, so that its file does not look stale.
                    if leader.rank == ROOT {
                        id.address(ROOT).remove();
                        return Err(self.error(GroupFault::Lost(ROOT)));
                    }
                    if leader.probe.status() == DECIDED {
                        id.leader_address().remove();
                        return Err(self.error(GroupFault::Lost(leader.rank)));
                    }
                }
                self.check_time()?;
                Ok(Step::Seek)
            }
        }
    }

    /// Ends joining: informs the ranks that wait for the decision, and returns the connections of this rank.
    fn complete(&self, decision: Decision, links: Links) -> Result<Step> {
        let own = self.request.rank;
        let nodes = match decision {
            Ok(nodes) => nodes,
            Err(fault) => {
                links.inform(own, &AssemblyReply::Failed(fault.clone()));
                links.finish();
                return Err(self.error(fault));
            }
        };
        links.inform(own, &AssemblyReply::Complete(nodes.clone()));
        let what = "its list of nodes does not have every rank once";
        let map = node_map(nodes, self.request.size).ok_or(Error::Protocol { rank: ROOT, what })?;
        let topology = Topology::over_nodes(own, Arc::new(map));
        let Links { local, remote, acceptor, .. } = links;
        let context = self.context.clone();
        Ok(Step::Done(Box::new(Assembled { topology, context, local, remote, acceptor })))
    }
}

/// The connections of a rank when joining ends.
#[derive(Default)]
struct Links {
    local: Vec<LocalPeer>,
    remote: Vec<NodeLink>,
    acceptor: Option<NodeAcceptor>,
    /// The links to the ranks that wait for the decision of this rank.
    waiting: Vec<Arc<RankLink>>,
}

impl Links {
    fn inform(&self, own: Rank, reply: &AssemblyReply) {
        let bytes = encode_reply(reply);
        self.waiting.iter().for_each(|link| post(link, own, FrameKind::NodeDecision, &bytes));
    }

    /// Waits for a short time until the other ranks have received everything. A TCP connection is closed by the other
    /// rank first: if it were closed with unread bytes, the other rank's kernel would drop what it has not read.
    fn finish(&self) {
        let deadline = Deadline::after(FAREWELL);
        let mut buffer = vec![0; MAX_PACKET];
        let mut open: Vec<_> = self.waiting.iter().collect();
        loop {
            open.retain(|link| {
                if link.flush() != SendStatus::Done {
                    return true;
                }
                let Some(stream) = link.socket.stream() else { return false };
                stream.shut_down_sending();
                loop {
                    match stream.recv(&mut buffer) {
                        Ok(_) => {}
                        Err(error) => return error == OsError::TimedOut,
                    }
                }
            });
            if open.is_empty() || deadline.has_passed() {
                return;
            }
            let sockets = open.iter().map(|link| link.socket.as_fd());
            let read = |socket| PollFd::from_borrowed_fd(socket, PollFlags::IN);
            wait_for(&mut sockets.map(read).collect::<Vec<_>>(), WAIT);
        }
    }
}

fn wait_for(polls: &mut [PollFd<'_>], wait: Duration) {
    let wait = Timespec::try_from(wait).expect("a few milliseconds");
    // An error of `poll` is ignored, since the caller checks everything after each wait.
    let _ = poll(polls, Some(&wait));
}

impl Role {
    /// Waits until a descriptor is ready, or for a short time.
    fn wait(&self) {
        let mut wait = WAIT;
        let read = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut polls: Vec<PollFd<'_>> = match self {
            Self::Seeking { root, leader } => {
                let next = [root, leader].into_iter().filter_map(|connector| connector.retry_in()).min();
                wait = next.map_or(wait, |next| wait.min(next));
                root.fd().into_iter().chain(leader.fd()).map(read).collect()
            }
            Self::Member(leader) => leader.fds().into_iter().map(read).collect(),
            Self::Leader(leader) => {
                wait = wait.min(leader.retry_in());
                leader.polls()
            }
            Self::Root(root) => root.polls(),
        };
        wait_for(&mut polls, wait);
    }
}
