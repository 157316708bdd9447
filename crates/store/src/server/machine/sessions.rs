//! The clients that the state machine knows: their users, accounts, protocol versions and drafts.

use std::collections::{BTreeMap, BTreeSet};

use super::interface::Requester;
use crate::id::{ClientId, ObjectId};
use crate::protocol::{OLDEST_PROTOCOL, Refusal, Request, RequestKind};
use crate::server::budget::{Account, Amount, Charge};

/// The maximum number of requests that a client may have sent before it notices that the server was replaced.
const MAX_UNCONFIRMED: usize = 64;

/// The first protocol version in which clients report how many servers died during a request.
const COUNTS_SERVERS: u32 = 5;

#[derive(Debug)]
struct Session {
    account: Account,
    /// The protocol version of the client; `None` before the client has sent its hello message.
    protocol: Option<u32>,
    /// The ids of the first requests that this server has received from the client, if a previous server served the client. The
    /// client sends these requests again when it notices that the server was replaced.
    unconfirmed: Option<BTreeSet<u64>>,
    /// The drafts (unsealed objects) that the client has created: single objects, and packs by their first object.
    drafts: BTreeSet<ObjectId>,
}

/// The decision about a client's request: it is processed or ignored, or the client is disconnected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reception {
    Process,
    /// The request is ignored: the client is unknown, or this server has already received the request.
    Ignore,
    /// The client is disconnected, because its first request was not a hello message.
    Disconnect,
}

/// The sessions of all connected clients.
#[derive(Debug)]
pub(super) struct Sessions {
    clients: BTreeMap<ClientId, Session>,
    /// The user that the server runs as.
    server_user: u32,
}

impl Sessions {
    pub(super) fn new(server_user: u32) -> Self {
        Self { clients: BTreeMap::new(), server_user }
    }

    /// Returns the number of clients that have a session.
    pub(super) fn count(&self) -> usize {
        self.clients.len()
    }

    /// Adds the session of a client that has just connected. A client that sends its hello message again keeps its session.
    pub(super) fn join(&mut self, client: ClientId, account: Account) {
        let drafts = BTreeSet::new();
        let session = || Session { account, protocol: None, unconfirmed: None, drafts };
        self.clients.entry(client).or_insert_with(session);
    }

    /// Adds the session of a client that has sent its hello message to the previous server. The client's protocol version is
    /// unknown.
    pub(super) fn take_over(&mut self, client: ClientId, account: Account) {
        let (protocol, unconfirmed) = (Some(OLDEST_PROTOCOL), Some(BTreeSet::new()));
        self.clients.insert(client, Session { account, protocol, unconfirmed, drafts: BTreeSet::new() });
    }

    /// Removes the session of a client, and returns the client's drafts (unsealed objects). A client without a session has no
    /// drafts.
    pub(super) fn leave(&mut self, client: ClientId) -> BTreeSet<ObjectId> {
        self.clients.remove(&client).map_or_else(BTreeSet::new, |session| session.drafts)
    }

    /// Decides whether a client's request is processed, and records the request's id if the client may send the request again.
    pub(super) fn receive(&mut self, client: ClientId, request: &Request) -> Reception {
        let Some(session) = self.clients.get_mut(&client) else { return Reception::Ignore };
        let is_repeated = request.resends != 0;
        if let Some(unconfirmed) = &mut session.unconfirmed {
            if request.resends > 1 {
                // Clients of older protocol versions never send a count of dead servers above one.
                session.protocol = session.protocol.max(Some(COUNTS_SERVERS));
            }
            if is_repeated && unconfirmed.contains(&request.id) {
                return Reception::Ignore;
            }
            if !is_repeated && unconfirmed.len() < MAX_UNCONFIRMED {
                unconfirmed.insert(request.id);
            }
        }
        match (session.protocol, &request.kind) {
            (None, kind) if !matches!(kind, RequestKind::Hello { .. }) => Reception::Disconnect,
            _ => Reception::Process,
        }
    }

    /// Records the protocol version that a client has sent in its hello message.
    pub(super) fn set_protocol(&mut self, client: ClientId, protocol: u32) {
        if let Some(session) = self.clients.get_mut(&client) {
            session.protocol = Some(protocol);
        }
    }

    /// Returns the protocol version of a client.
    pub(super) fn protocol(&self, client: ClientId) -> u32 {
        self.clients.get(&client).and_then(|session| session.protocol).unwrap_or(OLDEST_PROTOCOL)
    }

    /// Returns the user of a client; `None` if the client has left.
    pub(super) fn user(&self, client: ClientId) -> Option<u32> {
        self.clients.get(&client).map(|session| session.account.uid())
    }

    /// Returns the user of a client, or the server's own user if the client has left.
    pub(super) fn user_or_server(&self, client: ClientId) -> u32 {
        self.user(client).unwrap_or(self.server_user)
    }

    /// Returns the requester on whose behalf memory is allocated for a request of a client.
    pub(super) fn requester(&self, client: ClientId) -> Requester {
        Requester::User(self.user_or_server(client))
    }

    /// Returns the user that the server runs as.
    pub(super) fn server_user(&self) -> u32 {
        self.server_user
    }

    /// Returns true if a client is connected and runs as the same user as the server.
    pub(super) fn is_trusted(&self, client: ClientId) -> bool {
        self.user(client) == Some(self.server_user)
    }

    /// Charges an amount of memory or descriptors to a client, or returns a refusal with the limit that would be exceeded.
    pub(super) fn charge(&self, client: ClientId, amount: Amount) -> Result<Charge, Refusal> {
        let session = self.clients.get(&client);
        session.ok_or_else(|| Refusal::malformed("the client has left"))?.account.charge(amount)
    }

    /// Adds a draft (unsealed object) to a client's session. The client may write the draft until it is sealed.
    pub(super) fn add_draft(&mut self, client: ClientId, object: ObjectId) {
        if let Some(session) = self.clients.get_mut(&client) {
            session.drafts.insert(object);
        }
    }

    /// Removes a draft that was sealed, abandoned or freed from a client's session.
    pub(super) fn finish_draft(&mut self, client: ClientId, object: ObjectId) {
        if let Some(session) = self.clients.get_mut(&client) {
            session.drafts.remove(&object);
        }
    }

    /// Returns true if a client has a draft (unsealed object) that the client may still write.
    pub(super) fn has_drafts(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|session| !session.drafts.is_empty())
    }

    /// Returns true if an object is a draft (unsealed object) of this connected client.
    pub(super) fn is_draft(&self, client: ClientId, object: ObjectId) -> bool {
        self.clients.get(&client).is_some_and(|session| session.drafts.contains(&object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::PROTOCOL;
    use crate::server::budget::tests::unlimited;

    const CLIENT: ClientId = ClientId(1);
    const USER: u32 = 7;

    fn request(id: u64, resends: u8, kind: RequestKind) -> Request {
        Request { id, resends, kind }
    }

    #[test]
    fn the_first_request_of_a_client_must_be_a_hello() {
        let mut sessions = Sessions::new(0);
        let status = |id| request(id, 0, RequestKind::Status);
        assert_eq!(sessions.receive(CLIENT, &status(1)), Reception::Ignore, "the client has not joined");
        sessions.join(CLIENT, unlimited().open(USER));
        assert_eq!(sessions.receive(CLIENT, &status(1)), Reception::Disconnect);
        let hello = request(2, 0, RequestKind::Hello { protocol: PROTOCOL });
        assert_eq!(sessions.receive(CLIENT, &hello), Reception::Process);
        sessions.set_protocol(CLIENT, PROTOCOL);
        assert_eq!(sessions.receive(CLIENT, &status(3)), Reception::Process);
        assert_eq!((sessions.protocol(CLIENT), sessions.protocol(ClientId(2))), (PROTOCOL, OLDEST_PROTOCOL));
    }

    #[test]
    fn each_repeated_request_of_an_inherited_client_is_processed_once() {
        let mut sessions = Sessions::new(0);
        sessions.take_over(CLIENT, unlimited().open(USER));
        assert_eq!(sessions.receive(CLIENT, &request(1, 0, RequestKind::Status)), Reception::Process);
        assert_eq!(sessions.receive(CLIENT, &request(1, 1, RequestKind::Status)), Reception::Ignore);
        assert_eq!(sessions.receive(CLIENT, &request(2, 1, RequestKind::Status)), Reception::Process);
        assert_eq!(sessions.protocol(CLIENT), OLDEST_PROTOCOL);
        // A client that counts more than one dead server has a protocol version that includes the count.
        assert_eq!(sessions.receive(CLIENT, &request(3, 2, RequestKind::Status)), Reception::Process);
        assert_eq!(sessions.protocol(CLIENT), COUNTS_SERVERS);
    }

    #[test]
    fn an_inherited_client_that_sends_its_hello_again_keeps_its_drafts() {
        let mut sessions = Sessions::new(0);
        sessions.take_over(CLIENT, unlimited().open(USER));
        sessions.add_draft(CLIENT, ObjectId::new(1, 0));
        sessions.join(CLIENT, unlimited().open(USER));
        let hello = request(1, 1, RequestKind::Hello { protocol: PROTOCOL });
        assert_eq!(sessions.receive(CLIENT, &hello), Reception::Process);
        sessions.set_protocol(CLIENT, PROTOCOL);
        assert!(sessions.has_drafts(CLIENT));
        assert_eq!(sessions.protocol(CLIENT), PROTOCOL);
    }

    #[test]
    fn the_recorded_ids_of_a_client_are_bounded() {
        let mut sessions = Sessions::new(0);
        sessions.take_over(CLIENT, unlimited().open(USER));
        let last = MAX_UNCONFIRMED as u64;
        for id in 0..=last {
            assert_eq!(sessions.receive(CLIENT, &request(id, 0, RequestKind::Status)), Reception::Process);
        }
        assert_eq!(sessions.receive(CLIENT, &request(last - 1, 1, RequestKind::Status)), Reception::Ignore);
        assert_eq!(sessions.receive(CLIENT, &request(last, 1, RequestKind::Status)), Reception::Process);
    }

    #[test]
    fn drafts_belong_to_a_client_until_they_finish_or_it_leaves() {
        let mut sessions = Sessions::new(0);
        let [one, two] = [1, 2].map(|slot| ObjectId::new(slot, 0));
        sessions.add_draft(CLIENT, one);
        assert!(!sessions.has_drafts(CLIENT), "the client is not connected");
        sessions.join(CLIENT, unlimited().open(USER));
        sessions.add_draft(CLIENT, one);
        sessions.add_draft(CLIENT, two);
        sessions.finish_draft(CLIENT, one);
        assert_eq!([one, two].map(|object| sessions.is_draft(CLIENT, object)), [false, true]);
        assert_eq!(sessions.leave(CLIENT), BTreeSet::from([two]));
        assert_eq!((sessions.leave(CLIENT), sessions.count()), (BTreeSet::new(), 0));
    }

    #[test]
    fn only_connected_clients_of_the_servers_user_are_trusted() {
        let mut sessions = Sessions::new(USER);
        let other = ClientId(2);
        sessions.join(CLIENT, unlimited().open(USER));
        sessions.join(other, unlimited().open(8));
        assert_eq!([CLIENT, other].map(|client| sessions.is_trusted(client)), [true, false]);
        assert_eq!(sessions.requester(other), Requester::User(8));
        sessions.leave(CLIENT);
        sessions.leave(other);
        assert!(!sessions.is_trusted(CLIENT));
        assert_eq!(sessions.requester(other), Requester::User(USER), "attributed to the server's user");
        let refused = sessions.charge(other, Amount::bytes(1)).unwrap_err();
        assert_eq!(refused, Refusal::malformed("the client has left"));
    }
}
