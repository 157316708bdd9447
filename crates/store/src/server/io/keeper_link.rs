//! The server's connection to the keeper, a process that holds duplicates of the server's descriptors. The keeper gets the
//! descriptors before clients can use their resources.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::process::Child;
use std::rc::Rc;
use std::time::{Duration, Instant};

use wholemem_os::{Deadline, Error as OsError, PacketSocket};

use super::packet_queue::{FlushResult, PacketQueue};
use super::poller::{FixedSource, Interest, Poller};
use crate::id::{AllocationId, ClientId};
use crate::keeper::{DescriptorKey, DescriptorTable, Launch, ProcessRole, ToKeeper, ToServer};
use crate::{Error, Result};

/// How long the server waits for an answer of the keeper process. A keeper that has no free descriptor never answers.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The interval between attempts to start a keeper process.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// The number of messages of the keeper process that one iteration of the event loop reads.
const MESSAGES_AT_ONCE: usize = 4;

/// The number of bytes queued for the keeper process above which the server accepts no more clients.
const MAX_QUEUED: usize = 256 << 10;

/// How long the keeper process may still hold the descriptor of memory that the server has released. The kernel frees the pages
/// when the keeper closes this last descriptor. For a large object, that takes longer than the request that deletes the object,
/// and uses a core that the client may need. So releases are sent to the keeper after a delay, several at a time.
const RELEASE_DELAY: Duration = Duration::from_millis(1);

/// The number of released allocations at which the delayed releases are sent to the keeper process at once.
const MAX_RELEASED: usize = 64;

/// How long the keeper process may hold released memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReleaseDelay {
    /// The release is sent at once: freeing the memory takes about as long as waking the keeper, and the next object of its
    /// length gets pages that are still in the caches of the processor.
    None,
    /// The release is sent after [`RELEASE_DELAY`].
    Short,
}

/// An action of the server that waits until the keeper process has received or closed descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ParkAction {
    Memory(AllocationId),
    /// Repeat an allocation that failed, after the keeper process has freed all memory that was released before.
    Retry(AllocationId),
    Client(ClientId),
    /// Answer a client's request, after the keeper process has received or closed the descriptor of the client's process.
    Process {
        client: ClientId,
        request: u64,
    },
}

/// The connection to a keeper process, and the queue of messages to the keeper.
#[derive(Debug)]
struct KeeperProcess {
    socket: PacketSocket,
    packet_queue: PacketQueue,
    /// The keeper process, if this server has started it and has to reap it.
    child: Option<Child>,
    interest: Interest,
}

/// Messages that the server has received from the keeper process.
#[derive(Debug, Default)]
pub(super) struct KeeperMessages {
    pub(super) parked: Vec<ParkAction>,
    pub(super) stop: bool,
    pub(super) is_lost: bool,
}

/// The server's connection to the keeper process, and the actions that wait for the keeper's answers.
pub(super) struct KeeperLink<'a> {
    peer: Option<KeeperProcess>,
    /// The actions that wait until the keeper process has received descriptors, by the key of the first descriptor.
    parking: BTreeMap<u64, ParkAction>,
    /// The keys of descriptors that were sent to the keeper process, in the order of sending, with the times of sending. Some may
    /// be answered already.
    sent: VecDeque<(Instant, u64)>,
    /// The keys of released memory that have not been sent to the keeper process yet. `released_at` is the time of the first
    /// release.
    released: Vec<u64>,
    released_at: Option<Instant>,
    /// The actions that wait until the keeper process has freed released memory: one entry for each message that the keeper
    /// answers, in order. The actions of an entry are removed if the answer is late.
    fences: VecDeque<(Instant, Vec<ParkAction>)>,
    /// True if no memory was released since the last message for which the keeper process answers that earlier releases are done.
    is_fenced: bool,
    /// The time of the next attempt to start a keeper process.
    retry_at: Option<Instant>,
    launch: &'a Launch<'a>,
}

impl<'a> KeeperLink<'a> {
    pub(super) fn new(socket: PacketSocket, launch: &'a Launch<'a>, poller: &mut Poller) -> Result<Self> {
        let mut link = Self {
            peer: None,
            parking: BTreeMap::new(),
            sent: VecDeque::new(),
            released: Vec::new(),
            released_at: None,
            fences: VecDeque::new(),
            is_fenced: false,
            retry_at: None,
            launch,
        };
        link.attach(
            KeeperProcess { socket, packet_queue: PacketQueue::default(), child: None, interest: READ },
            poller,
        )?;
        Ok(link)
    }

    fn attach(&mut self, peer: KeeperProcess, poller: &mut Poller) -> Result<()> {
        poller.add_fixed(FixedSource::Keeper, &peer.socket, peer.interest)?;
        self.peer = Some(peer);
        Ok(())
    }

    /// Returns true if the server may accept more clients: not while the keeper process reads too slowly, nor after it could not
    /// be started.
    pub(super) fn accepts_clients(&self) -> bool {
        match &self.peer {
            Some(peer) => peer.packet_queue.len() <= MAX_QUEUED,
            None => self.retry_at.is_none(),
        }
    }

    /// Returns true if another attempt to start a keeper process is due.
    pub(super) fn take_retry(&mut self, now: Instant) -> bool {
        self.retry_at.take_if(|at| *at <= now).is_some() && self.peer.is_none()
    }

    /// Parks descriptors: sends them to the keeper process, which holds them. Returns the action if there is no keeper to wait
    /// for.
    pub(super) fn park(
        &mut self,
        action: ParkAction,
        fds: Vec<(DescriptorKey, OwnedFd)>,
    ) -> Option<ParkAction> {
        let first = fds.first().map(|(key, _)| key.encode())?;
        if self.peer.is_none() {
            return Some(action);
        }
        self.parking.insert(first, action);
        self.sent.push_back((Instant::now(), first));
        let keys = fds.iter().map(|(key, _)| key.encode()).collect();
        self.send(&ToKeeper::Park(keys), fds.into_iter().map(|(_, fd)| Rc::new(fd)).collect());
        None
    }

    /// Makes the keeper process close the descriptors with these keys.
    pub(super) fn unpark(&mut self, keys: &[DescriptorKey]) {
        self.send(&ToKeeper::Unpark(keys.iter().map(|key| key.encode()).collect()), Vec::new());
    }

    /// Makes the keeper process free memory: with the next message to the keeper, which is sent after the outputs of a step have
    /// been carried out at the earliest, and after the given delay at the latest.
    pub(super) fn release(&mut self, allocation: AllocationId, delay: ReleaseDelay) {
        if self.peer.is_none() {
            return;
        }
        self.released.push(DescriptorKey::Allocation(allocation).encode());
        self.released_at.get_or_insert_with(Instant::now);
        if delay == ReleaseDelay::None || self.released.len() >= MAX_RELEASED {
            self.send_released();
        }
    }

    /// Sends all delayed releases of memory to the keeper process, because a new allocation may need the memory.
    pub(super) fn send_released(&mut self) {
        self.released_at = None;
        if !self.released.is_empty() {
            let keys = std::mem::take(&mut self.released);
            self.queue(&ToKeeper::Unpark(keys), Vec::new());
            self.is_fenced = false;
        }
    }

    /// Delays an action until the keeper process has freed all memory that was released so far. Returns the action if there is no
    /// keeper to wait for.
    pub(super) fn after_releases(&mut self, action: ParkAction) -> Option<ParkAction> {
        if self.peer.is_none() {
            return Some(action);
        }
        self.send_released();
        match self.fences.back_mut() {
            Some((since, waiting)) if self.is_fenced && since.elapsed() < ANSWER_TIMEOUT => {
                waiting.push(action)
            }
            _ => {
                // The keeper processes messages in order, and answers this message although it contains no descriptor.
                self.queue(&ToKeeper::Park(Vec::new()), Vec::new());
                self.fences.push_back((Instant::now(), vec![action]));
                self.is_fenced = true;
            }
        }
        None
    }

    pub(super) fn send(&mut self, message: &ToKeeper, fds: Vec<Rc<OwnedFd>>) {
        self.send_released();
        self.queue(message, fds);
    }

    fn queue(&mut self, message: &ToKeeper, fds: Vec<Rc<OwnedFd>>) {
        if let (Some(peer), Ok(bytes)) = (&mut self.peer, postcard::to_allocvec(message)) {
            peer.packet_queue.push(vec![bytes], fds, None);
        }
    }

    /// Sends queued messages to the keeper process. Returns false if the keeper has exited.
    pub(super) fn flush(&mut self, poller: &mut Poller) -> bool {
        if self.released_at.is_some_and(|at| at.elapsed() >= RELEASE_DELAY) {
            self.send_released();
        }
        let Some(peer) = &mut self.peer else { return true };
        if peer.packet_queue.flush(&peer.socket) == FlushResult::Broken {
            return false;
        }
        let interest = Interest { read: true, write: !peer.packet_queue.is_empty() };
        if interest != peer.interest && poller.set_fixed(FixedSource::Keeper, &peer.socket, interest).is_ok()
        {
            peer.interest = interest;
        }
        true
    }

    /// Receives some messages of the keeper process.
    pub(super) fn receive(&mut self, packet: &mut [u8]) -> KeeperMessages {
        let mut messages = KeeperMessages::default();
        for _ in 0..MESSAGES_AT_ONCE {
            let Some(peer) = &self.peer else { return messages };
            match peer.socket.recv(packet, Deadline::NOW) {
                Ok(len) => match postcard::from_bytes(&packet[..len]) {
                    Ok(ToServer::Parked(keys)) if keys.is_empty() => {
                        messages
                            .parked
                            .extend(self.fences.pop_front().into_iter().flat_map(|(_, actions)| actions));
                    }
                    Ok(ToServer::Parked(keys)) => {
                        messages.parked.extend(keys.iter().filter_map(|key| self.parking.remove(key)));
                    }
                    Ok(ToServer::Stop) => messages.stop = true,
                    Err(_) => messages.is_lost = true,
                },
                Err(OsError::TimedOut) => return messages,
                Err(_) => messages.is_lost = true,
            }
            if messages.is_lost {
                return messages;
            }
        }
        messages
    }

    /// Removes and returns the actions for which the keeper's answer is late.
    pub(super) fn take_late(&mut self) -> Vec<ParkAction> {
        let now = Instant::now();
        let mut late = Vec::new();
        while let Some((since, key)) = self.sent.front().copied() {
            let is_answered = !self.parking.contains_key(&key);
            if !is_answered && now.saturating_duration_since(since) < ANSWER_TIMEOUT {
                break;
            }
            self.sent.pop_front();
            late.extend(self.parking.remove(&key));
        }
        let is_late = |since: &Instant| now.saturating_duration_since(*since) >= ANSWER_TIMEOUT;
        let fences = self.fences.iter_mut().take_while(|(since, _)| is_late(since));
        late.extend(fences.flat_map(|(_, actions)| actions.drain(..)));
        late
    }

    /// Returns how long the event loop may wait until [`Self::take_late`] or [`Self::take_retry`] has something to return, or
    /// [`Self::flush`] has something to send.
    pub(super) fn timeout(&self, now: Instant) -> Option<Duration> {
        let left = |at: Instant| at.saturating_duration_since(now);
        let late = self.sent.front().map(|(since, _)| left(*since + ANSWER_TIMEOUT));
        let fence = self.fences.iter().find(|(_, actions)| !actions.is_empty());
        let fence = fence.map(|(since, _)| left(*since + ANSWER_TIMEOUT));
        let release = self.released_at.map(|at| left(at + RELEASE_DELAY));
        [late, fence, release, self.retry_at.map(left)].into_iter().flatten().min()
    }

    /// Handles the exit of the keeper process. Returns all actions that wait for its answers.
    pub(super) fn on_exit(&mut self, poller: &mut Poller) -> Vec<ParkAction> {
        if let Some(peer) = self.peer.take() {
            poller.remove_fixed(&peer.socket);
            if let Some(mut child) = peer.child {
                let _ = child.wait();
            }
        }
        self.sent.clear();
        self.released.clear();
        self.released_at = None;
        let fences = self.fences.drain(..).flat_map(|(_, actions)| actions);
        std::mem::take(&mut self.parking).into_values().chain(fences).collect()
    }

    /// Starts another keeper process, and hands the descriptors over to it. After a failure, [`Self::take_retry`] returns true
    /// when another attempt is due.
    pub(super) fn start(&mut self, descriptors: Result<DescriptorTable>, poller: &mut Poller) {
        if let Err(error) = descriptors.and_then(|descriptors| self.launch(&descriptors, poller)) {
            tracing::error!(%error, "cannot start a keeper");
            self.retry_at = Some(Instant::now() + RETRY_INTERVAL);
        }
    }

    fn launch(&mut self, descriptors: &DescriptorTable, poller: &mut Poller) -> Result<()> {
        let (socket, child_end) = PacketSocket::pair()?;
        let child = (self.launch)(ProcessRole::Keeper, child_end.into())
            .map_err(|source| Error::Launch { source })?;
        descriptors.send(&socket)?;
        self.attach(
            KeeperProcess {
                socket,
                packet_queue: PacketQueue::default(),
                child: Some(child),
                interest: READ,
            },
            poller,
        )
    }
}

const READ: Interest = Interest { read: true, write: false };

#[cfg(test)]
mod tests {
    use super::*;

    fn no_launch(_: ProcessRole, _: OwnedFd) -> std::io::Result<Child> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    fn fds(client: ClientId) -> Vec<(DescriptorKey, OwnedFd)> {
        vec![(DescriptorKey::Pins(client), std::fs::File::open("/dev/null").unwrap().into())]
    }

    #[test]
    fn waits_for_released_memory_end_with_the_answer_or_exit_of_the_keeper() {
        let (local, peer) = PacketSocket::pair().unwrap();
        let mut poller = Poller::create().unwrap();
        let mut link = KeeperLink::new(local, &no_launch, &mut poller).unwrap();
        let [one, two, three] = [1, 2, 3].map(|slot| ParkAction::Retry(AllocationId::new(slot, 0)));
        assert_eq!((link.after_releases(one), link.after_releases(two)), (None, None));
        assert_eq!(link.fences.len(), 1, "no memory was released in between");
        link.release(AllocationId::new(4, 0), ReleaseDelay::Short);
        assert_eq!((link.after_releases(three), link.fences.len()), (None, 2));
        assert!(
            link.timeout(Instant::now()).is_some() && link.flush(&mut poller) && link.take_late().is_empty()
        );
        // The keeper's answer to the first message is late, but must still be matched to that message.
        link.fences[0].0 -= ANSWER_TIMEOUT;
        assert_eq!(link.take_late(), [one, two]);
        let answer = postcard::to_allocvec(&ToServer::Parked(Vec::new())).unwrap();
        peer.send(&answer, &[], Deadline::NEVER).unwrap();
        assert_eq!(link.receive(&mut [0; 100]).parked, []);
        assert_eq!(link.on_exit(&mut poller), [three]);
        assert_eq!(link.after_releases(one), Some(one), "there is no keeper");
    }

    #[test]
    fn parking_ends_with_the_answer_or_exit_of_the_keeper() {
        let (local, peer) = PacketSocket::pair().unwrap();
        let mut poller = Poller::create().unwrap();
        let mut link = KeeperLink::new(local, &no_launch, &mut poller).unwrap();
        let [one, two] = [1, 2].map(ClientId);
        for client in [one, two] {
            assert_eq!(link.park(ParkAction::Client(client), fds(client)), None);
        }
        assert!(link.flush(&mut poller) && link.take_late().is_empty());
        let (len, received) = peer.recv_with_fds(&mut [0; 100], 4, Deadline::NEVER).unwrap();
        assert!(len > 0 && received.len() == 1);
        let answer =
            postcard::to_allocvec(&ToServer::Parked(vec![DescriptorKey::Pins(one).encode()])).unwrap();
        peer.send(&answer, &[], Deadline::NEVER).unwrap();
        assert_eq!(link.receive(&mut [0; 100]).parked, [ParkAction::Client(one)]);
        drop(peer);
        assert!(link.receive(&mut [0; 100]).is_lost);
        assert_eq!(link.on_exit(&mut poller), [ParkAction::Client(two)]);
        assert_eq!(
            link.park(ParkAction::Client(one), fds(one)),
            Some(ParkAction::Client(one)),
            "there is no keeper"
        );
        let now = Instant::now();
        assert!(link.accepts_clients() && link.timeout(now).is_none());
        link.start(Ok(DescriptorTable::default()), &mut poller);
        assert!(!link.accepts_clients() && !link.take_retry(now), "the keeper could not be started");
        assert!(link.timeout(now).is_some() && link.take_retry(now + 2 * RETRY_INTERVAL));
        assert!(link.accepts_clients(), "the caller starts a keeper now");
    }
}
