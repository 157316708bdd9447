//! Bars for people who wait, on stderr, and only where that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar, gone when it is dropped.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar that counts bytes.
    pub fn of_bytes(label: &str, total: usize) -> Self {
        Self::create(label, total as u64, "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes}")
    }

    /// A bar that counts rounds.
    pub fn of_rounds(label: &str, total: usize) -> Self {
        Self::create(label, total as u64, "{msg} {wide_bar} {pos}/{len}")
    }

    /// A line that says what is being done.
    pub fn of_step(label: &str) -> Self {
        Self::create(label, 0, "{msg} ...")
    }

    fn create(label: &str, total: u64, template: &str) -> Self {
        // Hidden by itself where stderr is no terminal.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label.to_owned());
        bar.tick();
        Self(bar)
    }

    /// So much is done of so much, whatever was thought before.
    pub fn set(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Counts so much more as done.
    pub fn advance(&self, by: usize) {
        self.0.inc(by as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_count_what_they_are_told_whether_seen_or_not() {
        let bar = Progress::of_bytes("test", 10);
        bar.advance(3);
        bar.advance(4);
        assert_eq!((bar.0.position(), bar.0.length()), (7, Some(10)));
    }
}
