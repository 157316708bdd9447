//! Results and reports of the gather and scatter benchmarks, as JSON and as text.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_hal::Device;

use super::{RowOp, RowsCase};
use crate::args::{IndexChoice, IndexDistribution, KindChoice, LocationChoice, RowShare};
use crate::sample::Summary;

/// The result of one case of a gather or scatter benchmark. Rates count the bytes of moved rows once, although they are read
/// and written.
#[derive(Debug, Clone, Serialize)]
pub struct RowsResult {
    row_bytes: usize,
    index: IndexChoice,
    kind: KindChoice,
    location: LocationChoice,
    spread: IndexDistribution,
    share: RowShare,
    ranks: u32,
    /// The number of ranks that gather or scatter rows at the same time.
    movers: u32,
    /// The number of devices of all ranks. If it is below the number of ranks, ranks share devices.
    devices: u32,
    /// The number of rows in one gather or scatter call.
    pub rows: u64,
    /// The number of gather or scatter calls that were timed together.
    calls: u64,
    /// The length of the table in bytes.
    pub table_bytes: usize,
    value: f64,
    unit: &'static str,
    limit: f64,
    of_limit: f64,
    median: f64,
    limit_median: f64,
    best: f64,
    limit_best: f64,
    /// The time of one gather or scatter call in microseconds.
    call_us: f64,
    rounds: u32,
    /// The time of one round of calls.
    #[serde(skip)]
    pub took: Duration,
    /// The bytes that all ranks together moved in a round.
    #[serde(skip)]
    pub moved: usize,
}

impl RowsResult {
    pub(super) fn new(case: &RowsCase, device: &Device, summary: &Summary) -> Self {
        let moved = case.batch_len() * case.movers() as usize;
        let payload = moved as f64;
        let speed = |time: Duration| rounded(payload / time.as_secs_f64().max(1e-9) / 1e9);
        let Summary { typical, median, best } = *summary;
        let (value, limit) = (speed(typical.wholemem), speed(typical.raw));
        let devices =
            u32::try_from(device.backend().devices().len()).expect("devices are numbered in 32 bits");
        Self {
            row_bytes: case.row_len,
            index: case.index,
            kind: case.kind,
            location: case.location,
            spread: case.spread,
            share: case.share,
            ranks: case.ranks,
            movers: case.movers(),
            devices: devices.min(case.ranks),
            rows: case.rows,
            calls: case.calls,
            table_bytes: case.table_len(),
            value,
            unit: "GB/s",
            limit,
            of_limit: if limit > 0.0 { rounded(value / limit) } else { 1.0 },
            median: speed(median.wholemem),
            limit_median: speed(median.raw),
            best: speed(best.wholemem),
            limit_best: speed(best.raw),
            call_us: rounded(typical.wholemem.as_secs_f64() * 1e6 / case.calls as f64),
            rounds: case.rounds,
            took: typical.wholemem,
            moved,
        }
    }
}

/// Rounds a number to a thousandth, or to a millionth if it is below 0.1.
fn rounded(value: f64) -> f64 {
    let scale = if value.abs() < 0.1 { 1e6 } else { 1e3 };
    (value * scale).round() / scale
}

#[derive(Debug, Serialize)]
struct RowsReport<'a> {
    bench: &'static str,
    backend: String,
    device: String,
    ranks: u32,
    verified: bool,
    cases: &'a [RowsResult],
}

/// Prints the results of benchmark cases, all of which have been verified: a wrong result ends the benchmark with an error.
pub(super) fn print_report(op: RowOp, device: &Device, cases: &[RowsResult], json: bool) -> Result<()> {
    let report = RowsReport {
        bench: match op {
            RowOp::Gather => "gather",
            RowOp::Scatter => "scatter",
        },
        backend: device.backend().kind().to_string(),
        device: device.info().name.clone(),
        ranks: cases.iter().map(|case| case.ranks).max().unwrap_or(0),
        verified: true,
        cases,
    };
    if json {
        terminal::print_json(&report)
    } else {
        terminal::print(&terminal::fitted(&report.render(Colour::of_stdout())))
    }
}

/// Returns the name of an enum value in JSON.
fn word(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => String::new(),
    }
}

impl RowsReport<'_> {
    fn render(&self, colour: Colour) -> String {
        let columns = [
            "row",
            "rows",
            "table",
            "index",
            "spread",
            "ranks",
            "wholemem",
            "copy",
            "of limit",
            "best",
            "us per call",
        ];
        let mut table = TextTable::new(columns.map(|name| match name {
            "table" | "index" | "spread" | "ranks" => (name, Align::Left),
            _ => (name, Align::Right),
        }));
        for case in self.cases {
            let place = format!("{} {}", word(&case.kind), word(&case.location));
            let share =
                if case.share == RowShare::Even { String::new() } else { format!(", {}", word(&case.share)) };
            table.row(
                TextStyle::Plain,
                [
                    RoundedSize(case.row_bytes).to_string(),
                    case.rows.to_string(),
                    place,
                    word(&case.index),
                    word(&case.spread),
                    format!("{}{share}", case.ranks_label()),
                    digits(case.value),
                    digits(case.limit),
                    digits(case.of_limit),
                    digits(case.best),
                    digits(case.call_us),
                ],
            );
        }
        let what = match self.bench {
            "gather" => "gather from a table",
            _ => "scatter to a table",
        };
        let len = self.cases.iter().map(|case| case.table_bytes).max().unwrap_or(0);
        format!(
            "{what} of {}, on {} ({})\nGB/s of rows; the limit is a plain copy of as many bytes; \
            all moved rows were verified\n\n{}",
            RoundedSize(len),
            self.backend,
            self.device,
            table.render(colour)
        )
    }
}

impl RowsResult {
    /// Formats the number of ranks, and how they share devices or rows: `1`, `4 on one device`, `2, one moves`.
    fn ranks_label(&self) -> String {
        let on = match self.devices {
            devices if devices == self.ranks => String::new(),
            1 => " on one device".to_owned(),
            devices => format!(" on {devices} devices"),
        };
        let movers = if self.movers == self.ranks { "" } else { ", one moves" };
        format!("{}{on}{movers}", self.ranks)
    }
}

/// Formats a number with three digits, or as an integer from 100 on.
fn digits(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::super::case::DefaultSizes;
    use super::*;
    use crate::sample::TimePair;

    fn measured(ranks: u32, first_only: bool) -> RowsResult {
        let defaults = DefaultSizes { table: 1 << 30, payload: 1 << 20, max_rows: 1 << 20, ring: 1 << 20 };
        let case = RowsCase { first_only, calls: 8, ..RowsCase::for_demo(RowOp::Gather, ranks, &defaults) };
        let device = Backend::host(HostConfig::virtual_devices(1)).unwrap().device(0).unwrap();
        let pair = |wholemem, raw| TimePair {
            wholemem: Duration::from_micros(wholemem),
            raw: Duration::from_micros(raw),
        };
        let summary = Summary { typical: pair(4000, 2000), median: pair(5000, 2500), best: pair(3000, 1000) };
        RowsResult::new(&case, &device, &summary)
    }

    #[test]
    fn json_has_the_parameters_and_the_common_keys() {
        let expected = concat!(
            r#"{"row_bytes":1024,"index":"i64","kind":"continuous","location":"device","spread":"uniform","#,
            r#""share":"even","ranks":2,"movers":2,"devices":1,"rows":1024,"calls":8,"table_bytes":1073741824,"#,
            r#""value":4.194,"unit":"GB/s","limit":8.389,"of_limit":0.5,"median":3.355,"limit_median":6.711,"#,
            r#""best":5.592,"limit_best":16.777,"call_us":500.0,"rounds":3}"#
        );
        assert_eq!(serde_json::to_string(&measured(2, false)).unwrap(), expected);
    }

    #[test]
    fn the_text_report_names_ranks_that_share_a_device() {
        assert_eq!(measured(1, false).ranks_label(), "1");
        assert_eq!(measured(4, false).ranks_label(), "4 on one device");
        assert_eq!(measured(2, true).ranks_label(), "2 on one device, one moves");
    }

    #[test]
    fn rates_have_three_digits() {
        assert_eq!([1834.4, 12.34, 1.5, 0.0123].map(digits), ["1834", "12.3", "1.50", "0.0123"]);
        assert_eq!(rounded(0.000_123_4), 0.000_123);
    }
}
