//! A comparison: one thing that this library and the raw calls of `wholemem_hal::limits` both do, in the same order.

use anyhow::Result;
use wholemem_hal::Device;

use crate::sample::{Implementation, TimedRun};

/// Something that this library and the raw calls both do.
pub(super) trait Comparison {
    /// Its name on the command line.
    const NAME: &'static str;
    /// What is timed, for people.
    const TITLE: &'static str;
    /// How many processes take part.
    const RANKS: usize;

    /// The device whose memory is used.
    fn device(&self) -> &Device;

    /// How the processes are tied to processors, where it matters.
    fn pinned(&self) -> Option<&'static str>;

    /// Does it once with fresh memory of `len` bytes, and checks the outcome.
    fn once(&mut self, implementation: Implementation, len: usize) -> Result<TimedRun>;
}
