//! Conversions between integer types that cannot fail. Where that depends on the system, it is checked when the crate is
//! compiled.

const _: () = assert!(usize::BITS == u64::BITS, "the store runs on 64-bit systems");

/// A length, an offset or a count as an index.
pub(crate) fn to_usize(number: u64) -> usize {
    usize::try_from(number).expect("both have 64 bits")
}

/// The lower 32 bits of a number.
pub(crate) fn low_u32(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).expect("the upper bits were masked out")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_an_index_and_has_a_lower_half() {
        assert_eq!([0, u64::MAX].map(to_usize), [0, usize::MAX]);
        assert_eq!([7, 1 << 32, u64::MAX].map(low_u32), [7, 0, u32::MAX]);
    }
}
