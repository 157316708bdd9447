//! The trait of an operation that wholemem and the raw calls of `wholemem_hal::limits` both perform, so that their times can be
//! compared.

use anyhow::Result;
use wholemem_hal::Device;

use crate::sample::{Implementation, TimedRun};

/// An operation that wholemem and raw calls both perform.
pub(super) trait Comparison {
    /// The name of the benchmark on the command line.
    const NAME: &'static str;
    /// The operation, as the title of the report.
    const TITLE: &'static str;
    /// Number of processes.
    const RANKS: usize;

    /// The device whose memory is used.
    fn device(&self) -> &Device;

    /// The cores that the processes are pinned to, if they are.
    fn pinned(&self) -> Option<&'static str>;

    /// Performs the operation once with new memory of `len` bytes, and verifies the result.
    fn once(&mut self, implementation: Implementation, len: usize) -> Result<TimedRun>;
}
