//! Selects the memory sizes of a benchmark, and the number of rounds.

use anyhow::Result;
use wholemem_command::memory;
use wholemem_command::size::ByteCount;
use wholemem_hal::Device;

use crate::args::SweepArgs;

/// By default, the largest measured memory size is the available memory divided by `SHARE`.
const SHARE: usize = 3;

/// The memory sizes that a benchmark measures, and the number of rounds for each.
#[derive(Debug)]
pub(super) struct SweepPlan {
    /// The memory sizes in bytes, ascending, in whole granules.
    pub(super) sizes: Vec<usize>,
    /// The number of rounds for each size, or `None` for as many as fit in a time limit.
    pub(super) rounds: Option<u32>,
    /// True if sizes that would take too long are skipped. False if the user requested sizes or a maximum.
    pub(super) within_time: bool,
}

impl SweepPlan {
    pub(super) fn new(device: &Device, args: &SweepArgs) -> Result<Self> {
        let rounds = args.rounds;
        if !args.sizes.is_empty() {
            let sizes = args.sizes.iter().map(|&ByteCount(len)| memory::whole_granules(device, len));
            let mut sizes = sizes.collect::<Result<Vec<_>>>()?;
            sizes.sort_unstable();
            sizes.dedup();
            return Ok(Self { sizes, rounds, within_time: false });
        }
        let granule = device.granularity()?.minimum.len();
        let most = match args.max_size {
            Some(ByteCount(len)) => memory::whole_granules(device, len)?,
            None => round_to_four_bits(device.available()? / SHARE),
        };
        Ok(Self { sizes: size_steps(granule, most), rounds, within_time: args.max_size.is_none() })
    }
}

/// Returns memory sizes of one granule, four, sixteen, and so on. The last size is `most`, in whole granules; no other size is
/// above half of `most`, because the largest sizes take the longest.
fn size_steps(granule: usize, most: usize) -> Vec<usize> {
    let most = (most / granule * granule).max(granule);
    let steps = std::iter::successors(Some(granule), |len| len.checked_mul(4));
    steps.take_while(|&len| len <= most / 2).chain([most]).collect()
}

/// Rounds a length down to four significant bits, so that a size that is derived from the available memory is the same on
/// different days.
fn round_to_four_bits(len: usize) -> usize {
    let shift = len.checked_ilog2().unwrap_or(0).saturating_sub(3);
    len >> shift << shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_steps_begin_with_a_granule_and_end_with_the_maximum() {
        assert_eq!(size_steps(64, 64), [64]);
        assert_eq!(size_steps(64, 1), [64]);
        assert_eq!(size_steps(64, 256), [64, 256]);
        assert_eq!(size_steps(64, 1025), [64, 256, 1024]);
        assert_eq!(size_steps(64, 1984), [64, 256, 1984]);
        assert_eq!(size_steps(64, 2048), [64, 256, 1024, 2048]);
        assert_eq!(size_steps(1 << 62, usize::MAX), [1 << 62, 3 << 62]);
    }

    #[test]
    fn sizes_are_rounded_down_to_four_bits() {
        assert_eq!(round_to_four_bits(0), 0);
        assert_eq!(round_to_four_bits(15), 15);
        assert_eq!(round_to_four_bits(31), 30);
        assert_eq!(round_to_four_bits((7 << 30) + (3 << 29) / 2), (15 << 30) / 2);
    }
}
