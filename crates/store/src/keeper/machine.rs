//! The keeper's state machine, without I/O: decides when a server is started, and how long the keeper waits before a restart.

use std::time::Duration;

/// The time for which a server must have been ready so that its exit resets the restart backoff.
const STABLE_AFTER: Duration = Duration::from_millis(100);

const MIN_BACKOFF: Duration = Duration::from_millis(10);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeeperPhase {
    /// The keeper has started a server, which is not ready yet.
    Starting,
    Serving {
        since: Duration,
    },
    BackingOff {
        until: Duration,
    },
    /// The keeper has asked the server to stop, and waits for its exit.
    Stopping,
}

/// An input of the keeper's state machine: an event that the keeper has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeeperInput {
    Ready,
    /// The server process has exited.
    ServerDied,
    /// A signal, or the exit of the process that the store was started for, requests the end of the store.
    StopRequested,
    Tick,
}

/// An output of the keeper's state machine: an action that the keeper carries out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeeperOutput {
    StartServer,
    /// Reports that the first server of the store is ready.
    ReportReady,
    StopServer,
    /// Kills the server, which was asked to stop before and has not exited.
    KillServer,
    /// Ends the keeper: with success, or with an error because no server ever was ready.
    End {
        success: bool,
    },
}

#[derive(Debug)]
pub(super) struct KeeperMachine {
    phase: KeeperPhase,
    has_served: bool,
    backoff: Duration,
}

impl KeeperMachine {
    /// Creates the state machine of a keeper that has just started a server or, if `is_serving`, has taken one over from another
    /// keeper.
    pub(super) fn new(is_serving: bool) -> Self {
        let phase =
            if is_serving { KeeperPhase::Serving { since: Duration::ZERO } } else { KeeperPhase::Starting };
        Self { phase, has_served: is_serving, backoff: Duration::ZERO }
    }

    /// Returns the time of the keeper's next step if no input arrives before; `None` if the keeper only waits for input.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        if let KeeperPhase::BackingOff { until } = self.phase { Some(until) } else { None }
    }

    pub(super) fn step(&mut self, now: Duration, input: KeeperInput) -> Option<KeeperOutput> {
        match (self.phase, input) {
            (KeeperPhase::Starting, KeeperInput::Ready) => {
                self.phase = KeeperPhase::Serving { since: now };
                let is_first = !std::mem::replace(&mut self.has_served, true);
                is_first.then_some(KeeperOutput::ReportReady)
            }
            (KeeperPhase::Starting, KeeperInput::ServerDied) if !self.has_served => {
                Some(KeeperOutput::End { success: false })
            }
            (KeeperPhase::Starting, KeeperInput::ServerDied) => self.backoff(now),
            (KeeperPhase::Serving { since }, KeeperInput::ServerDied) => {
                if now.saturating_sub(since) >= STABLE_AFTER {
                    self.backoff = Duration::ZERO;
                }
                self.backoff(now)
            }
            (KeeperPhase::BackingOff { until }, KeeperInput::Tick) if now >= until => {
                self.phase = KeeperPhase::Starting;
                Some(KeeperOutput::StartServer)
            }
            (KeeperPhase::BackingOff { .. }, KeeperInput::StopRequested) => {
                Some(KeeperOutput::End { success: true })
            }
            (KeeperPhase::Starting | KeeperPhase::Serving { .. }, KeeperInput::StopRequested) => {
                self.phase = KeeperPhase::Stopping;
                Some(KeeperOutput::StopServer)
            }
            (KeeperPhase::Stopping, KeeperInput::StopRequested) => Some(KeeperOutput::KillServer),
            (KeeperPhase::Stopping, KeeperInput::ServerDied) => Some(KeeperOutput::End { success: true }),
            _ => None,
        }
    }

    /// Starts the next server at once, or after a backoff that grows while servers fail early.
    fn backoff(&mut self, now: Duration) -> Option<KeeperOutput> {
        let backoff = self.backoff;
        self.backoff = (2 * backoff).clamp(MIN_BACKOFF, MAX_BACKOFF);
        if backoff.is_zero() {
            self.phase = KeeperPhase::Starting;
            return Some(KeeperOutput::StartServer);
        }
        self.phase = KeeperPhase::BackingOff { until: now + backoff };
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
    fn the_keeper_exits_if_the_first_server_is_never_ready() {
        let mut keeper = KeeperMachine::new(false);
        assert_eq!(keeper.step(at(5), KeeperInput::ServerDied), Some(KeeperOutput::End { success: false }));
    }

    #[test]
    fn a_dead_server_is_replaced_at_once_and_an_early_failure_after_a_backoff() {
        let mut keeper = KeeperMachine::new(false);
        assert_eq!(keeper.step(at(5), KeeperInput::Ready), Some(KeeperOutput::ReportReady));
        assert_eq!(keeper.step(at(500), KeeperInput::ServerDied), Some(KeeperOutput::StartServer));
        // In this loop every server fails early: before it is ready, or right after.
        let mut now = at(500);
        let mut backoffs = Vec::new();
        for round in 0..9 {
            if round % 2 == 0 {
                assert_eq!(keeper.step(now, KeeperInput::Ready), None);
            }
            assert_eq!(keeper.step(now, KeeperInput::ServerDied), None);
            let until = keeper.wake_at().expect("the keeper must back off");
            assert_eq!(keeper.step(until - at(1), KeeperInput::Tick), None);
            assert_eq!(keeper.step(until, KeeperInput::Tick), Some(KeeperOutput::StartServer));
            backoffs.push((until - now).as_millis());
            now = until;
        }
        assert_eq!(backoffs, [10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        // A server that lives long enough resets the backoff.
        assert_eq!(keeper.step(now, KeeperInput::Ready), None);
        assert_eq!(keeper.step(now + STABLE_AFTER, KeeperInput::ServerDied), Some(KeeperOutput::StartServer));
    }

    #[test]
    fn the_keeper_exits_after_a_requested_stop_of_the_server() {
        let mut keeper = KeeperMachine::new(true);
        assert_eq!(keeper.step(at(1), KeeperInput::StopRequested), Some(KeeperOutput::StopServer));
        assert_eq!(keeper.step(at(2), KeeperInput::Tick), None);
        assert_eq!(keeper.step(at(3), KeeperInput::ServerDied), Some(KeeperOutput::End { success: true }));
        let mut backing_off = KeeperMachine::new(true);
        backing_off.step(at(1), KeeperInput::ServerDied);
        backing_off.step(at(1), KeeperInput::ServerDied);
        assert!(backing_off.wake_at().is_some());
        assert_eq!(
            backing_off.step(at(2), KeeperInput::StopRequested),
            Some(KeeperOutput::End { success: true })
        );
    }

    #[test]
    fn a_second_stop_request_kills_the_server() {
        let mut keeper = KeeperMachine::new(true);
        assert_eq!(keeper.step(at(1), KeeperInput::StopRequested), Some(KeeperOutput::StopServer));
        assert_eq!(
            keeper.step(at(60_000), KeeperInput::Tick),
            None,
            "the keeper waits for the server without a timeout"
        );
        assert_eq!(keeper.step(at(60_001), KeeperInput::StopRequested), Some(KeeperOutput::KillServer));
        assert_eq!(
            keeper.step(at(60_002), KeeperInput::ServerDied),
            Some(KeeperOutput::End { success: true })
        );
    }

    #[test]
    fn only_the_death_of_a_server_starts_another() {
        let mut keeper = KeeperMachine::new(true);
        for second in 1..1000 {
            assert_eq!(keeper.step(at(1000 * second), KeeperInput::Tick), None);
        }
        assert_eq!(keeper.wake_at(), None);
    }
}
