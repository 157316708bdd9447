//! Rounds that alternate with those of another program: each begins when that program says so, and its time is printed at once.
//!
//! ```text
//!   us  "ready"   ---->  the other program does a round of its own, while nothing runs here
//!   us            <----  an empty line
//!   us  our times ---->  ...
//! ```

use anyhow::{Result, ensure};
use serde::Serialize;
use wholemem_command::terminal;

use super::RowsCase;
use crate::sample::TimePair;

/// The protocol with the other program, by lines of standard input and output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alternate;

#[derive(Debug, Serialize)]
struct RowsRound {
    row_bytes: usize,
    rows: u64,
    calls: u64,
    /// How long all calls of the round took, and a plain copy of as many bytes.
    us: f64,
    copy_us: f64,
}

impl Alternate {
    /// Says that all is prepared, and waits for the other program.
    pub(super) fn wait(self) -> Result<()> {
        terminal::print("\"ready\"\n")?;
        let mut line = String::new();
        ensure!(std::io::stdin().read_line(&mut line)? > 0, "nobody says that it is our turn");
        Ok(())
    }

    /// Says how long the round took.
    pub(super) fn end(self, case: &RowsCase, pair: TimePair) -> Result<()> {
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let (row_bytes, rows, calls) = (case.row_len, case.rows, case.calls);
        let (us, copy_us) = (micros(pair.wholemem), micros(pair.raw));
        terminal::print_json(&RowsRound { row_bytes, rows, calls, us, copy_us })
    }
}
