//! The fourth chapter: processes that add up what each of them has in a window, and all get the same.

use anyhow::Result;
use wholemem_command::size::Rough;

use super::Setting;
use super::stage::{Done, Stage};

const RANKS: u32 = 4;

/// The most that each brings along.
const LEN: usize = 4 << 20;

/// Plays the chapter.
pub(super) fn play(stage: &mut Stage, setting: &Setting) -> Result<()> {
    stage.step("reduce", || {
        let len = setting.len.min(LEN);
        let took = wholemem_bench::reduce_tour(&setting.device, RANKS, len)?;
        let what = format!(
            "{RANKS} processes added up {} of each in a window, and all got the same sums",
            Rough(len)
        );
        Ok(((), Done::new(what).took(took)))
    })
}
