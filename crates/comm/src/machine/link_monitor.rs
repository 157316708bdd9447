//! Decides whether the rank at the other end of a connection between nodes runs, has died, or cannot be reached.
//!
//! ```text
//!             heard from it                    closed: probe its address
//!    open ------------------> open    open -----------------------------> closed
//!      | not heard for `silence`               refused |        | answered, or not known for `silence`
//!      v                                               v        v
//!    silent                                          lost     silent
//! ```
//!
//! The end of a connection is a hint, not a proof: a firewall or a cut link can reset it. The address at which the rank
//! listens decides: if the kernel of its node refuses connections there, the process has ended. If the process answers
//! (which needs the secret of the group), it lives, but messages may be lost. A rank that is stopped, or whose node is
//! cut off, neither refuses nor answers.
//!
//! Time in which this rank did not run does not count as silence of the peer, as in
//! [`stall_detector`](super::stall_detector).

use std::time::Duration;

/// The heartbeats that are sent in the time after which a silent peer is given up.
const HEARTBEATS: u32 = 8;

/// The time between two attempts to connect to the address of a rank whose connection has ended.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Input {
    /// A frame of the peer has arrived.
    Heard,
    /// The connection has ended. `by_peer` is true if the peer's end was closed, and false if the connection was reset.
    Closed { by_peer: bool },
    /// The result of a probe.
    Probed(ProbeResult),
    /// Time has passed.
    Tick,
}

/// What an attempt to connect to the address of the peer showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// The node refused the connection: no process listens at the address.
    Refused,
    /// The peer's process has proved that it knows the secret.
    Answered,
    /// Neither: the connection failed in another way, or was closed.
    Unknown,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// Send a heartbeat.
    Heartbeat,
    /// Try to connect to the address of the peer.
    Probe,
    LinkFailure(LinkFailure),
}

/// Why a connection between nodes is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkFailure {
    /// The peer's process has ended. It is `proved` if the peer's kernel closed the connection in order, which no cut
    /// and no firewall does.
    Lost { proved: bool },
    /// The peer does not answer, or the connection was interrupted.
    Silent,
}

/// The state of a connection to a rank of another node.
#[derive(Debug)]
pub(crate) struct LinkMonitor {
    silence: Duration,
    state: LinkState,
    /// The time without a sign of the peer, in which this rank ran.
    silent_for: Duration,
    observed: Duration,
    next_heartbeat: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkState {
    Open,
    Closed { by_peer: bool, next_probe: Duration, is_probing: bool },
    Ended,
}

impl LinkMonitor {
    /// Creates the monitor of a new connection. A peer from which nothing is heard for `silence` is given up.
    pub(crate) fn new(silence: Duration, now: Duration) -> Self {
        Self {
            silence,
            state: LinkState::Open,
            silent_for: Duration::ZERO,
            observed: now,
            next_heartbeat: now,
        }
    }

    fn period(&self) -> Duration {
        self.silence / HEARTBEATS
    }

    /// Returns the longest time until the next `Tick` input.
    pub(crate) fn tick_within(&self) -> Duration {
        (self.period() / 2).min(PROBE_INTERVAL)
    }

    pub(crate) fn step(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match (self.state, input) {
            (LinkState::Ended, _) => {}
            (LinkState::Open, Input::Heard) => self.silent_for = Duration::ZERO,
            (LinkState::Open, Input::Closed { by_peer }) => {
                self.silent_for = Duration::ZERO;
                self.state = LinkState::Closed { by_peer, next_probe: now, is_probing: false };
                self.tick(now, &mut outputs);
            }
            (LinkState::Closed { by_peer, .. }, Input::Probed(result)) => match result {
                ProbeResult::Refused => self.end(LinkFailure::Lost { proved: by_peer }, &mut outputs),
                ProbeResult::Answered => self.end(LinkFailure::Silent, &mut outputs),
                ProbeResult::Unknown => {
                    let next_probe = now + PROBE_INTERVAL;
                    self.state = LinkState::Closed { by_peer, next_probe, is_probing: false };
                }
            },
            (_, Input::Tick) => self.tick(now, &mut outputs),
            (LinkState::Open, Input::Probed(_)) | (LinkState::Closed { .. }, _) => {}
        }
        outputs
    }

    fn tick(&mut self, now: Duration, outputs: &mut Vec<Output>) {
        let passed = now.saturating_sub(self.observed);
        self.observed = now;
        self.silent_for += passed.min(2 * self.period());
        if self.silent_for >= self.silence {
            return self.end(LinkFailure::Silent, outputs);
        }
        match &mut self.state {
            LinkState::Open if now >= self.next_heartbeat => {
                self.next_heartbeat = now + self.period();
                outputs.push(Output::Heartbeat);
            }
            LinkState::Closed { next_probe, is_probing, .. } if !*is_probing && now >= *next_probe => {
                *is_probing = true;
                outputs.push(Output::Probe);
            }
            _ => {}
        }
    }

    fn end(&mut self, failure: LinkFailure, outputs: &mut Vec<Output>) {
        self.state = LinkState::Ended;
        outputs.push(Output::LinkFailure(failure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SILENCE: Duration = Duration::from_secs(1);

    fn monitor() -> LinkMonitor {
        LinkMonitor::new(SILENCE, Duration::ZERO)
    }

    /// Advances the time in short steps, and returns the outputs other than heartbeats with their times.
    fn run(monitor: &mut LinkMonitor, from: Duration, to: Duration) -> Vec<(Duration, Output)> {
        let mut outputs = Vec::new();
        let mut now = from;
        while now < to {
            now += Duration::from_millis(10);
            let new = monitor.step(now, Input::Tick);
            outputs.extend(
                new.into_iter().filter(|output| *output != Output::Heartbeat).map(|output| (now, output)),
            );
        }
        outputs
    }

    #[test]
    fn a_peer_that_is_not_heard_for_the_limit_is_silent_and_not_before() {
        let mut monitor = monitor();
        let half = SILENCE / 2;
        assert_eq!(run(&mut monitor, Duration::ZERO, half), []);
        monitor.step(half, Input::Heard);
        assert_eq!(run(&mut monitor, half, half + SILENCE - Duration::from_millis(10)), []);
        assert_eq!(
            run(&mut monitor, half + SILENCE - Duration::from_millis(10), 3 * SILENCE),
            [(half + SILENCE, Output::LinkFailure(LinkFailure::Silent))]
        );
    }

    #[test]
    fn heartbeats_are_sent_several_times_within_the_limit() {
        let mut monitor = monitor();
        let beats = (1..90).map(|n| monitor.step(Duration::from_millis(10 * n), Input::Tick));
        assert_eq!(beats.flatten().filter(|output| *output == Output::Heartbeat).count(), 7);
    }

    #[test]
    fn the_address_decides_why_a_connection_ended() {
        for by_peer in [true, false] {
            let outcome = |result| {
                let mut monitor = monitor();
                assert_eq!(monitor.step(SILENCE / 2, Input::Closed { by_peer }), [Output::Probe]);
                monitor.step(SILENCE / 2, Input::Probed(result))
            };
            assert_eq!(
                outcome(ProbeResult::Refused),
                [Output::LinkFailure(LinkFailure::Lost { proved: by_peer })]
            );
            assert_eq!(outcome(ProbeResult::Answered), [Output::LinkFailure(LinkFailure::Silent)]);
            assert_eq!(outcome(ProbeResult::Unknown), []);
        }
    }

    #[test]
    fn the_address_is_probed_again_until_the_limit() {
        let mut monitor = monitor();
        monitor.step(SILENCE, Input::Heard);
        monitor.step(SILENCE, Input::Closed { by_peer: false });
        monitor.step(SILENCE, Input::Probed(ProbeResult::Unknown));
        let outputs = run(&mut monitor, SILENCE, SILENCE + PROBE_INTERVAL);
        assert_eq!(outputs, [(SILENCE + PROBE_INTERVAL, Output::Probe)]);
        let outputs = run(&mut monitor, SILENCE + PROBE_INTERVAL, 3 * SILENCE);
        assert_eq!(outputs.len(), 1, "the second probe has no result: {outputs:?}");
        assert_eq!(outputs[0].1, Output::LinkFailure(LinkFailure::Silent));
        assert!(outputs[0].0 <= 2 * SILENCE);
    }

    #[test]
    fn time_in_which_this_rank_was_stopped_does_not_count() {
        let mut monitor = monitor();
        assert_eq!(monitor.step(10 * SILENCE, Input::Tick), [Output::Heartbeat]);
        monitor.step(10 * SILENCE, Input::Heard);
        assert_eq!(monitor.step(20 * SILENCE, Input::Tick), [Output::Heartbeat]);
        let failure = run(&mut monitor, 20 * SILENCE, 22 * SILENCE);
        assert_eq!(failure.len(), 1, "a peer that stays silent is given up");
    }
}
