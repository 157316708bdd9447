//! The layout of the memory that each rank has for a lane (a sequence of collective calls). The offsets are equal on all ranks.
//!
//! ```text
//!   0          notices_at            ll_at                       staging_at                 result_at             len
//!   [ signals ][ notices ][ terms ]..[ slots: parity 0, then 1 ]..[ parity 0 ][ parity 1 ]..[ reduced tiles      ]
//! ```

use super::{LaneRef, MAX_BLOCKS, SIGNAL_STRIDE, TERMS_WORDS};
use crate::error::{Error, Result};

/// The alignment in bytes of the regions in a lane's memory: packet slots, staging buffers and reduced tiles.
const PAGE: u64 = 4096;

/// The offsets of the regions in the memory that a rank has for a lane (a sequence of collective calls).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneLayout {
    pub(crate) notices_at: u64,
    pub(crate) terms_at: u64,
    pub(crate) ll_at: u64,
    pub(crate) ll_len: u64,
    pub(crate) staging_at: u64,
    pub(crate) staging_len: u64,
    pub(crate) result_at: u64,
    /// The length in bytes of one rank's memory of the lane.
    pub(crate) len: u64,
}

impl LaneLayout {
    /// Computes the layout for `ranks` ranks, each of which sends at most `ll_len` bytes in packets and stages `staging_len`
    /// bytes.
    pub(crate) fn new(ranks: u32, ll_len: usize, staging_len: usize) -> Result<Self> {
        let plan = || {
            let ranks = u64::from(ranks);
            let ll_len = (ll_len as u64).checked_next_multiple_of(PAGE)?;
            let staging_len = (staging_len as u64).max(PAGE).checked_next_multiple_of(PAGE)?;
            let notices_at = u64::from(MAX_BLOCKS) * ranks * SIGNAL_STRIDE;
            let terms_at = (notices_at + ranks * 8).checked_next_multiple_of(SIGNAL_STRIDE)?;
            let ll_at = (terms_at + u64::from(TERMS_WORDS) * 8).checked_next_multiple_of(PAGE)?;
            // Each rank has two packet slots for every rank, which calls use alternately. Half of a packet is flags, so a slot
            // has twice the bytes.
            let staging_at = ll_len.checked_mul(4 * ranks)?.checked_add(ll_at)?;
            let result_at = staging_len.checked_mul(2)?.checked_add(staging_at)?;
            let len = result_at.checked_add(staging_len)?;
            Some(Self { notices_at, terms_at, ll_at, ll_len, staging_at, staging_len, result_at, len })
        };
        plan().ok_or_else(|| Error::TooLong { rows: u64::from(ranks), row_len: staging_len })
    }
}

/// The number of CPU ranks whose packet slots have different offsets in a page.
const STAGGERED: u64 = 16;

/// Returns the offset at which a CPU rank stores its signal and its packets, in its own memory of the lane. All ranks read them
/// there, so of the slots that GPU ranks fill for each other, a CPU rank needs only the first one for each parity (0 or 1,
/// alternating between calls).
///
/// The slots of ranks have different offsets in a page: a load is delayed by an earlier store to the same offset of another page.
pub(crate) fn slot_at(lane: &LaneRef, rank: u32, parity: u64) -> u64 {
    lane.ll_at + parity * 2 * lane.ll_len + u64::from(rank) % STAGGERED * SIGNAL_STRIDE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_cpu_ranks_are_within_those_of_the_layout() {
        for ranks in [1, 2, 9, 40] {
            let layout = LaneLayout::new(ranks, 1, 1).unwrap();
            let lane = LaneRef { ll_at: layout.ll_at, ll_len: layout.ll_len, ranks, ..LaneRef::default() };
            for rank in 0..ranks {
                let [even, odd] = [0, 1].map(|parity| slot_at(&lane, rank, parity));
                // The signal has 16 bytes, and the packets behind it have at most `ll_len` bytes.
                assert!(even >= layout.ll_at && even + 16 + layout.ll_len <= odd, "rank {rank} of {ranks}");
                assert!(odd + 16 + layout.ll_len <= layout.staging_at, "rank {rank} of {ranks}");
            }
        }
    }

    #[test]
    fn parts_follow_each_other_on_pages() {
        let layout = LaneLayout::new(3, 5000, 100_000).unwrap();
        let LaneLayout { notices_at, terms_at, ll_at, ll_len, staging_at, staging_len, result_at, len } =
            layout;
        assert_eq!((notices_at, ll_len, staging_len), (128 * 3 * 128, 8192, 102_400));
        assert_eq!([ll_at % PAGE, staging_at % PAGE, result_at % PAGE], [0; 3]);
        assert!(terms_at >= notices_at + 24 && terms_at + 80 <= ll_at);
        assert_eq!(staging_at, ll_at + 2 * 3 * 2 * ll_len);
        assert_eq!((result_at, len), (staging_at + 2 * staging_len, staging_at + 3 * staging_len));
    }

    #[test]
    fn what_is_longer_than_numbers_is_refused() {
        let error = Error::TooLong { rows: 2, row_len: usize::MAX };
        assert_eq!(LaneLayout::new(2, 0, usize::MAX), Err(error));
    }
}
