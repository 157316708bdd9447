//! Tests that requests that wait for memory are resumed in bounded numbers per step, and fairly among users.

use std::time::Duration;

use super::super::simulation::{Simulation, create, now, sealed};
use super::super::{Input, Output};
use super::*;
use crate::protocol::Answer;

/// The number of waiting requests of a test, which exceeds the number that one step resumes.
const WAITING: u64 = MAX_RESUMED as u64 + 4;

fn step(sim: &mut Simulation, input: Input<'_>) -> Vec<Output> {
    sim.server.step(now(), input, &mut sim.memory)
}

fn put(client: ClientId, id: u64) -> Input<'static> {
    let request = Request { id, resends: 0, kind: create(&format!("object {id}"), 1, &[], 0) };
    Input::Request { client, request, payload: vec![7].into(), charge: None }
}

/// Returns the id and the answer of each request that was answered.
fn answered(outputs: &[Output]) -> Vec<(u64, &Answer)> {
    outputs
        .iter()
        .filter_map(|output| match output {
            Output::Respond { response, .. } => Some((response.id, &response.answer)),
            _ => None,
        })
        .collect()
}

/// Creates a simulation in which a client of one user waits with many requests, and a client of another user with one request.
/// Also returns the arena that is being allocated for them, and the second client.
fn waiting() -> (Simulation, AllocationId, ClientId) {
    let mut sim = Simulation::new();
    let (client, other) = (sim.join_as(1, 1000), sim.join_as(2, 2000));
    let outputs = step(&mut sim, put(client, 100));
    let [Output::Allocate { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
    for id in 101..100 + WAITING {
        assert_eq!(step(&mut sim, put(client, id)), []);
    }
    assert_eq!(step(&mut sim, put(other, 500)), []);
    assert_eq!(step(&mut sim, put(other, 500)), [], "a request that is sent twice waits once");
    (sim, allocation, other)
}

#[test]
fn a_step_resumes_a_bounded_number_of_requests_and_users_are_served_round_robin() {
    let (mut sim, allocation, _) = waiting();
    let outputs = step(&mut sim, Input::Allocated { allocation, outcome: Ok(()) });
    let first: Vec<_> = answered(&outputs).into_iter().map(|(id, _)| id).collect();
    assert_eq!((first.len(), &first[..3]), (MAX_RESUMED, &[100, 500, 101][..]));
    assert_eq!(sim.server.wake_at(), Some(Duration::ZERO), "the others are resumed at once");
    let outputs = step(&mut sim, Input::Tick);
    assert_eq!(answered(&outputs).len() as u64, WAITING + 1 - MAX_RESUMED as u64);
    assert_eq!(sim.server.wake_at(), None);
}

#[test]
fn a_bounded_number_of_requests_per_step_is_refused_if_their_arena_fails() {
    let (mut sim, allocation, other) = waiting();
    let outcome = Err("none left".to_owned());
    let outputs = step(&mut sim, Input::Allocated { allocation, outcome });
    let Output::Release { allocation: released } = outputs[0] else { panic!("{outputs:?}") };
    assert_eq!((released, outputs.len()), (allocation, 1 + MAX_RESUMED));
    let refused = Answer::Refused(Refusal::NoMemory { len: 64 << 10, reason: "none left".to_owned() });
    assert!(answered(&outputs).iter().all(|(_, answer)| **answer == refused), "{outputs:?}");
    let outputs = step(&mut sim, Input::Tick);
    assert_eq!(answered(&outputs).len() as u64, WAITING + 1 - MAX_RESUMED as u64);
    // After the refusals, the next request starts another allocation of an arena.
    let outputs = step(&mut sim, put(other, 501));
    assert!(matches!(outputs[..], [Output::Allocate { .. }]), "{outputs:?}");
}

#[test]
fn a_request_that_does_not_fit_waits_for_another_arena_at_the_front() {
    let mut sim = Simulation::new();
    let (client, other) = (sim.join_as(1, 1000), sim.join_as(2, 2000));
    let put = |client, id, len: usize| {
        let kind = create(&format!("object {id}"), len as u64, &[], 0);
        Input::Request {
            client,
            request: Request { id, resends: 0, kind },
            payload: vec![7; len].into(),
            charge: None,
        }
    };
    let outputs = step(&mut sim, put(client, 100, 15 << 10));
    let [Output::Allocate { allocation: first, .. }] = outputs[..] else { panic!("{outputs:?}") };
    for id in 101..105 {
        assert_eq!(step(&mut sim, put(client, id, 15 << 10)), []);
    }
    assert_eq!(step(&mut sim, put(other, 500, 15 << 10)), []);
    let outputs = step(&mut sim, Input::Allocated { allocation: first, outcome: Ok(()) });
    let [.., Output::Allocate { allocation: second, .. }] = outputs[..] else { panic!("{outputs:?}") };
    let ids = |outputs: &[Output]| answered(outputs).into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    assert_eq!(ids(&outputs), [100, 500, 101, 102]);
    // While other requests wait for an arena, a request that fits the existing arena is processed.
    assert_eq!(ids(&step(&mut sim, put(other, 501, 100))), [501]);
    let outputs = step(&mut sim, Input::Allocated { allocation: second, outcome: Ok(()) });
    assert_eq!(ids(&outputs), [103, 104]);
}

#[test]
fn an_arena_without_waiting_requests_is_released_if_another_is_empty() {
    let mut sim = Simulation::new();
    let (client, other) = (sim.join(1), sim.join(2));
    let objects: Vec<_> =
        (0..4).map(|number| sealed(&sim.create(other, &format!("object {number}"), 15 << 10).1)).collect();
    let request = Request { id: 100, resends: 0, kind: create("last", 15 << 10, &[], 0) };
    let payload = vec![7; 15 << 10].into();
    let outputs = step(&mut sim, Input::Request { client, request, payload, charge: None });
    let [Output::Allocate { allocation, .. }] = outputs[..] else { panic!("{outputs:?}") };
    for object in objects {
        let request = Request { id: object.as_u64(), resends: 0, kind: RequestKind::Delete { object } };
        let outputs = step(
            &mut sim,
            Input::Request { client: other, request, payload: Payload::default(), charge: None },
        );
        let is_released = outputs.iter().any(|output| matches!(output, Output::Release { .. }));
        assert!(!is_released, "the last empty arena is retained: {outputs:?}");
    }
    assert_eq!(step(&mut sim, Input::Left { client }), []);
    let outputs = step(&mut sim, Input::Allocated { allocation, outcome: Ok(()) });
    assert_eq!(outputs, [Output::Release { allocation }]);
}
