//! The fourth chapter: processes that add up what each of them has in a window, and all get the same.

use anyhow::Result;
use wholemem_command::size::RoundedSize;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

const RANKS: u32 = 4;

/// The most that each brings along.
const LEN: usize = 4 << 20;

/// Plays the chapter.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    recorder.step("reduce", || {
        let len = context.len.min(LEN);
        let took = wholemem_bench::reduce_demo(&context.device, RANKS, len)?;
        let what = format!(
            "{RANKS} processes added up {} of each in a window, and all got the same sums",
            RoundedSize(len)
        );
        Ok(((), StepResult::new(what).took(took)))
    })
}
