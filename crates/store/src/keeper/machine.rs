//! When a server is started, and how long a keeper rests before it starts the next: a machine without I/O.

use std::time::Duration;

/// A server that lived this long after it was ready is no failing one.
const LONG: Duration = Duration::from_millis(100);

const SHORTEST_REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A server was started, and has not said that it is ready.
    Starting,
    Serving {
        since: Duration,
    },
    Resting {
        until: Duration,
    },
    /// The server was told to end.
    Stopping,
}

/// What happens to a keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    Ready,
    /// The server's process is gone.
    Died,
    /// Somebody wants all of it to end.
    StopAsked,
    Tick,
}

/// What a keeper is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Output {
    StartServer,
    /// The first server serves: whoever waits for that is told.
    TellReady,
    TellServerToStop,
    /// The server was told to stop before, and did not.
    KillServer,
    /// The keeper ends: well, or because no server ever served.
    End {
        well: bool,
    },
}

#[derive(Debug)]
pub(super) struct Keeper {
    phase: Phase,
    has_served: bool,
    rest: Duration,
}

impl Keeper {
    /// One whose server was just started, or had been served by another keeper before.
    pub(super) fn new(is_serving: bool) -> Self {
        let phase = if is_serving { Phase::Serving { since: Duration::ZERO } } else { Phase::Starting };
        Self { phase, has_served: is_serving, rest: Duration::ZERO }
    }

    /// When to step again though nothing has happened.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        if let Phase::Resting { until } = self.phase { Some(until) } else { None }
    }

    pub(super) fn step(&mut self, now: Duration, input: Input) -> Option<Output> {
        match (self.phase, input) {
            (Phase::Starting, Input::Ready) => {
                self.phase = Phase::Serving { since: now };
                let is_first = !std::mem::replace(&mut self.has_served, true);
                is_first.then_some(Output::TellReady)
            }
            (Phase::Starting, Input::Died) if !self.has_served => Some(Output::End { well: false }),
            (Phase::Starting, Input::Died) => self.rest(now),
            (Phase::Serving { since }, Input::Died) => {
                if now.saturating_sub(since) >= LONG {
                    self.rest = Duration::ZERO;
                }
                self.rest(now)
            }
            (Phase::Resting { until }, Input::Tick) if now >= until => {
                self.phase = Phase::Starting;
                Some(Output::StartServer)
            }
            (Phase::Resting { .. }, Input::StopAsked) => Some(Output::End { well: true }),
            (Phase::Starting | Phase::Serving { .. }, Input::StopAsked) => {
                self.phase = Phase::Stopping;
                Some(Output::TellServerToStop)
            }
            (Phase::Stopping, Input::StopAsked) => Some(Output::KillServer),
            (Phase::Stopping, Input::Died) => Some(Output::End { well: true }),
            _ => None,
        }
    }

    /// Starts the next server at once, or after a rest that grows while servers die young.
    fn rest(&mut self, now: Duration) -> Option<Output> {
        let rest = self.rest;
        self.rest = (2 * rest).clamp(SHORTEST_REST, LONGEST_REST);
        if rest.is_zero() {
            self.phase = Phase::Starting;
            return Some(Output::StartServer);
        }
        self.phase = Phase::Resting { until: now + rest };
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn a_first_server_that_never_serves_ends_its_keeper() {
        let mut keeper = Keeper::new(false);
        assert_eq!(keeper.step(at(5), Input::Died), Some(Output::End { well: false }));
    }

    #[test]
    fn a_server_that_dies_is_replaced_at_once_and_one_that_dies_young_after_a_rest() {
        let mut keeper = Keeper::new(false);
        assert_eq!(keeper.step(at(5), Input::Ready), Some(Output::TellReady));
        assert_eq!(keeper.step(at(500), Input::Died), Some(Output::StartServer));
        // From here on each dies young, before it is ready or right after.
        let mut now = at(500);
        let mut rests = Vec::new();
        for round in 0..9 {
            if round % 2 == 0 {
                assert_eq!(keeper.step(now, Input::Ready), None);
            }
            assert_eq!(keeper.step(now, Input::Died), None);
            let until = keeper.wake_at().expect("a rest");
            assert_eq!(keeper.step(until - at(1), Input::Tick), None);
            assert_eq!(keeper.step(until, Input::Tick), Some(Output::StartServer));
            rests.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(rests, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        // One that lives long is forgiven.
        assert_eq!(keeper.step(now, Input::Ready), None);
        assert_eq!(keeper.step(now + LONG, Input::Died), Some(Output::StartServer));
    }

    #[test]
    fn everything_ends_when_it_is_asked_to_and_the_server_has_ended() {
        let mut keeper = Keeper::new(true);
        assert_eq!(keeper.step(at(1), Input::StopAsked), Some(Output::TellServerToStop));
        assert_eq!(keeper.step(at(2), Input::Tick), None);
        assert_eq!(keeper.step(at(3), Input::Died), Some(Output::End { well: true }));
        let mut resting = Keeper::new(true);
        resting.step(at(1), Input::Died);
        resting.step(at(1), Input::Died);
        assert!(resting.wake_at().is_some());
        assert_eq!(resting.step(at(2), Input::StopAsked), Some(Output::End { well: true }));
    }

    #[test]
    fn a_server_that_does_not_end_is_killed_when_that_is_asked_for_again() {
        let mut keeper = Keeper::new(true);
        assert_eq!(keeper.step(at(1), Input::StopAsked), Some(Output::TellServerToStop));
        assert_eq!(keeper.step(at(60_000), Input::Tick), None, "it is waited for, however long that takes");
        assert_eq!(keeper.step(at(60_001), Input::StopAsked), Some(Output::KillServer));
        assert_eq!(keeper.step(at(60_002), Input::Died), Some(Output::End { well: true }));
    }

    #[test]
    fn nothing_but_the_death_of_a_server_starts_another() {
        let mut keeper = Keeper::new(true);
        for second in 1..1000 {
            assert_eq!(keeper.step(at(1000 * second), Input::Tick), None);
        }
        assert_eq!(keeper.wake_at(), None);
    }
}
