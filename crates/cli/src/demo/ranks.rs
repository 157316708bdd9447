//! The second chapter: processes that join as ranks, and what they see when one of them is killed.

use std::time::Duration;

use anyhow::{Result, ensure};
use wholemem_bench::VictimGroup;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

const RANKS: u32 = 4;
const VICTIM: u32 = 2;

/// Far above what it takes: a survivor that knows only then has not been told, but has given up.
const MAX_DETECTION: Duration = Duration::from_secs(10);

/// Plays the chapter.
pub(super) fn run(recorder: &mut StepRecorder, _: &DemoContext) -> Result<()> {
    let group = recorder.step("join", || {
        let group = VictimGroup::start(RANKS, VICTIM, 0)?;
        let what =
            format!("{RANKS} processes joined as ranks, proved a secret, and gathered each other's bytes");
        Ok((group, StepResult::new(what)))
    })?;
    recorder.step("lose", || {
        let known = group.kill()?;
        ensure!(known < MAX_DETECTION, "the survivors knew only after {known:?}");
        let what =
            format!("rank {VICTIM} got SIGKILL; each of the others said so, the last after {known:.1?}");
        Ok(((), StepResult::new(what).took(known)))
    })
}
