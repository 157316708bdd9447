//! Counts the clients that have objects pinned, for requests that ask for the readers of objects.
//!
//! Clients write pins without notifying the server, so a request is answered by a pass over all pin pages, a bounded number of
//! pins in each step. A client that pins an object several times is one reader. The counts may be out of date when they arrive.

use std::collections::{BTreeMap, VecDeque};

use super::interface::ServerMemory;
use super::outputs::Outputs;
use super::pin_scan::{PinPosition, STEP_WORK};
use super::sessions::Sessions;
use crate::id::{ClientId, ObjectId};
use crate::protocol::{Answer, MAX_COUNTED, Refusal};
use crate::server::budget::{Amount, Charge};

/// The number of bytes that a counted object uses: its entries in the list of the request and in the table of counts.
const OBJECT_COST: u64 = 96;

/// The number of bytes that a request uses besides its objects.
const REQUEST_COST: u64 = 256;

/// The number of readers of an object, and the client that was counted last: pages are read client by client.
#[derive(Debug, Default)]
struct ReaderCount {
    readers: u32,
    last: Option<ClientId>,
}

#[derive(Debug)]
struct CountRequest {
    client: ClientId,
    request: u64,
    objects: Vec<ObjectId>,
    counts: BTreeMap<ObjectId, ReaderCount>,
    at: PinPosition,
    _charge: Charge,
}

/// The requests for readers, in the order in which they are answered; at most one of each client.
#[derive(Debug, Default)]
pub(super) struct ReaderCounts {
    requests: VecDeque<CountRequest>,
}

impl ReaderCounts {
    /// Adds a client's request. It is answered by a later [`ReaderCounts::read`].
    pub(super) fn add(
        &mut self,
        client: ClientId,
        request: u64,
        objects: Vec<ObjectId>,
        sessions: &Sessions,
    ) -> Result<(), Refusal> {
        if objects.len() > MAX_COUNTED {
            return Err(Refusal::malformed("a request for the readers of too many objects"));
        }
        if self.requests.iter().any(|waiting| waiting.client == client) {
            return Err(Refusal::malformed("two requests for readers at the same time"));
        }
        let cost = REQUEST_COST + OBJECT_COST * objects.len() as u64;
        let charge = sessions.charge(client, Amount::bytes(cost))?;
        let counts = objects.iter().map(|id| (*id, ReaderCount::default())).collect();
        let at = PinPosition::default();
        self.requests.push_back(CountRequest { client, request, objects, counts, at, _charge: charge });
        Ok(())
    }

    /// Removes the request of a client that has left.
    pub(super) fn forget(&mut self, client: ClientId) {
        self.requests.retain(|waiting| waiting.client != client);
    }

    /// Returns true if a request is not answered yet.
    pub(super) fn is_active(&self) -> bool {
        !self.requests.is_empty()
    }

    /// Reads some pins, and answers the requests for which all pins were read.
    pub(super) fn read(
        &mut self,
        server_memory: &impl ServerMemory,
        sessions: &Sessions,
        outputs: &mut Outputs,
    ) {
        let mut work = STEP_WORK / 2;
        while work > 0
            && let Some(waiting) = self.requests.front_mut()
        {
            let counts = &mut waiting.counts;
            let mut visit = |client: ClientId, pin: u64| {
                if let Some(count) = ObjectId::from_u64(pin).and_then(|id| counts.get_mut(&id))
                    && count.last != Some(client)
                {
                    count.readers += 1;
                    count.last = Some(client);
                }
                1
            };
            match server_memory.read_pins(waiting.at, &mut work, &mut visit) {
                Some(at) => waiting.at = at,
                None => {
                    let of = |id: &ObjectId| waiting.counts.get(id).map_or(0, |count| count.readers);
                    let counts = waiting.objects.iter().map(of).collect();
                    outputs.answer(sessions, waiting.client, waiting.request, Ok(Answer::Readers { counts }));
                    self.requests.pop_front();
                    // A pass over few pins uses little work, so the number of answers is bounded too.
                    work = work.saturating_sub(STEP_WORK / 16);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::interface::Output;
    use super::*;
    use crate::id::AllocationId;
    use crate::server::budget::tests::unlimited;

    /// The pin pages of a test, by client.
    struct Pages(Vec<(ClientId, Vec<u64>)>);

    impl ServerMemory for Pages {
        fn write(&mut self, _: AllocationId, _: u64, _: &[u8]) -> bool {
            false
        }

        fn read_pins(
            &self,
            from: PinPosition,
            work: &mut usize,
            visit: &mut dyn FnMut(ClientId, u64) -> usize,
        ) -> Option<PinPosition> {
            let pins = self.0.iter().flat_map(|(client, pins)| {
                (1..).zip(pins).map(|(cell, pin)| (PinPosition { client: *client, cell }, *pin))
            });
            for (at, pin) in pins.filter(|(at, _)| *at >= from) {
                if *work == 0 {
                    return Some(at);
                }
                *work = work.saturating_sub(visit(at.client, pin));
            }
            None
        }

        fn take_pins(&mut self, _: ClientId) -> Vec<u64> {
            Vec::new()
        }
    }

    const ASKER: ClientId = ClientId(9);

    fn sessions() -> Sessions {
        let mut sessions = Sessions::new(0);
        sessions.join(ASKER, unlimited().open(7));
        sessions
    }

    #[test]
    fn readers_are_counted_once_over_several_steps() {
        let [one, two, none] = [1, 2, 3].map(|slot| ObjectId::new(slot, 0));
        let pins = |ids: &[ObjectId]| ids.iter().map(|id| id.as_u64()).collect::<Vec<_>>();
        let mut many = vec![u64::MAX; 3 * STEP_WORK];
        many.extend(pins(&[two]));
        let pages = Pages(vec![
            (ClientId(1), pins(&[one, two, one])),
            (ClientId(2), pins(&[one])),
            (ClientId(3), many),
        ]);
        let (mut readers, sessions, mut outputs) = (ReaderCounts::default(), sessions(), Outputs::default());
        readers.add(ASKER, 5, vec![two, none, one], &sessions).unwrap();
        let mut steps = 0;
        while readers.is_active() {
            readers.read(&pages, &sessions, &mut outputs);
            steps += 1;
        }
        assert!(steps >= 6, "each of the {steps} steps is bounded");
        let outputs = outputs.take();
        let [Output::Respond { client: ASKER, response, .. }] = &outputs[..] else { panic!("{outputs:?}") };
        assert_eq!((response.id, &response.answer), (5, &Answer::Readers { counts: vec![2, 0, 2] }));
    }

    #[test]
    fn a_client_has_one_request_of_bounded_length() {
        let (mut readers, sessions) = (ReaderCounts::default(), sessions());
        let id = ObjectId::new(1, 0);
        let refused = readers.add(ASKER, 1, vec![id; MAX_COUNTED + 1], &sessions);
        assert_eq!(refused, Err(Refusal::malformed("a request for the readers of too many objects")));
        assert_eq!(readers.add(ASKER, 2, vec![id; MAX_COUNTED], &sessions), Ok(()));
        let refused = readers.add(ASKER, 3, vec![id], &sessions);
        assert_eq!(refused, Err(Refusal::malformed("two requests for readers at the same time")));
        readers.forget(ASKER);
        assert!(!readers.is_active());
    }
}
