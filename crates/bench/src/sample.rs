//! Alternating measurements of wholemem and of raw system or driver calls, and their statistics.
//!
//! The speed of a virtual machine changes by half and more from moment to moment. Plain medians of the two implementations may
//! then be taken at different speeds. The two times of one round are adjacent, so their ratio is stable. Rounds are sorted by
//! this ratio, which moves rounds in which only one implementation was disturbed to the ends, and the medians of the middle
//! fifth are reported. In 40 runs of one size on such a machine, the ratio of plain medians was between 1.06 and 1.19, and this
//! one between 1.07 and 1.10.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};

/// The implementation of an operation that is measured: wholemem, or raw system or driver calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Implementation {
    /// Performs the operation through wholemem.
    Wholemem,
    /// Performs the operation through direct system calls or driver calls, without wholemem.
    Raw,
}

/// One timed execution of a measured operation.
#[derive(Debug)]
pub(super) struct TimedRun {
    pub(super) took: Duration,
    /// How the result of the operation differs from the expected result, or `None` if it is correct.
    pub(super) mismatch: Option<String>,
}

/// The times of wholemem and of raw calls in one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TimePair {
    pub(super) wholemem: Duration,
    pub(super) raw: Duration,
}

impl TimePair {
    fn ratio(&self) -> f64 {
        self.wholemem.as_secs_f64() / self.raw.as_secs_f64()
    }
}

/// The times of wholemem and of raw calls in all rounds.
#[derive(Debug, Default)]
pub(super) struct PairedTimes {
    rounds: Vec<TimePair>,
    mismatch: Option<String>,
}

/// Statistics of the times of all rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Summary {
    /// The medians of the times in the middle fifth of the rounds, sorted by the ratio of wholemem to raw calls.
    pub(super) typical: TimePair,
    /// The medians of the times of all rounds.
    pub(super) median: TimePair,
    pub(super) best: TimePair,
}

impl PairedTimes {
    /// Runs wholemem and raw calls once each. The order alternates: wholemem raw, raw wholemem, wholemem raw, ...
    pub(super) fn round(&mut self, once: &mut impl FnMut(Implementation) -> Result<TimedRun>) -> Result<()> {
        let mut timed = |implementation| {
            let TimedRun { took, mismatch } = once(implementation)?;
            self.mismatch = self.mismatch.take().or(mismatch);
            anyhow::Ok(took)
        };
        let pair = if self.rounds.len().is_multiple_of(2) {
            let wholemem = timed(Implementation::Wholemem)?;
            TimePair { wholemem, raw: timed(Implementation::Raw)? }
        } else {
            let raw = timed(Implementation::Raw)?;
            TimePair { raw, wholemem: timed(Implementation::Wholemem)? }
        };
        self.rounds.push(pair);
        Ok(())
    }

    pub(super) fn rounds(&self) -> u32 {
        u32::try_from(self.rounds.len()).expect("rounds are counted in 32 bits")
    }

    /// Returns the times of the last round, if any.
    pub(super) fn latest(&self) -> Option<TimePair> {
        self.rounds.last().copied()
    }

    /// Returns the first mismatch between a result and the expected result in any round, if any.
    pub(super) fn mismatch(&self) -> Option<&str> {
        self.mismatch.as_deref()
    }

    pub(super) fn summary(&self) -> Summary {
        let mut by_ratio = self.rounds.clone();
        by_ratio.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
        let fifth = by_ratio.len().div_ceil(5);
        let start = (by_ratio.len() - fifth) / 2;
        let middle = &by_ratio[start..start + fifth];
        let each = |pairs: &[TimePair], pick: fn(Vec<Duration>) -> Duration| TimePair {
            wholemem: pick(pairs.iter().map(|pair| pair.wholemem).collect()),
            raw: pick(pairs.iter().map(|pair| pair.raw).collect()),
        };
        Summary {
            typical: each(middle, median),
            median: each(&self.rounds, median),
            best: each(&self.rounds, |times| times.into_iter().min().unwrap_or_default()),
        }
    }
}

/// Returns the median of `times`, or zero if there are none.
fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    let middle = times.len() / 2;
    match times.get(middle) {
        None => Duration::ZERO,
        Some(&upper) if times.len() % 2 == 1 => upper,
        Some(&upper) => (times[middle - 1] + upper) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn micros(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    fn paired(rounds: &[(u64, u64)]) -> PairedTimes {
        let rounds =
            rounds.iter().map(|&(wholemem, raw)| TimePair { wholemem: micros(wholemem), raw: micros(raw) });
        PairedTimes { rounds: rounds.collect(), mismatch: None }
    }

    #[test]
    fn the_median_does_not_depend_on_the_order() {
        for (times, expected) in
            [(&[][..], 0), (&[7], 7), (&[9, 5], 7), (&[900, 1, 3], 3), (&[4, 900, 2, 6], 5)]
        {
            assert_eq!(median(times.iter().copied().map(micros).collect()), micros(expected), "{times:?}");
        }
    }

    #[test]
    fn a_machine_with_two_speeds_does_not_change_the_ratio() {
        // Of eleven rounds, six of wholemem and five of raw calls are slow, so the plain medians differ by a factor of two.
        let mut rounds = vec![(11, 10); 5];
        rounds.extend([(22, 20); 5]);
        rounds.push((22, 10));
        let summary = paired(&rounds).summary();
        assert_eq!(summary.median, TimePair { wholemem: micros(22), raw: micros(10) });
        let TimePair { wholemem, raw } = summary.typical;
        assert_eq!(wholemem * 10, raw * 11);
        assert_eq!(summary.best, TimePair { wholemem: micros(11), raw: micros(10) });
    }

    #[test]
    fn rounds_with_one_disturbed_implementation_are_ignored() {
        let summary = paired(&[(12, 10), (500, 10), (12, 700), (13, 10), (11, 10)]).summary();
        assert_eq!(summary.typical, TimePair { wholemem: micros(12), raw: micros(10) });
    }

    #[test]
    fn a_summary_without_rounds_or_times_is_zero() {
        let nothing = TimePair { wholemem: Duration::ZERO, raw: Duration::ZERO };
        for rounds in [&[][..], &[(0, 0)]] {
            let summary = paired(rounds).summary();
            assert_eq!(summary, Summary { typical: nothing, median: nothing, best: nothing });
        }
    }

    #[test]
    fn the_first_implementation_alternates() {
        let mut order = Vec::new();
        let mut paired = PairedTimes::default();
        for _ in 0..3 {
            let mut once = |implementation| {
                order.push(implementation);
                Ok(TimedRun { took: Duration::ZERO, mismatch: None })
            };
            paired.round(&mut once).unwrap();
        }
        let [wholemem, raw] = [Implementation::Wholemem, Implementation::Raw];
        assert_eq!(order, [wholemem, raw, raw, wholemem, wholemem, raw]);
        assert_eq!(paired.rounds(), 3);
    }

    #[test]
    fn times_are_recorded_by_implementation_with_the_first_mismatch() {
        let mut paired = PairedTimes::default();
        let mut flaws = [None, Some("first"), Some("second"), None].into_iter();
        let mut once = |implementation| {
            let took = micros(if implementation == Implementation::Wholemem { 2 } else { 1 });
            Ok(TimedRun { took, mismatch: flaws.next().flatten().map(str::to_owned) })
        };
        paired.round(&mut once).unwrap();
        paired.round(&mut once).unwrap();
        assert_eq!(paired.summary().median, TimePair { wholemem: micros(2), raw: micros(1) });
        assert_eq!(paired.mismatch(), Some("first"));
    }
}
