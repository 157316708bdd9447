//! `wholemem bench copy`: measures copies within a device, between devices, and between a device and the host.
//!
//! Copies through a stream of wholemem alternate with copies by the driver alone, between the same addresses, and both are
//! timed by device events. The checksum of the destination is verified.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::size::{ByteCount, RoundedSize};
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_command::{backend, memory};
use wholemem_hal::limits::RawDevice;
use wholemem_hal::pattern::{self, Pattern};
use wholemem_hal::{Device, Event, EventKind, Grant, Mapping, PinnedBuffer, Rights, Span, Stream};
use wholemem_os::Deadline;

use super::alloc::raw_error;
use crate::args::CopyArgs;

const DEFAULT_SIZES: [usize; 3] = [4 << 20, 64 << 20, 512 << 20];
const ROUNDS: u32 = 15;
const SEED: u64 = 0x0057_401e_0e3e_3e01;

#[derive(Debug, Serialize)]
struct CopyReport {
    bench: &'static str,
    backend: String,
    device: String,
    ranks: usize,
    verified: bool,
    cases: Vec<CopyResult>,
}

#[derive(Debug, Serialize)]
struct CopyResult {
    direction: String,
    bytes: usize,
    value: f64,
    unit: &'static str,
    limit: f64,
    of_limit: f64,
    best: f64,
    limit_best: f64,
    rounds: u32,
}

/// The source and the destination of a measured copy.
struct CopyCase {
    direction: String,
    to: Span,
    from: Span,
}

pub(super) fn run(args: &CopyArgs) -> Result<()> {
    let selected = backend::open(args.backend)?;
    let device = selected.backend.device(0)?;
    let sizes = if args.sizes.is_empty() {
        DEFAULT_SIZES.to_vec()
    } else {
        args.sizes.iter().map(|&ByteCount(len)| len.next_multiple_of(size_of::<u64>())).collect()
    };
    let rounds = args.rounds.unwrap_or(ROUNDS);
    let mut report = CopyReport {
        bench: "copy",
        backend: device.backend().kind().to_string(),
        device: device.info().name.clone(),
        ranks: 1,
        verified: true,
        cases: Vec::new(),
    };
    for len in sizes {
        memory::ensure_available(&device, len.saturating_mul(4))?;
        let bench = CopyBench::new(&device)?;
        for case in cases(&device, len)? {
            report.cases.push(bench.measure(&case, rounds)?);
        }
    }
    if args.json {
        terminal::print_json(&report)
    } else {
        terminal::print(&terminal::fitted(&report.render(Colour::of_stdout())))
    }
}

/// Creates the cases of `bench copy`: all directions of copies of `len` bytes from and to `device`.
fn cases(device: &Device, len: usize) -> Result<Vec<CopyCase>> {
    let map = |on: &Device| -> Result<Mapping> {
        let map = on.allocate(memory::whole_granules(on, len)?)?.map(Rights::ReadWrite)?;
        map.grant(&[Grant { device: device.id(), rights: Rights::ReadWrite }])?;
        map.populate()?;
        Ok(map)
    };
    let part = |map: Mapping| map.span(0, len);
    let case = |direction: &str, to, from| CopyCase { direction: direction.to_owned(), to, from };
    let (here, there) = (part(map(device)?)?, part(map(device)?)?);
    let host = PinnedBuffer::create(device, len)?.all();
    let mut cases = vec![
        case("within the device", there, here.clone()),
        case("host to device", here.clone(), host.clone()),
        case("device to host", host, here.clone()),
    ];
    for info in device.backend().devices().iter().filter(|info| info.id != device.id()) {
        let peer = device.backend().device(info.id)?;
        if device.check_peer_access(&peer).is_ok() {
            cases.push(case(&format!("to device {}", info.id), part(map(&peer)?)?, here.clone()));
        }
    }
    Ok(cases)
}

struct CopyBench {
    stream: Stream,
    raw: RawDevice,
    pattern: Pattern,
    start: Event,
    end: Event,
}

impl CopyBench {
    fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            stream: device.stream()?,
            raw: RawDevice::of(device).map_err(raw_error)?,
            pattern: Pattern::load(device)?,
            start: Event::create(device, EventKind::Timed)?,
            end: Event::create(device, EventKind::Timed)?,
        })
    }

    fn copy_with_wholemem(&self, case: &CopyCase) -> Result<Duration> {
        self.stream.record(&self.start)?;
        self.stream.copy(&case.to, &case.from)?;
        self.stream.record(&self.end)?;
        self.stream.synchronize(Deadline::NEVER)?;
        Ok(self.start.elapsed(&self.end)?)
    }

    fn measure(&self, case: &CopyCase, rounds: u32) -> Result<CopyResult> {
        let len = case.to.len();
        let label = format!("{} {}", RoundedSize(len), case.direction);
        let progress = ProgressDisplay::rounds(&label, rounds as usize);
        let (mut wholemem, mut raw) = (Vec::new(), Vec::new());
        self.pattern.fill(&self.stream, &case.from, SEED)?;
        self.stream.fill(&case.to, 0xEE)?;
        // Round 0 is a warm-up and is not counted.
        for round in 0..=rounds {
            let wholemem_took = self.copy_with_wholemem(case)?;
            let raw_took = self.raw.best_copy(&case.to, &case.from, 1).map_err(raw_error)?;
            if round > 0 {
                wholemem.push(wholemem_took);
                raw.push(raw_took);
                progress.advance(1);
            }
        }
        self.stream.fill(&case.to, 0xEE)?;
        self.copy_with_wholemem(case)?;
        let seen = self.pattern.checksum(&self.stream, &case.to)?;
        ensure!(seen == pattern::expected(SEED, len), "{label}: the copied bytes are wrong");

        let speed = |time: Duration| rounded(len as f64 / time.as_secs_f64().max(1e-9) / 1e9);
        let [value, limit] = [&mut wholemem, &mut raw].map(|times| {
            times.sort_unstable();
            speed(times[times.len() / 2])
        });
        Ok(CopyResult {
            direction: case.direction.clone(),
            bytes: len,
            value,
            unit: "GB/s",
            limit,
            of_limit: rounded(value / limit),
            best: speed(wholemem[0]),
            limit_best: speed(raw[0]),
            rounds,
        })
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

impl CopyReport {
    fn render(&self, colour: Colour) -> String {
        let columns = ["direction", "size", "wholemem", "raw copy", "of limit", "best", "raw best"];
        let mut table = TextTable::new(columns.map(|name| match name {
            "direction" => (name, Align::Left),
            _ => (name, Align::Right),
        }));
        for case in &self.cases {
            let speed = |value: f64| format!("{value:.1}");
            let row = [
                case.direction.clone(),
                RoundedSize(case.bytes).to_string(),
                speed(case.value),
                speed(case.limit),
                format!("{:.2}", case.of_limit),
                speed(case.best),
                speed(case.limit_best),
            ];
            table.row(TextStyle::Plain, row);
        }
        let (backend, device) = (&self.backend, &self.device);
        let title = format!("copies, on {backend} ({device})\nGB/s; the copied bytes were verified");
        format!("{title}\n\n{}", table.render(colour))
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    #[test]
    fn every_direction_is_measured_with_both_implementations() {
        let device = Backend::host(HostConfig::virtual_devices(2)).unwrap().device(0).unwrap();
        let bench = CopyBench::new(&device).unwrap();
        let measured: Vec<_> =
            cases(&device, 1 << 20).unwrap().iter().map(|case| bench.measure(case, 3).unwrap()).collect();
        let directions: Vec<_> = measured.iter().map(|case| case.direction.as_str()).collect();
        assert_eq!(directions, ["within the device", "host to device", "device to host", "to device 1"]);
        assert!(measured.iter().all(|case| case.value > 0.0 && case.limit > 0.0 && case.rounds == 3));
    }
}
