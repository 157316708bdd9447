//! Requests to create objects that wait for memory that is being allocated.
//!
//! ```text
//!   large object   request --> its own allocation
//!   small object   user 7: request request request \
//!                  user 9: request                  > queue of a place --> one arena at a time
//!                  user 4: request request         /
//! ```
//!
//! A request for a large object, or to adopt memory, waits for one allocation. Requests for small objects wait in one queue for
//! each place until an arena has space: at most one arena of a place is being allocated at a time, for the first request of the
//! queue. Queues are fair between users.
//!
//! Every operation is a lookup, O(log n) in the number of waiting requests. When an arena is ready, the server resumes a bounded
//! number of requests at each step, and the requests of a departed client are dropped a few at a time ([`PendingMemory::trim`]),
//! so that the work of a step does not grow with the number of waiting requests.
//!
//! The number of waiting requests is limited by the budget of their clients.

use std::collections::BTreeMap;

use super::sessions::Sessions;
use crate::id::{AllocationId, ClientId};
use crate::protocol::frame::Payload;
use crate::protocol::{Refusal, Request};
use crate::server::budget::{Amount, Charge};
use crate::server::fair_queue::FairQueue;

/// The fixed number of bytes that a client is charged for a waiting request. The request's payload, and the names and lists
/// in the request, are charged in addition.
pub(super) const REQUEST_COST: u64 = 512;

/// A request to create an object, which waits until memory for the object is allocated.
#[derive(Debug)]
pub(super) struct PendingRequest {
    pub(super) client: ClientId,
    pub(super) request: Request,
    pub(super) payload: Payload<'static>,
    /// The charge of the waiting request and its payload to the account of the client.
    _charge: Charge,
}

impl PendingRequest {
    /// Creates a waiting request, and charges its client for all memory that the request uses. `charge` is the charge of the
    /// payload, if the payload has memory of its own.
    pub(super) fn new(
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
        sessions: &Sessions,
    ) -> Result<Self, Refusal> {
        let mut held = sessions.charge(client, Amount::bytes(REQUEST_COST))?;
        held.grow(Amount::bytes(request.kind.decoded_len()))?;
        let charge = match charge {
            Some(mut charge) => {
                charge.absorb(held);
                charge
            }
            None => {
                held.grow(Amount::bytes(payload.len() as u64))?;
                held
            }
        };
        Ok(Self { client, request, payload: payload.into_owned(), _charge: charge })
    }
}

/// The length of an arena that could not be allocated, and the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ArenaFailure {
    /// The length in bytes of the arena that could not be allocated.
    pub(super) len: u64,
    pub(super) reason: String,
}

/// The key of a waiting request: the client, and the id of the request.
type RequestKey = (ClientId, u64);

/// The requests that wait for an arena (memory that small objects share) of one place, and the state of that arena.
#[derive(Debug, Default)]
struct ArenaQueue {
    /// The keys of the waiting requests, in a queue that takes turns between the users (uids) of the clients. It also contains
    /// keys of requests whose client has disconnected.
    queue: FairQueue<u32, RequestKey>,
    /// The arena that is being allocated for the requests of this queue.
    allocating: Option<AllocationId>,
    /// The arena that was allocated last, until all requests for which the arena has space have been resumed.
    allocated: Option<AllocationId>,
    /// The error of the last attempt to allocate an arena, until all waiting requests have been refused.
    failure: Option<ArenaFailure>,
}

impl ArenaQueue {
    /// Returns true if requests that wait for an arena of this queue can be resumed.
    fn is_ready(&self) -> bool {
        self.allocating.is_none() && !self.queue.is_empty()
    }
}

/// All requests to create objects that wait for memory.
#[derive(Debug, Default)]
pub(super) struct PendingMemory {
    requests: BTreeMap<ClientId, BTreeMap<u64, PendingRequest>>,
    /// The waiting requests of departed clients, which are dropped a few at a time.
    abandoned: Vec<BTreeMap<u64, PendingRequest>>,
    /// The request that waits for each allocation that is for one object.
    single: BTreeMap<AllocationId, RequestKey>,
    /// The queue of each place (the host or a device) for which requests wait or an arena is being allocated.
    arena_queues: BTreeMap<u32, ArenaQueue>,
    /// Requests that found no space while the pins of deleted objects were being scanned, by the number of completed scan passes
    /// that they wait for, and by the user of their client.
    deferred: BTreeMap<u64, FairQueue<u32, RequestKey>>,
}

impl PendingMemory {
    /// Returns true if this request of a client waits for memory.
    pub(super) fn contains(&self, client: ClientId, request: u64) -> bool {
        self.requests.get(&client).is_some_and(|requests| requests.contains_key(&request))
    }

    /// Makes a request wait for an allocation of its own.
    pub(super) fn wait_for_allocation(&mut self, allocation: AllocationId, pending: PendingRequest) {
        let key = self.insert(pending);
        self.single.insert(allocation, key);
    }

    /// Returns the request that waits for an allocation; `None` if the request's client has left.
    pub(super) fn waits_for(&self, allocation: AllocationId) -> Option<&PendingRequest> {
        let (client, id) = self.single.get(&allocation)?;
        self.requests.get(client)?.get(id)
    }

    /// Removes and returns the request that waits for an allocation; `None` if the request's client has left.
    pub(super) fn take(&mut self, allocation: AllocationId) -> Option<PendingRequest> {
        let key = self.single.remove(&allocation)?;
        self.remove(key)
    }

    /// Makes a request of a user wait until an arena of a place (the host or a device) has space.
    pub(super) fn wait_for_arena(&mut self, place: u32, user: u32, pending: PendingRequest) {
        let key = self.insert(pending);
        self.arena_queues.entry(place).or_default().queue.push(user, key);
    }

    /// Undoes [`Self::pop`] for a request for which no arena has space yet.
    pub(super) fn requeue(&mut self, place: u32, user: u32, pending: PendingRequest) {
        let key = self.insert(pending);
        self.arena_queues.entry(place).or_default().queue.push_front(user, key);
    }

    /// Makes a request of a user wait until this number of scan passes over all pins is complete.
    pub(super) fn wait_for_passes(&mut self, passes: u64, user: u32, pending: PendingRequest) {
        let key = self.insert(pending);
        self.deferred.entry(passes).or_default().push(user, key);
    }

    /// Returns true if the scan passes over all pins that some request waits for are complete.
    pub(super) fn has_due(&self, passes: u64) -> bool {
        self.deferred.first_key_value().is_some_and(|(needed, _)| *needed <= passes)
    }

    /// Removes and returns the next request for which enough scan passes over all pins are complete; `None` if there is none. The
    /// request itself is `None` if its client has left.
    pub(super) fn pop_due(&mut self, passes: u64) -> Option<Option<PendingRequest>> {
        let mut first = self.deferred.first_entry().filter(|first| *first.key() <= passes)?;
        let (_, key) = first.get_mut().pop()?;
        if first.get().is_empty() {
            first.remove();
        }
        Some(self.remove(key))
    }

    fn insert(&mut self, pending: PendingRequest) -> RequestKey {
        let (client, id) = (pending.client, pending.request.id);
        self.requests.entry(client).or_default().insert(id, pending);
        (client, id)
    }

    fn remove(&mut self, (client, id): RequestKey) -> Option<PendingRequest> {
        let requests = self.requests.get_mut(&client)?;
        let removed = requests.remove(&id);
        if requests.is_empty() {
            self.requests.remove(&client);
        }
        removed
    }

    /// Returns true if another arena has to be allocated for a request that finds no space. Returns false while an arena of the
    /// place is being allocated, or after its allocation has just failed.
    pub(super) fn needs_arena(&self, place: u32) -> bool {
        self.arena_queues
            .get(&place)
            .is_none_or(|queue| queue.allocating.is_none() && queue.failure.is_none())
    }

    /// Records that an arena of a place (the host or a device) is being allocated.
    pub(super) fn begin_arena(&mut self, place: u32, allocation: AllocationId) {
        self.arena_queues.entry(place).or_default().allocating = Some(allocation);
    }

    /// Records that the arena of a place (the host or a device) is ready or has failed, so that the requests that wait for it can
    /// be resumed.
    pub(super) fn finish_arena(&mut self, place: u32, outcome: Result<(), ArenaFailure>) {
        let queue = self.arena_queues.entry(place).or_default();
        let allocation = queue.allocating.take();
        match outcome {
            Ok(()) => queue.allocated = allocation,
            Err(failure) => queue.failure = Some(failure),
        }
    }

    /// Returns the error with which the requests for an arena of a place are refused, if the arena could not be allocated.
    pub(super) fn failure(&self, place: u32) -> Option<&ArenaFailure> {
        self.arena_queues.get(&place)?.failure.as_ref()
    }

    /// Removes and returns the next request that waits for an arena of a place, with its user; `None` if no request waits or an
    /// arena is being allocated. The request itself is `None` if its client has left.
    pub(super) fn pop(&mut self, place: u32) -> Option<(u32, Option<PendingRequest>)> {
        let queue = self.arena_queues.get_mut(&place).filter(|queue| queue.is_ready())?;
        let (user, key) = queue.queue.pop()?;
        Some((user, self.remove(key)))
    }

    /// Returns true if any request that waits for an arena can be resumed.
    pub(super) fn is_ready(&self) -> bool {
        self.arena_queues.values().any(ArenaQueue::is_ready)
    }

    /// Returns the places whose queues of waiting requests have work to do: requests to resume, or [a round to
    /// finish](Self::finish_round).
    pub(super) fn ready_places(&self) -> Vec<u32> {
        let is_ready = |queue: &ArenaQueue| {
            queue.is_ready() || (queue.allocating.is_none() && queue.allocated.is_some())
        };
        self.arena_queues.iter().filter(|(_, queue)| is_ready(queue)).map(|(place, _)| *place).collect()
    }

    /// Finishes a round of resuming the requests of a queue, after they were resumed as far as there is space. Returns the arena
    /// that was allocated last: if the arena is still empty, no request needs it. Does nothing while there are requests to
    /// resume.
    pub(super) fn finish_round(&mut self, place: u32) -> Option<AllocationId> {
        let queue = self.arena_queues.get_mut(&place).filter(|queue| !queue.is_ready())?;
        let allocated = queue.allocated.take();
        if queue.allocating.is_none() {
            self.arena_queues.remove(&place);
        }
        allocated
    }

    /// Removes the waiting requests of a client that has left. Allocations for these requests continue.
    pub(super) fn forget_client(&mut self, client: ClientId) {
        self.abandoned.extend(self.requests.remove(&client));
    }

    /// Returns true if waiting requests of departed clients remain to be dropped.
    pub(super) fn has_abandoned(&self) -> bool {
        !self.abandoned.is_empty()
    }

    /// Drops up to `count` waiting requests of departed clients.
    pub(super) fn trim(&mut self, count: usize) {
        for _ in 0..count {
            let Some(requests) = self.abandoned.last_mut() else { return };
            if requests.pop_first().is_none() {
                self.abandoned.pop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::simulation::create;
    use super::*;
    use crate::protocol::RequestKind;
    use crate::server::budget::tests::unlimited;

    const PLACE: u32 = 0;

    fn request(client: u64, id: u64) -> PendingRequest {
        let request = Request { id, resends: 0, kind: RequestKind::Status };
        let charge = unlimited().open(7).charge(Amount::default()).unwrap();
        PendingRequest { client: ClientId(client), request, payload: Payload::default(), _charge: charge }
    }

    fn id(slot: usize) -> AllocationId {
        AllocationId::new(slot, 0)
    }

    #[test]
    fn a_waiting_request_is_charged_for_all_of_its_memory() {
        let (mut sessions, mut budget, client) = (Sessions::new(0), unlimited(), ClientId(1));
        sessions.join(client, budget.open(7));
        let names: Vec<_> = (0..1000).map(|number| format!("member {number}")).collect();
        let members: Vec<_> = names.iter().map(|name| (&name[..], 1)).collect();
        let request = Request { id: 9, resends: 0, kind: create("pack", 0, &members, 0) };
        let texts = names.iter().map(String::len).sum::<usize>();
        let least = 1000 * size_of::<crate::protocol::MemberSpec>() + texts;
        let charge = sessions.charge(client, Amount::bytes(REQUEST_COST)).unwrap();
        for charge in [None, Some(charge)] {
            let payload = vec![7; 1000].into();
            let pending = PendingRequest::new(client, request.clone(), payload, charge, &sessions).unwrap();
            assert!(budget.held().bytes >= least as u64);
            drop(pending);
        }
        assert_eq!(budget.held().bytes, 0);
    }

    /// Resumes requests until none can be resumed, and returns their keys.
    fn resumed(pending: &mut PendingMemory) -> Vec<Option<(u64, u64)>> {
        let popped = std::iter::from_fn(|| pending.pop(PLACE));
        popped.map(|(_, request)| request.map(|request| (request.client.0, request.request.id))).collect()
    }

    #[test]
    fn a_request_waits_for_its_own_allocation() {
        let mut pending = PendingMemory::default();
        pending.wait_for_allocation(id(1), request(1, 10));
        pending.wait_for_allocation(id(2), request(1, 11));
        assert!(pending.contains(ClientId(1), 10) && !pending.contains(ClientId(2), 10));
        assert_eq!(pending.take(id(1)).map(|request| request.request.id), Some(10));
        assert!(!pending.contains(ClientId(1), 10) && pending.take(id(1)).is_none());
        pending.forget_client(ClientId(1));
        assert!(!pending.contains(ClientId(1), 11) && pending.take(id(2)).is_none());
        assert!(pending.requests.is_empty() && pending.single.is_empty());
    }

    #[test]
    fn a_queue_waits_for_its_arena_and_then_serves_users_round_robin() {
        let mut pending = PendingMemory::default();
        assert!(pending.needs_arena(PLACE));
        pending.begin_arena(PLACE, id(1));
        assert!(!pending.needs_arena(PLACE) && pending.needs_arena(PLACE + 1));
        for (user, client, id) in [(7, 1, 1), (7, 1, 2), (7, 2, 3), (9, 3, 4)] {
            pending.wait_for_arena(PLACE, user, request(client, id));
        }
        assert!(!pending.is_ready() && pending.pop(PLACE).is_none() && pending.finish_round(PLACE).is_none());
        pending.finish_arena(PLACE, Ok(()));
        assert!(pending.is_ready() && pending.ready_places() == [PLACE]);
        let (user, first) = pending.pop(PLACE).unwrap();
        // No arena has space for the request yet: the request is first in the queue again when another arena is ready.
        pending.requeue(PLACE, user, first.unwrap());
        pending.begin_arena(PLACE, id(2));
        assert_eq!((pending.finish_round(PLACE), pending.ready_places()), (Some(id(1)), vec![]));
        pending.finish_arena(PLACE, Ok(()));
        assert_eq!(resumed(&mut pending), [Some((1, 1)), Some((3, 4)), Some((1, 2)), Some((2, 3))]);
        assert_eq!((pending.finish_round(PLACE), pending.arena_queues.len()), (Some(id(2)), 0));
    }

    #[test]
    fn a_failed_arena_refuses_waiting_requests_but_not_later_ones() {
        let mut pending = PendingMemory::default();
        pending.begin_arena(PLACE, id(1));
        pending.wait_for_arena(PLACE, 7, request(1, 1));
        let failure = ArenaFailure { len: 64, reason: "none left".to_owned() };
        pending.finish_arena(PLACE, Err(failure.clone()));
        assert_eq!(pending.failure(PLACE), Some(&failure));
        assert!(!pending.needs_arena(PLACE), "no arena is allocated while requests are being refused");
        assert_eq!(resumed(&mut pending), [Some((1, 1))]);
        assert_eq!((pending.finish_round(PLACE), pending.failure(PLACE)), (None, None));
        assert!(pending.needs_arena(PLACE));
    }

    #[test]
    fn a_deferred_request_waits_for_its_pass_and_is_removed_with_its_client() {
        let mut pending = PendingMemory::default();
        for (user, client, id) in [(7, 1, 1), (7, 2, 2), (7, 1, 3), (9, 3, 4)] {
            pending.wait_for_passes(2 + u64::from(id == 3), user, request(client, id));
        }
        assert!(pending.contains(ClientId(2), 2) && !pending.has_due(1) && pending.pop_due(1).is_none());
        pending.forget_client(ClientId(1));
        let mut pop =
            |passes| pending.pop_due(passes).map(|request| request.map(|request| request.request.id));
        assert_eq!([pop(2), pop(2), pop(2), pop(2)], [Some(None), Some(Some(4)), Some(Some(2)), None]);
        assert!(pending.has_due(3) && pending.pop_due(3).is_some_and(|request| request.is_none()));
        assert!(pending.deferred.is_empty());
    }

    #[test]
    fn requests_of_a_departed_client_are_removed_at_once_and_dropped_in_slices() {
        let mut pending = PendingMemory::default();
        pending.begin_arena(PLACE, id(1));
        for (client, id) in [(1, 1), (2, 2), (1, 3)] {
            pending.wait_for_arena(PLACE, 7, request(client, id));
        }
        pending.forget_client(ClientId(1));
        assert_eq!(pending.requests.len(), 1);
        pending.finish_arena(PLACE, Ok(()));
        assert_eq!(resumed(&mut pending), [None, Some((2, 2)), None]);
        assert_eq!(pending.finish_round(PLACE), Some(id(1)));
        assert_eq!(pending.abandoned[0].len(), 2);
        pending.trim(1);
        assert!(pending.has_abandoned() && pending.abandoned[0].len() == 1);
        pending.trim(2);
        assert!(!pending.has_abandoned());
    }
}
