//! What a run says: a heading and an ending for each step, then a table, the failures again, and the count.

use std::env;
use std::fmt::Write;
use std::io::{self, IsTerminal};

use anyhow::{Result, bail};

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// The machine lacks what the step needs, and why.
    Skipped(String),
    Failed(String),
}

impl Outcome {
    /// The words alone carry the meaning; colour only repeats it.
    fn words(&self) -> String {
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

/// A step that has run.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) seconds: f64,
}

#[derive(Clone, Copy, Debug)]
enum Style {
    Bold,
    Green,
    Yellow,
    Red,
}

/// The steps that have run so far, and whether to write in colour.
#[derive(Debug)]
pub(crate) struct Report {
    colour: bool,
    steps: Vec<Ended>,
}

impl Report {
    /// A report in colour only where standard output is a terminal and nothing forbids it.
    pub(crate) fn on_stdout() -> Self {
        let no_colour = env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_some_and(|value| value == "dumb");
        Self { colour: io::stdout().is_terminal() && !no_colour && !dumb, steps: Vec::new() }
    }

    pub(crate) fn add(&mut self, step: Ended) {
        self.steps.push(step);
    }

    pub(crate) fn all_well(&self) -> bool {
        !self.steps.iter().any(|step| matches!(step.outcome, Outcome::Failed(_)))
    }

    pub(crate) fn heading(&self, number: usize, of: usize, name: &str, sentence: &str) -> String {
        format!("{} {sentence}", self.paint(&format!("[{number}/{of}] {name}:"), Style::Bold))
    }

    pub(crate) fn ending(&self, step: &Ended) -> String {
        let words = self.paint(&step.outcome.words(), step.outcome.style());
        let mut ending = format!("{}: {words} ({:.1} s)", step.name, step.seconds);
        if let Outcome::Failed(reason) = &step.outcome {
            let _ = write!(ending, "\n{} {reason}", self.paint("error:", Style::Red));
        }
        ending
    }

    /// The table, the failures with their reasons, and the count of steps alone on the last line.
    pub(crate) fn summary(&self) -> String {
        let mut text = self.table();
        text.push('\n');
        let mut failed = 0;
        let mut skipped = 0;
        for step in &self.steps {
            match &step.outcome {
                Outcome::Passed => {}
                Outcome::Skipped(_) => skipped += 1,
                Outcome::Failed(reason) => {
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
            .map(|step| (step, step.outcome.words(), format!("{:.1}", step.seconds)))
            .collect();
        let width = |least: &str, longest: Option<usize>| longest.unwrap_or(0).max(least.len());
        let name = width("step", rows.iter().map(|(step, ..)| step.name.len()).max());
        let result = width("result", rows.iter().map(|(_, words, _)| words.len()).max());
        let seconds = width("seconds", rows.iter().map(|(_, _, time)| time.len()).max());

        let head = format!("{:name$}  {:result$}  {:>seconds$}", "step", "result", "seconds");
        let mut table = self.paint(&head, Style::Bold);
        table.push('\n');
        for (step, words, time) in &rows {
            let words = self.paint(&format!("{words:result$}"), step.outcome.style());
            let _ = writeln!(table, "{:name$}  {words}  {time:>seconds$}", step.name);
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

/// Prints what a check has found, one line each, and fails if that is anything.
pub(crate) fn no_findings(findings: Vec<String>) -> Result<()> {
    for finding in &findings {
        println!("{finding}");
    }
    match findings.as_slice() {
        [] => Ok(()),
        [only] => bail!("{only}"),
        [first, ..] => bail!("{} findings, the first: {first}", findings.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(name: &str, outcome: Outcome, seconds: f64) -> Ended {
        Ended { name: name.to_owned(), outcome, seconds }
    }

    fn report(colour: bool) -> Report {
        let steps = vec![
            ended("fmt", Outcome::Passed, 0.91),
            ended("tests", Outcome::Failed("cargo test: exit status: 101".to_owned()), 123.44),
            ended("miri", Outcome::Skipped("no nightly toolchain".to_owned()), 0.0),
        ];
        Report { colour, steps }
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
    fn colour_changes_no_word_and_no_column() {
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
    fn a_failure_is_not_well_and_a_skip_is() {
        let mut report = Report { colour: false, steps: Vec::new() };
        report.add(ended("miri", Outcome::Skipped("no rustup".to_owned()), 0.0));
        assert!(report.all_well());
        report.add(ended("tests", Outcome::Failed("exit status: 101".to_owned()), 0.0));
        assert!(!report.all_well());
    }

    #[test]
    fn an_ending_carries_the_time_and_the_reason() {
        let failed = ended("crate-graph", Outcome::Failed("2 findings".to_owned()), 0.26);
        assert_eq!(report(false).ending(&failed), "crate-graph: FAILED (0.3 s)\nerror: 2 findings");
    }

    #[test]
    fn findings_are_a_failure_and_none_is_not() {
        no_findings(Vec::new()).unwrap();
        let failure = |findings: &[&str]| {
            no_findings(findings.iter().map(|finding| (*finding).to_owned()).collect())
                .unwrap_err()
                .to_string()
        };
        assert_eq!(failure(&["a.rs: is long"]), "a.rs: is long");
        assert_eq!(failure(&["a.rs: is long", "b.rs: is long"]), "2 findings, the first: a.rs: is long");
    }
}
