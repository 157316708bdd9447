//! The actions that the current step of the state machine has decided on, in the order in which they are carried out.

use super::interface::{Output, SharedAllocation};
use super::sessions::Sessions;
use crate::id::{AllocationId, ClientId};
use crate::protocol::{Answer, Change, Refusal, Response};

/// The outputs of the current step of the state machine.
#[derive(Debug, Default)]
pub(super) struct Outputs {
    list: Vec<Output>,
}

impl Outputs {
    pub(super) fn push(&mut self, output: Output) {
        self.list.push(output);
    }

    /// Answers a client's request. A refusal is converted to the client's protocol version.
    pub(super) fn answer(
        &mut self,
        sessions: &Sessions,
        client: ClientId,
        id: u64,
        outcome: Result<Answer, Refusal>,
    ) {
        let refused = |refusal: Refusal| Answer::Refused(refusal.for_protocol(sessions.protocol(client)));
        self.respond(client, id, outcome.unwrap_or_else(refused), None);
    }

    /// Answers a client's request, with the descriptor of an allocation if `share` is set.
    pub(super) fn respond(
        &mut self,
        client: ClientId,
        id: u64,
        answer: Answer,
        share: Option<SharedAllocation>,
    ) {
        self.push(Output::Respond { client, response: Response { id, answer }, share });
    }

    /// Sends the events of a change to the clients that watch names, if the change concerns any name.
    pub(super) fn notify(&mut self, change: Change) {
        if !change.published.is_empty() || !change.deleted.is_empty() {
            self.push(Output::Notify(change));
        }
    }

    /// Returns the allocations that the current step of the state machine releases.
    pub(super) fn released(&self) -> impl Iterator<Item = AllocationId> {
        self.list.iter().filter_map(|output| match output {
            Output::Release { allocation } => Some(*allocation),
            _ => None,
        })
    }

    /// Removes and returns all outputs of the current step of the state machine.
    pub(super) fn take(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{OLDEST_PROTOCOL, PROTOCOL};
    use crate::server::budget::tests::unlimited;

    #[test]
    fn a_refusal_is_converted_to_the_protocol_of_its_client() {
        let mut sessions = Sessions::new(0);
        let [new, old] = [1, 2].map(ClientId);
        for (client, protocol) in [(new, PROTOCOL), (old, OLDEST_PROTOCOL)] {
            sessions.join(client, unlimited().open(7));
            sessions.set_protocol(client, protocol);
        }
        let refusal = Refusal::ServersDied { servers: 2 };
        assert_ne!(refusal.clone().for_protocol(OLDEST_PROTOCOL), refusal, "older clients cannot decode it");
        let mut outputs = Outputs::default();
        for client in [new, old] {
            outputs.answer(&sessions, client, 9, Err(refusal.clone()));
        }
        let answers = outputs.take().into_iter().map(|output| match output {
            Output::Respond { response, .. } => response.answer,
            other => panic!("{other:?}"),
        });
        let expected = [refusal.clone(), refusal.for_protocol(OLDEST_PROTOCOL)].map(Answer::Refused);
        assert_eq!(answers.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn outputs_are_taken_once_and_releases_are_listed() {
        let mut outputs = Outputs::default();
        let [one, two] = [1, 2].map(|slot| AllocationId::new(slot, 0));
        outputs.push(Output::Release { allocation: one });
        outputs.push(Output::Reclaim { allocation: two });
        assert_eq!(outputs.released().collect::<Vec<_>>(), [one]);
        assert_eq!(
            outputs.take(),
            [Output::Release { allocation: one }, Output::Reclaim { allocation: two }]
        );
        assert_eq!(outputs.take(), []);
    }
}
