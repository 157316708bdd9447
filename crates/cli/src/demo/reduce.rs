//! Part 4 of the demo: an all-reduce of buffers in a window (memory that all ranks have mapped), by several processes.

use anyhow::Result;
use wholemem_command::size::RoundedSize;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

const RANKS: u32 = 4;

/// The maximum length of each rank's buffer in the all-reduce.
const LEN: usize = 4 << 20;

/// Runs part 4 of the demo: an all-reduce by several processes.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    recorder.step("reduce", || {
        let len = context.len.min(LEN);
        let took = wholemem_bench::reduce_demo(&context.device, RANKS, len)?;
        let text = format!(
            "{RANKS} processes summed {} of each rank in a window, and all got the same sums",
            RoundedSize(len)
        );
        Ok(((), StepResult::new(text).took(took)))
    })
}
