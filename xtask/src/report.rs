//! Prints the output of `cargo xtask test`: a heading and a result line for each step, then a table, the failures, and the
//! counts.

use std::env;
use std::fmt::Write;
use std::io::{self, IsTerminal};

use anyhow::{Result, bail};

/// The outcome of a test step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StepOutcome {
    Passed,
    /// The step was skipped, because a tool or device that it needs is missing; the text names it.
    Skipped(String),
    Failed(String),
}

impl StepOutcome {
    /// Returns the text for the outcome in the table. It is understandable without colour.
    fn label(&self) -> String {
        match self {
            Self::Passed => "ok".to_owned(),
            Self::Skipped(reason) => format!("skipped: {reason}"),
            Self::Failed(_) => "FAILED".to_owned(),
        }
    }

    fn style(&self) -> Style {
        match self {
            Self::Passed => Style::Green,
            Self::Skipped(_) => Style::Yellow,
            Self::Failed(_) => Style::Red,
        }
    }
}

/// The result of a test step: name, outcome and duration.
#[derive(Debug)]
pub(crate) struct StepResult {
    pub(crate) name: String,
    pub(crate) outcome: StepOutcome,
    pub(crate) seconds: f64,
}

#[derive(Clone, Copy, Debug)]
enum Style {
    Bold,
    Green,
    Yellow,
    Red,
}

/// The results of the test steps so far, and whether to write in colour.
#[derive(Debug)]
pub(crate) struct StepReport {
    colour: bool,
    steps: Vec<StepResult>,
}

impl StepReport {
    /// Creates a report, in colour if standard output is a terminal and neither `NO_COLOR` nor `TERM=dumb` is set.
    pub(crate) fn on_stdout() -> Self {
        let no_colour = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_some_and(|value| value == "dumb");
        Self { colour: io::stdout().is_terminal() && !no_colour && !dumb, steps: Vec::new() }
    }

    pub(crate) fn add(&mut self, step: StepResult) {
        self.steps.push(step);
    }

    pub(crate) fn has_no_failure(&self) -> bool {
        !self.steps.iter().any(|step| matches!(step.outcome, StepOutcome::Failed(_)))
    }

    pub(crate) fn heading(&self, number: usize, count: usize, name: &str, description: &str) -> String {
        format!("{} {description}", self.paint(&format!("[{number}/{count}] {name}:"), Style::Bold))
    }

    pub(crate) fn result_line(&self, step: &StepResult) -> String {
        let label = self.paint(&step.outcome.label(), step.outcome.style());
        let mut line = format!("{}: {label} ({:.1} s)", step.name, step.seconds);
        if let StepOutcome::Failed(reason) = &step.outcome {
            let _ = write!(line, "\n{} {reason}", self.paint("error:", Style::Red));
        }
        line
    }

    /// Returns the summary of a test run: a table of the steps, the failures with their reasons, and the counts on the last
    /// line.
    pub(crate) fn summary(&self) -> String {
        let mut text = self.table();
        text.push('\n');
        let mut failed = 0;
        let mut skipped = 0;
        for step in &self.steps {
            match &step.outcome {
                StepOutcome::Passed => {}
                StepOutcome::Skipped(_) => skipped += 1,
                StepOutcome::Failed(reason) => {
                    failed += 1;
                    let _ = writeln!(text, "{} {}: {reason}", self.paint("error:", Style::Red), step.name);
                }
            }
        }
        let passed = self.steps.len() - failed - skipped;
        let _ = writeln!(text, "{passed} passed, {failed} failed, {skipped} skipped");
        text
    }

    fn table(&self) -> String {
        let rows: Vec<_> = self
            .steps
            .iter()
            .map(|step| (step, step.outcome.label(), format!("{:.1}", step.seconds)))
            .collect();
        let width = |least: &str, longest: Option<usize>| longest.unwrap_or(0).max(least.len());
        let name = width("step", rows.iter().map(|(step, ..)| step.name.len()).max());
        let result = width("result", rows.iter().map(|(_, label, _)| label.len()).max());
        let seconds = width("seconds", rows.iter().map(|(_, _, time)| time.len()).max());

        let head = format!("{:name$}  {:result$}  {:>seconds$}", "step", "result", "seconds");
        let mut table = self.paint(&head, Style::Bold);
        table.push('\n');
        for (step, label, time) in &rows {
            let label = self.paint(&format!("{label:result$}"), step.outcome.style());
            let _ = writeln!(table, "{:name$}  {label}  {time:>seconds$}", step.name);
        }
        table
    }

    fn paint(&self, text: &str, style: Style) -> String {
        let code = match style {
            _ if !self.colour => return text.to_owned(),
            Style::Bold => "1",
            Style::Green => "32",
            Style::Yellow => "33",
            Style::Red => "1;31",
        };
        format!("\u{1b}[{code}m{text}\u{1b}[0m")
    }
}

/// Prints the findings of a check, one on each line, and returns an error if there are any.
pub(crate) fn no_findings(findings: Vec<String>) -> Result<()> {
    for finding in &findings {
        println!("{finding}");
    }
    match findings.as_slice() {
        [] => Ok(()),
        [only] => bail!("{only}"),
        [first, ..] => bail!(
            "the check found {count} problems, which are listed on stdout; the first: {first}",
            count = findings.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_result(name: &str, outcome: StepOutcome, seconds: f64) -> StepResult {
        StepResult { name: name.to_owned(), outcome, seconds }
    }

    fn report(colour: bool) -> StepReport {
        let steps = vec![
            step_result("fmt", StepOutcome::Passed, 0.91),
            step_result("tests", StepOutcome::Failed("cargo test: exit status: 101".to_owned()), 123.44),
            step_result("miri", StepOutcome::Skipped("no nightly toolchain".to_owned()), 0.0),
        ];
        StepReport { colour, steps }
    }

    #[test]
    fn the_summary_is_a_table_then_failures_then_the_count() {
        assert_eq!(
            report(false).summary(),
            "step   result                         seconds\n\
             fmt    ok                                 0.9\n\
             tests  FAILED                           123.4\n\
             miri   skipped: no nightly toolchain      0.0\n\
             \n\
             error: tests: cargo test: exit status: 101\n\
             1 passed, 1 failed, 1 skipped\n"
        );
    }

    #[test]
    fn colour_does_not_change_text_or_columns() {
        let mut stripped = report(true).summary();
        assert_ne!(stripped, report(false).summary());
        for code in ["\u{1b}[1;31m", "\u{1b}[1m", "\u{1b}[32m", "\u{1b}[33m", "\u{1b}[0m"] {
            stripped = stripped.replace(code, "");
        }
        assert_eq!(stripped, report(false).summary());
    }

    #[test]
    fn the_count_is_never_coloured() {
        assert!(report(true).summary().ends_with("\n1 passed, 1 failed, 1 skipped\n"));
    }

    #[test]
    fn only_failed_steps_fail_the_run() {
        let mut report = StepReport { colour: false, steps: Vec::new() };
        report.add(step_result("miri", StepOutcome::Skipped("no rustup".to_owned()), 0.0));
        assert!(report.has_no_failure());
        report.add(step_result("tests", StepOutcome::Failed("exit status: 101".to_owned()), 0.0));
        assert!(!report.has_no_failure());
    }

    #[test]
    fn a_result_line_has_the_time_and_the_reason() {
        let failed = step_result("crate-graph", StepOutcome::Failed("2 findings".to_owned()), 0.26);
        assert_eq!(report(false).result_line(&failed), "crate-graph: FAILED (0.3 s)\nerror: 2 findings");
    }

    #[test]
    fn findings_are_an_error() {
        no_findings(Vec::new()).unwrap();
        let failure = |findings: &[&str]| {
            no_findings(findings.iter().map(|finding| (*finding).to_owned()).collect())
                .unwrap_err()
                .to_string()
        };
        assert_eq!(failure(&["a.rs: is long"]), "a.rs: is long");
        assert_eq!(
            failure(&["a.rs: is long", "b.rs: is long"]),
            "the check found 2 problems, which are listed on stdout; the first: a.rs: is long"
        );
    }
}
