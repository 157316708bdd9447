//! Fault injection for tests: delays, call counters close to their wrap, and broken synchronization rules.
//!
//! Every synchronization rule has a bit that makes kernels break it, and a test that then fails.

use std::sync::atomic::Ordering;

use zerocopy::IntoBytes;

use super::Lane;
use crate::Result;
use crate::abi::{DEBUG_POINTS, DebugWord, MAX_BLOCKS, Mutant};

/// What is to go wrong on this rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Chaos {
    /// A rule that is not kept.
    pub mutant: Option<Mutant>,
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
    /// The debug words.
    fn words(&self) -> Vec<u64> {
        let delay_at = |point: usize, block: u32| {
            DebugWord::Delays as usize + point * MAX_BLOCKS as usize + block as usize
        };
        let mut words = vec![0_u64; delay_at(DEBUG_POINTS as usize, 0)];
        words[DebugWord::Mutant as usize] = self.mutant.map_or(0, |mutant| u64::from(mutant as u32));
        words[DebugWord::Seed as usize] = self.seed;
        words[DebugWord::MaxDelay as usize] = self.random;
        for (point, block, delay) in &self.delays {
            if let Some(word) = words.get_mut(delay_at(*point, *block)) {
                *word = *delay;
            }
        }
        words
    }

    /// Whether kernels have to look.
    fn is_visible(&self) -> bool {
        let Self { mutant, random, delays, .. } = self;
        mutant.is_some() || *random != 0 || !delays.is_empty()
    }
}

impl Lane {
    /// Makes this rank's calls go wrong from here on, as tests want it. No call is under way, on any rank.
    ///
    /// # Errors
    /// [`Error::Hal`](crate::Error::Hal).
    #[doc(hidden)]
    pub fn disturb(&self, chaos: &Chaos) -> Result<()> {
        self.preset(chaos.counter, chaos.words().as_bytes())?;
        let address = if chaos.is_visible() { self.debug_address() } else { 0 };
        self.debug.store(address, Ordering::Release);
        Ok(())
    }
}
