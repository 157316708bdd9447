//! Which object each request has created, so that a request that a client repeats is not processed twice.

use std::collections::BTreeMap;

use crate::id::{ClientId, ObjectId};

/// The first object that each request has created, for every client that is still there.
#[derive(Debug, Default)]
pub(super) struct RequestHistory {
    clients: BTreeMap<ClientId, BTreeMap<u64, ObjectId>>,
    /// The entries of clients that have left. A bounded number of them is dropped at each step, because one client may have
    /// created all objects there are.
    abandoned: Vec<BTreeMap<u64, ObjectId>>,
}

impl RequestHistory {
    pub(super) fn get(&self, client: ClientId, request: u64) -> Option<ObjectId> {
        self.clients.get(&client)?.get(&request).copied()
    }

    pub(super) fn insert(&mut self, client: ClientId, request: u64, object: ObjectId) {
        self.clients.entry(client).or_default().insert(request, object);
    }

    /// Removes the entry of a request, if this is the object that it has created.
    pub(super) fn remove(&mut self, client: ClientId, request: u64, object: ObjectId) {
        let Some(made) = self.clients.get_mut(&client) else { return };
        if made.get(&request) == Some(&object) {
            made.remove(&request);
        }
        if made.is_empty() {
            self.clients.remove(&client);
        }
    }

    /// Removes the entries of a client that has left.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.abandoned.extend(self.clients.remove(&client));
    }

    /// Removes the entries of all clients that are not there.
    pub(super) fn retain(&mut self, is_there: impl Fn(ClientId) -> bool) {
        self.clients.retain(|client, _| is_there(*client));
    }

    /// Whether entries of clients that have left are to be dropped.
    pub(super) fn has_abandoned(&self) -> bool {
        !self.abandoned.is_empty()
    }

    /// Drops up to `count` entries of clients that have left.
    pub(super) fn trim(&mut self, mut count: usize) {
        while let Some(made) = self.abandoned.last_mut() {
            while count > 0 && made.pop_first().is_some() {
                count -= 1;
            }
            if count == 0 {
                return;
            }
            self.abandoned.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_a_client_that_left_are_gone_at_once_and_dropped_a_bounded_number_at_a_time() {
        let (mut made, client) = (RequestHistory::default(), ClientId(1));
        (1..=1000).for_each(|request| made.insert(client, request, ObjectId::new(1, request)));
        made.insert(ClientId(2), 5, ObjectId::new(2, 0));
        made.forget(client);
        assert_eq!((made.get(client, 1), made.get(ClientId(2), 5)), (None, Some(ObjectId::new(2, 0))));
        let steps = std::iter::from_fn(|| made.has_abandoned().then(|| made.trim(300))).count();
        assert_eq!(steps, 4);
    }

    #[test]
    fn an_entry_is_removed_only_with_the_object_that_its_request_created() {
        let (mut made, client) = (RequestHistory::default(), ClientId(1));
        made.insert(client, 1, ObjectId::new(1, 0));
        made.remove(client, 1, ObjectId::new(2, 0));
        assert_eq!(made.get(client, 1), Some(ObjectId::new(1, 0)));
        made.remove(client, 1, ObjectId::new(1, 0));
        assert_eq!(made.get(client, 1), None);
    }
}
