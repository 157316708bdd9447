//! Measures an operation with wholemem and with raw calls at many memory sizes: both alternate, with new memory each time.
//!
//! The implementation that runs first alternates too, so that disturbances of the machine affect both equally. Results are
//! verified outside of the measured time.

use std::time::{Duration, Instant};

use anyhow::Result;
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::size::RoundedSize;
use wholemem_command::terminal::Colour;
use wholemem_command::{backend, memory, terminal};
use wholemem_hal::{BackendKind, Device};

use crate::args::SweepArgs;
use crate::comparison::Comparison;
use crate::report::{SizeResult, SweepReport};
use crate::sample::PairedTimes;
use crate::sizes::SweepPlan;

/// The time limit for one memory size, unless an option sets the number of rounds.
const CASE_TIME: Duration = Duration::from_secs(4);

/// The time limit for all memory sizes, unless an option sets the sizes.
const SWEEP_TIME: Duration = Duration::from_secs(60);

const MIN_ROUNDS: u32 = 7;
const MAX_ROUNDS: u32 = 400;

/// The warm-up before the measured rounds ends after this number of rounds or this time, whichever is reached first.
const WARM_UP: (u32, Duration) = (20, Duration::from_millis(50));

pub(super) fn sweep<C: Comparison>(
    args: &SweepArgs,
    start: impl FnOnce(Device, &SweepArgs) -> Result<C>,
) -> Result<()> {
    let selected = backend::open(args.backend)?;
    let device = selected.backend.device(0)?;
    let plan = SweepPlan::new(&device, args)?;
    let mut report = SweepReport::new::<C>(&device);
    let mut comparison = start(device, args)?;
    measure_all(&mut comparison, &plan, &mut report)?;

    if args.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&terminal::fitted(&report.render(C::TITLE, Colour::of_stdout())))?;
    }
    report.check_outcomes()
}

fn measure_all(comparison: &mut impl Comparison, plan: &SweepPlan, report: &mut SweepReport) -> Result<()> {
    let start = Instant::now();
    // The previous memory size, and the time of one of its rounds.
    let mut before: Option<(usize, Duration)> = None;
    for &len in &plan.sizes {
        if let (Some((shorter, round)), true) = (before, plan.within_time) {
            let rounds = f64::from(plan.rounds.unwrap_or(MIN_ROUNDS)) + 1.0;
            let expected = round.as_secs_f64() * rounds * (len as f64 / shorter as f64);
            if start.elapsed().as_secs_f64() + expected > SWEEP_TIME.as_secs_f64() {
                let size = RoundedSize(len);
                report.stop(&format!(
                    "{size}: it would take about {expected:.0} s; request it with `--max-size`"
                ));
                return Ok(());
            }
        }
        match measure(comparison, len, plan.rounds) {
            Ok((case, round)) => {
                let is_flawed = case.mismatch.is_some();
                report.push(case);
                before = Some((len, round));
                if is_flawed {
                    return Ok(());
                }
            }
            // Memory is exhausted: the benchmark ends, and reports the smaller sizes that were measured before.
            Err(error) if memory::is_out_of_memory(&error) && !report.cases.is_empty() => {
                report.stop(&format!("{}: {error:#}", RoundedSize(len)));
                return Ok(());
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Measures one memory size. Returns the result, and the time of a whole round including verification.
fn measure(
    comparison: &mut impl Comparison,
    len: usize,
    rounds: Option<u32>,
) -> Result<(SizeResult, Duration)> {
    let label = RoundedSize(len).to_string();
    let mut once = |implementation| {
        // Checks the available memory first, because raw calls do not.
        memory::ensure_available(comparison.device(), len)?;
        pause(comparison.device(), len);
        comparison.once(implementation, len)
    };
    let (most, enough) = WARM_UP;
    let start = Instant::now();
    let mut warm = PairedTimes::default();
    while warm.rounds() < most && (warm.rounds() == 0 || start.elapsed() < enough) {
        warm.round(&mut once)?;
    }
    let round = start.elapsed() / warm.rounds();

    let rounds = rounds.unwrap_or_else(|| rounds_within(CASE_TIME, round));
    let progress = ProgressDisplay::rounds(&label, rounds as usize);
    let mut paired = PairedTimes::default();
    while paired.rounds() < rounds && paired.mismatch().is_none() {
        paired.round(&mut once)?;
        progress.advance(1);
    }
    let mismatch = warm.mismatch().or_else(|| paired.mismatch()).map(ToOwned::to_owned);
    Ok((SizeResult::new(len, comparison.pinned(), &paired, mismatch), round))
}

/// The number of bytes for which, if the previous round freed them, the pause before a round on a GPU lasts one second.
const PAUSE: f64 = 200e9;

/// Pauses before a round on a GPU, in proportion to the memory that the previous round freed.
///
/// Without a pause, allocating 8 GiB and more takes one of two times that differ by a factor of ten, for both implementations,
/// and the comparison is arbitrary. With a pause it takes the longer time. The cause in the driver is not known.
fn pause(device: &Device, len: usize) {
    if device.backend().kind() == BackendKind::Cuda {
        std::thread::sleep(Duration::from_secs_f64(len as f64 / PAUSE));
    }
}

fn rounds_within(time: Duration, round: Duration) -> u32 {
    let fitting = time.as_nanos() / round.as_nanos().max(1);
    u32::try_from(fitting).unwrap_or(u32::MAX).clamp(MIN_ROUNDS, MAX_ROUNDS)
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Attempt, Backend, BackendError, Error, HostConfig};

    use super::*;
    use crate::sample::{Implementation, TimedRun};

    /// A fake operation that takes a constant time, and from certain sizes on fails or returns a mismatch.
    struct FakeComparison {
        device: Device,
        full_from: usize,
        flawed_from: usize,
        round: Duration,
    }

    impl Comparison for FakeComparison {
        const NAME: &'static str = "fake";
        const TITLE: &'static str = "no operation";
        const RANKS: usize = 1;

        fn device(&self) -> &Device {
            &self.device
        }

        fn pinned(&self) -> Option<&'static str> {
            None
        }

        fn once(&mut self, _side: Implementation, len: usize) -> Result<TimedRun> {
            if len >= self.full_from {
                let cause = BackendError::OutOfMemory { available: 7 };
                return Err(Error::Failed { attempt: Attempt::Reserve { len }, cause }.into());
            }
            let mismatch = (len >= self.flawed_from).then(|| "wrong".to_owned());
            Ok(TimedRun { took: self.round, mismatch })
        }
    }

    const NEVER: usize = usize::MAX;

    fn measured(full_from: usize, flawed_from: usize) -> Result<SweepReport> {
        measured_over(vec![1 << 16, 1 << 18, 1 << 20], full_from, flawed_from)
    }

    fn measured_over(sizes: Vec<usize>, full_from: usize, flawed_from: usize) -> Result<SweepReport> {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let plan = SweepPlan { sizes, rounds: Some(3), within_time: true };
        let mut report = SweepReport::new::<FakeComparison>(&device);
        let mut comparison =
            FakeComparison { device, full_from, flawed_from, round: Duration::from_micros(5) };
        measure_all(&mut comparison, &plan, &mut report).map(|()| report)
    }

    fn sizes(report: &SweepReport) -> Vec<usize> {
        report.cases.iter().map(|case| case.bytes).collect()
    }

    #[test]
    fn every_size_is_measured_for_the_requested_rounds() {
        let report = measured(NEVER, NEVER).unwrap();
        assert_eq!(sizes(&report), [1 << 16, 1 << 18, 1 << 20]);
        assert!(report.cases.iter().all(|case| case.rounds == 3 && case.mismatch.is_none()));
        report.check_outcomes().unwrap();
    }

    #[test]
    fn a_sweep_that_runs_out_of_memory_keeps_the_measured_sizes() {
        let report = measured(1 << 20, NEVER).unwrap();
        assert_eq!(sizes(&report), [1 << 16, 1 << 18]);
        let reason = "1 MiB: cannot reserve 1 MiB of addresses: only 7 B of memory are available";
        assert_eq!(report.stopped.as_deref(), Some(reason));
        report.check_outcomes().unwrap();
    }

    #[test]
    fn a_size_that_would_take_too_long_is_skipped() {
        let report = measured_over(vec![1 << 16, 1 << 60], NEVER, NEVER).unwrap();
        assert_eq!(sizes(&report), [1 << 16]);
        let reason = report.stopped.as_deref().unwrap();
        assert!(reason.starts_with("1048576 TiB: it would take about "), "{reason}");
    }

    #[test]
    fn too_little_memory_for_the_first_size_is_an_error() {
        assert!(memory::is_out_of_memory(&measured(0, NEVER).unwrap_err()));
    }

    #[test]
    fn a_mismatch_ends_the_sweep_with_an_error() {
        let report = measured(NEVER, 1 << 18).unwrap();
        assert_eq!(sizes(&report), [1 << 16, 1 << 18]);
        assert_eq!(report.check_outcomes().unwrap_err().to_string(), "256 KiB: wrong");
    }

    #[test]
    fn rounds_fit_in_the_time_within_their_bounds() {
        let within = |micros| rounds_within(Duration::from_secs(2), Duration::from_micros(micros));
        assert_eq!(within(0), MAX_ROUNDS);
        assert_eq!(within(50), MAX_ROUNDS);
        assert_eq!(within(20_000), 100);
        assert_eq!(within(10_000_000), MIN_ROUNDS);
    }
}
