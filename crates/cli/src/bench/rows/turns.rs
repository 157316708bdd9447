//! Rounds in turn with another program: each begins when that says so, and its time is told at once.
//!
//! ```text
//!   us  "ready"   ---->  the other program does a round of its own, while nothing runs here
//!   us            <----  an empty line
//!   us  our times ---->  ...
//! ```

use anyhow::{Result, ensure};
use serde::Serialize;

use super::Course;
use crate::bench::sample::Pair;
use crate::terminal;

/// The turns of this process, by lines of its standard input and output.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turns;

#[derive(Debug, Serialize)]
struct Round {
    row_bytes: usize,
    rows: u64,
    calls: u64,
    /// How long all calls of the round took, and a plain copy of as many bytes.
    us: f64,
    copy_us: f64,
}

impl Turns {
    /// Says that all is prepared, and waits for the turn.
    pub(super) fn wait(self) -> Result<()> {
        terminal::print("\"ready\"\n")?;
        let mut line = String::new();
        ensure!(std::io::stdin().read_line(&mut line)? > 0, "nobody says that it is our turn");
        Ok(())
    }

    /// Says how long the turn took.
    pub(super) fn end(self, course: &Course, pair: Pair) -> Result<()> {
        let micros = |time: std::time::Duration| time.as_secs_f64() * 1e6;
        let (row_bytes, rows, calls) = (course.row_len, course.rows, course.calls);
        let (us, copy_us) = (micros(pair.ours), micros(pair.raw));
        terminal::print_json(&Round { row_bytes, rows, calls, us, copy_us })
    }
}
