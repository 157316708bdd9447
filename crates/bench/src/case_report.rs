//! Results and reports of the benchmarks `bootstrap`, `comm`, `death` and `store`: one result for each case.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};

/// The result of one benchmark case: its parameters, the measured times, and the limit (the least possible time) that was
/// measured in the same run.
#[derive(Debug, Serialize)]
pub(super) struct CaseResult {
    pub(super) ranks: u32,
    pub(super) what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<usize>,
    pub(super) value: f64,
    pub(super) unit: &'static str,
    pub(super) limit: f64,
    pub(super) of_limit: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
    pub(super) rounds: usize,
}

impl CaseResult {
    /// Creates the result of a benchmark case from measured times. The reported value is their median.
    pub(super) fn of_times(
        ranks: u32,
        what: &str,
        unit: &'static str,
        times: &[Duration],
        limits: &[Duration],
    ) -> Self {
        let scale = match unit {
            "ms" => 1e3,
            _ => 1e6,
        };
        let rounded = |time: Duration| (time.as_secs_f64() * scale * 1e3).round() / 1e3;
        let (value, limit) = (rounded(percentile(times, 50)), rounded(percentile(limits, 50)));
        Self {
            ranks,
            what: what.to_owned(),
            bytes: None,
            value,
            unit,
            limit,
            of_limit: if value > 0.0 { (limit / value * 1e3).round() / 1e3 } else { 1.0 },
            p99: rounded(percentile(times, 99)),
            max: rounded(percentile(times, 100)),
            rounds: times.len(),
        }
    }
}

/// Returns the median of `times`, or zero if there are none.
pub(super) fn median(times: &[Duration]) -> Duration {
    percentile(times, 50)
}

/// Returns the nearest-rank percentile of `times`, or zero if there are none.
fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or_default()
}

#[derive(Debug, Serialize)]
struct CasesReport<'a> {
    bench: &'static str,
    backend: &'static str,
    device: &'static str,
    ranks: u32,
    verified: bool,
    cases: &'a [CaseResult],
}

/// Prints the results of benchmark cases, all of which have been verified: a wrong result ends the benchmark with an error.
pub(super) fn print_cases(
    bench: &'static str,
    title: &str,
    limit: &str,
    json: bool,
    cases: &[CaseResult],
) -> Result<()> {
    if json {
        let ranks = cases.iter().map(|case| case.ranks).max().unwrap_or(0);
        let report = CasesReport { bench, backend: "host", device: "sockets", ranks, verified: true, cases };
        return terminal::print_json(&report);
    }
    let columns = ["ranks", "what", "bytes", "median", limit, "of limit", "p99", "max", "unit", "rounds"];
    let mut table = TextTable::new(columns.map(|name| (name, Align::Right)));
    for case in cases {
        table.row(
            TextStyle::Plain,
            [
                case.ranks.to_string(),
                case.what.clone(),
                case.bytes.map_or_else(String::new, |bytes| bytes.to_string()),
                format!("{:.1}", case.value),
                format!("{:.1}", case.limit),
                format!("{:.2}", case.of_limit),
                format!("{:.1}", case.p99),
                format!("{:.1}", case.max),
                case.unit.to_owned(),
                case.rounds.to_string(),
            ],
        );
    }
    let title = terminal::fitted(&format!("{title}; every result was verified\n\n"));
    terminal::print(&(title + &table.render(Colour::of_stdout())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_times() {
        let times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(percentile(&times, 50), Duration::from_millis(100));
        assert_eq!(percentile(&times, 99), Duration::from_millis(198));
        assert_eq!(percentile(&times, 100), Duration::from_millis(200));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn of_limit_is_the_limit_divided_by_the_value() {
        let [two, one] = [2, 1].map(Duration::from_millis);
        let case = CaseResult::of_times(4, "x", "ms", &[two], &[one]);
        assert_eq!((case.value, case.limit, case.of_limit), (2.0, 1.0, 0.5));
    }
}
