//! `wholemem bench gather --in-turns` and `scatter --in-turns`: rounds that alternate with those of another program, which
//! starts each round.
//!
//! ```text
//!   wholemem  "ready"       ---->  the other program runs a round, while wholemem is idle
//!   wholemem                <----  an empty line
//!   wholemem  its times     ---->  ...
//! ```

use anyhow::{Result, ensure};
use serde::Serialize;
use wholemem_command::terminal;

use super::RowsCase;
use crate::sample::TimePair;

/// The protocol by which rounds alternate with those of another program, in lines on stdin and stdout.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alternate;

#[derive(Debug, Serialize)]
struct RowsRound {
    row_bytes: usize,
    rows: u64,
    calls: u64,
    /// The time of all calls of the round (`us`), and of a plain copy of as many bytes (`copy_us`).
    us: f64,
    copy_us: f64,
}

impl Alternate {
    /// Prints `"ready"`, and waits until the other program writes a line to stdin.
    pub(super) fn wait(self) -> Result<()> {
        terminal::print("\"ready\"\n")?;
        let mut line = String::new();
        ensure!(
            std::io::stdin().read_line(&mut line)? > 0,
            "stdin was closed before the other program started the next round"
        );
        Ok(())
    }

    /// Prints the times of a round as JSON.
    pub(super) fn end(self, case: &RowsCase, pair: TimePair) -> Result<()> {
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let (row_bytes, rows, calls) = (case.row_len, case.rows, case.calls);
        let (us, copy_us) = (micros(pair.wholemem), micros(pair.raw));
        terminal::print_json(&RowsRound { row_bytes, rows, calls, us, copy_us })
    }
}
