//! Results and reports of the collective benchmarks, as JSON and as text.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_hal::{BackendKind, Device};

use super::case::CollectiveCase;
use super::limit::FlagMethod;
use super::tune::Thresholds;
use super::{CaseOutcome, CollectiveOp};
use crate::args::{BufferKind, LaunchMode, OutputPlace};

/// The result of one case of a collective benchmark: the time of a call on the slowest rank.
#[derive(Debug, Clone, Serialize)]
pub(super) struct CollectiveResult {
    pub(super) ranks: u32,
    /// The length of each rank's input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dtype: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) algorithm: Option<String>,
    pub(super) mode: LaunchMode,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) buffers: Option<BufferKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) place: Option<OutputPlace>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pinned: Option<&'static str>,
    /// The number of calls that were timed together (`calls`), and of buffers that they used cyclically (`slots`).
    calls: u32,
    slots: u32,
    pub(super) value: f64,
    unit: &'static str,
    limit: f64,
    of_limit: f64,
    best: f64,
    /// The time of the thread that makes a call; on a GPU, the time in which the call is enqueued.
    caller: f64,
    /// The two terms of the lower limit of the call's time: the time of a flag's round trip, and the time of a plain copy.
    flag: f64,
    copy: f64,
    rounds: usize,
    /// The method by which the flag's round trip was measured.
    flag_by: FlagMethod,
}

impl CollectiveResult {
    pub(super) fn new(case: &CollectiveCase, outcome: &CaseOutcome) -> Self {
        let moves = case.what != CollectiveOp::Barrier;
        let reduces = case.what == CollectiveOp::Allreduce;
        let mut rounds = outcome.rounds.clone();
        rounds.sort_unstable();
        let median = rounds.get(rounds.len() / 2).copied().unwrap_or_default();
        let (value, limit) = (micros(median), micros(outcome.flag.took + outcome.copy));
        Self {
            ranks: case.ranks,
            bytes: moves.then_some(case.len),
            dtype: reduces.then(|| case.dtype().to_string()),
            op: reduces.then(|| case.op().to_string()),
            algorithm: outcome.algorithm.clone(),
            mode: case.mode,
            buffers: moves.then_some(case.buffers),
            place: reduces.then_some(case.place),
            pinned: case.bound.then_some("a core each"),
            calls: case.calls,
            slots: case.slots,
            value,
            unit: "us",
            limit,
            of_limit: if value > 0.0 { (limit / value * 1e3).round() / 1e3 } else { 1.0 },
            best: micros(rounds.first().copied().unwrap_or_default()),
            caller: micros(outcome.caller),
            flag: micros(outcome.flag.took),
            copy: micros(outcome.copy),
            rounds: rounds.len(),
            flag_by: outcome.flag.by,
        }
    }
}

/// Converts a time to microseconds, rounded to nanoseconds.
fn micros(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

#[derive(Debug, Serialize)]
struct CollectiveReport<'a> {
    bench: CollectiveOp,
    backend: String,
    device: String,
    ranks: u32,
    verified: bool,
    cases: &'a [CollectiveResult],
    /// The thresholds between the all-reduce algorithms, if `--tune` is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    tuning: Option<&'a [Thresholds]>,
}

/// Prints the results of benchmark cases, all of which have been verified: a wrong result ends the benchmark with an error.
pub(super) fn print_report(
    what: CollectiveOp,
    device: &Device,
    cases: &[CollectiveResult],
    tuning: Option<&[Thresholds]>,
    json: bool,
) -> Result<()> {
    let ranks = cases.iter().map(|case| case.ranks).max().unwrap_or(0);
    let report = CollectiveReport {
        bench: what,
        backend: device.backend().kind().to_string(),
        device: place(device, ranks),
        ranks,
        verified: true,
        cases,
        tuning,
    };
    if json {
        terminal::print_json(&report)
    } else {
        terminal::print(&terminal::fitted(&report.render(Colour::of_stdout())))
    }
}

/// Returns the name of the ranks' devices, and whether ranks share a device.
fn place(device: &Device, ranks: u32) -> String {
    let (name, devices) = (&device.info().name, device.backend().devices().len());
    match device.backend().kind() {
        BackendKind::Cuda if devices == 1 && ranks > 1 => format!("{name}, shared by all ranks"),
        BackendKind::Cuda if devices < ranks as usize => format!("{devices} x {name}, shared by ranks"),
        _ => name.clone(),
    }
}

impl CollectiveReport<'_> {
    fn render(&self, colour: Colour) -> String {
        let columns = [
            "ranks",
            "size",
            "buffers",
            "algorithm",
            "mode",
            "wholemem",
            "limit",
            "of limit",
            "best",
            "calls",
        ];
        let mut table = TextTable::new(columns.map(|name| match name {
            "buffers" | "algorithm" | "mode" => (name, Align::Left),
            _ => (name, Align::Right),
        }));
        for case in self.cases {
            table.row(
                TextStyle::Plain,
                [
                    case.ranks.to_string(),
                    case.bytes.map_or_else(String::new, |bytes| RoundedSize(bytes).to_string()),
                    case.buffers.map_or_else(String::new, |at| buffers_label(at, case.place)),
                    case.algorithm.clone().unwrap_or_default(),
                    if case.mode == LaunchMode::Graph { "graph" } else { "eager" }.to_owned(),
                    digits(case.value),
                    digits(case.limit),
                    digits(case.of_limit),
                    digits(case.best),
                    case.calls.to_string(),
                ],
            );
        }
        let what = match self.bench {
            CollectiveOp::Allreduce => "allreduce",
            CollectiveOp::Allgather => "allgather",
            CollectiveOp::Broadcast => "broadcast",
            CollectiveOp::Barrier => "barrier",
        };
        let flag = match self.cases.first().map(|case| case.flag_by) {
            Some(FlagMethod::BarrierKernel) => "a barrier kernel",
            _ => "a flag's round trip",
        };
        let copy = if self.bench != CollectiveOp::Barrier { " and a plain copy" } else { "" };
        let best: String = self.tuning.unwrap_or_default().iter().map(|best| format!("\n{best}\n")).collect();
        format!(
            "{what}, on {} ({})\nmicroseconds per call on the slowest rank; the limit is {flag}{copy}; every round was verified\n\n{}{best}",
            self.backend,
            self.device,
            table.render(colour)
        )
    }
}

/// Formats the kind of the buffers, and whether calls are in place, such as `window` or `staged, in place`.
fn buffers_label(buffers: BufferKind, place: Option<OutputPlace>) -> String {
    let at = match buffers {
        BufferKind::Window => "window",
        BufferKind::Staged => "staged",
        BufferKind::Registered => "registered",
    };
    let place = if place == Some(OutputPlace::In) { ", in place" } else { "" };
    format!("{at}{place}")
}

/// Formats a number with three digits, or as an integer from 100 on.
fn digits(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value => format!("{value:.2}"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::limit::FlagTime;
    use super::*;

    /// Returns the result of a case in which a call took `took` microseconds in the fastest of three rounds.
    pub(in super::super) fn measured(case: &CollectiveCase, algorithm: &str, took: u64) -> CollectiveResult {
        let flag = FlagTime { took: Duration::from_micros(1), by: FlagMethod::PingPong };
        let rounds = [took, took + 2, 1000].map(Duration::from_micros).to_vec();
        let algorithm = Some(algorithm.to_owned());
        let [caller, copy] = [took, 4].map(Duration::from_micros);
        CollectiveResult::new(case, &CaseOutcome { rounds, caller, algorithm, flag, copy })
    }

    #[test]
    fn json_has_the_parameters_and_the_common_keys() {
        let case = super::super::case::tests::reductions(&["--ranks", "2", "--sizes", "1KiB"]);
        let expected = concat!(
            r#"{"ranks":2,"bytes":1024,"dtype":"f32","op":"sum","algorithm":"packets","mode":"eager","#,
            r#""buffers":"window","place":"out","pinned":"a core each","calls":4096,"slots":1,"value":10.0,"#,
            r#""unit":"us","limit":5.0,"of_limit":0.5,"best":8.0,"caller":8.0,"flag":1.0,"copy":4.0,"rounds":3,"#,
            r#""flag_by":"ping-pong"}"#
        );
        assert_eq!(serde_json::to_string(&measured(&case[0], "packets", 8)).unwrap(), expected);
    }

    #[test]
    fn the_text_report_names_buffers_and_places() {
        assert_eq!(buffers_label(BufferKind::Window, Some(OutputPlace::Out)), "window");
        assert_eq!(buffers_label(BufferKind::Staged, Some(OutputPlace::In)), "staged, in place");
        assert_eq!(buffers_label(BufferKind::Registered, None), "registered");
        assert_eq!([1834.4, 12.34, 0.123].map(digits), ["1834", "12.3", "0.12"]);
    }
}
