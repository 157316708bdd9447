//! The second chapter: processes that join as ranks, and what they see when one of them is killed.

use std::time::Duration;

use anyhow::{Result, ensure};
use wholemem_bench::Doomed;

use super::Setting;
use super::stage::{Done, Stage};

const RANKS: u32 = 4;
const VICTIM: u32 = 2;

/// Far above what it takes: a survivor that knows only then has not been told, but has given up.
const PROMPTLY: Duration = Duration::from_secs(10);

/// Plays the chapter.
pub(super) fn play(stage: &mut Stage, _: &Setting) -> Result<()> {
    let group = stage.step("join", || {
        let group = Doomed::start(RANKS, VICTIM, 0)?;
        let what =
            format!("{RANKS} processes joined as ranks, proved a secret, and gathered each other's bytes");
        Ok((group, Done::new(what)))
    })?;
    stage.step("lose", || {
        let known = group.kill()?;
        ensure!(known < PROMPTLY, "the survivors knew only after {known:?}");
        let what =
            format!("rank {VICTIM} got SIGKILL; each of the others said so, the last after {known:.1?}");
        Ok(((), Done::new(what).took(known)))
    })
}
