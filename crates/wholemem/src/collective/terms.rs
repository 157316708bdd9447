//! The terms of a collective call: the arguments that must be equal on all ranks, their digest, and their description.
//!
//! In every call, ranks compare 16-bit digests of their terms: the digest travels beside each signal and in each packet. If two
//! digests differ, neither rank completes the call. Both publish all their terms, read those of the other rank and report
//! [`RanksDisagree`](wholemem_comm::Error::RanksDisagree). If calls differ but their digests are equal, the difference is not
//! detected. The digests of two random calls are equal with a probability of 2^-16. They are never equal if the calls differ
//! only in the collective, algorithm, element type, operation or in-place use, nor if they differ only in a count, by less than
//! 1024.
//!
//! The address of memory that is not in a window is not a term, because it differs legitimately among ranks.

use std::fmt;

use wholemem_comm::Rank;

use super::kernel::CollectiveKind;
use super::tuning::Algorithm;
use super::window_table::WindowId;
use crate::abi::{CallTerms, TERMS_WORDS};
use crate::{Dtype, ReduceOp};

/// A range of a window that is an input or output of a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowRange {
    pub(super) window: WindowId,
    pub(super) offset: u64,
}

/// The arguments of a collective call that must be equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) kind: CollectiveKind,
    pub(super) algorithm: Algorithm,
    pub(super) dtype: Dtype,
    pub(super) op: ReduceOp,
    pub(super) root: Rank,
    /// The number of elements of each rank's input.
    pub(super) count: u64,
    pub(super) in_place: bool,
    /// The range of a window from which the call reads its input; `None` if the input is not in a window.
    pub(super) input: Option<WindowRange>,
    /// The range of a window to which the call writes its output; `None` if the output is not in a window.
    pub(super) output: Option<WindowRange>,
}

// The first word of encoded terms: the bits of each field.
const KIND: u32 = 0;
const ALGORITHM: u32 = 3;
const DTYPE: u32 = 5;
const OP: u32 = 10;
const IN_PLACE: u32 = 13;
const INPUT: u32 = 14;
const OUTPUT: u32 = 15;

impl Terms {
    /// Creates the terms of a barrier.
    pub(super) fn barrier() -> Self {
        Self {
            kind: CollectiveKind::Barrier,
            algorithm: Algorithm::OneShot,
            dtype: Dtype::U8,
            op: ReduceOp::Sum,
            root: Rank(0),
            count: 0,
            in_place: false,
            input: None,
            output: None,
        }
    }

    /// Encodes these terms, and computes their digest, which has 16 bits.
    pub(super) fn encode(&self) -> (CallTerms, u32) {
        // A window id that needs more than 32 bits is cut: ids are assigned in sequence.
        let range =
            |range: Option<WindowRange>| range.map_or((0, 0), |range| (low(range.window), range.offset));
        let ((input, input_offset), (output, output_offset)) = (range(self.input), range(self.output));
        let first = (self.kind as u32) << KIND
            | (self.algorithm as u32) << ALGORITHM
            | self.dtype.code() << DTYPE
            | self.op.code() << OP
            | u32::from(self.in_place) << IN_PLACE
            | u32::from(self.input.is_some()) << INPUT
            | u32::from(self.output.is_some()) << OUTPUT;
        let words = [
            first,
            self.root.0,
            low(self.count),
            high(self.count),
            input,
            output,
            low(input_offset),
            high(input_offset),
            low(output_offset),
            high(output_offset),
        ];
        // A product with an odd constant near 2^64 divided by the golden ratio (Fibonacci hashing) spreads consecutive numbers, so the
        // upper bits differ for numbers that are close to each other.
        let mix = |word: u64, factor: u64| word.wrapping_mul(factor) >> 48;
        let windows = mix(u64::from(input) << 32 | u64::from(output), 0xd6e8_feb8_6659_fd93)
            ^ mix(input_offset, 0xa076_1d64_78bd_642f)
            ^ mix(output_offset, 0xe703_7ed1_a0b4_28db);
        let digest = u64::from(first)
            ^ mix(self.count, 0x9e37_79b9_7f4a_7c15)
            ^ mix(self.root.0.into(), 0xbf58_476d_1ce4_e5b9)
            ^ windows;
        (CallTerms { words }, low(digest & 0xffff))
    }

    /// Decodes terms that a kernel has reported; returns `None` if they are not terms of a collective call.
    pub(super) fn decode(words: [u32; TERMS_WORDS as usize]) -> Option<Self> {
        let [first, root, low, high, input, output, offsets @ ..] = words;
        let bits = |at: u32, count: u32| first >> at & ((1 << count) - 1);
        let wide = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        let range = |at, window: u32, offset| {
            (bits(at, 1) == 1).then_some(WindowRange { window: window.into(), offset })
        };
        if first >> (OUTPUT + 1) != 0 {
            return None;
        }
        Some(Self {
            kind: CollectiveKind::from_code(bits(KIND, 3))?,
            algorithm: *Algorithm::ALL.get(bits(ALGORITHM, 2) as usize)?,
            dtype: Dtype::from_code(bits(DTYPE, 5))?,
            op: ReduceOp::from_code(bits(OP, 3))?,
            root: Rank(root),
            count: wide(low, high),
            in_place: bits(IN_PLACE, 1) == 1,
            input: range(INPUT, input, wide(offsets[0], offsets[1])),
            output: range(OUTPUT, output, wide(offsets[2], offsets[3])),
        })
    }
}

/// Returns the low 32 bits of a word.
fn low(word: u64) -> u32 {
    u32::try_from(word & 0xffff_ffff).expect("masked to 32 bits")
}

/// Returns the high 32 bits of a word.
fn high(word: u64) -> u32 {
    low(word >> 32)
}

impl fmt::Display for Terms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            CollectiveKind::AllReduce => {
                write!(f, "all_reduce({}) of {} {}", self.op, self.count, self.dtype)?;
            }
            CollectiveKind::AllGather => write!(f, "all_gather of {} bytes", self.count)?,
            CollectiveKind::Broadcast => {
                write!(f, "broadcast of {} bytes from rank {}", self.count, self.root)?;
            }
            CollectiveKind::Barrier => return f.write_str("barrier"),
        }
        if self.kind != CollectiveKind::AllReduce && self.dtype != Dtype::U8 {
            write!(f, " as {}", self.dtype)?;
        }
        match (self.input, self.output) {
            (None, None) => {}
            (Some(input), Some(output)) if input == output => write!(f, ", in {input}")?,
            (input, output) => {
                let own = "memory that is not in a window";
                match input {
                    Some(range) => write!(f, ", from {range}")?,
                    None => write!(f, ", from {own}")?,
                }
                match output {
                    Some(range) => write!(f, " to {range}")?,
                    None => write!(f, " to {own}")?,
                }
            }
        }
        let place = if self.in_place { ", in place" } else { "" };
        write!(f, "{place}, by {}", self.algorithm)
    }
}

impl fmt::Display for WindowRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "window {} at byte {}", self.window, self.offset)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn digest(terms: &Terms) -> u32 {
        terms.encode().1
    }

    fn any_range() -> impl Strategy<Value = Option<WindowRange>> {
        let range = (0..1_u64 << 32, any::<u64>());
        proptest::option::of(range.prop_map(|(window, offset)| WindowRange { window, offset }))
    }

    prop_compose! {
        fn any_terms()(
            kind in proptest::sample::select(CollectiveKind::ALL.to_vec()),
            algorithm in proptest::sample::select(Algorithm::ALL.to_vec()),
            dtype in proptest::sample::select(Dtype::ALL.to_vec()),
            op in proptest::sample::select(ReduceOp::ALL.to_vec()),
            (root, count, in_place) in any::<(u32, u64, bool)>(),
            (input, output) in (any_range(), any_range()),
        ) -> Terms {
            Terms { kind, algorithm, dtype, op, root: Rank(root), count, in_place, input, output }
        }
    }

    proptest! {
        #[test]
        fn terms_round_trip_and_their_digest_has_16_bits(terms in any_terms()) {
            let (encoded, digest) = terms.encode();
            prop_assert_eq!(Terms::decode(encoded.words), Some(terms));
            prop_assert!(digest < 1 << 16);
        }

        #[test]
        fn words_that_are_not_terms_are_not_decoded_as_others(words in any::<[u32; 10]>()) {
            if let Some(terms) = Terms::decode(words) {
                prop_assert_eq!(Terms::decode(terms.encode().0.words), Some(terms));
            }
        }

        #[test]
        fn digests_differ_if_counts_differ_by_less_than_1024(terms in any_terms(), more in 1..1024_u64) {
            let other = Terms { count: terms.count.wrapping_add(more), ..terms };
            prop_assert_ne!(digest(&terms), digest(&other));
        }

        #[test]
        fn digests_differ_if_only_a_choice_differs(terms in any_terms(), other in any_terms()) {
            let Terms { kind, algorithm, dtype, op, in_place, .. } = other;
            let other = Terms { kind, algorithm, dtype, op, in_place, ..terms };
            prop_assert_eq!(terms == other, digest(&terms) == digest(&other));
        }
    }

    #[test]
    fn digests_of_random_calls_collide_with_the_stated_probability() {
        // Deterministic calls that differ in several terms: counts and types of the same length in bytes, roots and windows.
        let mut digests = Vec::new();
        for count in 1..400_u64 {
            for root in 0..8 {
                for window in 0..4_u64 {
                    let range = (window > 0).then_some(WindowRange { window, offset: count * 256 * window });
                    let terms =
                        Terms { count, root: Rank(root), input: range, output: range, ..Terms::barrier() };
                    digests.push(digest(&terms));
                }
            }
        }
        let mut pairs = 0_u64;
        let mut seen = vec![0_u64; 1 << 16];
        for digest in &digests {
            pairs += seen[*digest as usize];
            seen[*digest as usize] += 1;
        }
        let all = digests.len() as u64 * (digests.len() as u64 - 1) / 2;
        assert!(pairs < (2 * all) >> 16, "{pairs} of {all} pairs collide");
    }

    #[test]
    fn terms_are_described_as_they_are_called() {
        let range = WindowRange { window: 3, offset: 256 };
        let all_reduce = Terms {
            kind: CollectiveKind::AllReduce,
            algorithm: Algorithm::TwoShot,
            dtype: Dtype::F32,
            op: ReduceOp::Max,
            count: 1000,
            input: Some(range),
            ..Terms::barrier()
        };
        let own = "memory that is not in a window";
        let expected = [
            (
                all_reduce,
                format!("all_reduce(max) of 1000 f32, from window 3 at byte 256 to {own}, by two-shot"),
            ),
            (
                Terms { output: Some(range), in_place: true, ..all_reduce },
                "all_reduce(max) of 1000 f32, in window 3 at byte 256, in place, by two-shot".to_owned(),
            ),
            (
                Terms { kind: CollectiveKind::Broadcast, root: Rank(2), input: None, ..all_reduce },
                "broadcast of 1000 bytes from rank 2 as f32, by two-shot".to_owned(),
            ),
            (Terms::barrier(), "barrier".to_owned()),
        ];
        for (terms, text) in expected {
            assert_eq!(terms.to_string(), text);
        }
    }
}
