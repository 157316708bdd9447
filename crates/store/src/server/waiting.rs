//! Questions that are answered later: for a name that nobody has yet, and for room where the quota is full.
//!
//! Who waits for room is told when there is some, and then creates; nothing is set aside meanwhile. Those who came first are
//! told first, and nobody is told of room that one before him needs: so large objects are not kept waiting by small
//! ones for ever.

use std::time::Duration;

use super::ledger::HOST;
use super::machine::Server;
use crate::cells::Cells;
use crate::id::{ClientId, ObjectId};
use crate::protocol::{Answer, Refusal};

/// How many questions of one client may wait.
const MOST_WAITING: usize = 1024;

/// What is waited for.
#[derive(Debug)]
enum What {
    Name(String),
    Room { len: u64, place: u32 },
}

#[derive(Debug)]
pub(super) struct Waiter {
    what: What,
    client: ClientId,
    request: u64,
    until: Duration,
}

impl Waiter {
    pub(super) fn until(&self) -> Duration {
        self.until
    }
}

impl<C: Cells> Server<C> {
    pub(super) fn await_name(&mut self, client: ClientId, request: u64, name: String, wait: u64) {
        self.wait(client, request, What::Name(name), wait);
    }

    pub(super) fn await_room(&mut self, client: ClientId, request: u64, len: u64, place: u32, wait: u64) {
        let outcome = self.ledger.check_place(place).and_then(|()| {
            let refusal = self.ledger.over_quota(place, len);
            // What exceeds the quota by itself is not worth waiting for.
            if self.ledger.could_hold(place, len) { Ok(()) } else { Err(refusal) }
        });
        match outcome {
            Err(refusal) => self.answer(client, request, Err(refusal)),
            Ok(()) => self.wait(client, request, What::Room { len, place }, wait),
        }
    }

    fn wait(&mut self, client: ClientId, request: u64, what: What, wait: u64) {
        let waiting = self.waiting.iter().filter(|waiter| waiter.client == client).count();
        if waiting >= MOST_WAITING {
            return self.answer(client, request, Err(Refusal::TooManyWaiting { limit: MOST_WAITING }));
        }
        // One without any time is answered at the end of this step.
        let until = self.now.elapsed.saturating_add(Duration::from_millis(wait));
        self.waiting.push(Waiter { what, client, request, until });
    }

    /// Tells those who wait for room that there is some.
    pub(super) fn tell_of_room(&mut self) {
        let mut told = Vec::new();
        for is_host in [true, false] {
            let mut promised = 0;
            for (at, waiter) in self.waiting.iter().enumerate() {
                let What::Room { len, place } = waiter.what else { continue };
                if (place == HOST) != is_host {
                    continue;
                }
                match self.ledger.room_for(place, len, promised) {
                    Some(needed) => promised += needed,
                    None => break,
                }
                told.push(at);
            }
        }
        told.sort_unstable();
        for at in told.into_iter().rev() {
            let waiter = self.waiting.remove(at);
            self.answer(waiter.client, waiter.request, Ok(Answer::Done));
        }
    }

    /// Answers the questions whose time is over.
    pub(super) fn expire(&mut self) {
        let now = self.now.elapsed;
        for waiter in self.waiting.extract_if(.., |waiter| waiter.until <= now).collect::<Vec<_>>() {
            let refusal = match waiter.what {
                What::Name(name) => Refusal::NoSuchName { name },
                What::Room { len, place } => self.ledger.over_quota(place, len),
            };
            self.answer(waiter.client, waiter.request, Err(refusal));
        }
    }

    /// A name means an object now: whoever waited for that is told.
    pub(super) fn tell_of_name(&mut self, name: &str, object: ObjectId) {
        let waits = |waiter: &mut Waiter| matches!(&waiter.what, What::Name(wanted) if wanted == name);
        for waiter in self.waiting.extract_if(.., waits).collect::<Vec<_>>() {
            self.answer(waiter.client, waiter.request, Ok(Answer::Found { object }));
        }
    }

    pub(super) fn forget_waiting(&mut self, client: ClientId) {
        self.waiting.retain(|waiter| waiter.client != client);
    }
}

#[cfg(test)]
mod tests {
    use super::super::machine::{Input, Now};
    use super::super::world::{TERMS, World, create, sealed};
    use super::*;
    use crate::protocol::Ask;

    const HALF: u64 = TERMS.quota / 2;

    fn room(len: u64, wait: u64) -> Ask {
        Ask::AwaitRoom { len, place: HOST, wait }
    }

    fn over_quota(wanted: u64, used: u64) -> Answer {
        Answer::Refused(Refusal::OverQuota { wanted, used, quota: TERMS.quota })
    }

    /// A world with a sealed object of half the quota.
    fn half_full() -> (World, ClientId, ObjectId) {
        let mut world = World::new();
        let client = world.join(1);
        let (made, _) = world.create(client, "half", HALF);
        let object = sealed(&world.one(client, Ask::Seal { create: made }, &[]));
        (world, client, object)
    }

    #[test]
    fn room_that_is_there_is_told_at_once_and_what_never_fits_is_refused_at_once() {
        let (mut world, client, _) = half_full();
        assert_eq!(world.one(client, room(HALF, 0), &[]), Answer::Done);
        assert_eq!(world.one(client, room(HALF + 1, 0), &[]), over_quota(HALF + 1, HALF));
        let never = TERMS.quota + 1;
        assert_eq!(world.one(client, room(never, 1000), &[]), over_quota(never, HALF));
        let device = Ask::AwaitRoom { len: 1, place: 9, wait: 1000 };
        let refused = Answer::Refused(Refusal::NoSuchDevice { device: 8 });
        assert_eq!(world.one(client, device, &[]), refused);
    }

    #[test]
    fn who_waits_for_room_is_told_when_somebody_makes_some() {
        let (mut world, client, object) = half_full();
        let other = world.join(2);
        assert_eq!(world.ask(other, room(TERMS.quota, 60_000), &[]), []);
        assert_eq!(
            world.one(client, create("more", TERMS.quota, &[], 0), &[]),
            over_quota(TERMS.quota, HALF)
        );
        // Pinned, it keeps its memory.
        world.yard.pins.insert(object);
        assert_eq!(world.ask(client, Ask::Delete { object }, &[]), [Answer::Done]);
        world.yard.pins.clear();
        assert_eq!(world.ask(client, Ask::Kick { object }, &[]), [Answer::Done]);
        let (_, answer) = world.create(other, "more", TERMS.quota);
        assert!(matches!(answer, Answer::Created { .. }), "{answer:?}");
    }

    #[test]
    fn nobody_is_told_of_room_that_one_before_him_needs() {
        let (mut world, client, object) = half_full();
        let [large, small, late] = [2, 3, 4].map(|client| world.join(client));
        assert_eq!(world.ask(large, room(HALF + 1, 60_000), &[]), []);
        assert_eq!(world.ask(small, room(HALF / 4, 60_000), &[]), [], "there is room, but not for both");
        assert_eq!(world.ask(late, room(HALF, 60_000), &[]), []);
        // Three quarters and a granule fit, and not half of it besides.
        let mut answers = world.ask(client, Ask::Delete { object }, &[]);
        assert_eq!(answers.len(), 3, "{answers:?}");
        answers.retain(|answer| *answer == Answer::Done);
        assert_eq!(answers.len(), 3);
        world.clients.remove(&late);
        world.run(Input::Left { client: late });
    }

    #[test]
    fn who_waited_long_enough_hears_what_is_taken() {
        let (mut world, client, _) = half_full();
        assert_eq!(world.ask(client, room(TERMS.quota, 500), &[]), []);
        assert_eq!(world.server.wake_at(), Some(Duration::from_millis(1500)));
        let late = Now { elapsed: Duration::from_secs(2), unix: 0 };
        let outputs = world.server.step(late, Input::Tick, &mut world.yard);
        let refused = over_quota(TERMS.quota, HALF);
        let said = |output: &crate::server::Output| matches!(output, crate::server::Output::Say { response, .. } if response.answer == refused);
        assert!(outputs.iter().any(said), "{outputs:?}");
    }

    #[test]
    fn a_small_object_waits_for_its_part_of_an_arena() {
        let mut world = World::new();
        let client = world.join(1);
        sealed(&world.create(client, "small", 100).1);
        // An arena has room left where the quota has none.
        let rest = TERMS.quota - TERMS.arena;
        world.create(client, "rest", rest);
        assert_eq!(world.one(client, room(100, 0), &[]), Answer::Done);
        assert_eq!(world.one(client, room(TERMS.small, 0), &[]), over_quota(TERMS.small, TERMS.quota));
    }
}
