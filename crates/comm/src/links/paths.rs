//! Direct links between ranks that are not neighbours in the tree of ranks, created when one rank first sends a long
//! message to the other.
//!
//! ```text
//!    offering rank             the tree              receiving rank
//!       |--- LinkOffer, with one end of a socket pair, hop by hop --->|
//!       |<-- LinkAccepted or LinkDeclined, hop by hop ----------------|
//!       |======================= the socket pair =====================|
//! ```
//!
//! No further handshake is needed, since the offer is sent over links between authenticated ranks. The message waits
//! for the reply. If the receiving rank declines because it has too many links or descriptors, the message is
//! forwarded along the tree, as short messages always are. If two ranks send each other an offer at the same time,
//! that of the lower rank is used, and both drop the other one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use wholemem_os::{PacketSocket, Result};

use crate::Rank;
use crate::links::{FramePacket, RankLink, SendStatus};

/// The maximum number of direct links of a rank. If several ranks are threads of one process, the limit applies to each
/// of them.
const MAX_LINKS: usize = 128;

/// The path of messages to a rank that is not a neighbour: an offered or open direct link, or the tree of ranks.
#[derive(Debug)]
enum RankPath {
    Offered {
        ours: PacketSocket,
        waiting: Vec<FramePacket>,
    },
    Open(Arc<RankLink>),
    /// There is no direct link: messages are forwarded along the tree of ranks.
    Tree,
}

/// An action that the caller has to perform to send messages to another rank.
#[derive(Debug)]
pub(crate) enum PathAction {
    /// Wake the progress thread, which sends the packets that the socket did not accept.
    Flush,
    /// Forward these packets along the tree of ranks.
    AlongTree(Vec<FramePacket>),
    /// Offer a direct link to the other rank by sending it this descriptor, one end of a socket pair.
    Offer(OwnedFd),
    /// Accept the direct link that the other rank has offered.
    Accept,
    /// Decline the direct link that the other rank has offered.
    Decline,
    /// Read from this direct link from now on, and send its queued packets.
    Read(Arc<RankLink>),
}

/// The direct links of a rank to ranks that are not its neighbours.
#[derive(Debug)]
pub(crate) struct Paths {
    rank: Rank,
    paths: BTreeMap<Rank, RankPath>,
}

impl Paths {
    pub(crate) fn new(rank: Rank) -> Self {
        Self { rank, paths: BTreeMap::new() }
    }

    /// Returns the number of open direct links.
    pub(crate) fn open(&self) -> usize {
        self.paths.values().filter(|path| matches!(path, RankPath::Open(_))).count()
    }

    fn has_capacity(&self) -> bool {
        self.paths.values().filter(|path| !matches!(path, RankPath::Tree)).count() < MAX_LINKS
    }

    /// Sends packets to a rank that is not a neighbour, or queues them until that rank has replied to the offer of a
    /// direct link. `pair` creates two connected sockets.
    pub(crate) fn send(
        &mut self,
        to: Rank,
        packets: Vec<FramePacket>,
        pair: impl FnOnce() -> Result<(PacketSocket, PacketSocket)>,
    ) -> Vec<PathAction> {
        match self.paths.get_mut(&to) {
            Some(RankPath::Open(link)) => match link.post(packets) {
                SendStatus::Done => vec![],
                _ => vec![PathAction::Flush],
            },
            Some(RankPath::Offered { waiting, .. }) => {
                waiting.extend(packets);
                vec![]
            }
            Some(RankPath::Tree) => vec![PathAction::AlongTree(packets)],
            None => match self.has_capacity().then(pair) {
                Some(Ok((ours, theirs))) => {
                    self.paths.insert(to, RankPath::Offered { ours, waiting: packets });
                    vec![PathAction::Offer(theirs.into())]
                }
                // No socket pair could be created, or there are too many links. No further offer is made to this rank,
                // because it would fail again.
                _ => {
                    self.paths.insert(to, RankPath::Tree);
                    vec![PathAction::AlongTree(packets)]
                }
            },
        }
    }

    /// Handles the offer of a direct link from another rank. `socket` is `None` if the descriptor was lost while it was
    /// forwarded.
    pub(crate) fn on_offer(&mut self, from: Rank, socket: Option<PacketSocket>) -> Vec<PathAction> {
        let has_capacity = self.has_capacity();
        let waiting = match self.paths.remove(&from) {
            None | Some(RankPath::Tree) if !has_capacity => None,
            None | Some(RankPath::Tree) => Some(Vec::new()),
            // Both ranks have offered a link. The offer of the other, lower rank is used, and that rank does not reply
            // to this rank's offer.
            Some(RankPath::Offered { waiting, .. }) if from < self.rank => Some(waiting),
            // Both ranks have offered a link, and the offer of this rank is used: the reply to it is in flight or has
            // arrived.
            Some(ours) => {
                self.paths.insert(from, ours);
                return vec![];
            }
        };
        match (socket, waiting) {
            (Some(socket), Some(waiting)) => vec![PathAction::Accept, self.open_link(from, socket, waiting)],
            (_, waiting) => {
                self.paths.insert(from, RankPath::Tree);
                vec![PathAction::Decline, PathAction::AlongTree(waiting.unwrap_or_default())]
            }
        }
    }

    /// Handles another rank's reply to this rank's offer of a direct link.
    pub(crate) fn on_reply(&mut self, by: Rank, accepted: bool) -> Vec<PathAction> {
        match self.paths.remove(&by) {
            Some(RankPath::Offered { ours, waiting }) if accepted => vec![self.open_link(by, ours, waiting)],
            Some(RankPath::Offered { waiting, .. }) => {
                self.paths.insert(by, RankPath::Tree);
                vec![PathAction::AlongTree(waiting)]
            }
            // The reply is ignored if this rank has no open offer to the rank that replied.
            other => {
                self.paths.extend(other.map(|path| (by, path)));
                vec![]
            }
        }
    }

    /// Removes a direct link that the peer has closed.
    pub(crate) fn close(&mut self, peer: Rank) {
        self.paths.remove(&peer);
    }

    fn open_link(&mut self, peer: Rank, socket: PacketSocket, waiting: Vec<FramePacket>) -> PathAction {
        let link = Arc::new(RankLink::new(peer, socket));
        link.post(waiting);
        self.paths.insert(peer, RankPath::Open(Arc::clone(&link)));
        PathAction::Read(link)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use wholemem_os::Deadline;

    use super::*;

    /// A message forwarded along the tree between the two ranks of a test. Messages in the same direction stay in
    /// order.
    #[derive(Debug)]
    enum TreeMessage {
        Offer(Option<OwnedFd>),
        Reply(bool),
        Packets(Vec<FramePacket>),
    }

    /// Two simulated ranks, with the messages in flight to each and the bytes and links that each has received.
    struct TwoRanks {
        ranks: [Paths; 2],
        queues: [VecDeque<TreeMessage>; 2],
        links: [Vec<Arc<RankLink>>; 2],
        along_tree: [Vec<u8>; 2],
        lossy: bool,
    }

    impl TwoRanks {
        fn new(lossy: bool) -> Self {
            Self {
                ranks: [Paths::new(Rank(3)), Paths::new(Rank(8))],
                queues: Default::default(),
                links: Default::default(),
                along_tree: Default::default(),
                lossy,
            }
        }

        fn peer(one: usize) -> Rank {
            [Rank(8), Rank(3)][one]
        }

        fn send(&mut self, one: usize, byte: u8) {
            let packets = vec![FramePacket::from(vec![byte])];
            let next = self.ranks[one].send(Self::peer(one), packets, PacketSocket::pair);
            self.apply(one, next);
        }

        fn apply(&mut self, one: usize, next: Vec<PathAction>) {
            for next in next {
                let message = match next {
                    PathAction::Flush => continue,
                    PathAction::Read(link) => {
                        self.links[one].push(link);
                        continue;
                    }
                    PathAction::Offer(fd) => TreeMessage::Offer((!self.lossy).then_some(fd)),
                    PathAction::AlongTree(packets) => TreeMessage::Packets(packets),
                    PathAction::Accept => TreeMessage::Reply(true),
                    PathAction::Decline => TreeMessage::Reply(false),
                };
                self.queues[1 - one].push_back(message);
            }
        }

        /// Delivers the next message in flight to one of the two ranks.
        fn deliver_next(&mut self, one: usize) {
            let next = match self.queues[one].pop_front() {
                None => return,
                Some(TreeMessage::Offer(fd)) => {
                    let socket = fd.map(|fd| PacketSocket::adopt(fd).unwrap());
                    self.ranks[one].on_offer(Self::peer(one), socket)
                }
                Some(TreeMessage::Reply(accepted)) => self.ranks[one].on_reply(Self::peer(one), accepted),
                Some(TreeMessage::Packets(packets)) => {
                    self.along_tree[one].extend(packets.iter().flat_map(|packet| &packet.bytes));
                    return;
                }
            };
            self.apply(one, next);
        }

        /// Returns all bytes that one of the two ranks has received, over the tree or a direct link.
        fn received(&self, one: usize) -> Vec<u8> {
            let mut bytes = self.along_tree[one].clone();
            let mut buffer = [0; 8];
            for link in &self.links[one] {
                while let Ok(len) = link.socket.recv(&mut buffer, Deadline::NOW) {
                    bytes.extend(&buffer[..len]);
                }
            }
            bytes.sort_unstable();
            bytes
        }
    }

    /// Tries every order of seven steps. In each step, one of the two ranks sends or receives a message.
    #[test]
    fn every_message_arrives_and_one_link_opens_whichever_rank_offers_first() {
        for lossy in [false, true] {
            for schedule in 0..4u32.pow(7) {
                let mut two = TwoRanks::new(lossy);
                let mut sent = [vec![], vec![]];
                for step in 0..7 {
                    let (one, sends) =
                        ((schedule >> (2 * step) & 1) as usize, schedule >> (2 * step + 1) & 1 == 1);
                    if sends {
                        let byte = u8::try_from(step).unwrap();
                        sent[one].push(byte);
                        two.send(one, byte);
                    } else {
                        two.deliver_next(one);
                    }
                }
                while two.queues.iter().any(|queues| !queues.is_empty()) {
                    two.deliver_next(0);
                    two.deliver_next(1);
                }
                assert_eq!([two.received(1), two.received(0)], sent, "schedule {schedule:#x}, lossy {lossy}");
                let any = sent.iter().any(|sent| !sent.is_empty());
                let expected = usize::from(any && !lossy);
                assert_eq!(two.ranks.each_ref().map(Paths::open), [expected; 2], "schedule {schedule:#x}");
                assert!(two.links.iter().all(|links| links.len() == expected), "schedule {schedule:#x}");
            }
        }
    }

    #[test]
    fn above_the_maximum_of_links_messages_are_forwarded_along_the_tree() {
        let mut paths = Paths::new(Rank(0));
        let packet = || vec![FramePacket::from(vec![1])];
        let mut theirs = Vec::new();
        for rank in (1..).map(Rank).take(MAX_LINKS) {
            let next = paths.send(rank, packet(), PacketSocket::pair);
            assert!(matches!(next[..], [PathAction::Offer(_)]), "{next:?}");
            theirs.push(next);
        }
        for _ in 0..2 {
            let next = paths.send(Rank(1000), packet(), || panic!("no more sockets are created"));
            assert!(matches!(next[..], [PathAction::AlongTree(_)]), "{next:?}");
        }
        let (ours, _) = PacketSocket::pair().unwrap();
        let next = paths.on_offer(Rank(1001), Some(ours));
        assert!(matches!(next[..], [PathAction::Decline, PathAction::AlongTree(_)]), "{next:?}");
    }
}
