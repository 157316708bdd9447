//! What the requests of clients have made, so that a request that is said again is not done again.

use std::collections::BTreeMap;

use crate::id::{ClientId, ObjectId};

/// The first object that each request has made, of every client that is still there.
#[derive(Debug, Default)]
pub(super) struct Made {
    clients: BTreeMap<ClientId, BTreeMap<u64, ObjectId>>,
    /// What clients that left have made. It is dropped little by little: one client may have made all objects there are.
    dropped: Vec<BTreeMap<u64, ObjectId>>,
}

impl Made {
    pub(super) fn get(&self, client: ClientId, request: u64) -> Option<ObjectId> {
        self.clients.get(&client)?.get(&request).copied()
    }

    pub(super) fn insert(&mut self, client: ClientId, request: u64, object: ObjectId) {
        self.clients.entry(client).or_default().insert(request, object);
    }

    /// An object is free.
    pub(super) fn remove(&mut self, client: ClientId, request: u64, object: ObjectId) {
        let Some(made) = self.clients.get_mut(&client) else { return };
        if made.get(&request) == Some(&object) {
            made.remove(&request);
        }
        if made.is_empty() {
            self.clients.remove(&client);
        }
    }

    /// A client has left.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.dropped.extend(self.clients.remove(&client));
    }

    /// Forgets all clients but some.
    pub(super) fn retain(&mut self, is_there: impl Fn(ClientId) -> bool) {
        self.clients.retain(|client, _| is_there(*client));
    }

    /// Whether there is something to drop.
    pub(super) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    /// Drops some of what clients that left have made.
    pub(super) fn trim(&mut self, mut count: usize) {
        while let Some(made) = self.dropped.last_mut() {
            while count > 0 && made.pop_first().is_some() {
                count -= 1;
            }
            if count == 0 {
                return;
            }
            self.dropped.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_made_much_is_forgotten_at_once_and_dropped_little_by_little() {
        let (mut made, client) = (Made::default(), ClientId(1));
        (1..=1000).for_each(|request| made.insert(client, request, ObjectId::new(1, request)));
        made.insert(ClientId(2), 5, ObjectId::new(2, 0));
        made.forget(client);
        assert_eq!((made.get(client, 1), made.get(ClientId(2), 5)), (None, Some(ObjectId::new(2, 0))));
        let steps = std::iter::from_fn(|| made.has_dropped().then(|| made.trim(300))).count();
        assert_eq!(steps, 4);
    }

    #[test]
    fn only_the_object_that_a_request_made_is_removed() {
        let (mut made, client) = (Made::default(), ClientId(1));
        made.insert(client, 1, ObjectId::new(1, 0));
        made.remove(client, 1, ObjectId::new(2, 0));
        assert_eq!(made.get(client, 1), Some(ObjectId::new(1, 0)));
        made.remove(client, 1, ObjectId::new(1, 0));
        assert_eq!(made.get(client, 1), None);
    }
}
