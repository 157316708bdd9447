//! The granule: the unit in which a device allocates physical memory.

use super::{Error, Result};

/// The allocation unit of a device: a power of two that divides the length of every allocation and the offset of every
/// mapping.
///
/// GPUs use 2 MiB. The host backend uses the granule of its [configuration](crate::HostConfig), so that tests without a
/// GPU can use large granules too.
///
/// ```
/// use wholemem_hal::Granule;
///
/// let granule = Granule::new(64 << 10)?;
/// assert_eq!(granule.round_up(100_000), Some(128 << 10));
/// assert!(!granule.divides(100_000));
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Granule(usize);

impl Granule {
    /// A granule of one byte: every length is a whole number of granules.
    pub const BYTE: Self = Self(1);

    /// Creates a granule of `len` bytes.
    ///
    /// # Errors
    /// [`Error::BadConfig`] unless `len` is a power of two.
    pub fn new(len: usize) -> Result<Self> {
        if len.is_power_of_two() {
            Ok(Self(len))
        } else {
            Err(Error::BadConfig { setting: "the granule", value: len, rule: "it must be a power of two" })
        }
    }

    /// Returns the length of the granule in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a granule is never empty")]
    pub fn len(self) -> usize {
        self.0
    }

    /// Returns whether `len` is a multiple of the granule, as zero is.
    #[must_use]
    pub fn divides(self, len: usize) -> bool {
        len & (self.0 - 1) == 0
    }

    /// Rounds `len` up to a multiple of the granule; `None` if the result overflows.
    #[must_use]
    pub fn round_up(self, len: usize) -> Option<usize> {
        len.checked_next_multiple_of(self.0)
    }
}

/// The minimum and the recommended granule of one kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "cuMemGetAllocationGranularity")]
pub struct Granularity {
    /// The granule of which lengths and offsets must be multiples.
    pub minimum: Granule,
    /// The granule of which lengths and offsets should be multiples for the best speed.
    pub recommended: Granule,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_granule_must_be_a_power_of_two() {
        for len in [0, 3, 6, 100, usize::MAX] {
            let rule = "it must be a power of two";
            assert_eq!(Granule::new(len), Err(Error::BadConfig { setting: "the granule", value: len, rule }));
        }
        assert_eq!(Granule::new(1).map(Granule::len), Ok(1));
    }

    proptest! {
        #[test]
        fn granule_arithmetic_agrees_with_division(shift in 0_u32..40, len: usize) {
            let granule = Granule::new(1 << shift).expect("a power of two");
            prop_assert_eq!(granule.divides(len), len % granule.len() == 0);
            let expected = len.div_ceil(granule.len()).checked_mul(granule.len());
            prop_assert_eq!(granule.round_up(len), expected);
        }
    }
}
