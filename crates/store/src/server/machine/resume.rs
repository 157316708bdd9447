//! Requests that waited for memory, resumed: small objects when an arena has room, and requests that found the store full
//! when deleted objects were looked for.
//!
//! Any number of clients may wait for the same event. A step resumes a bounded number of their requests, users in turn, and
//! the next steps the others: [`Server::wake_at`] asks for a step at once while there are any.

use super::create::Begun;
use super::pending::{ArenaFailure, PendingRequest};
use super::server::{Server, ServerMemory};
use crate::cells::Cells;
use crate::protocol::Refusal;

/// How many requests are resumed in one step: of those that waited for an arena of each place, and of those that found the
/// store full.
const MOST_RESUMED: usize = 8;

/// After so many bytes of small objects, a step resumes no further requests.
const MOST_COPIED: usize = 128 << 10;

impl<C: Cells> Server<C> {
    /// Tries requests again that found no room before deleted objects were looked for.
    pub(super) fn retry_deferred(&mut self, server_memory: &mut impl ServerMemory) {
        for _ in 0..MOST_RESUMED {
            let Some(pending) = self.pending.pop_scanned(self.scan.passes()) else { return };
            // `None` where its client has left.
            if let Some(pending) = pending {
                let begun = self.begin(pending.client, &pending.request, &pending.payload, server_memory);
                self.wait_for_memory(begun, pending, false);
            }
        }
    }

    /// Creates small objects for which there is room now, or refuses them where their arena could not be made.
    pub(super) fn resume_small_creates(&mut self, server_memory: &mut impl ServerMemory) {
        for place in self.pending.ready_places() {
            let mut copied = 0;
            for _ in 0..MOST_RESUMED {
                let Some((user, pending)) = self.pending.pop(place) else { break };
                // `None` where its client has left.
                if let Some(pending) = pending {
                    copied += pending.payload.len();
                    self.resume_small_create(place, user, pending, server_memory);
                }
                if copied >= MOST_COPIED {
                    break;
                }
            }
            // Whoever wanted it may have left meanwhile.
            if let Some(arena) = self.pending.settle(place)
                && self.ledger.is_idle(arena)
            {
                self.close_allocation(arena);
            }
        }
    }

    fn resume_small_create(
        &mut self,
        place: u32,
        user: u32,
        pending: PendingRequest,
        server_memory: &mut impl ServerMemory,
    ) {
        let (client, id) = (pending.client, pending.request.id);
        if let Some(ArenaFailure { len, reason }) = self.pending.failure(place).cloned() {
            return self.answer(client, id, Err(Refusal::NoMemory { len, reason }));
        }
        let outcome = match self.begin(client, &pending.request, &pending.payload, server_memory) {
            Ok(Begun::Done) => return,
            Ok(Begun::NeedsAllocation(_)) => unreachable!("a small object has no allocation of its own"),
            Ok(Begun::NeedsArena { place, len }) => self.have_arena_made(place, len),
            Err(refusal) => Err(refusal),
        };
        match outcome {
            Ok(()) => self.pending.put_back(place, user, pending),
            refused => self.wait_for_memory(refused.map(|()| Begun::Done), pending, true),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::server::{Input, Output};
    use super::super::simulation::{Simulation, create, now, sealed};
    use super::*;
    use crate::id::{AllocationId, ClientId};
    use crate::protocol::frame::Payload;
    use crate::protocol::{Answer, Ask, Request};

    /// More requests than one step resumes.
    const WAITING: u64 = MOST_RESUMED as u64 + 4;

    fn step(sim: &mut Simulation, input: Input<'_>) -> Vec<Output> {
        sim.server.step(now(), input, &mut sim.memory)
    }

    fn put(client: ClientId, id: u64) -> Input<'static> {
        let request = Request { id, again: 0, ask: create(&format!("object {id}"), 1, &[], 0) };
        Input::Asked { client, request, payload: vec![7].into(), charge: None }
    }

    /// The requests that were answered, each with its answer.
    fn answered(outputs: &[Output]) -> Vec<(u64, &Answer)> {
        outputs
            .iter()
            .filter_map(|output| match output {
                Output::Say { response, .. } => Some((response.id, &response.answer)),
                _ => None,
            })
            .collect()
    }

    /// A sim in which one client of a user waits with many requests, and one of another user with one. The arena that is
    /// being made for them, and the second client.
    fn waiting() -> (Simulation, AllocationId, ClientId) {
        let mut sim = Simulation::new();
        let (client, other) = (sim.join_as(1, 1000), sim.join_as(2, 2000));
        let outputs = step(&mut sim, put(client, 100));
        let [Output::Make { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        for id in 101..100 + WAITING {
            assert_eq!(step(&mut sim, put(client, id)), []);
        }
        assert_eq!(step(&mut sim, put(other, 500)), []);
        assert_eq!(step(&mut sim, put(other, 500)), [], "a request that is said twice waits once");
        (sim, allocation, other)
    }

    #[test]
    fn a_step_resumes_a_bounded_number_of_requests_and_users_take_turns() {
        let (mut sim, allocation, _) = waiting();
        let outputs = step(&mut sim, Input::Made { allocation, outcome: Ok(()) });
        let first: Vec<_> = answered(&outputs).into_iter().map(|(id, _)| id).collect();
        assert_eq!((first.len(), &first[..3]), (MOST_RESUMED, &[100, 500, 101][..]));
        assert_eq!(sim.server.wake_at(), Some(Duration::ZERO), "the others are resumed at once");
        let outputs = step(&mut sim, Input::Tick);
        assert_eq!(answered(&outputs).len() as u64, WAITING + 1 - MOST_RESUMED as u64);
        assert_eq!(sim.server.wake_at(), None);
    }

    #[test]
    fn requests_are_refused_a_bounded_number_at_a_step_when_their_arena_cannot_be_made() {
        let (mut sim, allocation, other) = waiting();
        let outcome = Err("none left".to_owned());
        let outputs = step(&mut sim, Input::Made { allocation, outcome });
        let Output::Release { allocation: released } = outputs[0] else { panic!("{outputs:?}") };
        assert_eq!((released, outputs.len()), (allocation, 1 + MOST_RESUMED));
        let refused = Answer::Refused(Refusal::NoMemory { len: 64 << 10, reason: "none left".to_owned() });
        assert!(answered(&outputs).iter().all(|(_, answer)| **answer == refused), "{outputs:?}");
        let outputs = step(&mut sim, Input::Tick);
        assert_eq!(answered(&outputs).len() as u64, WAITING + 1 - MOST_RESUMED as u64);
        // The next request tries again.
        let outputs = step(&mut sim, put(other, 501));
        assert!(matches!(outputs[..], [Output::Make { .. }]), "{outputs:?}");
    }

    #[test]
    fn a_request_that_waits_is_charged_for_all_that_it_holds() {
        let mut sim = Simulation::new();
        let client = sim.join(1);
        let names: Vec<_> = (0..1000).map(|number| format!("member {number}")).collect();
        let members: Vec<_> = names.iter().map(|name| (&name[..], 1)).collect();
        let request = Request { id: 9, again: 0, ask: create("pack", 0, &members, 0) };
        let before = sim.budget.held().bytes;
        let texts = names.iter().map(String::len).sum::<usize>();
        let least = 1000 * size_of::<crate::protocol::Member>() + texts;
        let charge = sim.server.charge_request(client).unwrap();
        for charge in [None, Some(charge)] {
            let pending = sim.server.pend(client, request.clone(), vec![7; 1000].into(), charge).unwrap();
            assert!(sim.budget.held().bytes - before >= least as u64);
            drop(pending);
        }
        assert_eq!(sim.budget.held().bytes, before);
    }

    #[test]
    fn a_request_that_does_not_fit_has_another_arena_made_and_keeps_its_turn() {
        let mut sim = Simulation::new();
        let (client, other) = (sim.join_as(1, 1000), sim.join_as(2, 2000));
        let put = |client, id, len: usize| {
            let ask = create(&format!("object {id}"), len as u64, &[], 0);
            Input::Asked {
                client,
                request: Request { id, again: 0, ask },
                payload: vec![7; len].into(),
                charge: None,
            }
        };
        let outputs = step(&mut sim, put(client, 100, 15 << 10));
        let [Output::Make { allocation: first, .. }] = outputs[..] else { panic!("{outputs:?}") };
        for id in 101..105 {
            assert_eq!(step(&mut sim, put(client, id, 15 << 10)), []);
        }
        assert_eq!(step(&mut sim, put(other, 500, 15 << 10)), []);
        let outputs = step(&mut sim, Input::Made { allocation: first, outcome: Ok(()) });
        let [.., Output::Make { allocation: second, .. }] = outputs[..] else { panic!("{outputs:?}") };
        let ids = |outputs: &[Output]| answered(outputs).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
        assert_eq!(ids(&outputs), [100, 500, 101, 102]);
        // What fits is created meanwhile.
        assert_eq!(ids(&step(&mut sim, put(other, 501, 100))), [501]);
        let outputs = step(&mut sim, Input::Made { allocation: second, outcome: Ok(()) });
        assert_eq!(ids(&outputs), [103, 104]);
    }

    #[test]
    fn an_arena_for_which_nobody_waits_any_more_is_closed_beside_another_empty_one() {
        let mut sim = Simulation::new();
        let (client, other) = (sim.join(1), sim.join(2));
        let objects: Vec<_> = (0..4)
            .map(|number| sealed(&sim.create(other, &format!("object {number}"), 15 << 10).1))
            .collect();
        let request = Request { id: 100, again: 0, ask: create("last", 15 << 10, &[], 0) };
        let payload = vec![7; 15 << 10].into();
        let outputs = step(&mut sim, Input::Asked { client, request, payload, charge: None });
        let [Output::Make { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
        for object in objects {
            let request = Request { id: object.as_u64(), again: 0, ask: Ask::Delete { object } };
            let outputs = step(
                &mut sim,
                Input::Asked { client: other, request, payload: Payload::default(), charge: None },
            );
            let is_released = outputs.iter().any(|output| matches!(output, Output::Release { .. }));
            assert!(!is_released, "the last empty arena is kept: {outputs:?}");
        }
        assert_eq!(step(&mut sim, Input::Left { client }), []);
        let outputs = step(&mut sim, Input::Made { allocation, outcome: Ok(()) });
        assert_eq!(outputs, [Output::Release { allocation }]);
    }
}
