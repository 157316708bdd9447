//! The recorder of the tour: times each step, keeps what came of it, and shows what is going on meanwhile.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::TextStyle;

/// What a step did, once it has checked it.
#[derive(Debug, Default)]
pub(super) struct StepResult {
    /// What happened, for people.
    what: String,
    /// How long it took, where that is not the time of the whole step.
    took: Option<Duration>,
    /// How many bytes moved.
    moved: Option<usize>,
}

impl StepResult {
    pub(super) fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), ..Self::default() }
    }

    /// It was timed elsewhere.
    pub(super) fn took(self, time: Duration) -> Self {
        Self { took: Some(time), ..self }
    }

    /// So many bytes moved.
    pub(super) fn moved(self, len: usize) -> Self {
        Self { moved: Some(len), ..self }
    }
}

/// A step that was played.
#[derive(Debug, Serialize)]
pub(super) struct StepRecord {
    step: &'static str,
    seconds: f64,
    ok: bool,
    #[serde(skip)]
    what: String,
    #[serde(skip)]
    moved: Option<usize>,
}

/// The steps so far.
#[derive(Debug, Default)]
pub(super) struct StepRecorder {
    steps: Vec<StepRecord>,
}

impl StepRecorder {
    /// Plays a step. What it returns besides what it did is for the steps after it.
    ///
    /// # Errors
    /// Why it failed, which is kept too.
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
            what: done.what,
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
            let tone = if step.ok { TextStyle::Plain } else { TextStyle::Error };
            let rate = step.moved.map(|len| format!("{:.1} GB/s", len as f64 / step.seconds / 1e9));
            let cells =
                [step.step.to_owned(), step.what.clone(), time(step.seconds), rate.unwrap_or_default()];
            table.row(tone, cells);
        }
        table
    }
}

/// A time with three digits, in the unit that suits it.
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
    fn a_step_that_fails_is_kept_as_failed_and_named_in_the_error() {
        let mut recorder = StepRecorder::default();
        let done = StepResult::new("made it").took(Duration::from_millis(20)).moved(1 << 30);
        assert_eq!(recorder.step("make", || Ok((7, done))).unwrap(), 7);
        let error =
            recorder.step("check", || Err::<((), StepResult), _>(anyhow!("byte 3 is wrong"))).unwrap_err();
        assert_eq!(format!("{error:#}"), "step `check`: byte 3 is wrong");

        let oks: Vec<_> = recorder.steps().iter().map(|step| (step.step, step.ok)).collect();
        assert_eq!(oks, [("make", true), ("check", false)]);
        let text = recorder.table().render(Colour::Off);
        assert!(text.contains("  make   made it  20.0 ms  53.7 GB/s\n"), "{text}");
        assert!(text.contains("  check  FAILED"), "{text}");
    }

    #[test]
    fn json_holds_the_step_its_time_and_its_outcome() {
        let mut recorder = StepRecorder::default();
        recorder.step("make", || Ok(((), StepResult::new("x").took(Duration::from_millis(1500))))).unwrap();
        let json = serde_json::to_string(recorder.steps()).unwrap();
        assert_eq!(json, r#"[{"step":"make","seconds":1.5,"ok":true}]"#);
    }

    #[test]
    fn times_are_read_at_a_glance() {
        for (seconds, text) in
            [(0.0, "0.00 us"), (4.2e-6, "4.20 us"), (0.0521, "52.1 ms"), (0.9, "900 ms"), (2.0, "2.00 s")]
        {
            assert_eq!(time(seconds), text);
        }
    }
}
