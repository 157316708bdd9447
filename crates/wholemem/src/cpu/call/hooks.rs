//! Test hooks of a collective call on the CPU: points at which a test delays a rank, and synchronization rules that a test makes
//! a rank break.
//!
//! They exist only with the feature `test-hooks`. Without it, no rank is delayed, every rule is followed, and the compiler removes
//! both methods.

#[cfg(not(feature = "test-hooks"))]
use super::CollectiveCall;

/// A synchronization rule of a collective call. For each rule there is a `Mutant` that breaks it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) enum Rule {
    /// The rule that consecutive pieces of collective calls use alternating buffers.
    AlternateBuffers,
    /// The rule that ranks wait for each other at the first barrier of a collective call.
    FirstBarrier,
    /// The rule that ranks wait for each other at the second barrier of a collective call.
    SecondBarrier,
    /// The rule that ranks wait for each other at the end of a collective call that staged its input in several pieces.
    LastBarrier,
    /// The rule that a rank checks the flag of a packet, which shows that the packet has arrived, before it uses the
    /// packet's data.
    CheckFlag,
    /// The rule that ranks compare the digests of their calls' terms.
    CompareDigests,
    /// The rule that ranks compare published terms only if these are terms of the current call.
    CheckCallOfTerms,
}

#[cfg(not(feature = "test-hooks"))]
impl CollectiveCall<'_> {
    /// Returns true if this rank follows a synchronization rule: always true without test hooks.
    #[inline(always)]
    pub(in crate::cpu) const fn follows(&self, _: Rule) -> bool {
        true
    }

    /// Marks a point of a collective call at which a test can delay this rank. Without test hooks it has no effect.
    #[inline(always)]
    pub(in crate::cpu) const fn pause(&self, _: u64) {}
}

#[cfg(feature = "test-hooks")]
mod enabled {
    use std::sync::atomic::Ordering;
    use std::time::{Duration, Instant};

    use super::super::{CollectiveCall, word_address};
    use super::Rule;
    use crate::abi::{DEBUG_POINTS, DebugWord, MAX_BLOCKS, Mutant};

    /// The length of delay up to which a test busy-waits, because a sleep would take ten times as long.
    const SHORT: Duration = Duration::from_micros(20);

    impl Rule {
        /// Returns the mutant (test fault) that breaks this synchronization rule.
        fn mutant(self) -> Mutant {
            match self {
                Self::AlternateBuffers => Mutant::OneBuffer,
                Self::FirstBarrier => Mutant::NoFirstBarrier,
                Self::SecondBarrier => Mutant::NoSecondBarrier,
                Self::LastBarrier => Mutant::NoLastBarrier,
                Self::CheckFlag => Mutant::AnyFlag,
                Self::CompareDigests => Mutant::AnyDigest,
                Self::CheckCallOfTerms => Mutant::OldTerms,
            }
        }
    }

    impl CollectiveCall<'_> {
        /// Returns true if this rank follows a synchronization rule. A test can make the rank break the rule.
        pub(in crate::cpu) fn follows(&self, rule: Rule) -> bool {
            self.lane.debug == 0
                || self.debug(DebugWord::Mutant as u32) & u64::from(rule.mutant() as u32) == 0
        }

        /// Delays this rank at a point of a collective call if a test requests it.
        pub(in crate::cpu) fn pause(&self, point: u64) {
            if self.lane.debug != 0 {
                self.delay(point);
            }
        }

        #[cold]
        fn delay(&self, point: u64) {
            let (seed, most) = (self.debug(DebugWord::Seed as u32), self.debug(DebugWord::MaxDelay as u32));
            let last = DEBUG_POINTS - 1;
            let place = u32::try_from(point.min(last.into())).expect("the point is at most the last one");
            let fixed = self.debug(DebugWord::Delays as u32 + place * MAX_BLOCKS);
            let random =
                if most == 0 { 0 } else { scramble(seed ^ scramble(self.number << 3 | point)) % (most + 1) };
            let delay = Duration::from_nanos(fixed + random);
            if delay > SHORT {
                std::thread::sleep(delay);
            }
            let start = Instant::now();
            while delay <= SHORT && start.elapsed() < delay {
                std::thread::yield_now();
            }
        }

        fn debug(&self, word: u32) -> u64 {
            self.word(word_address(self.lane.debug, word)).load(Ordering::Relaxed)
        }
    }

    /// Returns a hash of a number, from which random delays are derived.
    fn scramble(number: u64) -> u64 {
        let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }
}
