//! Waits for events of sockets and processes, and returns ready events fairly among users.
//!
//! Each user has an epoll set of its own. These sets are members of one set, which also has the listener, the keeper and the
//! workers. An iteration of the event loop takes a few events of each user that has some. The kernel maintains the queues and
//! rotates them, so the cost of an iteration depends on the number of active users, not on the number of connections.
//!
//! A descriptor must be removed before it is closed: its open file is shared with the keeper, so closing it here does not remove
//! it from the set.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use wholemem_os::time_slice::Yielder;
use wholemem_os::{Deadline, Errno, Error as OsError};

use crate::Result;
use crate::convert::low_u32;
use crate::id::ClientId;

/// The maximum number of events of one user that one iteration of the event loop fetches from the kernel.
const MAX_USER_EVENTS: usize = 8;

/// The maximum number of events that one iteration of the event loop fetches from the common epoll set: users with ready events,
/// and three fixed sources.
const MAX_EVENTS: usize = 64;

const WORKERS: u64 = 0;
const KEEPER: u64 = 1;
const LISTENER: u64 = 2;
/// The epoll token of a user is this value plus the user id.
const FIRST_USER: u64 = 1 << 32;

/// The event sources of the server that are ready after a wait.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ReadySources {
    pub(super) workers: bool,
    pub(super) keeper: bool,
    pub(super) listener: bool,
    /// The users whose clients have ready events.
    pub(super) users: Vec<u32>,
}

/// The event sources of the server that do not belong to a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FixedSource {
    Workers,
    Keeper,
    Listener,
}

/// An event of a client's socket or process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientEvent {
    /// The process of the client has exited.
    Exited(ClientId),
    /// The client's socket is readable or writable, or was closed by the client.
    Socket { client: ClientId, is_readable: bool, is_writable: bool, is_closed: bool },
}

/// The events to wait for on a socket. A close by the peer is always reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Interest {
    pub(super) read: bool,
    pub(super) write: bool,
}

impl Interest {
    fn flags(self) -> EventFlags {
        let read = if self.read { EventFlags::IN } else { EventFlags::empty() };
        read | if self.write { EventFlags::OUT } else { EventFlags::empty() }
    }
}

#[derive(Debug)]
struct UserEpollSet {
    set: OwnedFd,
    members: usize,
    /// Events that the kernel has reported and that were not returned yet. They are returned before new events are fetched,
    /// because the kernel has already moved them to the end of its own queue. The client of an event may have left.
    reported: VecDeque<ClientEvent>,
}

/// All event sources of a store server: an epoll set for each user, and a common set.
#[derive(Debug)]
pub(super) struct Poller {
    all: OwnedFd,
    users: BTreeMap<u32, UserEpollSet>,
    /// Yields the CPU to other threads when the thread of the event loop has been busy for long.
    yielder: Yielder,
}

fn failed(call: &'static str) -> impl Fn(Errno) -> crate::Error {
    move |errno| OsError::Call { call, errno }.into()
}

fn create() -> Result<OwnedFd> {
    epoll::create(CreateFlags::CLOEXEC).map_err(failed("epoll_create"))
}

fn add(set: &OwnedFd, fd: impl AsFd, token: u64, flags: EventFlags) -> Result<()> {
    epoll::add(set, fd, EventData::new_u64(token), flags).map_err(failed("epoll_ctl"))
}

/// Returns the epoll token of a client's socket or, with the lowest bit set, of the client's process. Client ids have 60 bits.
fn token(client: ClientId, is_process: bool) -> u64 {
    client.0 << 1 | u64::from(is_process)
}

impl Poller {
    pub(super) fn create() -> Result<Self> {
        Ok(Self { all: create()?, users: BTreeMap::new(), yielder: Yielder::new() })
    }

    pub(super) fn add_fixed(&mut self, source: FixedSource, fd: impl AsFd, flags: Interest) -> Result<()> {
        add(&self.all, fd, Self::fixed_token(source), flags.flags())
    }

    pub(super) fn set_fixed(&mut self, source: FixedSource, fd: impl AsFd, flags: Interest) -> Result<()> {
        let data = EventData::new_u64(Self::fixed_token(source));
        epoll::modify(&self.all, fd, data, flags.flags()).map_err(failed("epoll_ctl"))
    }

    /// Removes the descriptor of a fixed event source from the common epoll set, because it is about to be closed.
    pub(super) fn remove_fixed(&mut self, fd: impl AsFd) {
        // An error is ignored: the descriptor may never have been added.
        let _ = epoll::delete(&self.all, fd);
    }

    fn fixed_token(source: FixedSource) -> u64 {
        match source {
            FixedSource::Workers => WORKERS,
            FixedSource::Keeper => KEEPER,
            FixedSource::Listener => LISTENER,
        }
    }

    pub(super) fn add_socket(
        &mut self,
        user: u32,
        client: ClientId,
        fd: impl AsFd,
        interest: Interest,
    ) -> Result<()> {
        self.add_member(user, fd, token(client, false), interest.flags())
    }

    pub(super) fn add_process(&mut self, user: u32, client: ClientId, fd: impl AsFd) -> Result<()> {
        self.add_member(user, fd, token(client, true), EventFlags::IN)
    }

    fn add_member(&mut self, user: u32, fd: impl AsFd, token: u64, flags: EventFlags) -> Result<()> {
        let of_user = match self.users.entry(user) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                let set = create()?;
                add(&self.all, &set, FIRST_USER | u64::from(user), EventFlags::IN)?;
                unknown.insert(UserEpollSet { set, members: 0, reported: VecDeque::new() })
            }
        };
        of_user.members += 1;
        let added = add(&of_user.set, fd, token, flags);
        if added.is_err() {
            self.remove_member(user);
        }
        added
    }

    pub(super) fn set_interest(
        &mut self,
        user: u32,
        client: ClientId,
        fd: impl AsFd,
        interest: Interest,
    ) -> Result<()> {
        let Some(of_user) = self.users.get(&user) else { return Ok(()) };
        let data = EventData::new_u64(token(client, false));
        epoll::modify(&of_user.set, fd, data, interest.flags()).map_err(failed("epoll_ctl"))
    }

    /// Removes a client's socket or pidfd from its user's epoll set, because it is about to be closed.
    pub(super) fn remove(&mut self, user: u32, fd: impl AsFd) {
        if self.users.get(&user).is_some_and(|of_user| epoll::delete(&of_user.set, fd).is_ok()) {
            self.remove_member(user);
        }
    }

    fn remove_member(&mut self, user: u32) {
        if let Some(of_user) = self.users.get_mut(&user) {
            of_user.members -= 1;
            if of_user.members == 0 {
                // No other process has the user's epoll set open, so closing the set removes it from the common set.
                self.users.remove(&user);
            }
        }
    }

    /// Waits until an event source is ready, at most until the deadline.
    pub(super) fn wait(&mut self, deadline: Deadline) -> Result<ReadySources> {
        let mut events: Vec<Event> = Vec::with_capacity(MAX_EVENTS);
        let buffer = rustix::buffer::spare_capacity(&mut events);
        let wait = |left: Option<Duration>| {
            // A time that is too long for the kernel's type is treated as unlimited.
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            epoll::wait(&self.all, buffer, timeout.as_ref())
        };
        match self.yielder.wait(deadline, wait) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed("epoll_wait")(errno)),
        }
        let mut ready = ReadySources::default();
        for event in &events {
            match event.data.u64() {
                WORKERS => ready.workers = true,
                KEEPER => ready.keeper = true,
                LISTENER => ready.listener = true,
                user => ready.users.push(low_u32(user)),
            }
        }
        Ok(ready)
    }

    /// Returns the next reported event of a user's clients; `None` if none is left.
    pub(super) fn next_event(&mut self, user: u32) -> Option<ClientEvent> {
        self.users.get_mut(&user)?.reported.pop_front()
    }

    /// Starts to serve a user in this iteration of the event loop: fetches events from the kernel, if all events that were
    /// reported before have been returned. Connections are served round-robin.
    pub(super) fn fetch_events(&mut self, user: u32) -> Result<()> {
        let Some(of_user) = self.users.get_mut(&user).filter(|of_user| of_user.reported.is_empty()) else {
            return Ok(());
        };
        let mut events = Vec::with_capacity(MAX_USER_EVENTS);
        match epoll::wait(
            &of_user.set,
            rustix::buffer::spare_capacity(&mut events),
            Some(&Timespec::default()),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed("epoll_wait")(errno)),
        }
        let event = |event: &Event| {
            let (token, flags) = (event.data.u64(), event.flags);
            let client = ClientId(token >> 1);
            match token & 1 {
                1 => ClientEvent::Exited(client),
                _ => ClientEvent::Socket {
                    client,
                    is_readable: flags.contains(EventFlags::IN),
                    is_writable: flags.contains(EventFlags::OUT),
                    is_closed: flags.intersects(EventFlags::HUP | EventFlags::ERR),
                },
            }
        };
        of_user.reported.extend(events.iter().map(event));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use wholemem_os::{Deadline, PacketSocket};

    use super::*;

    const READ: Interest = Interest { read: true, write: false };

    /// Creates a poller with `count` readable connections of each user.
    fn poller(users: &[(u32, usize)]) -> (Poller, BTreeMap<ClientId, (u32, PacketSocket, PacketSocket)>) {
        let mut poller = Poller::create().unwrap();
        let mut sockets = BTreeMap::new();
        for (user, count) in users {
            for number in 0..*count {
                let client = ClientId(u64::from(*user) << 16 | number as u64);
                let (local, peer) = PacketSocket::pair().unwrap();
                poller.add_socket(*user, client, &local, READ).unwrap();
                peer.send(b"x", &[], Deadline::NOW).unwrap();
                sockets.insert(client, (*user, local, peer));
            }
        }
        (poller, sockets)
    }

    /// Returns the next events of a user, at most `most` of them.
    fn take(poller: &mut Poller, user: u32, most: usize) -> Vec<ClientEvent> {
        let mut events = Vec::new();
        while events.len() < most {
            poller.fetch_events(user).unwrap();
            let Some(event) = poller.next_event(user) else { break };
            events.push(event);
        }
        events
    }

    fn clients(events: &[ClientEvent]) -> Vec<ClientId> {
        events
            .iter()
            .map(|event| match event {
                ClientEvent::Exited(client) | ClientEvent::Socket { client, .. } => *client,
            })
            .collect()
    }

    #[test]
    fn an_iteration_serves_users_equally_whatever_their_number_of_connections() {
        let (mut poller, _sockets) = poller(&[(7, 100), (8, 1)]);
        let mut ready = poller.wait(Deadline::NOW).unwrap().users;
        ready.sort_unstable();
        assert_eq!(ready, [7, 8]);
        assert_eq!(take(&mut poller, 7, MAX_USER_EVENTS).len(), MAX_USER_EVENTS);
        assert_eq!(clients(&take(&mut poller, 8, 1)), [ClientId(8 << 16)]);
    }

    #[test]
    fn connections_of_a_user_are_served_round_robin() {
        let (mut poller, sockets) = poller(&[(7, 100)]);
        // The events are taken in batches of several sizes, also smaller than the number that the kernel reports at a time.
        for turn in [1, 3, MAX_USER_EVENTS] {
            let mut seen = Vec::new();
            while seen.len() < sockets.len() {
                let left = sockets.len() - seen.len();
                seen.extend(clients(&take(&mut poller, 7, turn.min(left))));
            }
            let distinct: BTreeSet<_> = seen.iter().collect();
            assert_eq!(
                distinct.len(),
                sockets.len(),
                "no connection is served twice before all are served once"
            );
        }
    }

    #[test]
    fn a_socket_without_interest_still_reports_a_close() {
        let (mut poller, mut sockets) = poller(&[(7, 1)]);
        let (client, (user, local, peer)) = sockets.pop_first().unwrap();
        poller.set_interest(user, client, &local, Interest::default()).unwrap();
        assert_eq!(poller.wait(Deadline::NOW).unwrap(), ReadySources::default());
        drop(peer);
        let closed = ClientEvent::Socket { client, is_readable: false, is_writable: false, is_closed: true };
        assert_eq!(take(&mut poller, user, 1), [closed]);
    }

    #[test]
    fn a_removed_descriptor_is_not_reported_although_another_process_has_it_open() {
        let (mut poller, mut sockets) = poller(&[(7, 1)]);
        let (_, (user, local, _peer)) = sockets.pop_first().unwrap();
        let _kept = wholemem_os::memfd::share_fd(local.as_fd()).unwrap();
        poller.remove(user, &local);
        drop(local);
        assert_eq!(poller.wait(Deadline::NOW).unwrap(), ReadySources::default());
        assert!(poller.users.is_empty(), "a user without connections has no set");
    }
}
