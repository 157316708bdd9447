//! The trait of an operation that wholemem and the raw calls of `wholemem_hal::limits` both perform, so that their times can be
//! compared.

use anyhow::Result;
use wholemem_hal::Device;

use crate::sample::{Implementation, TimedRun};

/// An operation that is measured both with wholemem and with raw system or driver calls.
pub(super) trait Comparison {
    /// The name of the benchmark on the command line, such as `alloc`.
    const NAME: &'static str;
    /// The description of the measured operation, which is the title of the report.
    const TITLE: &'static str;
    /// The number of processes that the benchmark uses.
    const RANKS: usize;

    /// Returns the device whose memory the benchmark uses.
    fn device(&self) -> &Device;

    /// Returns which cores the benchmark's processes are pinned to, or `None` if they are not pinned.
    fn pinned(&self) -> Option<&'static str>;

    /// Performs the measured operation once with new memory of `len` bytes, and verifies the result.
    fn once(&mut self, implementation: Implementation, len: usize) -> Result<TimedRun>;
}
