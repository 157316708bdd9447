//! Conversions between `usize` and `u64`, which lose nothing on the 64-bit targets that wholemem supports.
//!
//! Wire formats, file formats and drivers use `u64` for lengths, offsets and addresses; Rust code uses `usize`. On a
//! 64-bit target both have the same range, so the conversions cannot fail. On a target with another pointer width the
//! assertion below fails to compile.
//!
//! These functions do not validate: the caller compares a length received from a peer with the expected one.
//!
//! ```
//! use wholemem_os::width::{to_u64, to_usize};
//!
//! assert_eq!(to_u64(usize::MAX), u64::MAX);
//! assert_eq!(to_usize(1 << 40), 1 << 40);
//! let rank = 7_u32;
//! assert_eq!(to_usize(rank.into()), 7);
//! ```

const _: () = assert!(usize::BITS == u64::BITS, "wholemem supports targets with 64-bit addresses only");

/// Converts a `usize` to a `u64` without loss.
#[must_use]
#[inline]
pub const fn to_u64(number: usize) -> u64 {
    number as u64
}

/// Converts a `u64` to a `usize` without loss.
#[must_use]
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a `usize` has 64 bits: this module asserts it")]
pub const fn to_usize(number: u64) -> usize {
    number as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_both_conversions() {
        for number in [0, 1, u64::from(u32::MAX), u64::from(u32::MAX) + 1, u64::MAX] {
            assert_eq!(u64::try_from(to_usize(number)), Ok(number));
            assert_eq!(to_u64(to_usize(number)), number);
        }
    }
}
