//! Progress bars on stderr, shown only if stderr is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A progress bar or a status line on stderr, which is cleared on drop.
#[derive(Debug)]
pub struct ProgressDisplay(ProgressBar);

impl ProgressDisplay {
    /// Shows a progress bar that counts bytes.
    pub fn bytes(label: &str, total: usize) -> Self {
        Self::create(label, total as u64, "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes}")
    }

    /// Shows how many bytes were read, if their total is not known.
    pub fn unbounded(label: &str) -> Self {
        Self::create(label, 0, "{msg} {binary_bytes}")
    }

    /// Shows a progress bar that counts rounds of a benchmark.
    pub fn rounds(label: &str, total: usize) -> Self {
        Self::create(label, total as u64, "{msg} {wide_bar} {pos}/{len}")
    }

    /// Shows a status line with the name of the current step.
    pub fn step(label: &str) -> Self {
        Self::create(label, 0, "{msg} ...")
    }

    fn create(label: &str, total: u64, template: &str) -> Self {
        // The library indicatif hides the progress bar if stderr is not a terminal.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        bar.set_message(label.to_owned());
        bar.tick();
        Self(bar)
    }

    /// Sets the position and the total of the progress bar.
    pub fn set(&self, done: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(done);
    }

    /// Advances the position of the progress bar by `by`.
    pub fn advance(&self, by: usize) {
        self.0.inc(by as u64);
    }
}

impl Drop for ProgressDisplay {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hidden_bar_counts_too() {
        let bar = ProgressDisplay::bytes("test", 10);
        bar.advance(3);
        bar.advance(4);
        assert_eq!((bar.0.position(), bar.0.length()), (7, Some(10)));
    }
}
