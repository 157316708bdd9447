//! Part 3 of the demo: processes create a table together, and gather and scatter its rows.
//!
//! Each process has a part of the table and accesses rows of all parts. Every byte is verified.

use anyhow::Result;
use wholemem_bench::RowOp;
use wholemem_command::size::RoundedSize;

use super::DemoContext;
use super::step::{StepRecorder, StepResult};

const RANKS: u32 = 4;

/// Runs part 3 of the demo: gather and scatter by several processes.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    for (name, op) in [("gather", RowOp::Gather), ("scatter", RowOp::Scatter)] {
        recorder.step(name, || {
            let result = wholemem_bench::rows_demo(op, &context.device, RANKS, context.len)?;
            let (table, rows) = (RoundedSize(result.table_bytes), result.rows);
            let text = match op {
                RowOp::Gather => format!(
                    "{RANKS} processes created a table of {table}; each gathered {rows} rows of 1 KiB from all ranks"
                ),
                RowOp::Scatter => format!("each scattered {rows} rows to all ranks, and read them again"),
            };
            Ok(((), StepResult::new(text).took(result.took).moved(result.moved)))
        })?;
    }
    Ok(())
}
