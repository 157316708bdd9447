//! The third chapter: processes that make one table between them, and move its rows.
//!
//! Each holds a part of the table, gathers rows from everywhere, and scatters new ones; every byte is checked.

use anyhow::Result;
use wholemem_bench::RowOp;
use wholemem_command::size::RoundedSize;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

const RANKS: u32 = 4;

/// Plays the chapter.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    for (name, op) in [("gather", RowOp::Gather), ("scatter", RowOp::Scatter)] {
        recorder.step(name, || {
            let tour = wholemem_bench::rows_demo(op, &context.device, RANKS, context.len)?;
            let (table, rows) = (RoundedSize(tour.table_bytes), tour.rows);
            let what = match op {
                RowOp::Gather => format!(
                    "{RANKS} processes made one table of {table}; each gathered {rows} rows of 1 KiB from all of it"
                ),
                RowOp::Scatter => format!("each scattered {rows} rows over all of it, and found them there again"),
            };
            Ok(((), StepResult::new(what).took(tour.took).moved(tour.moved)))
        })?;
    }
    Ok(())
}
