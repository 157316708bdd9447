//! The object that each request of a client has created, so that a request that is sent again is not processed twice.

use std::collections::BTreeMap;

use crate::id::{ClientId, ObjectId};

/// The first object that each request has created, for every connected client.
#[derive(Debug, Default)]
pub(super) struct RequestHistory {
    clients: BTreeMap<ClientId, BTreeMap<u64, ObjectId>>,
    /// Request history entries of clients that have left. Each step of the state machine drops a bounded number of them, because
    /// one client may have created all objects.
    abandoned: Vec<BTreeMap<u64, ObjectId>>,
}

impl RequestHistory {
    pub(super) fn get(&self, client: ClientId, request: u64) -> Option<ObjectId> {
        self.clients.get(&client)?.get(&request).copied()
    }

    pub(super) fn insert(&mut self, client: ClientId, request: u64, object: ObjectId) {
        self.clients.entry(client).or_default().insert(request, object);
    }

    /// Removes a request from the history if it has created this object.
    pub(super) fn remove(&mut self, client: ClientId, request: u64, object: ObjectId) {
        let Some(created) = self.clients.get_mut(&client) else { return };
        if created.get(&request) == Some(&object) {
            created.remove(&request);
        }
        if created.is_empty() {
            self.clients.remove(&client);
        }
    }

    /// Removes the request history of a client that has left.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.abandoned.extend(self.clients.remove(&client));
    }

    /// Removes the request history of all clients that are not connected.
    pub(super) fn retain(&mut self, exists: impl Fn(ClientId) -> bool) {
        self.clients.retain(|client, _| exists(*client));
    }

    /// Returns true if request history entries of departed clients remain to be dropped.
    pub(super) fn has_abandoned(&self) -> bool {
        !self.abandoned.is_empty()
    }

    /// Drops up to `count` request history entries of departed clients.
    pub(super) fn trim(&mut self, mut count: usize) {
        while let Some(created) = self.abandoned.last_mut() {
            while count > 0 && created.pop_first().is_some() {
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
    fn entries_of_a_departed_client_are_removed_at_once_and_dropped_in_bounded_slices() {
        let (mut created, client) = (RequestHistory::default(), ClientId(1));
        (1..=1000).for_each(|request| created.insert(client, request, ObjectId::new(1, request)));
        created.insert(ClientId(2), 5, ObjectId::new(2, 0));
        created.forget(client);
        assert_eq!((created.get(client, 1), created.get(ClientId(2), 5)), (None, Some(ObjectId::new(2, 0))));
        let steps = std::iter::from_fn(|| created.has_abandoned().then(|| created.trim(300))).count();
        assert_eq!(steps, 4);
    }

    #[test]
    fn an_entry_is_removed_only_with_the_object_that_its_request_created() {
        let (mut created, client) = (RequestHistory::default(), ClientId(1));
        created.insert(client, 1, ObjectId::new(1, 0));
        created.remove(client, 1, ObjectId::new(2, 0));
        assert_eq!(created.get(client, 1), Some(ObjectId::new(1, 0)));
        created.remove(client, 1, ObjectId::new(1, 0));
        assert_eq!(created.get(client, 1), None);
    }
}
