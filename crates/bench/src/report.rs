//! Results and report of a benchmark over many memory sizes, as JSON and as text.

use std::time::Duration;

use anyhow::{Result, bail};
use serde::Serialize;
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_hal::Device;

use super::comparison::Comparison;
use super::sample::{PairedTimes, Summary};

/// The report of a benchmark over many memory sizes.
#[derive(Debug, Serialize)]
pub(super) struct SweepReport {
    bench: &'static str,
    backend: String,
    device: String,
    ranks: usize,
    /// True if all results were verified and correct.
    verified: bool,
    pub(super) cases: Vec<SizeResult>,
    /// The reason why larger memory sizes were not measured, if so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stopped: Option<String>,
}

/// The result of a benchmark at one memory size.
#[derive(Debug, Serialize)]
pub(super) struct SizeResult {
    pub(super) bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<&'static str>,
    value: f64,
    unit: &'static str,
    limit: f64,
    of_limit: f64,
    median: f64,
    limit_median: f64,
    best: f64,
    limit_best: f64,
    pub(super) rounds: u32,
    #[serde(skip)]
    pub(super) mismatch: Option<String>,
}

impl SizeResult {
    pub(super) fn new(
        bytes: usize,
        pinned: Option<&'static str>,
        paired: &PairedTimes,
        mismatch: Option<String>,
    ) -> Self {
        let Summary { typical, median, best } = paired.summary();
        let [value, limit] = [typical.wholemem, typical.raw].map(|time| time.as_secs_f64());
        Self {
            bytes,
            pinned,
            value: micros(typical.wholemem),
            unit: "us",
            limit: micros(typical.raw),
            of_limit: if value > 0.0 { rounded(limit / value) } else { 1.0 },
            median: micros(median.wholemem),
            limit_median: micros(median.raw),
            best: micros(best.wholemem),
            limit_best: micros(best.raw),
            rounds: paired.rounds(),
            mismatch,
        }
    }
}

/// Converts a time to microseconds, rounded to nanoseconds.
fn micros(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e6)
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

impl SweepReport {
    pub(super) fn new<C: Comparison>(device: &Device) -> Self {
        Self {
            bench: C::NAME,
            backend: device.backend().kind().to_string(),
            device: device.info().name.clone(),
            ranks: C::RANKS,
            verified: true,
            cases: Vec::new(),
            stopped: None,
        }
    }

    pub(super) fn push(&mut self, case: SizeResult) {
        self.verified &= case.mismatch.is_none();
        self.cases.push(case);
    }

    /// Records that larger memory sizes are not measured, and prints the reason.
    pub(super) fn stop(&mut self, why: &str) {
        terminal::note(&format!("stopped before {why}"));
        self.stopped = Some(why.to_owned());
    }

    /// Returns an error if the result of any memory size was wrong.
    pub(super) fn check_outcomes(&self) -> Result<()> {
        for case in &self.cases {
            if let Some(mismatch) = &case.mismatch {
                bail!("{}: {mismatch}", RoundedSize(case.bytes));
            }
        }
        Ok(())
    }

    pub(super) fn render(&self, title: &str, colour: Colour) -> String {
        let columns = ["size", "wholemem", "raw calls", "ratio", "best", "raw best", "rounds"];
        let mut table = TextTable::new(columns.map(|name| (name, Align::Right)));
        for case in &self.cases {
            let ratio = case.value / case.limit;
            let tone = if case.mismatch.is_none() { TextStyle::Plain } else { TextStyle::Error };
            let time = |time: f64| format!("{time:.1}");
            table.row(
                tone,
                [
                    RoundedSize(case.bytes).to_string(),
                    time(case.value),
                    time(case.limit),
                    format!("{ratio:.2}"),
                    time(case.best),
                    time(case.limit_best),
                    case.rounds.to_string(),
                ],
            );
        }
        let pinned = self.cases.iter().find_map(|case| case.pinned);
        let pinned = pinned.map(|where_to| format!(", pinned to {where_to}"));
        let verified = if self.verified { "every round was verified" } else { "a check FAILED" };
        format!(
            "{title}, on {} ({}), {} process{}{}\nmicroseconds; {verified}\n\n{}",
            self.backend,
            self.device,
            self.ranks,
            if self.ranks == 1 { "" } else { "es" },
            pinned.unwrap_or_default(),
            table.render(colour)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::Implementation;
    use super::*;
    use crate::sample::TimedRun;

    fn paired(wholemem: u64, raw: u64) -> PairedTimes {
        let mut paired = PairedTimes::default();
        let mut once = |implementation| {
            let took =
                Duration::from_nanos(if implementation == Implementation::Wholemem { wholemem } else { raw });
            Ok(TimedRun { took, mismatch: None })
        };
        paired.round(&mut once).unwrap();
        paired
    }

    fn example(mismatch: Option<String>) -> SweepReport {
        let mut report = SweepReport {
            bench: "share",
            backend: "host".to_owned(),
            device: "NUMA node 0".to_owned(),
            ranks: 2,
            verified: true,
            cases: Vec::new(),
            stopped: None,
        };
        report.push(SizeResult::new(1 << 16, Some("one core"), &paired(25_000, 20_000), mismatch));
        report
    }

    #[test]
    fn json_has_the_common_keys() {
        let expected = concat!(
            r#"{"bench":"share","backend":"host","device":"NUMA node 0","ranks":2,"verified":true,"cases":["#,
            r#"{"bytes":65536,"pinned":"one core","value":25.0,"unit":"us","limit":20.0,"of_limit":0.8,"#,
            r#""median":25.0,"limit_median":20.0,"best":25.0,"limit_best":20.0,"rounds":1}]}"#
        );
        assert_eq!(serde_json::to_string(&example(None)).unwrap(), expected);
    }

    #[test]
    fn the_text_report_has_the_ratio_and_the_conditions() {
        let expected = "\
share it, on host (NUMA node 0), 2 processes, pinned to one core
microseconds; every round was verified

    size  wholemem  raw calls  ratio  best  raw best  rounds
  64 KiB      25.0       20.0   1.25  25.0      20.0       1
";
        assert_eq!(example(None).render("share it", Colour::Off), expected);
    }

    #[test]
    fn a_mismatch_is_in_both_reports_and_is_an_error() {
        let report = example(Some("the last byte is 3".to_owned()));
        assert!(!report.verified);
        assert!(report.render("share it", Colour::Off).contains("a check FAILED"));
        assert_eq!(report.check_outcomes().unwrap_err().to_string(), "64 KiB: the last byte is 3");
    }

    #[test]
    fn a_time_of_zero_does_not_divide_by_zero() {
        assert_eq!(SizeResult::new(1, None, &paired(0, 0), None).of_limit, 1.0);
    }
}
