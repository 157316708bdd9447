//! Part 2 of the demo: processes join as ranks, one of them is killed, and the others report its rank.

use std::time::Duration;

use anyhow::{Result, ensure};
use wholemem_bench::VictimGroup;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

const RANKS: u32 = 4;
const VICTIM: u32 = 2;

/// A limit far above the usual detection time. A survivor that needs longer did not detect the death of the rank but ran into a
/// timeout.
const MAX_DETECTION: Duration = Duration::from_secs(10);

/// Runs part 2 of the demo: ranks join, and one of them is killed.
pub(super) fn run(recorder: &mut StepRecorder, _: &DemoContext) -> Result<()> {
    let group = recorder.step("join", || {
        let group = VictimGroup::start(RANKS, VICTIM, 0)?;
        let text =
            format!("{RANKS} processes joined as ranks, authenticated each other, and gathered their bytes");
        Ok((group, StepResult::new(text)))
    })?;
    recorder.step("lose", || {
        let detected = group.kill()?;
        ensure!(
            detected < MAX_DETECTION,
            "the surviving ranks detected the death of a rank only after {detected:?}"
        );
        let text =
            format!("rank {VICTIM} got SIGKILL; all other ranks reported it, the last after {detected:.1?}");
        Ok(((), StepResult::new(text).took(detected)))
    })
}
