//! The clients as the machine knows them: their users, accounts and protocol versions, and the drafts they hold.

use std::collections::{BTreeMap, BTreeSet};

use super::interface::Requester;
use crate::id::{ClientId, ObjectId};
use crate::protocol::{OLDEST_PROTOCOL, Refusal, Request, RequestKind};
use crate::server::budget::{Account, Amount, Charge};

/// How many requests a client may have sent before it reads that the server was restarted.
const MOST_UNCONFIRMED: usize = 64;

/// The version of the protocol from which on clients count the servers that died while a request was in progress.
const COUNTS_SERVERS: u32 = 5;

#[derive(Debug)]
struct Session {
    account: Account,
    /// The version of the protocol the client speaks, once it has sent its hello.
    protocol: Option<u32>,
    /// If another server served the client before this one: the ids of the first requests that this server has received from it.
    /// The client sends them again when it reads that the server was restarted.
    unconfirmed: Option<BTreeSet<u64>>,
    /// What it has created and not sealed: single objects, and packs by their first object.
    drafts: BTreeSet<ObjectId>,
}

/// What is to be done with a request, as far as its session decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reception {
    Process,
    /// The client is unknown, or this server has received the request before and answers that one.
    Ignore,
    /// The client has not sent a hello.
    Disconnect,
}

/// The sessions of all clients.
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

    /// How many clients there are.
    pub(super) fn count(&self) -> usize {
        self.clients.len()
    }

    /// Adds a client that has just connected.
    pub(super) fn join(&mut self, client: ClientId, account: Account) {
        let drafts = BTreeSet::new();
        self.clients.insert(client, Session { account, protocol: None, unconfirmed: None, drafts });
    }

    /// Adds a client of the server before this one. It has sent its hello to that server; which protocol it speaks is unknown.
    pub(super) fn take_over(&mut self, client: ClientId, account: Account) {
        let (protocol, unconfirmed) = (Some(OLDEST_PROTOCOL), Some(BTreeSet::new()));
        self.clients.insert(client, Session { account, protocol, unconfirmed, drafts: BTreeSet::new() });
    }

    /// Removes a client and returns its drafts. A client that never sent a hello has no session, and so no drafts.
    pub(super) fn leave(&mut self, client: ClientId) -> BTreeSet<ObjectId> {
        self.clients.remove(&client).map_or_else(BTreeSet::new, |session| session.drafts)
    }

    /// Decides whether a request is processed, and remembers its id where the client may send it again.
    pub(super) fn receive(&mut self, client: ClientId, request: &Request) -> Reception {
        let Some(session) = self.clients.get_mut(&client) else { return Reception::Ignore };
        let is_repeated = request.resends != 0;
        if let Some(unconfirmed) = &mut session.unconfirmed {
            if request.resends > 1 {
                // Clients of older protocols do not count.
                session.protocol = session.protocol.max(Some(COUNTS_SERVERS));
            }
            if is_repeated && unconfirmed.contains(&request.id) {
                return Reception::Ignore;
            }
            if !is_repeated && unconfirmed.len() < MOST_UNCONFIRMED {
                unconfirmed.insert(request.id);
            }
        }
        match (session.protocol, &request.kind) {
            (None, kind) if !matches!(kind, RequestKind::Hello { .. }) => Reception::Disconnect,
            _ => Reception::Process,
        }
    }

    /// The client has sent a hello with this version of the protocol.
    pub(super) fn set_protocol(&mut self, client: ClientId, protocol: u32) {
        if let Some(session) = self.clients.get_mut(&client) {
            session.protocol = Some(protocol);
        }
    }

    /// The version of the protocol in which a client is answered.
    pub(super) fn protocol(&self, client: ClientId) -> u32 {
        self.clients.get(&client).and_then(|session| session.protocol).unwrap_or(OLDEST_PROTOCOL)
    }

    /// The user of a client; `None` if the client has left.
    pub(super) fn user(&self, client: ClientId) -> Option<u32> {
        self.clients.get(&client).map(|session| session.account.uid())
    }

    /// The user to whom a client's requests are attributed: the server's own user if the client has left.
    pub(super) fn user_or_server(&self, client: ClientId) -> u32 {
        self.user(client).unwrap_or(self.server_user)
    }

    /// The requester of memory that a client asks for.
    pub(super) fn requester(&self, client: ClientId) -> Requester {
        Requester::User(self.user_or_server(client))
    }

    /// The user that the server runs as.
    pub(super) fn server_user(&self) -> u32 {
        self.server_user
    }

    /// Whether a client is there and runs as the same user as the server.
    pub(super) fn is_trusted(&self, client: ClientId) -> bool {
        self.user(client) == Some(self.server_user)
    }

    /// Charges an amount to a client, or returns which limit it would exceed.
    pub(super) fn charge(&self, client: ClientId, amount: Amount) -> Result<Charge, Refusal> {
        let session = self.clients.get(&client);
        session.ok_or_else(|| Refusal::malformed("a client that has left"))?.account.charge(amount)
    }

    /// A client has created an object that it may write until it seals it.
    pub(super) fn add_draft(&mut self, client: ClientId, object: ObjectId) {
        if let Some(session) = self.clients.get_mut(&client) {
            session.drafts.insert(object);
        }
    }

    /// A draft is sealed, abandoned or free: its client does not write it any more.
    pub(super) fn finish_draft(&mut self, client: ClientId, object: ObjectId) {
        if let Some(session) = self.clients.get_mut(&client) {
            session.drafts.remove(&object);
        }
    }

    /// Whether a client has a draft that it may still write.
    pub(super) fn has_drafts(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|session| !session.drafts.is_empty())
    }

    /// Whether an object is a draft of a client that is there.
    pub(super) fn is_draft(&self, client: ClientId, object: ObjectId) -> bool {
        self.clients.get(&client).is_some_and(|session| session.drafts.contains(&object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::PROTOCOL;
    use crate::server::budget::tests::ample;

    const CLIENT: ClientId = ClientId(1);
    const USER: u32 = 7;

    fn request(id: u64, resends: u8, kind: RequestKind) -> Request {
        Request { id, resends, kind }
    }

    #[test]
    fn a_client_says_hello_before_anything_else() {
        let mut sessions = Sessions::new(0);
        let status = |id| request(id, 0, RequestKind::Status);
        assert_eq!(sessions.receive(CLIENT, &status(1)), Reception::Ignore, "it has not joined");
        sessions.join(CLIENT, ample().open(USER));
        assert_eq!(sessions.receive(CLIENT, &status(1)), Reception::Disconnect);
        let hello = request(2, 0, RequestKind::Hello { protocol: PROTOCOL });
        assert_eq!(sessions.receive(CLIENT, &hello), Reception::Process);
        sessions.set_protocol(CLIENT, PROTOCOL);
        assert_eq!(sessions.receive(CLIENT, &status(3)), Reception::Process);
        assert_eq!((sessions.protocol(CLIENT), sessions.protocol(ClientId(2))), (PROTOCOL, OLDEST_PROTOCOL));
    }

    #[test]
    fn a_client_of_another_server_repeats_its_requests_and_each_is_processed_once() {
        let mut sessions = Sessions::new(0);
        sessions.take_over(CLIENT, ample().open(USER));
        assert_eq!(sessions.receive(CLIENT, &request(1, 0, RequestKind::Status)), Reception::Process);
        assert_eq!(sessions.receive(CLIENT, &request(1, 1, RequestKind::Status)), Reception::Ignore);
        assert_eq!(sessions.receive(CLIENT, &request(2, 1, RequestKind::Status)), Reception::Process);
        assert_eq!(sessions.protocol(CLIENT), OLDEST_PROTOCOL);
        // A client that counts more than one dead server speaks a protocol that can.
        assert_eq!(sessions.receive(CLIENT, &request(3, 2, RequestKind::Status)), Reception::Process);
        assert_eq!(sessions.protocol(CLIENT), COUNTS_SERVERS);
    }

    #[test]
    fn the_ids_that_are_remembered_of_a_client_are_bounded() {
        let mut sessions = Sessions::new(0);
        sessions.take_over(CLIENT, ample().open(USER));
        let last = MOST_UNCONFIRMED as u64;
        for id in 0..=last {
            assert_eq!(sessions.receive(CLIENT, &request(id, 0, RequestKind::Status)), Reception::Process);
        }
        assert_eq!(sessions.receive(CLIENT, &request(last - 1, 1, RequestKind::Status)), Reception::Ignore);
        assert_eq!(sessions.receive(CLIENT, &request(last, 1, RequestKind::Status)), Reception::Process);
    }

    #[test]
    fn drafts_belong_to_a_client_until_they_are_finished_or_it_leaves() {
        let mut sessions = Sessions::new(0);
        let [one, two] = [1, 2].map(|slot| ObjectId::new(slot, 0));
        sessions.add_draft(CLIENT, one);
        assert!(!sessions.has_drafts(CLIENT), "it is not there");
        sessions.join(CLIENT, ample().open(USER));
        sessions.add_draft(CLIENT, one);
        sessions.add_draft(CLIENT, two);
        sessions.finish_draft(CLIENT, one);
        assert_eq!([one, two].map(|object| sessions.is_draft(CLIENT, object)), [false, true]);
        assert_eq!(sessions.leave(CLIENT), BTreeSet::from([two]));
        assert_eq!((sessions.leave(CLIENT), sessions.count()), (BTreeSet::new(), 0));
    }

    #[test]
    fn only_a_client_of_the_servers_user_is_trusted_and_only_while_it_is_there() {
        let mut sessions = Sessions::new(USER);
        let other = ClientId(2);
        sessions.join(CLIENT, ample().open(USER));
        sessions.join(other, ample().open(8));
        assert_eq!([CLIENT, other].map(|client| sessions.is_trusted(client)), [true, false]);
        assert_eq!(sessions.requester(other), Requester::User(8));
        sessions.leave(CLIENT);
        sessions.leave(other);
        assert!(!sessions.is_trusted(CLIENT));
        assert_eq!(sessions.requester(other), Requester::User(USER), "attributed to the server");
        let refused = sessions.charge(other, Amount::bytes(1)).unwrap_err();
        assert_eq!(refused, Refusal::malformed("a client that has left"));
    }
}
