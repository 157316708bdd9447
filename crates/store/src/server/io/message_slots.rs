//! Limits how many connections of a user may have an incomplete long message at the same time.
//!
//! A message of several packets is assembled in memory of the server, and its length is not known before its end. So it is
//! charged at the maximum length of a message, a *slot*, and a user has few of them. If a user has no slot left, a connection is
//! not read until another connection of its user has finished; connections wait first in, first out. If a connection waits, one
//! that has a slot and sends nothing is disconnected.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::id::ClientId;

/// How long a connection that has a message slot (the right to have an incomplete long message) may send nothing while another
/// connection of its user waits for a slot.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a connection may wait for a message slot (the right to have an incomplete long message) before it is disconnected.
const SLOT_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct UserSlots {
    /// Clients that have a message slot, which is the right to have an incomplete long message.
    holders: BTreeSet<ClientId>,
    /// Clients that wait for a message slot (the right to have an incomplete long message), and the start of each wait.
    waiting: VecDeque<(Instant, ClientId)>,
}

/// The message slots of all users. A slot is the right of a connection to have an incomplete long message.
#[derive(Debug, Default)]
pub(super) struct MessageSlots {
    users: BTreeMap<u32, UserSlots>,
}

/// The next action for a user whose connections wait for a message slot (the right to have an incomplete long message).
#[derive(Debug, PartialEq, Eq)]
pub(super) enum SlotAction {
    /// Try to assign a message slot (the right to have an incomplete long message) to this client.
    Try(ClientId),
    /// Try for the last time to assign a message slot to this client, and disconnect the client if that fails: its wait to send a
    /// long message has timed out.
    TimeOut(ClientId),
}

impl MessageSlots {
    pub(super) fn assign(&mut self, user: u32, client: ClientId) {
        let user_slots = self.users.entry(user).or_default();
        user_slots.waiting.retain(|(_, waiting)| *waiting != client);
        user_slots.holders.insert(client);
    }

    pub(super) fn wait(&mut self, user: u32, client: ClientId, now: Instant) {
        self.users.entry(user).or_default().waiting.push_back((now, client));
    }

    /// Releases the message slot of a client (the right to have an incomplete long message), or ends its wait for a slot.
    pub(super) fn remove(&mut self, user: u32, client: ClientId) {
        let Some(user_slots) = self.users.get_mut(&user) else { return };
        user_slots.holders.remove(&client);
        user_slots.waiting.retain(|(_, waiting)| *waiting != client);
        if user_slots.holders.is_empty() && user_slots.waiting.is_empty() {
            self.users.remove(&user);
        }
    }

    /// Returns true if any client waits for a message slot (the right to have an incomplete long message).
    pub(super) fn has_waiting(&self) -> bool {
        self.users.values().any(|user_slots| !user_slots.waiting.is_empty())
    }

    /// Returns an action for each user whose clients wait for a message slot (the right to have an incomplete long message). The
    /// action is for the client that has waited longest.
    pub(super) fn next(&self, now: Instant) -> Vec<SlotAction> {
        let next = |user_slots: &UserSlots| {
            let (since, client) = user_slots.waiting.front()?;
            let is_late = now.saturating_duration_since(*since) >= SLOT_TIMEOUT;
            Some(if is_late { SlotAction::TimeOut(*client) } else { SlotAction::Try(*client) })
        };
        self.users.values().filter_map(next).collect()
    }

    /// Returns a client of a user that has begun to send a long message and has sent nothing for too long. `last_packet` returns
    /// the time of a client's last packet.
    pub(super) fn stalled(
        &self,
        user: u32,
        now: Instant,
        last_packet: impl Fn(ClientId) -> Option<Instant>,
    ) -> Option<ClientId> {
        let user_slots = self.users.get(&user)?;
        let is_stalled = |client: &ClientId| {
            last_packet(*client).is_some_and(|last| now.saturating_duration_since(last) >= STALL_TIMEOUT)
        };
        user_slots.holders.iter().copied().find(is_stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: ClientId = ClientId(1);
    const TWO: ClientId = ClientId(2);

    #[test]
    fn the_longest_wait_is_served_first_until_it_times_out() {
        let (mut slots, start) = (MessageSlots::default(), Instant::now());
        slots.wait(7, ONE, start);
        slots.wait(7, TWO, start);
        slots.wait(8, ClientId(3), start);
        assert_eq!(slots.next(start), [SlotAction::Try(ONE), SlotAction::Try(ClientId(3))]);
        slots.assign(7, ONE);
        assert_eq!(
            slots.next(start + SLOT_TIMEOUT),
            [SlotAction::TimeOut(TWO), SlotAction::TimeOut(ClientId(3))]
        );
        slots.remove(7, TWO);
        slots.remove(8, ClientId(3));
        assert!(!slots.has_waiting());
    }

    #[test]
    fn a_connection_that_sends_nothing_is_stalled() {
        let (mut slots, start) = (MessageSlots::default(), Instant::now());
        slots.assign(7, ONE);
        slots.assign(7, TWO);
        let last_packet = |client| Some(if client == TWO { start } else { start + STALL_TIMEOUT });
        assert_eq!(slots.stalled(7, start, last_packet), None);
        assert_eq!(slots.stalled(7, start + STALL_TIMEOUT, last_packet), Some(TWO));
        slots.remove(7, TWO);
        assert_eq!(slots.stalled(7, start + STALL_TIMEOUT, last_packet), None);
    }
}
