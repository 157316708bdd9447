//! The words that the kernels of a lane (a sequence of collective calls) share with the host: control, report and debug words.
//!
//! A word is a `u64`. Its address is that of the first word plus eight times its number.
//!
//! ```text
//!   LaneRef::control   ControlWord   this rank's device memory
//!   LaneRef::report    ReportWord    pinned host memory
//!   LaneRef::debug     DebugWord     this rank's device memory
//! ```

use wholemem_comm::Rank;

/// A control word of a lane (a sequence of collective calls), which only the kernels of one rank access.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ControlWord {
    /// Nonzero after a collective call of the lane has failed. Every later call of the lane does nothing.
    Poison = 0,
    /// Nonzero after a block has started to write the report of an aborted call, so that other blocks do not write it. GPU ranks
    /// only.
    #[expect(dead_code, reason = "only CUDA code names it")]
    Claim = 1,
    /// The time that a collective call waits for other ranks, in nanoseconds. Zero is no limit.
    Timeout = 2,
    /// The lock that a thread of this rank holds during a collective call. CPU ranks only.
    CallLock = 3,
    /// The number of times that a waiting rank polls before it yields its core. CPU ranks only.
    Spins = 4,
    /// The first of `MAX_BLOCKS` words, one for each block, that hold the number of the next collective call. All are equal
    /// between calls.
    Sequence = 16,
}

/// A word of a lane's report, in which kernels tell the host why a collective call was aborted.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportWord {
    /// The cause for which kernels must abort their collective calls, stored by the host; zero for none.
    Abort = 0,
    /// Nonzero after a kernel has aborted a collective call. It is stored after the other words of the report.
    Aborted = 1,
    /// The number of the aborted collective call.
    Call = 2,
    /// The phase that the aborted collective call had reached.
    Phase = 3,
    /// The reason why the collective call was aborted: a `Cause` shifted by `CAUSE_SHIFT`, plus 1 + the rank at fault.
    Cause = 4,
    /// Nonzero while the thread that runs a collective call of this rank sleeps. CPU ranks only.
    Asleep = 5,
    /// The first of the `TERMS_WORDS` words with the terms of this rank's aborted call, if the ranks' calls differ.
    OwnTerms = 6,
    /// The first of the `TERMS_WORDS` words with the terms that the rank at fault has published, if the ranks' calls differ.
    PeerTerms = 16,
    /// The first of the words that have one bit for each rank; the bit is set if the rank did not arrive before the timeout.
    Missing = 26,
}

/// The cause for which a collective call was aborted.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A rank of the group died or lost its connection.
    Lost = 1,
    /// A rank aborted the group.
    Aborted = 2,
    /// A rank did not arrive in the collective call before the timeout.
    TimedOut = 3,
    /// A rank left the group.
    Left = 4,
    /// Two ranks made different calls: the terms of their calls differ.
    Disagreed = 5,
}

/// The number of bits by which a `Cause` is shifted in a word; the lower bits hold 1 + the rank at fault.
pub const CAUSE_SHIFT: u32 = 32;

/// A word with which a test injects faults into collective calls. Kernels read these words only if `LaneRef::debug` is not zero.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DebugWord {
    /// The bits of the `Mutant`s (broken synchronization rules) that kernels apply, or zero.
    Mutant = 0,
    /// The seed of the random delays in collective calls.
    Seed = 1,
    /// The maximum random delay in a collective call, in nanoseconds.
    MaxDelay = 2,
    /// The first word of the fixed delays in nanoseconds, one for each block at each of the `DEBUG_POINTS` in a collective call.
    Delays = 16,
}

/// The number of points in a collective call at which a test can delay a rank: at the start, between sending and receiving
/// packets, and before and after each of the first barriers.
pub const DEBUG_POINTS: u32 = 8;

/// A synchronization rule of collective calls that kernels break if a test requests it.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// With this mutant, consecutive calls use the same buffer instead of alternating between two.
    OneBuffer = 1,
    /// With this mutant, no rank waits at the first barrier of a collective call.
    NoFirstBarrier = 2,
    /// With this mutant, no rank waits at the second barrier of a collective call.
    NoSecondBarrier = 4,
    /// With this mutant, no rank waits at the end of a collective call that staged its input in several pieces.
    NoLastBarrier = 8,
    /// With this mutant, packet slots are not cleared when the flags in packets wrap around.
    NoClearing = 16,
    /// With this mutant, a packet is read without a check that its flag is the expected one.
    AnyFlag = 32,
    /// With this mutant, ranks do not compare the digests of their calls' terms.
    AnyDigest = 64,
    /// With this mutant, a rank takes the terms that another rank has published for an earlier call as the terms of the current
    /// call.
    OldTerms = 128,
}

impl Cause {
    const ALL: [Self; 5] = [Self::Lost, Self::Aborted, Self::TimedOut, Self::Left, Self::Disagreed];

    /// Encodes this cause of an abort and the rank at fault as a word.
    pub(crate) fn word(self, rank: Rank) -> u64 {
        u64::from(self as u32) << CAUSE_SHIFT | (u64::from(rank.0) + 1)
    }

    /// Decodes the cause of an abort and the rank at fault from a word; returns `None` if the word has no valid cause or no rank.
    pub(crate) fn of_word(word: u64) -> Option<(Self, Rank)> {
        let cause = Self::ALL.into_iter().find(|cause| u64::from(*cause as u32) == word >> CAUSE_SHIFT)?;
        let rank = u32::try_from(word & 0xffff_ffff).expect("masked to 32 bits").checked_sub(1)?;
        Some((cause, Rank(rank)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_read_back_with_its_rank() {
        for cause in Cause::ALL {
            for rank in [0, 7, u32::MAX - 1].map(Rank) {
                assert_eq!(Cause::of_word(cause.word(rank)), Some((cause, rank)));
            }
        }
        assert_eq!(Cause::TimedOut.word(Rank(2)), 3 << 32 | 3);
        for word in [0, 1, 6 << 32 | 1, 3 << 32] {
            assert_eq!(Cause::of_word(word), None, "{word}");
        }
    }
}
