//! Links between ranks that are not neighbours in the tree, made when one first sends the other a long message.
//!
//! ```text
//!     asker                    the tree                     asked
//!       |--- Offer, with one of a pair of sockets, hop by hop -->|
//!       |<-- Accepted, or Declined, hop by hop ------------------|
//!       |====================== the pair ========================|
//! ```
//!
//! No further handshake is needed, since the offer comes through links between authenticated ranks. The message waits for the answer.
//! If the other rank declines because it has no room for one more descriptor, the message is forwarded along the tree, as short
//! messages always are. If two ranks send each other an offer at the same time, that of the lower rank counts, and both drop the
//! other one.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use wholemem_os::{PacketSocket, Result};

use crate::Rank;
use crate::links::{Left, Link, Packet};

/// How many such links a rank has at most. In a group of threads, each thread has that many.
const MOST: usize = 128;

#[derive(Debug)]
enum Path {
    Asked {
        ours: PacketSocket,
        waiting: Vec<Packet>,
    },
    Open(Arc<Link>),
    /// There is no link: messages are forwarded along the tree.
    Tree,
}

/// What the caller has to do.
#[derive(Debug)]
pub(crate) enum Next {
    /// Wake the progress thread, which sends what the link has not taken at once.
    Flush,
    /// Forward these along the tree.
    AlongTree(Vec<Packet>),
    /// Offer this to the other rank.
    Offer(OwnedFd),
    /// Accept the offer.
    Accept,
    /// Decline the offer.
    Decline,
    /// Read from this link from now on, and send what waits on it.
    Read(Arc<Link>),
}

#[derive(Debug)]
pub(crate) struct Paths {
    rank: Rank,
    paths: BTreeMap<Rank, Path>,
}

impl Paths {
    pub(crate) fn new(rank: Rank) -> Self {
        Self { rank, paths: BTreeMap::new() }
    }

    /// How many links there are.
    pub(crate) fn open(&self) -> usize {
        self.paths.values().filter(|path| matches!(path, Path::Open(_))).count()
    }

    fn has_room(&self) -> bool {
        self.paths.values().filter(|path| !matches!(path, Path::Tree)).count() < MOST
    }

    /// Sends packets to a rank, or queues them until it has answered the offer. `pair` makes two connected sockets.
    pub(crate) fn send(
        &mut self,
        to: Rank,
        packets: Vec<Packet>,
        pair: impl FnOnce() -> Result<(PacketSocket, PacketSocket)>,
    ) -> Vec<Next> {
        match self.paths.get_mut(&to) {
            Some(Path::Open(link)) => match link.post(packets) {
                Left::Nothing => vec![],
                _ => vec![Next::Flush],
            },
            Some(Path::Asked { waiting, .. }) => {
                waiting.extend(packets);
                vec![]
            }
            Some(Path::Tree) => vec![Next::AlongTree(packets)],
            None => match self.has_room().then(pair) {
                Some(Ok((ours, theirs))) => {
                    self.paths.insert(to, Path::Asked { ours, waiting: packets });
                    vec![Next::Offer(theirs.into())]
                }
                // No further offer is made: there would be no room for the next either.
                _ => {
                    self.paths.insert(to, Path::Tree);
                    vec![Next::AlongTree(packets)]
                }
            },
        }
    }

    /// Handles an offer. The socket is `None` if it was lost on the way.
    pub(crate) fn offered(&mut self, from: Rank, socket: Option<PacketSocket>) -> Vec<Next> {
        let room = self.has_room();
        let waiting = match self.paths.remove(&from) {
            None | Some(Path::Tree) if !room => None,
            None | Some(Path::Tree) => Some(Vec::new()),
            // The offer of the other rank counts, and it does not answer that of this rank.
            Some(Path::Asked { waiting, .. }) if from < self.rank => Some(waiting),
            // The offer of this rank counts, and its answer is on the way or has arrived.
            Some(ours) => {
                self.paths.insert(from, ours);
                return vec![];
            }
        };
        match (socket, waiting) {
            (Some(socket), Some(waiting)) => vec![Next::Accept, self.open_with(from, socket, waiting)],
            (_, waiting) => {
                self.paths.insert(from, Path::Tree);
                vec![Next::Decline, Next::AlongTree(waiting.unwrap_or_default())]
            }
        }
    }

    /// Handles the answer to the offer of this rank.
    pub(crate) fn answered(&mut self, by: Rank, accepted: bool) -> Vec<Next> {
        match self.paths.remove(&by) {
            Some(Path::Asked { ours, waiting }) if accepted => vec![self.open_with(by, ours, waiting)],
            Some(Path::Asked { waiting, .. }) => {
                self.paths.insert(by, Path::Tree);
                vec![Next::AlongTree(waiting)]
            }
            // An answer without an offer.
            other => {
                self.paths.extend(other.map(|path| (by, path)));
                vec![]
            }
        }
    }

    /// Removes a link whose other end is closed.
    pub(crate) fn close(&mut self, peer: Rank) {
        self.paths.remove(&peer);
    }

    fn open_with(&mut self, peer: Rank, socket: PacketSocket, waiting: Vec<Packet>) -> Next {
        let link = Arc::new(Link::new(peer, socket));
        link.post(waiting);
        self.paths.insert(peer, Path::Open(Arc::clone(&link)));
        Next::Read(link)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use wholemem_os::Deadline;

    use super::*;

    /// What travels along the tree between the two of a test, in order in each direction.
    #[derive(Debug)]
    enum Letter {
        Offer(Option<OwnedFd>),
        Answer(bool),
        Packets(Vec<Packet>),
    }

    /// Two ranks, and what each has received.
    struct Two {
        ranks: [Paths; 2],
        mail: [VecDeque<Letter>; 2],
        links: [Vec<Arc<Link>>; 2],
        along_tree: [Vec<u8>; 2],
        lossy: bool,
    }

    impl Two {
        fn new(lossy: bool) -> Self {
            Self {
                ranks: [Paths::new(Rank(3)), Paths::new(Rank(8))],
                mail: Default::default(),
                links: Default::default(),
                along_tree: Default::default(),
                lossy,
            }
        }

        fn peer(one: usize) -> Rank {
            [Rank(8), Rank(3)][one]
        }

        fn send(&mut self, one: usize, byte: u8) {
            let packets = vec![Packet::from(vec![byte])];
            let next = self.ranks[one].send(Self::peer(one), packets, PacketSocket::pair);
            self.act(one, next);
        }

        fn act(&mut self, one: usize, next: Vec<Next>) {
            for next in next {
                let letter = match next {
                    Next::Flush => continue,
                    Next::Read(link) => {
                        self.links[one].push(link);
                        continue;
                    }
                    Next::Offer(fd) => Letter::Offer((!self.lossy).then_some(fd)),
                    Next::AlongTree(packets) => Letter::Packets(packets),
                    Next::Accept => Letter::Answer(true),
                    Next::Decline => Letter::Answer(false),
                };
                self.mail[1 - one].push_back(letter);
            }
        }

        /// One rank opens its next letter.
        fn open_letter(&mut self, one: usize) {
            let next = match self.mail[one].pop_front() {
                None => return,
                Some(Letter::Offer(fd)) => {
                    let socket = fd.map(|fd| PacketSocket::adopt(fd).unwrap());
                    self.ranks[one].offered(Self::peer(one), socket)
                }
                Some(Letter::Answer(accepted)) => self.ranks[one].answered(Self::peer(one), accepted),
                Some(Letter::Packets(packets)) => {
                    self.along_tree[one].extend(packets.iter().flat_map(|packet| &packet.bytes));
                    return;
                }
            };
            self.act(one, next);
        }

        /// Everything that one rank has got, by whichever way.
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

    /// Plays every order of seven moves: each of two ranks sends, or opens a letter.
    #[test]
    fn whoever_asks_first_all_is_received_and_there_is_one_link() {
        for lossy in [false, true] {
            for moves in 0..4u32.pow(7) {
                let mut two = Two::new(lossy);
                let mut sent = [vec![], vec![]];
                for turn in 0..7 {
                    let (one, sends) = ((moves >> (2 * turn) & 1) as usize, moves >> (2 * turn + 1) & 1 == 1);
                    if sends {
                        let byte = u8::try_from(turn).unwrap();
                        sent[one].push(byte);
                        two.send(one, byte);
                    } else {
                        two.open_letter(one);
                    }
                }
                while two.mail.iter().any(|mail| !mail.is_empty()) {
                    two.open_letter(0);
                    two.open_letter(1);
                }
                assert_eq!([two.received(1), two.received(0)], sent, "moves {moves:#x}, lossy {lossy}");
                let any = sent.iter().any(|sent| !sent.is_empty());
                let expected = usize::from(any && !lossy);
                assert_eq!(two.ranks.each_ref().map(Paths::open), [expected; 2], "moves {moves:#x}");
                assert!(two.links.iter().all(|links| links.len() == expected), "moves {moves:#x}");
            }
        }
    }

    #[test]
    fn beyond_the_most_everything_goes_along_the_tree() {
        let mut paths = Paths::new(Rank(0));
        let packet = || vec![Packet::from(vec![1])];
        let mut theirs = Vec::new();
        for rank in (1..).map(Rank).take(MOST) {
            let next = paths.send(rank, packet(), PacketSocket::pair);
            assert!(matches!(next[..], [Next::Offer(_)]), "{next:?}");
            theirs.push(next);
        }
        for _ in 0..2 {
            let next = paths.send(Rank(1000), packet(), || panic!("no more sockets are made"));
            assert!(matches!(next[..], [Next::AlongTree(_)]), "{next:?}");
        }
        let (ours, _) = PacketSocket::pair().unwrap();
        let next = paths.offered(Rank(1001), Some(ours));
        assert!(matches!(next[..], [Next::Decline, Next::AlongTree(_)]), "{next:?}");
    }
}
