//! `CallTerms`: the arguments of a collective call that must be equal on all ranks, as kernels compare and publish them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The number of 32-bit words of [`CallTerms`].
pub const TERMS_WORDS: u32 = 10;

/// The number of low bits of a mark that hold the digest of a call's terms. The bits above hold the number of the call.
pub const DIGEST_BITS: u32 = 16;

/// The terms of a collective call: its arguments that must be equal on all ranks, encoded in words. Kernels compare the words, but
/// do not interpret them. All words of a user's kernel are zero.
///
/// Ranks compare a digest of the terms in every call. A rank that waits long publishes all words in its memory of the lane, each in a
/// 64-bit word below the tag of the call, and compares them with the words that other ranks have published.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct CallTerms {
    /// The encoded arguments.
    pub words: [u32; TERMS_WORDS as usize],
}

layout!(CallTerms: 40 { words: 0 });

/// The highest bit of every tag. It distinguishes tags from zero, the content of memory in which no terms have been published.
pub const TAG_BIT: u32 = 0x8000_0000;

/// Returns the tag of a call with the given number: the low 31 bits of the number, and `TAG_BIT`.
pub(crate) fn tag_of(number: u64) -> u64 {
    number & u64::from(TAG_BIT - 1) | u64::from(TAG_BIT)
}
