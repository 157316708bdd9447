//! Adopts memory of a client without a copy: the memory becomes an object that is sealed from the beginning.
//!
//! Only clients of the server's own user may send memory: closing a descriptor of another kind may block until its creator allows
//! it. A worker checks the descriptor nevertheless, and the memory counts as if the server had allocated it.

use crate::cells::Cells;
use crate::id::{AllocationId, ClientId};
use crate::protocol::{Refusal, RequestKind};
use crate::server::machine::pending::PendingRequest;
use crate::server::machine::state::StoreState;

/// Validates a request to adopt memory, and starts to check the memory and to send its descriptor to the keeper process.
pub(super) fn begin<C: Cells>(
    store: &mut StoreState<C>,
    client: ClientId,
    kind: &RequestKind,
) -> Result<AllocationId, Refusal> {
    let RequestKind::Adopt { label, place, len, part } = kind else {
        return Err(Refusal::malformed("the request adopts no memory"));
    };
    if !store.sessions.is_trusted(client) {
        return Err(Refusal::NotTrusted { user: store.sessions.server_user() });
    }
    label.check()?;
    store.check_owner(client, &label.name)?;
    store.memory.ledger().check_place(*place)?;
    part.check(*len)?;
    store.objects.check_slots(1)?;
    let requester = store.sessions.requester(client);
    store.memory.import(*place, *len, requester, &mut store.outputs)
}

/// Creates the object of a request to adopt memory, when the memory is ready.
pub(super) fn finish<C: Cells>(
    store: &mut StoreState<C>,
    pending: &PendingRequest,
    allocation: AllocationId,
) {
    let (client, id) = (pending.client, pending.request.id);
    let RequestKind::Adopt { label, part, .. } = &pending.request.kind else {
        unreachable!("only a request to adopt memory waits for an import")
    };
    let region = store.memory.ledger().whole(allocation).expect("memory that is ready is in the ledger");
    // Another user may have taken the name while the memory was being checked.
    let outcome = store.check_owner(client, &label.name);
    let outcome = outcome.and_then(|()| store.insert_part(client, id, label.clone(), region, *part));
    store.answer(client, id, outcome);
}

#[cfg(test)]
mod tests {
    use super::super::super::Input;
    use super::super::super::simulation::*;
    use super::*;
    use crate::cells::recorded::{Prefixes, RecordedCells};
    use crate::id::ObjectId;
    use crate::protocol::frame::Payload;
    use crate::protocol::{Answer, ByteRange, Request};
    use crate::server::Output;

    /// The user that the server runs as.
    const OWN: u32 = 0;

    fn adopt(name: &str, place: u32, len: u64, offset: u64, part: u64) -> RequestKind {
        RequestKind::Adopt { label: label(name), place, len, part: ByteRange { offset, len: part } }
    }

    fn publish(name: &str, object: ObjectId, offset: u64, len: u64) -> RequestKind {
        RequestKind::Publish { label: label(name), object, part: Some(ByteRange { offset, len }) }
    }

    /// Returns a copy of the index, as the next server finds it.
    fn unchanged(sim: &Simulation) -> RecordedCells {
        Prefixes { before: sim.cells.snapshot(), stores: vec![] }.replay(0)
    }

    fn refused(answer: Answer) -> &'static str {
        match answer {
            Answer::Refused(refusal) => refusal.code(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn adopted_memory_is_an_object_at_once_and_is_released_with_it() {
        let mut sim = Simulation::new();
        let client = sim.join_as(1, OWN);
        for place in [0, 1] {
            let answer = sim.request_one(client, adopt("name", place, 12 << 10, 5000, 6000), &[]);
            let object = sealed(&answer);
            assert_eq!(answer, Answer::Sealed { object, version: 1 });
            // If the client sends the request again to the next server, that server answers it from the object's record.
            let kind = adopt("name", place, 12 << 10, 5000, 6000);
            let request = Request { id: sim.requests, resends: 1, kind };
            let (mut another, _) = sim.recover(unchanged(&sim));
            let input = Input::Request { client, request, payload: Payload::default(), charge: None };
            let outputs = another.step(now(), input, &mut sim.memory);
            let [Output::Respond { response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
            assert_eq!(response.answer, answer);
            let (_, record) = sim.server.index().read(object).unwrap();
            assert_eq!((record.offset, record.len, record.region.len), (5000, 6000, 12 << 10));
            let status = sim.status(client);
            let used = if place == 0 { status.host.used } else { status.device.used };
            assert_eq!((used, sim.parked.len()), (12 << 10, 1));
            let Answer::Fetched { memory } = sim.request_one(client, RequestKind::Fetch { object }, &[])
            else {
                panic!("memory")
            };
            assert_eq!((memory.offset, memory.allocation_len, memory.place), (5000, 12 << 10, place));
            sim.request_one(client, RequestKind::Delete { object }, &[]);
            assert_eq!(sim.parked.len(), 0);
        }
        assert!(sim.prefixes >= 30, "{} prefixes", sim.prefixes);
    }

    #[test]
    fn other_names_of_adopted_memory_retain_it() {
        let mut sim = Simulation::new();
        let client = sim.join_as(1, OWN);
        let first = sealed(&sim.request_one(client, adopt("first", 1, 64 << 10, 0, 100), &[]));
        let second = sealed(&sim.request_one(client, publish("second", first, 60 << 10, 4 << 10), &[]));
        sim.request_one(client, RequestKind::Delete { object: first }, &[]);
        assert_eq!(sim.status(client).device.used, 64 << 10);
        let third = sealed(&sim.request_one(client, publish("third", second, 0, 1), &[]));
        sim.request_one(client, RequestKind::Delete { object: second }, &[]);
        // Sealed objects remain when the client that created them leaves.
        sim.clients.remove(&client);
        sim.run(Input::Left { client });
        let other = sim.join_as(2, OWN);
        assert_eq!(sim.status(other).device.used, 64 << 10);
        sim.request_one(other, RequestKind::Delete { object: third }, &[]);
        assert_eq!((sim.status(other).device.used, sim.parked.len()), (0, 0));
    }

    #[test]
    fn memory_that_fails_the_check_leaves_nothing_behind() {
        let mut sim = Simulation::new();
        let client = sim.join_as(1, OWN);
        sim.writable = true;
        let answer = sim.request_one(client, adopt("name", 0, 12 << 10, 0, 1), &[]);
        let (len, reason) = (12 << 10, "it can be written".to_owned());
        assert_eq!(answer, Answer::Refused(Refusal::CannotAdopt { len, reason }));
        let status = sim.status(client);
        assert_eq!((status.objects, status.host.used, sim.parked.len()), (0, 0, 0));
    }

    #[test]
    fn invalid_adoptions_are_refused_before_memory_is_counted() {
        let mut sim = Simulation::new();
        let (other, client) = (sim.join(1), sim.join_as(2, OWN));
        assert_eq!(refused(sim.request_one(other, adopt("a", 0, 4096, 0, 1), &[])), "not-trusted");
        sealed(&sim.create(other, "theirs", 10).1);
        let own = sealed(&sim.create(client, "own", 300).1);
        let long = "n".repeat(300);
        for (kind, code) in [
            (adopt("a", 0, 4096, 4096, 1), "out-of-range"),
            (adopt("a", 0, 4096, u64::MAX, 2), "out-of-range"),
            (adopt("a", 0, 5000, 0, 1), "malformed"),
            (adopt("a", 0, 0, 0, 0), "malformed"),
            (adopt("a", 0, 2 << 20, 0, 1), "over-quota"),
            (adopt("a", 7, 4096, 0, 1), "no-such-device"),
            (adopt(&long, 0, 4096, 0, 1), "name-too-long"),
            (publish("a", own, 0, 301), "out-of-range"),
            (publish("a", own, 1, u64::MAX), "out-of-range"),
        ] {
            assert_eq!(refused(sim.request_one(client, kind.clone(), &[])), code, "{kind:?}");
        }
        assert_eq!(sim.status(client).host.used, 64 << 10, "the arena of the small objects");
    }

    #[test]
    fn a_client_that_left_during_an_adoption_leaves_nothing_behind() {
        let mut sim = Simulation::new();
        let client = sim.join_as(1, OWN);
        sim.requests += 1;
        let request = Request { id: sim.requests, resends: 0, kind: adopt("a", 1, 8 << 10, 0, 1) };
        let outputs = sim.step(Input::Request { client, request, payload: Payload::default(), charge: None });
        let [Output::Import { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        sim.clients.remove(&client);
        sim.step(Input::Left { client });
        sim.parked.insert(allocation);
        sim.run(Input::Allocated { allocation, outcome: Ok(()) });
        let other = sim.join(2);
        assert_eq!((sim.status(other).device.used, sim.parked.len()), (0, 0));
    }
}
