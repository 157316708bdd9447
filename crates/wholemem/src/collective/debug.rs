//! Fault injection for tests: delays, call counters close to their wrap, and broken synchronization rules.
//!
//! Every synchronization rule has a bit that makes kernels break it, and a test that then fails.

use std::sync::atomic::Ordering;

use super::Lane;
use crate::Result;
use crate::abi::{BLOCKS, DELAYS, Mutants, POINTS};

/// What is to go wrong on this rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chaos {
    /// Rules that are not kept.
    pub mutants: Mutants,
    /// Where random delays begin.
    pub seed: u64,
    /// The longest random delay, in nanoseconds.
    pub random: u64,
    /// A delay at a point of a call, in nanoseconds, for a block.
    pub delays: Vec<(usize, u32, u64)>,
    /// The number of the next call, if it is to be another one. The same on all ranks.
    pub counter: Option<u64>,
}

impl Chaos {
    fn to_bytes(&self) -> Vec<u8> {
        let mut words = vec![0_u64; DELAYS + POINTS * BLOCKS as usize];
        words[..3].copy_from_slice(&[self.mutants.0, self.seed, self.random]);
        for (point, block, delay) in &self.delays {
            if let Some(word) = words.get_mut(DELAYS + point * BLOCKS as usize + *block as usize) {
                *word = *delay;
            }
        }
        words.into_iter().flat_map(u64::to_ne_bytes).collect()
    }

    /// Whether kernels have to look.
    fn is_visible(&self) -> bool {
        let Self { mutants, random, delays, .. } = self;
        mutants.0 != 0 || *random != 0 || !delays.is_empty()
    }
}

impl Lane {
    /// Makes this rank's calls go wrong from here on, as tests want it. No call is under way, on any rank.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal).
    #[doc(hidden)]
    pub fn disturb(&self, chaos: &Chaos) -> Result<()> {
        self.preset(chaos.counter, &chaos.to_bytes())?;
        let address = if chaos.is_visible() { self.debug_address() } else { 0 };
        self.debug.store(address, Ordering::Release);
        Ok(())
    }
}
