//! Which connections may be in the middle of a long message.
//!
//! A message of several packets is assembled in memory of the server, and its length is not known before its end. So it is
//! charged as the longest message there is, which is a *slot*, and a user has few of them. If a user has no slot left, a connection
//! waits: it is not read until another connection of its user has finished, first come, first served. A connection that has a
//! slot and sends nothing is disconnected if another waits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::id::ClientId;

/// How long a connection that has a slot may send nothing while another waits for one.
const STALL: Duration = Duration::from_secs(1);

/// How long a connection waits for a slot.
const WAIT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct OfUser {
    /// Connections that have a slot.
    holders: BTreeSet<ClientId>,
    /// Connections that wait for one, and since when.
    waiting: VecDeque<(Instant, ClientId)>,
}

/// The slots of all users.
#[derive(Debug, Default)]
pub(super) struct MessageSlots {
    users: BTreeMap<u32, OfUser>,
}

/// What to do for a user whose connections wait.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Try to give this connection a slot.
    Try(ClientId),
    /// Disconnect this one: it has waited long enough.
    GiveUp(ClientId),
}

impl MessageSlots {
    pub(super) fn took(&mut self, user: u32, client: ClientId) {
        let of_user = self.users.entry(user).or_default();
        of_user.waiting.retain(|(_, waiting)| *waiting != client);
        of_user.holders.insert(client);
    }

    pub(super) fn wait(&mut self, user: u32, client: ClientId, now: Instant) {
        self.users.entry(user).or_default().waiting.push_back((now, client));
    }

    /// A connection has no slot any more, and waits for none.
    pub(super) fn forget(&mut self, user: u32, client: ClientId) {
        let Some(of_user) = self.users.get_mut(&user) else { return };
        of_user.holders.remove(&client);
        of_user.waiting.retain(|(_, waiting)| *waiting != client);
        if of_user.holders.is_empty() && of_user.waiting.is_empty() {
            self.users.remove(&user);
        }
    }

    /// Whether any connection waits.
    pub(super) fn has_waiting(&self) -> bool {
        self.users.values().any(|of_user| !of_user.waiting.is_empty())
    }

    /// For each user whose connections wait, what to do for the one that waits longest.
    pub(super) fn next(&self, now: Instant) -> Vec<Next> {
        let next = |of_user: &OfUser| {
            let (since, client) = of_user.waiting.front()?;
            let is_late = now.saturating_duration_since(*since) >= WAIT;
            Some(if is_late { Next::GiveUp(*client) } else { Next::Try(*client) })
        };
        self.users.values().filter_map(next).collect()
    }

    /// The connections of a user that have a slot and have sent nothing for too long. `last_packet` returns when one sent its last packet.
    pub(super) fn stalled(
        &self,
        user: u32,
        now: Instant,
        last_packet: impl Fn(ClientId) -> Option<Instant>,
    ) -> Option<ClientId> {
        let of_user = self.users.get(&user)?;
        let is_stalled = |client: &ClientId| {
            last_packet(*client).is_some_and(|last| now.saturating_duration_since(last) >= STALL)
        };
        of_user.holders.iter().copied().find(is_stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: ClientId = ClientId(1);
    const TWO: ClientId = ClientId(2);

    #[test]
    fn the_one_that_waits_longest_is_tried_first_until_it_has_waited_too_long() {
        let (mut slots, start) = (MessageSlots::default(), Instant::now());
        slots.wait(7, ONE, start);
        slots.wait(7, TWO, start);
        slots.wait(8, ClientId(3), start);
        assert_eq!(slots.next(start), [Next::Try(ONE), Next::Try(ClientId(3))]);
        slots.took(7, ONE);
        assert_eq!(slots.next(start + WAIT), [Next::GiveUp(TWO), Next::GiveUp(ClientId(3))]);
        slots.forget(7, TWO);
        slots.forget(8, ClientId(3));
        assert!(!slots.has_waiting());
    }

    #[test]
    fn one_that_sends_nothing_is_stalled_and_one_that_sends_is_not() {
        let (mut slots, start) = (MessageSlots::default(), Instant::now());
        slots.took(7, ONE);
        slots.took(7, TWO);
        let last_packet = |client| Some(if client == TWO { start } else { start + STALL });
        assert_eq!(slots.stalled(7, start, last_packet), None);
        assert_eq!(slots.stalled(7, start + STALL, last_packet), Some(TWO));
        slots.forget(7, TWO);
        assert_eq!(slots.stalled(7, start + STALL, last_packet), None);
    }
}
