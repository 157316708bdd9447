//! Runs, times and records the steps of the demo, and shows the current step.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::TextStyle;

/// The result of a demo step whose check passed.
#[derive(Debug, Default)]
pub(super) struct StepResult {
    /// A description of what the step did, which the table shows.
    text: String,
    /// The time that was measured within the step, or `None` to report the time of the whole step.
    took: Option<Duration>,
    /// The number of bytes that the step moved, from which its rate is computed.
    moved: Option<usize>,
}

impl StepResult {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), ..Self::default() }
    }

    /// Reports `time`, which was measured within the step, in place of the duration of the whole step.
    pub(super) fn took(self, time: Duration) -> Self {
        Self { took: Some(time), ..self }
    }

    /// Sets the number of bytes that the step moved.
    pub(super) fn moved(self, len: usize) -> Self {
        Self { moved: Some(len), ..self }
    }
}

/// The record of a demo step that has run.
#[derive(Debug, Serialize)]
pub(super) struct StepRecord {
    step: &'static str,
    seconds: f64,
    ok: bool,
    #[serde(skip)]
    text: String,
    #[serde(skip)]
    moved: Option<usize>,
}

/// Runs the steps of the demo and records their results.
#[derive(Debug, Default)]
pub(super) struct StepRecorder {
    steps: Vec<StepRecord>,
}

impl StepRecorder {
    /// Runs a step of the demo and returns its value, which later steps use.
    ///
    /// # Errors
    /// The error of the step. The step is recorded as failed.
    pub(super) fn step<T>(
        &mut self,
        name: &'static str,
        act: impl FnOnce() -> Result<(T, StepResult)>,
    ) -> Result<T> {
        let shown = ProgressDisplay::step(name);
        let start = Instant::now();
        let outcome = act();
        let all = start.elapsed();
        drop(shown);
        let (value, done) = match outcome {
            Ok((value, done)) => (Ok(value), done),
            Err(error) => {
                let done = StepResult::new("FAILED");
                (Err(error).context(format!("step `{name}`")), done)
            }
        };
        let seconds = done.took.unwrap_or(all).as_secs_f64();
        self.steps.push(StepRecord {
            step: name,
            seconds,
            ok: value.is_ok(),
            text: done.text,
            moved: done.moved,
        });
        value
    }

    pub(super) fn steps(&self) -> &[StepRecord] {
        &self.steps
    }

    pub(super) fn table(&self) -> TextTable {
        let columns =
            [("step", Align::Left), ("what", Align::Left), ("time", Align::Right), ("rate", Align::Right)];
        let mut table = TextTable::new(columns);
        for step in &self.steps {
            let style = if step.ok { TextStyle::Plain } else { TextStyle::Error };
            let rate = step.moved.map(|len| format!("{:.1} GB/s", len as f64 / step.seconds / 1e9));
            let cells =
                [step.step.to_owned(), step.text.clone(), time(step.seconds), rate.unwrap_or_default()];
            table.row(style, cells);
        }
        table
    }
}

/// Formats a time with three digits in us, ms or s.
fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        seconds if seconds < 1e-3 => (seconds * 1e6, "us"),
        seconds if seconds < 1.0 => (seconds * 1e3, "ms"),
        seconds => (seconds, "s"),
    };
    let digits = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;
    use wholemem_command::terminal::Colour;

    #[test]
    fn a_failed_step_is_recorded_and_named_in_the_error() {
        let mut recorder = StepRecorder::default();
        let done = StepResult::new("created").took(Duration::from_millis(20)).moved(1 << 30);
        assert_eq!(recorder.step("make", || Ok((7, done))).unwrap(), 7);
        let error =
            recorder.step("check", || Err::<((), StepResult), _>(anyhow!("byte 3 is wrong"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "step `check`: byte 3 is wrong");

        let oks: Vec<_> = recorder.steps().iter().map(|step| (step.step, step.ok)).collect();
        assert_eq!(oks, [("make", true), ("check", false)]);
        let text = recorder.table().render(Colour::Off);
        assert!(text.contains("  make   created  20.0 ms  53.7 GB/s\n"), "{text}");
        assert!(text.contains("  check  FAILED"), "{text}");
    }

    #[test]
    fn json_has_the_step_its_time_and_its_outcome() {
        let mut recorder = StepRecorder::default();
        recorder.step("make", || Ok(((), StepResult::new("x").took(Duration::from_millis(1500))))).unwrap();
        let json = serde_json::to_string(recorder.steps()).unwrap();
        assert_eq!(json, r#"[{"step":"make","seconds":1.5,"ok":true}]"#);
    }

    #[test]
    fn times_are_printed_with_three_digits() {
        for (seconds, text) in
            [(0.0, "0.00 us"), (4.2e-6, "4.20 us"), (0.0521, "52.1 ms"), (0.9, "900 ms"), (2.0, "2.00 s")]
        {
            assert_eq!(time(seconds), text);
        }
    }
}
