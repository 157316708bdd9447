//! The third chapter: processes that make one table between them, and move its rows.
//!
//! Each holds a part of the table, gathers rows from everywhere, and scatters new ones; every byte is checked.

use anyhow::Result;
use wholemem_bench::Op;
use wholemem_command::size::Rough;

use super::Setting;
use super::stage::{Done, Stage};

const RANKS: u32 = 4;

/// Plays the chapter.
pub(super) fn play(stage: &mut Stage, setting: &Setting) -> Result<()> {
    for (name, op) in [("gather", Op::Gather), ("scatter", Op::Scatter)] {
        stage.step(name, || {
            let tour = wholemem_bench::tour(op, &setting.device, RANKS, setting.len)?;
            let (table, rows) = (Rough(tour.table_bytes), tour.rows);
            let what = match op {
                Op::Gather => format!(
                    "{RANKS} processes made one table of {table}; each gathered {rows} rows of 1 KiB from all of it"
                ),
                Op::Scatter => format!("each scattered {rows} rows over all of it, and found them there again"),
            };
            Ok(((), Done::new(what).took(tour.took).moved(tour.moved)))
        })?;
    }
    Ok(())
}
