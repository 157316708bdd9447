//! `wholemem demo`: demonstrates the features of the library and verifies every result.
//!
//! The demo has several parts, one file each. A part runs its steps on a [`StepRecorder`], which times them and records their
//! results. A step fails if its check fails, and a failed step sets a failing exit code.

mod pattern;
mod ranks;
mod reduce;
mod rows;
mod sharing;
mod step;
mod store;

use anyhow::Result;
use serde::Serialize;
use wholemem_command::backend;
use wholemem_command::memory::{self, MemoryShortage};
use wholemem_command::size::RoundedSize;
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_hal::Device;
use wholemem_os::Size;

use self::pattern::Pattern;
use self::step::{StepRecord, StepRecorder};
use crate::cli::DemoArgs;

pub(crate) use self::sharing::creator;

type DemoPart = fn(&mut StepRecorder, &DemoContext) -> Result<()>;

/// The parts of `wholemem demo`, in the order in which they run.
const PARTS: &[DemoPart] = &[sharing::run, ranks::run, rows::run, reduce::run, store::run];

/// The parameters of all parts of the demo.
#[derive(Debug)]
struct DemoContext {
    device: Device,
    /// The length of the memory that each part of the demo uses, in bytes.
    len: usize,
    pattern: Pattern,
}

#[derive(Debug, Serialize)]
struct DemoReport<'a> {
    demo: &'static str,
    backend: String,
    seed: u64,
    bytes: usize,
    steps: &'a [StepRecord],
    ok: bool,
}

pub(crate) fn run(args: &DemoArgs) -> Result<()> {
    let selected = backend::open(args.backend)?;
    let device = selected.backend.device(0)?;
    let len = fitting_len(&device, args.size.0)?;
    let seed = args.seed.unwrap_or_else(random_seed);
    let context = DemoContext { device, len, pattern: Pattern::new(seed) };
    if !args.json {
        let title = format!("wholemem {} on {}\n", env!("CARGO_PKG_VERSION"), selected.describe());
        terminal::print(&terminal::fitted(&title))?;
    }

    let mut recorder = StepRecorder::default();
    let outcome = PARTS.iter().try_for_each(|run| run(&mut recorder, &context));
    let ok = outcome.is_ok();
    if args.json {
        let backend = selected.backend.kind().to_string();
        terminal::print_json(&DemoReport {
            demo: "tour",
            backend,
            seed,
            bytes: len,
            steps: recorder.steps(),
            ok,
        })?;
    } else {
        terminal::print(&render(&recorder, &context, ok, Colour::of_stdout()))?;
    }
    outcome
}

fn render(recorder: &StepRecorder, context: &DemoContext, ok: bool, colour: Colour) -> String {
    let (summary, style) =
        if ok { ("all checks passed", TextStyle::Success) } else { ("a check failed", TextStyle::Error) };
    let (size, seed) = (Size(context.len).to_string().replace(' ', ""), context.pattern.seed());
    let repeat = format!("repeat with `--size {size} --seed {seed}`");
    format!("\n{}\n{}; {repeat}\n", recorder.table().render(colour), colour.paint(style, summary))
}

/// Rounds the requested size up to whole granules, and reduces it to half of the available memory if it is more.
fn fitting_len(device: &Device, requested: usize) -> Result<usize> {
    let len = memory::whole_granules(device, requested)?;
    match memory::ensure_available(device, len.saturating_mul(2)) {
        Ok(()) => Ok(len),
        Err(error) => {
            let Some(&MemoryShortage { available, .. }) = error.downcast_ref() else { return Err(error) };
            let granule = device.granularity()?.minimum.len();
            let less = available / 2 / granule * granule;
            if less == 0 {
                return Err(error);
            }
            let (less_text, available) = (RoundedSize(less), RoundedSize(available));
            terminal::note(&format!("using {less_text}, because {available} of memory are available"));
            Ok(less.min(len))
        }
    }
}

/// Returns a random seed, which differs between runs of the program.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The seed has 53 bits, so that JSON readers that use doubles keep its exact value.
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
    fn a_size_is_rounded_up_to_granules() {
        assert_eq!(fitting_len(&device(), 1).unwrap(), 64 << 10);
        assert_eq!(fitting_len(&device(), 128 << 10).unwrap(), 128 << 10);
    }

    #[test]
    fn a_size_above_the_available_memory_is_reduced() {
        let requested = 1 << 50;
        let len = fitting_len(&device(), requested).unwrap();
        assert!(len > 0 && len < requested && len.is_multiple_of(64 << 10));
    }

    #[test]
    fn random_seeds_differ_and_have_53_bits() {
        assert_ne!(random_seed(), random_seed());
        assert!(random_seed() < 1 << 53);
    }
}
