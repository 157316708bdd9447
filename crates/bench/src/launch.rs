//! `wholemem bench launch`: measures launches of empty kernels, by the driver alone and through wholemem, with parameters of several
//! lengths.
//!
//! All cases alternate in one process, so differences between them are not differences between processes, which are larger.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use wholemem_command::backend::{self, BackendChoice};
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_hal::Device;
use wholemem_hal::limits::{EmptyLaunches, LaunchMethod, LaunchTime};

use super::alloc::raw_error;
use crate::args::LaunchArgs;

#[derive(Debug, Serialize)]
struct LaunchReport {
    bench: &'static str,
    backend: String,
    device: String,
    ranks: usize,
    verified: bool,
    cases: Vec<LaunchResult>,
}

#[derive(Debug, Serialize)]
struct LaunchResult {
    parameter_bytes: usize,
    by: &'static str,
    /// The time of the calling thread.
    value: f64,
    unit: &'static str,
    best: f64,
    /// The time on the device.
    elapsed: f64,
    calls: u32,
    rounds: u32,
}

pub(super) fn run(args: &LaunchArgs) -> Result<()> {
    let device = backend::open(BackendChoice::Cuda)?.backend.device(0)?;
    let report = LaunchReport {
        bench: "launch",
        backend: device.backend().kind().to_string(),
        device: device.info().name.clone(),
        ranks: 1,
        verified: true,
        cases: measure(&device, args.calls, args.rounds)?,
    };
    if args.json {
        terminal::print_json(&report)
    } else {
        terminal::print(&report.render(Colour::of_stdout()))
    }
}

fn measure(device: &Device, calls: u32, rounds: u32) -> Result<Vec<LaunchResult>> {
    let launches = EmptyLaunches::load(device).map_err(raw_error)?;
    let lens: Vec<_> = launches.parameter_lens().collect();
    let cases: Vec<_> =
        (0..lens.len()).flat_map(|kernel| LaunchMethod::ALL.map(|method| (kernel, method))).collect();
    let mut times = vec![Vec::new(); cases.len()];
    let progress = ProgressDisplay::rounds("launches", rounds as usize);
    // Round 0 is a warm-up and is not counted.
    for round in 0..=rounds {
        for (&(kernel, method), times) in cases.iter().zip(&mut times) {
            let took = launches.measure(kernel, method, calls).map_err(raw_error)?;
            if round > 0 {
                times.push(took);
            }
        }
        if round > 0 {
            progress.advance(1);
        }
    }
    let result = |(&(kernel, method), times): (&(usize, LaunchMethod), &Vec<LaunchTime>)| {
        let sorted = |time: fn(&LaunchTime) -> Duration| {
            let mut all: Vec<_> = times.iter().map(time).collect();
            all.sort_unstable();
            all
        };
        let (caller, elapsed) = (sorted(|time| time.caller), sorted(|time| time.device));
        LaunchResult {
            parameter_bytes: lens[kernel],
            by: name_of(method),
            value: micros(caller[caller.len() / 2]),
            unit: "us",
            best: micros(caller[0]),
            elapsed: micros(elapsed[elapsed.len() / 2]),
            calls,
            rounds,
        }
    };
    Ok(cases.iter().zip(&times).map(result).collect())
}

fn name_of(method: LaunchMethod) -> &'static str {
    match method {
        LaunchMethod::DriverInContext => "driver, in its context",
        LaunchMethod::Driver => "driver",
        LaunchMethod::Stream => "wholemem",
    }
}

/// Converts a time to microseconds, rounded to nanoseconds.
fn micros(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

impl LaunchReport {
    fn render(&self, colour: Colour) -> String {
        let columns = ["parameters", "by", "caller", "best", "device"];
        let mut table = TextTable::new(columns.map(|name| match name {
            "by" => (name, Align::Left),
            _ => (name, Align::Right),
        }));
        for case in &self.cases {
            let row = [
                format!("{} B", case.parameter_bytes),
                case.by.to_owned(),
                format!("{:.2}", case.value),
                format!("{:.2}", case.best),
                format!("{:.2}", case.elapsed),
            ];
            table.row(TextStyle::Plain, row);
        }
        let (backend, device) = (&self.backend, &self.device);
        let title = format!("launches of empty kernels, on {backend} ({device})\nmicroseconds per launch");
        format!("{title}\n\n{}", table.render(colour))
    }
}
