//! `wholemem demo`: a tour that checks its own results.
//!
//! The tour is made of chapters, one file each. A chapter plays on a [`Stage`], which times its steps and keeps what
//! came of them; every step either checked what it claims or fails, and a failed step is a failing exit code.

mod pattern;
mod ranks;
mod reduce;
mod rows;
mod sharing;
mod stage;
mod store;

use anyhow::Result;
use serde::Serialize;
use wholemem_command::backend;
use wholemem_command::memory::{self, Shortage};
use wholemem_command::size::Rough;
use wholemem_command::terminal::{self, Colour, Tone};
use wholemem_hal::Device;
use wholemem_os::Size;

use self::pattern::Pattern;
use self::stage::{Stage, Step};
use crate::cli::DemoArgs;

pub(crate) use self::sharing::creator;

type Chapter = fn(&mut Stage, &Setting) -> Result<()>;

/// The tour, in order.
const CHAPTERS: &[Chapter] = &[sharing::play, ranks::play, rows::play, reduce::play, store::play];

/// What all chapters have in common.
#[derive(Debug)]
struct Setting {
    device: Device,
    /// How much memory to use.
    len: usize,
    pattern: Pattern,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    demo: &'static str,
    backend: String,
    seed: u64,
    bytes: usize,
    steps: &'a [Step],
    ok: bool,
}

pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    let opened = backend::open(args.backend)?;
    let device = opened.backend.device(0)?;
    let len = fitting(&device, args.size.0)?;
    let seed = args.seed.unwrap_or_else(random);
    let setting = Setting { device, len, pattern: Pattern::new(seed) };
    if !args.json {
        let title = format!("wholemem {} on {}\n", env!("CARGO_PKG_VERSION"), opened.describe());
        terminal::print(&title)?;
    }

    let mut stage = Stage::default();
    let outcome = CHAPTERS.iter().try_for_each(|play| play(&mut stage, &setting));
    let ok = outcome.is_ok();
    if args.json {
        let backend = opened.backend.kind().to_string();
        terminal::print_json(&Report { demo: "tour", backend, seed, bytes: len, steps: stage.steps(), ok })?;
    } else {
        terminal::print(&render(&stage, &setting, ok, Colour::of_stdout()))?;
    }
    outcome
}

fn render(stage: &Stage, setting: &Setting, ok: bool, colour: Colour) -> String {
    let (verdict, tone) =
        if ok { ("everything was checked", Tone::Good) } else { ("a check failed", Tone::Bad) };
    let (size, seed) = (Size(setting.len).to_string().replace(' ', ""), setting.pattern.seed());
    let repeat = format!("repeat it with `--size {size} --seed {seed}`");
    format!("\n{}\n{}; {repeat}\n", stage.table().render(colour), colour.paint(tone, verdict))
}

/// As much of the asked size as leaves half of the memory free, in whole granules.
fn fitting(device: &Device, asked: usize) -> Result<usize> {
    let len = memory::whole_granules(device, asked)?;
    match memory::ensure_room(device, len.saturating_mul(2)) {
        Ok(()) => Ok(len),
        Err(error) => {
            let Some(&Shortage { available, .. }) = error.downcast_ref() else { return Err(error) };
            let granule = device.granularity()?.minimum.len();
            let less = available / 2 / granule * granule;
            if less == 0 {
                return Err(error);
            }
            let (less_text, available) = (Rough(less), Rough(available));
            terminal::note(&format!("using {less_text}, as {available} of memory are available"));
            Ok(less.min(len))
        }
    }
}

/// A number that differs from run to run.
fn random() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // Small enough that every JSON reader keeps all of it.
    std::hash::RandomState::new().build_hasher().finish() >> 11
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    fn device() -> Device {
        Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
    }

    #[test]
    fn a_size_is_made_whole_granules() {
        assert_eq!(fitting(&device(), 1).unwrap(), 64 << 10);
        assert_eq!(fitting(&device(), 128 << 10).unwrap(), 128 << 10);
    }

    #[test]
    fn more_than_there_is_becomes_what_there_is() {
        let asked = 1 << 50;
        let len = fitting(&device(), asked).unwrap();
        assert!(len > 0 && len < asked && len.is_multiple_of(64 << 10));
    }

    #[test]
    fn seeds_differ_and_fit_every_reader() {
        assert_ne!(random(), random());
        assert!(random() < 1 << 53);
    }
}
