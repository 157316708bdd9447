//! Conversions between integer types that cannot fail.

pub(crate) use wholemem_os::width::to_usize;

/// Returns the lower 32 bits of a number.
pub(crate) fn low_u32(number: u64) -> u32 {
    u32::try_from(number & u64::from(u32::MAX)).expect("the upper bits were masked out")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_u32_masks_the_upper_half() {
        assert_eq!([7, 1 << 32, u64::MAX].map(low_u32), [7, 0, u32::MAX]);
    }
}
