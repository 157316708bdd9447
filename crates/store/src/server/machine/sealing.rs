//! Seals drafts (unsealed objects). Host memory of a single object is first sealed against writes (`F_SEAL_WRITE`), and the
//! requests to seal the draft wait for that.

use std::collections::BTreeMap;

use super::interface::Output;
use super::ledger::HOST;
use super::pending::REQUEST_COST;
use super::state::StoreState;
use crate::cells::Cells;
use crate::id::{AllocationId, ClientId, ObjectId, SlotState};
use crate::protocol::{Answer, Refusal, Request};
use crate::server::budget::{Amount, Charge};

/// The length of memory up to which sealing it against writes takes less time than passing the job to a worker thread.
const MAX_INLINE_CLOSE: u64 = 16 << 20;

/// A draft (unsealed object) whose memory is being sealed against writes.
#[derive(Debug)]
struct ClosingDraft {
    client: ClientId,
    object: ObjectId,
    /// The requests that wait until the draft is sealed, with their charges.
    seals: Vec<(u64, Charge)>,
}

/// The drafts (unsealed objects) whose memory is being sealed against writes, by allocation.
#[derive(Debug, Default)]
pub(super) struct Sealing {
    closing: BTreeMap<AllocationId, ClosingDraft>,
}

impl Sealing {
    /// Seals the object that an earlier request has created, either at once or when the object's memory has been sealed against
    /// writes.
    pub(super) fn seal<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        client: ClientId,
        request: &Request,
        create: u64,
    ) {
        let id = request.id;
        let created = store.history.get(client, create);
        let Some((object, (state, record))) =
            created.and_then(|object| Some((object, store.objects.read(object)?)))
        else {
            return store.answer(client, id, Err(Refusal::NothingToSeal));
        };
        let allocation = record.region.allocation;
        match (state, store.memory.ledger().record(allocation)) {
            (SlotState::Created, Some(memory)) if memory.place == HOST && !memory.is_arena => {
                let charge = request
                    .check_server_deaths()
                    .and_then(|()| store.sessions.charge(client, Amount::bytes(REQUEST_COST)));
                match charge {
                    Ok(charge) => {
                        let draft = ClosingDraft { client, object, seals: Vec::new() };
                        self.close(store, (allocation, memory.len), draft, (id, charge));
                    }
                    Err(refusal) => store.answer(client, id, Err(refusal)),
                }
            }
            (SlotState::Created, _) => {
                let outcome = store.seal(client, object);
                store.answer(client, id, outcome);
            }
            (SlotState::Sealed, _) => {
                store.answer(client, id, Ok(Answer::Sealed { object, version: record.version }));
            }
            _ => store.answer(client, id, Err(Refusal::NothingToSeal)),
        }
    }

    /// Makes a request wait until the memory of a draft is sealed against writes, and starts to seal the memory unless that is in
    /// progress.
    fn close<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        (allocation, len): (AllocationId, u64),
        draft: ClosingDraft,
        seal: (u64, Charge),
    ) {
        let client = draft.client;
        let seals = &mut self.closing.entry(allocation).or_insert(draft).seals;
        seals.push(seal);
        if seals.len() == 1 {
            // While a client has pages of the memory pinned (for example by direct I/O), the kernel delays sealing the memory. So
            // the event loop itself only seals memory of clients of the server's own user.
            let at_once = store.sessions.is_trusted(client) && len <= MAX_INLINE_CLOSE;
            let requester = store.sessions.requester(client);
            store.outputs.push(Output::CloseForWriting { allocation, at_once, requester });
        }
    }

    /// Answers the requests that wait until memory is sealed against writes. The seal may have failed because the memory is still
    /// mapped for writing.
    pub(super) fn closed<C: Cells>(
        &mut self,
        store: &mut StoreState<C>,
        allocation: AllocationId,
        outcome: Result<(), Refusal>,
    ) {
        let Some(ClosingDraft { client, object, seals }) = self.closing.remove(&allocation) else { return };
        // The client may have abandoned the draft or left while its memory was being sealed.
        let exists = store.objects.state(object) == Some(SlotState::Created);
        let outcome = outcome.and(if exists { Ok(()) } else { Err(Refusal::NothingToSeal) });
        let outcome = outcome.and_then(|()| store.seal(client, object));
        for (id, _charge) in seals {
            store.answer(client, id, outcome.clone());
        }
        // The preallocation of more memory is scheduled only now: before, the client that writes the draft would have to share
        // the CPU with the worker thread that preallocates.
        store.memory.expect_next(allocation, store.now.elapsed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::plan::CreatePlan;
    use super::super::simulation::{GEOMETRY, POLICY, create, now, settings};
    use super::*;
    use crate::cells::recorded::RecordedCells;
    use crate::index::ObjectIndex;
    use crate::protocol::RequestKind;
    use crate::server::budget::tests::unlimited;

    const CREATE: u64 = 1;
    const LEN: u64 = POLICY.small;

    /// Creates a client of a user, and a draft (unsealed object) of the client at a place (the host or a device). Returns the
    /// state, the client and the draft's allocation.
    fn draft(user: u32, place: u32) -> (StoreState<RecordedCells>, ClientId, AllocationId) {
        let index = ObjectIndex::format(RecordedCells::new(GEOMETRY.cells()), GEOMETRY);
        let mut store = StoreState::new(index, &settings(0), now());
        let client = ClientId(1);
        store.sessions.join(client, unlimited().open(user));
        let requester = store.sessions.requester(client);
        let id = store.memory.allocate(place, LEN, false, requester, &mut store.outputs).unwrap();
        store.memory.ready(id, store.objects.index());
        let region = store.memory.ledger().whole(id).unwrap();
        let kind = create("draft", LEN, &[], place);
        store.insert(client, CREATE, &CreatePlan::new(&kind).unwrap(), region, SlotState::Created);
        store.outputs.take();
        (store, client, id)
    }

    fn request(id: u64) -> Request {
        Request { id, resends: 0, kind: RequestKind::Seal { create: CREATE } }
    }

    fn answers(store: &mut StoreState<RecordedCells>) -> Vec<(u64, Answer)> {
        let answer = |output| match output {
            Output::Respond { response, .. } => Some((response.id, response.answer)),
            _ => None,
        };
        store.outputs.take().into_iter().filter_map(answer).collect()
    }

    #[test]
    fn host_memory_is_sealed_once_and_every_request_is_answered() {
        for (user, at_once) in [(settings(0).user, true), (7, false)] {
            let (mut store, client, allocation) = draft(user, HOST);
            let mut sealing = Sealing::default();
            sealing.seal(&mut store, client, &request(2), CREATE);
            sealing.seal(&mut store, client, &request(3), CREATE);
            let requester = store.sessions.requester(client);
            let close = Output::CloseForWriting { allocation, at_once, requester };
            assert_eq!(store.outputs.take(), [close], "only the server's user is trusted");
            sealing.closed(&mut store, allocation, Ok(()));
            let object = store.objects.find("draft").unwrap();
            let sealed = Answer::Sealed { object, version: 1 };
            assert_eq!(answers(&mut store), [(2, sealed.clone()), (3, sealed.clone())]);
            assert!(sealing.closing.is_empty());
            sealing.seal(&mut store, client, &request(4), CREATE);
            assert_eq!(answers(&mut store), [(4, sealed)], "the object is already sealed");
        }
    }

    #[test]
    fn memory_that_is_still_mapped_leaves_the_draft_unsealed() {
        let (mut store, client, allocation) = draft(7, HOST);
        let mut sealing = Sealing::default();
        sealing.seal(&mut store, client, &request(2), CREATE);
        store.outputs.take();
        sealing.closed(&mut store, allocation, Err(Refusal::StillMapped));
        assert_eq!(answers(&mut store), [(2, Answer::Refused(Refusal::StillMapped))]);
        assert!(store.sessions.has_drafts(client) && store.objects.find("draft").is_none());
    }

    #[test]
    fn device_memory_is_sealed_without_a_file_seal() {
        let (mut store, client, _) = draft(7, 1);
        Sealing::default().seal(&mut store, client, &request(2), CREATE);
        let object = store.objects.find("draft").unwrap();
        assert_eq!(answers(&mut store), [(2, Answer::Sealed { object, version: 1 })]);
        assert!(!store.sessions.has_drafts(client));
    }

    #[test]
    fn only_created_objects_can_be_sealed() {
        let (mut store, client, _) = draft(7, HOST);
        let mut sealing = Sealing::default();
        sealing.seal(&mut store, client, &request(2), CREATE + 1);
        assert_eq!(answers(&mut store), [(2, Answer::Refused(Refusal::NothingToSeal))]);
        sealing.closed(&mut store, AllocationId::new(5, 0), Ok(()));
        assert_eq!(answers(&mut store), []);
    }
}
