//! The state machine of the store server as a whole: passes each input to the part that handles it, and returns the outputs.

use std::time::Duration;

use super::creation::Creation;
use super::interface::{Input, Output, ServerMemory, StepTime, WatchStart};
use super::sealing::Sealing;
use super::sessions::Reception;
use super::state::StoreState;
use super::waiting::TimedRequest;
use crate::cells::Cells;
use crate::id::{ClientId, ObjectId};
use crate::index::ObjectIndex;
use crate::protocol::frame::Payload;
use crate::protocol::{Answer, OLDEST_PROTOCOL, PROTOCOL, Refusal, Request, RequestKind, Status, check_name};
use crate::server::budget::Charge;

/// The number of request history entries of departed clients that one step of the state machine drops.
const HISTORY_DROPPED_AT_ONCE: usize = 128;

/// The store server as a state machine without I/O. The index holds the durable state of all objects; everything else can be
/// derived from the index.
#[derive(Debug)]
pub(crate) struct Server<C> {
    pub(super) state: StoreState<C>,
    creation: Creation,
    sealing: Sealing,
}

impl<C: Cells> Server<C> {
    /// Creates a server from a state that was recovered from an index.
    pub(super) fn new(state: StoreState<C>) -> Self {
        Self { state, creation: Creation::default(), sealing: Sealing::default() }
    }

    pub(crate) fn index(&self) -> &ObjectIndex<C> {
        self.state.objects.index()
    }

    /// Returns the status of the store.
    pub(crate) fn status(&self) -> Status {
        self.state.status()
    }

    /// Returns the protocol version of a client.
    pub(crate) fn protocol(&self, client: ClientId) -> u32 {
        self.state.sessions.protocol(client)
    }

    /// Returns true if a client has a draft (unsealed object) that the client may still write.
    pub(crate) fn has_drafts(&self, client: ClientId) -> bool {
        self.state.sessions.has_drafts(client)
    }

    /// Returns the time of the next step of the state machine if there is no input. The time is zero if work was left for the
    /// next step.
    pub(crate) fn wake_at(&self) -> Option<Duration> {
        let state = &self.state;
        if self.creation.is_ready(state.retirement.passes())
            || state.history.has_abandoned()
            || state.readers.is_active()
        {
            return Some(Duration::ZERO);
        }
        let wakes = [state.waiting.wake_at(), state.retirement.wake_at(), state.memory.wake_at()];
        wakes.into_iter().flatten().min()
    }

    /// Runs a step of the state machine: processes an input, and then a bounded amount of the work that earlier steps have left.
    /// Returns the outputs in order.
    pub(crate) fn step(
        &mut self,
        now: StepTime,
        input: Input<'_>,
        server_memory: &mut impl ServerMemory,
    ) -> Vec<Output> {
        self.state.now = now;
        match input {
            Input::Joined { client, account } => self.state.sessions.join(client, account),
            Input::Request { client, request, payload, charge } => {
                self.receive(client, request, payload, charge, server_memory);
            }
            Input::Left { client } => self.leave(client, server_memory),
            Input::Allocated { allocation, outcome } => {
                self.creation.allocated(&mut self.state, allocation, outcome);
            }
            Input::ClosedForWriting { allocation, outcome } => {
                self.sealing.closed(&mut self.state, allocation, outcome);
            }
            Input::Tick => {}
        }
        self.state.scan_pins(server_memory);
        self.state.count_readers(server_memory);
        self.creation.resume(&mut self.state, server_memory);
        let StoreState { memory, waiting, sessions, history, outputs, .. } = &mut self.state;
        memory.update(now.elapsed, outputs);
        waiting.answer_due(now.elapsed, memory.ledger(), sessions, outputs);
        history.trim(HISTORY_DROPPED_AT_ONCE);
        self.creation.trim();
        outputs.take()
    }

    fn receive(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
        server_memory: &mut impl ServerMemory,
    ) {
        match self.state.sessions.receive(client, &request) {
            Reception::Process => {
                let id = request.id;
                if let Some(outcome) = self.process(client, request, payload, charge, server_memory) {
                    self.state.answer(client, id, outcome);
                }
            }
            Reception::Ignore => {}
            Reception::Disconnect => self.state.outputs.push(Output::Disconnect { client }),
        }
    }

    /// Processes a client's request. Returns its outcome; `None` if the request has been answered already or is answered later.
    fn process(
        &mut self,
        client: ClientId,
        request: Request,
        payload: Payload<'_>,
        charge: Option<Charge>,
        server_memory: &mut impl ServerMemory,
    ) -> Option<Result<Answer, Refusal>> {
        let (id, is_repeated) = (request.id, request.resends != 0);
        let state = &mut self.state;
        match request.kind {
            RequestKind::Hello { protocol } if !(OLDEST_PROTOCOL..=PROTOCOL).contains(&protocol) => {
                return Some(Err(Refusal::OtherProtocol { server: PROTOCOL, client: protocol }));
            }
            RequestKind::Hello { protocol } => {
                state.sessions.set_protocol(client, protocol);
                state.outputs.push(Output::Admit { client, request: id, is_repeated });
            }
            RequestKind::Create { .. } => {
                self.creation.create(state, client, request, payload, charge, server_memory);
            }
            RequestKind::Seal { create } => self.sealing.seal(state, client, &request, create),
            RequestKind::Abandon { create } => return Some(state.abandon(client, create)),
            RequestKind::Publish { label, object, part } => {
                self.creation.alias(state, (client, id, is_repeated), label, object, part);
            }
            RequestKind::Adopt { .. } => self.creation.adopt(state, client, request),
            RequestKind::Delete { object } => return Some(state.delete(client, object, is_repeated)),
            RequestKind::Find { name, wait } => {
                return self.find(TimedRequest { client, request: id, wait }, name);
            }
            RequestKind::AwaitSpace { len, place, wait } => {
                let StoreState { memory, waiting, sessions, now, .. } = state;
                let request = TimedRequest { client, request: id, wait };
                return waiting.wait_for_space(request, place, len, now.elapsed, memory.ledger(), sessions);
            }
            RequestKind::Fetch { object } => state.fetch(client, id, object),
            RequestKind::PinReleased { object } => state.retirement.pin_released(object, &state.objects),
            RequestKind::Watch { prefix } => {
                return Some(check_name(&prefix).map(|()| {
                    state.outputs.push(Output::Watch { client, prefix, start: WatchStart::NameEvents });
                    Answer::Done
                }));
            }
            RequestKind::WatchFrom { prefix, after } => match check_name(&prefix) {
                Ok(()) => {
                    let start = WatchStart::After { request: id, revision: after };
                    state.outputs.push(Output::Watch { client, prefix, start });
                }
                Err(refusal) => return Some(Err(refusal)),
            },
            RequestKind::Statistics => {
                let (status, values) = (state.status(), state.values());
                state.outputs.push(Output::Report { client, request: id, status, values });
            }
            RequestKind::Readers { objects } => {
                let StoreState { readers, sessions, .. } = state;
                if let Err(refusal) = readers.add(client, id, objects, sessions) {
                    return Some(Err(refusal));
                }
            }
            RequestKind::Status => return Some(Ok(Answer::Status(state.status()))),
            RequestKind::Goodbye => self.leave(client, server_memory),
            // The event loop processes these two kinds of request, because the state machine has no access to processes.
            RequestKind::AwaitChild | RequestKind::Claim { .. } => {
                return Some(Err(Refusal::malformed(
                    "a request about processes that the event loop did not handle",
                )));
            }
        }
        None
    }

    fn find(&mut self, request: TimedRequest, name: String) -> Option<Result<Answer, Refusal>> {
        let StoreState { objects, waiting, sessions, now, .. } = &mut self.state;
        if let Some(object) = objects.find(&name) {
            return Some(Ok(Answer::Found { object }));
        }
        match check_name(&name) {
            Ok(()) => waiting.wait_for_name(request, name, now.elapsed, sessions),
            Err(refusal) => Some(Err(refusal)),
        }
    }

    /// Removes a client that has left: deletes its drafts (unsealed objects), and removes its requests and pins.
    fn leave(&mut self, client: ClientId, server_memory: &mut impl ServerMemory) {
        let state = &mut self.state;
        let drafts = state.sessions.leave(client);
        state.waiting.forget(client);
        state.readers.forget(client);
        self.creation.forget_client(client);
        for object in drafts {
            state.drop_draft(object);
        }
        state.history.forget(client);
        for pin in server_memory.take_pins(client) {
            // A client may have written any number to its pin page, so a pin may not be a valid object id.
            if let Some(object) = ObjectId::from_u64(pin) {
                state.retirement.pin_released(object, &state.objects);
            }
        }
    }
}
