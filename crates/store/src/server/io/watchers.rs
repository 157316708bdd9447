//! The log of published and deleted names, and the clients that watch names.
//!
//! An event is appended to a log, and encoded when it is sent for the first time. Each watcher has a position in the log, and
//! receives later events, a bounded number at a time, when its socket accepts them. So a watcher that does not read uses no memory
//! but its position, and publishing a name costs the same however many clients watch.
//!
//! The log is bounded. A watcher whose position is before its beginning has missed events, and is disconnected. Some events are
//! retained after all watchers have received them, so that a watch can be resumed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

use crate::convert::to_usize;
use crate::id::ClientId;
use crate::protocol::frame;
use crate::protocol::{Answer, Event, NameEvent, Response};
use crate::server::budget::Charge;

/// The maximum number of bytes of the event log. The events of the largest pack (objects that are published together) fit, also if
/// the pack has no name and each of its objects an event of its own.
const MAX_LOG_BYTES: usize = 16 << 20;

/// The number of bytes that an entry of the event log uses besides its name and packets.
const ENTRY_COST: usize = 192;

/// The number of bytes of events that are retained after all watchers have received them.
const HISTORY_BYTES: usize = 1 << 20;

/// The number of events that one iteration of the event loop compares with the prefixes that clients watch.
const COMPARED_AT_ONCE: usize = 64;

/// The number of events that one iteration of the event loop sends to clients that watch names.
const SENT_AT_ONCE: usize = 8;

/// An event in the form in which the clients of a log receive it.
#[derive(Debug, Clone)]
pub(super) enum LoggedEvent {
    Event(Event),
    NameEvent(NameEvent),
}

impl LoggedEvent {
    fn name(&self) -> &str {
        match self {
            Self::Event(event) => &event.name,
            Self::NameEvent(event) => &event.name,
        }
    }
}

#[derive(Debug)]
struct LogEntry {
    event: LoggedEvent,
    /// The sorted names of all objects that the event concerns; empty if they all have the name of the event.
    names: Vec<String>,
    packets: Option<Rc<[Vec<u8>]>>,
}

impl LogEntry {
    fn cost(&self) -> usize {
        let names: usize = self.names.iter().map(|name| size_of::<String>() + name.len()).sum();
        // The name of the event is also in its packet.
        ENTRY_COST + names + 2 * self.event.name().len()
    }

    /// Returns true if one of the names begins with a prefix.
    fn concerns(&self, prefix: &str) -> bool {
        if self.names.is_empty() {
            return self.event.name().starts_with(prefix);
        }
        let at = self.names.partition_point(|name| name.as_str() < prefix);
        self.names.get(at).is_some_and(|name| name.starts_with(prefix))
    }

    fn packets(&mut self) -> Rc<[Vec<u8>]> {
        let packets = self.packets.take().unwrap_or_else(|| {
            let answer = match self.event.clone() {
                LoggedEvent::Event(event) => Answer::Event(event),
                LoggedEvent::NameEvent(event) => Answer::NameEvent(event),
            };
            let response = Response { id: 0, answer };
            match frame::encode(&response, &[]) {
                Ok(packets) => packets.into(),
                Err(malformed) => {
                    tracing::error!(%malformed, "an event cannot be encoded");
                    Rc::default()
                }
            }
        });
        self.packets = Some(Rc::clone(&packets));
        packets
    }
}

#[derive(Debug)]
struct EventWatcher {
    user: u32,
    prefix: String,
    /// The number of the next event in the log that is compared with the watched prefix.
    next: u64,
    /// True if the socket of the watching client is full.
    is_blocked: bool,
    _charge: Charge,
}

/// The result of sending an event to a client that watches names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendResult {
    Yes,
    /// The client's socket is full: [`EventWatchers::unblock`] has to be called when the socket is writable.
    Full,
}

/// The log of published and deleted names, and the position of each watching client in the log.
#[derive(Debug, Default)]
pub(super) struct EventWatchers {
    log: VecDeque<LogEntry>,
    /// The number of the first event that is still in the log.
    first: u64,
    bytes: usize,
    /// The number of bytes that the log retains for watches that are resumed.
    history: usize,
    /// The number of events that were appended to the log.
    notified: u64,
    watchers: BTreeMap<ClientId, EventWatcher>,
    /// Watching clients whose sockets are not full, by their positions in the event log, for each user.
    ready: BTreeMap<u32, BTreeSet<(u64, ClientId)>>,
    /// Watching clients whose sockets are full, by their positions in the event log.
    blocked: BTreeSet<(u64, ClientId)>,
    /// The user whose watching client was served last.
    last_user: u32,
    #[cfg(test)]
    compared: usize,
}

impl EventWatchers {
    /// Creates a log that retains events, so that watches can be resumed. `first` is the number of its first event.
    pub(super) fn with_history(first: u64) -> Self {
        Self { first, history: HISTORY_BYTES, ..Self::default() }
    }

    /// Registers a client's watch of names with a prefix, which replaces an earlier watch of the client. The watch begins behind
    /// the event with the number `after`, or with the next event. Returns the number of the event before its first, and whether
    /// the log has all events behind `after`.
    pub(super) fn add(
        &mut self,
        client: ClientId,
        user: u32,
        prefix: String,
        after: Option<u64>,
        charge: Charge,
    ) -> (u64, bool) {
        self.remove(client);
        let end = self.end();
        let resumed = after.map_or(Some(end), |after| after.checked_add(1));
        let resumed = resumed.filter(|next| (self.first..=end).contains(next));
        let next = resumed.unwrap_or(end);
        self.watchers.insert(client, EventWatcher { user, prefix, next, is_blocked: false, _charge: charge });
        self.ready.entry(user).or_default().insert((next, client));
        (next.saturating_sub(1), resumed.is_some())
    }

    /// Removes a client's watch of names.
    pub(super) fn remove(&mut self, client: ClientId) {
        let Some(watcher) = self.watchers.remove(&client) else { return };
        self.remove_position(client, &watcher);
        if self.watchers.is_empty() {
            self.shrink(self.history);
            self.log.shrink_to_fit();
        }
    }

    /// Drops the oldest events until the log has at most `limit` bytes.
    fn shrink(&mut self, limit: usize) {
        while self.bytes > limit
            && let Some(entry) = self.log.pop_front()
        {
            self.bytes -= entry.cost();
            self.first += 1;
        }
    }

    fn remove_position(&mut self, client: ClientId, watcher: &EventWatcher) {
        let position = (watcher.next, client);
        if watcher.is_blocked {
            self.blocked.remove(&position);
        } else if let Some(ready) = self.ready.get_mut(&watcher.user) {
            ready.remove(&position);
            if ready.is_empty() {
                self.ready.remove(&watcher.user);
            }
        }
    }

    /// Returns the number of the next event that will be appended to the log.
    fn end(&self) -> u64 {
        self.first + self.log.len() as u64
    }

    /// Appends an event to the log and sets its number, or drops the event if no client watches names and the log retains
    /// nothing. `names` are the sorted names of all objects that the event concerns, or empty if they all have its name.
    pub(super) fn notify(&mut self, mut event: LoggedEvent, names: Vec<String>) {
        if self.watchers.is_empty() && self.history == 0 {
            return;
        }
        if let LoggedEvent::Event(event) = &mut event {
            event.revision = self.end();
        }
        let entry = LogEntry { event, names, packets: None };
        self.bytes += entry.cost();
        self.notified += 1;
        self.log.push_back(entry);
        self.shrink(if self.watchers.is_empty() { self.history } else { MAX_LOG_BYTES });
    }

    /// Returns true if a watching client has unsent events and its socket is not full, or if one has missed events and has to be
    /// disconnected.
    pub(super) fn has_work(&self) -> bool {
        let end = self.end();
        let is_behind =
            |ready: &BTreeSet<(u64, ClientId)>| ready.first().is_some_and(|(next, _)| *next < end);
        self.ready.values().any(is_behind) || self.blocked.first().is_some_and(|(next, _)| *next < self.first)
    }

    /// Returns the number of events that were appended to the log.
    pub(super) fn notified(&self) -> u64 {
        self.notified
    }

    /// Returns true if any client watches names.
    pub(super) fn has_watchers(&self) -> bool {
        !self.watchers.is_empty()
    }

    /// Returns true if a client has unsent events and its socket is full.
    pub(super) fn is_blocked(&self, client: ClientId) -> bool {
        self.watchers.get(&client).is_some_and(|watcher| watcher.is_blocked)
    }

    /// Resumes sending events to a client whose socket is writable again.
    pub(super) fn unblock(&mut self, client: ClientId) {
        self.update_position(client, |watcher| watcher.is_blocked = false);
    }

    /// Changes the state of a watching client, and updates its entry in `ready` or `blocked`.
    fn update_position(&mut self, client: ClientId, change: impl FnOnce(&mut EventWatcher)) {
        let Some(mut watcher) = self.watchers.remove(&client) else { return };
        self.remove_position(client, &watcher);
        change(&mut watcher);
        let position = (watcher.next, client);
        match watcher.is_blocked {
            true => drop(self.blocked.insert(position)),
            false => drop(self.ready.entry(watcher.user).or_default().insert(position)),
        }
        self.watchers.insert(client, watcher);
    }

    /// Selects the watching client that is served next: users take turns, and the client furthest behind in the event log is the
    /// first of its user.
    fn next_behind(&mut self) -> Option<ClientId> {
        let end = self.end();
        let after = self.ready.range(self.last_user.saturating_add(1)..);
        let (user, (_, client)) = after
            .chain(&self.ready)
            .filter_map(|(user, ready)| Some((*user, *ready.first()?)))
            .find(|(_, (next, _))| *next < end)?;
        self.last_user = user;
        Some(client)
    }

    /// Sends some events to clients that watch names. Returns the clients that have to be disconnected because they have missed
    /// events.
    pub(super) fn deliver(
        &mut self,
        mut send: impl FnMut(ClientId, &[Vec<u8>]) -> SendResult,
    ) -> Vec<ClientId> {
        let mut lost = Vec::new();
        let (mut compared, mut sent) = (0, 0);
        while let Some((_, client)) = self.blocked.first().copied().filter(|(next, _)| *next < self.first) {
            self.remove(client);
            lost.push(client);
            if lost.len() == SENT_AT_ONCE {
                return lost;
            }
        }
        while compared < COMPARED_AT_ONCE
            && sent < SENT_AT_ONCE
            && let Some(client) = self.next_behind()
        {
            compared += 1;
            let Some(watcher) = self.watchers.get(&client) else { continue };
            let Some(at) = watcher.next.checked_sub(self.first) else {
                self.remove(client);
                lost.push(client);
                continue;
            };
            let entry = self.log.get_mut(to_usize(at));
            let wanted = entry.filter(|entry| entry.concerns(&watcher.prefix));
            let outcome = wanted.map(|entry| send(client, &entry.packets()));
            sent += usize::from(outcome.is_some());
            self.update_position(client, |watcher| match outcome {
                Some(SendResult::Full) => watcher.is_blocked = true,
                Some(SendResult::Yes) | None => watcher.next += 1,
            });
        }
        #[cfg(test)]
        {
            self.compared = compared;
        }
        self.drop_seen();
        lost
    }

    /// Drops some events from the log that have been compared with the prefixes of all watching clients.
    fn drop_seen(&mut self) {
        let positions = self.ready.values().chain([&self.blocked]).filter_map(BTreeSet::first);
        let Some(least) = positions.map(|(next, _)| *next).min() else { return };
        for _ in 0..COMPARED_AT_ONCE {
            if self.first >= least || self.bytes <= self.history {
                return;
            }
            let Some(entry) = self.log.pop_front() else { return };
            self.bytes -= entry.cost();
            self.first += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::ObjectId;
    use crate::protocol::EventKind;
    use crate::server::budget::{Amount, tests::unlimited};

    fn event(name: &str) -> LoggedEvent {
        let (object, kind) = (ObjectId::new(1, 0), EventKind::Deleted { version: 1 });
        LoggedEvent::Event(Event { revision: 0, name: name.to_owned(), object, objects: 1, kind })
    }

    fn notify(watchers: &mut EventWatchers, name: &str) {
        watchers.notify(event(name), Vec::new());
    }

    fn watchers(count: u64, user: u32) -> EventWatchers {
        let (mut watchers, mut budget) = (EventWatchers::default(), unlimited());
        for client in 0..count {
            let charge = budget.open(user).charge(Amount::bytes(100)).unwrap();
            watchers.add(ClientId(client), user, String::new(), None, charge);
        }
        watchers
    }

    fn add(watchers: &mut EventWatchers, client: u64, user: u32, prefix: &str) {
        let charge = unlimited().open(user).charge(Amount::bytes(100)).unwrap();
        watchers.add(ClientId(client), user, prefix.to_owned(), None, charge);
    }

    #[test]
    fn a_watcher_receives_events_of_its_names_in_order_from_its_start() {
        let mut watchers = EventWatchers::default();
        add(&mut watchers, 9, 7, "");
        notify(&mut watchers, "a/0");
        add(&mut watchers, 1, 7, "a/");
        for name in ["a/1", "b/1", "a/2"] {
            notify(&mut watchers, name);
        }
        let mut notified = Vec::new();
        while watchers.has_work() {
            let lost = watchers.deliver(|client, packets| {
                notified.push((client, packets[0].clone()));
                SendResult::Yes
            });
            assert_eq!(lost, []);
        }
        let of = |client| notified.iter().filter(|(to, _)| *to == ClientId(client)).count();
        assert_eq!((of(9), of(1)), (4, 2));
    }

    #[test]
    fn the_work_of_an_iteration_is_independent_of_the_number_of_watchers() {
        for count in [10_u64, 1000] {
            let mut watchers = watchers(count, 7);
            (0..100).for_each(|_| notify(&mut watchers, "x"));
            let mut sends = 0;
            watchers.deliver(|_, _| {
                sends += 1;
                SendResult::Yes
            });
            assert_eq!((sends, watchers.compared), (SENT_AT_ONCE, SENT_AT_ONCE));
        }
    }

    #[test]
    fn users_are_served_round_robin_whatever_their_number_of_watchers() {
        let mut watchers = watchers(1000, 7);
        add(&mut watchers, 5000, 8, "");
        notify(&mut watchers, "x");
        let mut notified = Vec::new();
        watchers.deliver(|client, _| {
            notified.push(client);
            SendResult::Yes
        });
        assert!(notified[..2].contains(&ClientId(5000)), "{notified:?}");
    }

    #[test]
    fn watchers_that_do_not_read_are_disconnected_when_they_miss_events() {
        let mut watchers = watchers(3, 7);
        notify(&mut watchers, "x");
        assert_eq!(watchers.deliver(|_, _| SendResult::Full), []);
        assert!(!watchers.has_work(), "the watchers wait for their sockets");
        let name = "x".repeat(200);
        let mut lost = Vec::new();
        for _ in 0..100_000 {
            notify(&mut watchers, &name);
            assert!(watchers.bytes <= MAX_LOG_BYTES);
            lost.extend(watchers.deliver(|_, _| SendResult::Full));
        }
        assert_eq!(lost, [0, 1, 2].map(ClientId));
        assert_eq!((watchers.bytes, watchers.log.len()), (0, 0), "the log is empty without a watcher");
    }

    #[test]
    fn a_watcher_whose_socket_was_full_continues_at_its_position() {
        let mut watchers = watchers(1, 7);
        (0..3).for_each(|_| notify(&mut watchers, "x"));
        assert_eq!(watchers.deliver(|_, _| SendResult::Full), []);
        watchers.unblock(ClientId(0));
        let mut sends = 0;
        watchers.deliver(|_, _| {
            sends += 1;
            SendResult::Yes
        });
        assert_eq!((sends, watchers.has_work()), (3, false));
        assert_eq!(
            (watchers.bytes, watchers.log.len()),
            (0, 0),
            "events that all watchers have received are dropped"
        );
    }

    #[test]
    fn an_event_of_several_names_is_sent_once_to_watchers_of_any_of_them() {
        let mut watchers = EventWatchers::default();
        for (client, prefix) in [(1, ""), (2, "p/"), (3, "p/b"), (4, "p/c"), (5, "q")] {
            add(&mut watchers, client, 7, prefix);
        }
        let names = ["p", "p/a", "p/b", "p/d"].map(str::to_owned);
        watchers.notify(event("p"), names.to_vec());
        let mut notified = Vec::new();
        while watchers.has_work() {
            watchers.deliver(|client, _| {
                notified.push(client.0);
                SendResult::Yes
            });
        }
        notified.sort_unstable();
        assert_eq!(notified, [1, 2, 3]);
    }

    #[test]
    fn a_watch_is_resumed_if_the_log_still_has_the_events() {
        let resume = |watchers: &mut EventWatchers, after| {
            let charge = unlimited().open(7).charge(Amount::bytes(100)).unwrap();
            watchers.add(ClientId(1), 7, String::new(), after, charge)
        };
        let mut watchers = EventWatchers::with_history(100);
        assert_eq!(resume(&mut watchers, None), (99, true));
        watchers.remove(ClientId(1));
        (0..10).for_each(|_| notify(&mut watchers, "x"));
        for (after, outcome) in
            [(98, (109, false)), (99, (99, true)), (109, (109, true)), (110, (109, false))]
        {
            assert_eq!(resume(&mut watchers, Some(after)), outcome, "{after}");
        }
        assert_eq!(resume(&mut watchers, Some(u64::MAX)), (109, false));
        resume(&mut watchers, Some(104));
        let mut sends = 0;
        while watchers.has_work() {
            watchers.deliver(|_, _| {
                sends += 1;
                SendResult::Yes
            });
        }
        assert_eq!(sends, 5);
        (0..100_000).for_each(|_| notify(&mut watchers, "x"));
        assert!(watchers.bytes > HISTORY_BYTES, "the watcher has not received them");
        watchers.remove(ClientId(1));
        assert!(watchers.bytes <= HISTORY_BYTES && watchers.bytes > HISTORY_BYTES / 2);
        assert_eq!(resume(&mut watchers, Some(109)), (100_109, false));
    }
}
