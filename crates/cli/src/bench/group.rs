//! What the benches of ranks share: this program started as many ranks, and a report by cases.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;
use wholemem_comm::UniqueId;

use crate::cli::RankRole;
use crate::table::{Align, Table};
use crate::terminal::{self, Colour, Tone};

/// Ranks as processes, all of them dead when this is dropped.
#[derive(Debug)]
pub(crate) struct Communicator {
    pub(crate) ranks: Vec<Child>,
    /// They leave when this is closed.
    stay: Vec<ChildStdin>,
    /// What all of them write, unless each has a pipe of its own.
    output: Option<std::io::PipeReader>,
}

impl Communicator {
    /// Starts `count` ranks that all write to one pipe, or each to its own.
    pub(crate) fn start(count: u32, role: impl Fn(u32) -> (RankRole, usize), own: bool) -> Result<Self> {
        let args = |rank| {
            let (role, resident) = role(rank);
            (role, vec!["--resident".to_owned(), resident.to_string()])
        };
        Self::start_with(count, args, own)
    }

    /// As [`start`](Self::start), with whatever arguments a rank's role takes.
    pub(crate) fn start_with(
        count: u32,
        role: impl Fn(u32) -> (RankRole, Vec<String>),
        own: bool,
    ) -> Result<Self> {
        let id = UniqueId::create()?.to_string();
        let (output, write) = std::io::pipe().context("cannot make a pipe")?;
        let mut group = Self { ranks: Vec::new(), stay: Vec::new(), output: Some(output) };
        for rank in 0..count {
            let (role, args) = role(rank);
            let word = role.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            let mut command = Command::new("/proc/self/exe");
            command
                .arg0("wholemem")
                .args(["rank", &word, "--parent", &std::process::id().to_string()])
                .args(args)
                .env("WHOLEMEM_ID", &id)
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", count.to_string())
                .stdin(Stdio::piped());
            if own {
                command.stdout(Stdio::piped());
            } else {
                command.stdout(write.try_clone().context("cannot share a pipe")?);
            }
            let mut child = command.spawn().with_context(|| format!("cannot start rank {rank}"))?;
            group.stay.extend(child.stdin.take());
            group.ranks.push(child);
        }
        Ok(group)
    }

    /// Waits for one byte of each rank.
    pub(crate) fn words(&mut self) -> Result<Vec<u8>> {
        let mut words = vec![0; self.ranks.len()];
        if let Some(output) = &mut self.output {
            output.read_exact(&mut words).context("a rank ended before it said anything")?;
        }
        Ok(words)
    }

    /// Waits for all ranks to end by themselves, which they must do well, and kills nobody.
    pub(crate) fn leave(mut self) -> Result<()> {
        self.stay.clear();
        for (rank, child) in self.ranks.iter_mut().enumerate() {
            let status = child.wait()?;
            ensure!(status.success(), "rank {rank} ended with {status}");
        }
        self.ranks.clear();
        Ok(())
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        for child in &mut self.ranks {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// One case: its parameters, what was measured, and the limit measured in the same run.
#[derive(Debug, Serialize)]
pub(super) struct Case {
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

impl Case {
    /// A case of times, of which the median is the value.
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
        let told = |time: Duration| (time.as_secs_f64() * scale * 1e3).round() / 1e3;
        let (value, limit) = (told(percentile(times, 50)), told(percentile(limits, 50)));
        Self {
            ranks,
            what: what.to_owned(),
            bytes: None,
            value,
            unit,
            limit,
            of_limit: if value > 0.0 { (limit / value * 1e3).round() / 1e3 } else { 1.0 },
            p99: told(percentile(times, 99)),
            max: told(percentile(times, 100)),
            rounds: times.len(),
        }
    }
}

/// The time that half of them do not exceed.
pub(super) fn median(times: &[Duration]) -> Duration {
    percentile(times, 50)
}

/// The time that so many of a hundred do not exceed. Of no times, nothing.
fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or_default()
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    bench: &'static str,
    backend: &'static str,
    device: &'static str,
    ranks: u32,
    verified: bool,
    cases: &'a [Case],
}

/// Prints the cases. Each was checked, or there would have been an error.
pub(super) fn tell(bench: &'static str, title: &str, limit: &str, json: bool, cases: &[Case]) -> Result<()> {
    if json {
        let ranks = cases.iter().map(|case| case.ranks).max().unwrap_or(0);
        let report = Report { bench, backend: "host", device: "sockets", ranks, verified: true, cases };
        return terminal::print_json(&report);
    }
    let columns = ["ranks", "what", "bytes", "median", limit, "of limit", "p99", "max", "unit", "rounds"];
    let mut table = Table::new(columns.map(|name| (name, Align::Right)));
    for case in cases {
        table.row(
            Tone::Plain,
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
    terminal::print(&format!("{title}; every outcome was checked\n\n{}", table.render(Colour::of_stdout())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let times: Vec<_> = (1..=200).rev().map(Duration::from_millis).collect();
        assert_eq!(percentile(&times, 50), Duration::from_millis(100));
        assert_eq!(percentile(&times, 99), Duration::from_millis(198));
        assert_eq!(percentile(&times, 100), Duration::from_millis(200));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn the_limit_is_one_and_farther_from_it_is_less() {
        let [two, one] = [2, 1].map(Duration::from_millis);
        let case = Case::of_times(4, "x", "ms", &[two], &[one]);
        assert_eq!((case.value, case.limit, case.of_limit), (2.0, 1.0, 0.5));
    }
}
