//! `wholemem bench allreduce --tune`: measures every algorithm at every size, and computes the size thresholds between the
//! algorithms.

use std::fmt;

use anyhow::Result;
use serde::Serialize;
use wholemem::Algorithm;
use wholemem_command::size::{ByteCount, RoundedSize};
use wholemem_hal::{BackendKind, Device};

use super::case::{CollectiveCase, MachineInfo};
use super::report::{CollectiveResult, print_report};
use super::{CollectiveOp, measure};
use crate::args::{BufferKind, LaunchMode, OutputPlace, ReduceArgs};

/// The exponents of the default input lengths, which are powers of two.
const SIZES: std::ops::RangeInclusive<u32> = 6..=23;

pub(super) fn run(args: &ReduceArgs, device: &Device, machine: &MachineInfo) -> Result<()> {
    let mut args = args.clone();
    args.place = vec![OutputPlace::Out];
    args.moves.algorithm = Algorithm::ALL.to_vec();
    if args.moves.sizes.is_empty() {
        args.moves.sizes = SIZES.map(|power| ByteCount(1 << power)).collect();
    }
    if args.moves.all.mode.is_empty() && device.backend().kind() == BackendKind::Cuda {
        args.moves.all.mode = vec![LaunchMode::Graph];
    }
    let measured = measure(device, &CollectiveCase::reductions(&args, machine)?)?;
    let best: Vec<_> = args.moves.all.ranks.iter().map(|ranks| Thresholds::of(*ranks, &measured)).collect();
    print_report(CollectiveOp::Allreduce, device, &measured, Some(&best), args.moves.all.json)
}

/// Thresholds for the fields of `wholemem::Tuning`: the length in bytes up to which an algorithm is the best, or `None` if it
/// is the best at every length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Thresholds {
    ranks: u32,
    packets: Option<usize>,
    one_shot_staged: Option<usize>,
    one_shot_window: Option<usize>,
}

impl Thresholds {
    fn of(ranks: u32, measured: &[CollectiveResult]) -> Self {
        let of_these = |one: &&CollectiveResult| one.ranks == ranks;
        let of_buffers = |buffers| {
            let measured: Vec<_> =
                measured.iter().filter(of_these).filter(|one| one.buffers == Some(buffers)).collect();
            threshold(&measured, &[Algorithm::OneShot], &[Algorithm::TwoShot])
        };
        let all: Vec<_> = measured.iter().filter(of_these).collect();
        let others = [Algorithm::OneShot, Algorithm::TwoShot];
        Self {
            ranks,
            packets: threshold(&all, &[Algorithm::Packets], &others),
            one_shot_staged: of_buffers(BufferKind::Staged),
            one_shot_window: of_buffers(BufferKind::Window),
        }
    }
}

/// Returns the size up to which the algorithms `ones` should be used instead of `others` so that the summed slowdown is
/// minimal, or `None` if they should be used at every size.
fn threshold(measured: &[&CollectiveResult], ones: &[Algorithm], others: &[Algorithm]) -> Option<usize> {
    // `loss` is the slowdown of the algorithms `ones` against `others` at a size, as a logarithm of the ratio of their times.
    let mut sizes: Vec<_> = measured.iter().filter_map(|one| one.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let loss = |size: usize| {
        let best = |which: &[Algorithm], buffers| {
            let by = |one: &&&CollectiveResult| {
                let name = one.algorithm.as_deref().unwrap_or_default();
                let is_one = which.iter().any(|algorithm| algorithm.to_string() == name);
                is_one && one.bytes == Some(size) && one.buffers == Some(buffers)
            };
            let times = measured.iter().filter(by).map(|one| one.value);
            times.min_by(f64::total_cmp)
        };
        let log = |buffers| match (best(ones, buffers), best(others, buffers)) {
            (Some(one), Some(other)) => (one / other.max(1e-9)).max(1e-9).ln(),
            // The algorithms `ones` have no measurement at this size, because they do not support it.
            (None, Some(_)) => f64::INFINITY,
            _ => 0.0,
        };
        log(BufferKind::Window) + log(BufferKind::Staged)
    };
    let mut lost = 0.0;
    let (mut least, mut at) = (0.0, 0);
    for &size in &sizes {
        lost += loss(size);
        if lost <= least {
            (least, at) = (lost, size);
        }
    }
    (sizes.last() != Some(&at)).then_some(at)
}

impl fmt::Display for Thresholds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let up_to = |len: Option<usize>| {
            len.map_or_else(|| "any size".to_owned(), |len| RoundedSize(len).to_string())
        };
        write!(
            f,
            "{} ranks: packets up to {}; one-shot up to {} staged and up to {} in windows",
            self.ranks,
            up_to(self.packets),
            up_to(self.one_shot_staged),
            up_to(self.one_shot_window)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::case::tests::reductions;
    use super::super::report::tests::measured;
    use super::*;

    #[test]
    fn thresholds_are_where_the_next_algorithm_is_faster() {
        let cases = reductions(&["--ranks", "2", "--sizes", "64,1KiB,64KiB,1MiB", "--place", "out"]);
        // In these times, packets are the fastest up to 1 KiB. If staged, one-shot is faster than two-shot at every size; in
        // windows up to 64 KiB, except at 1 KiB.
        let times = |case: &CollectiveCase| match (case.len, case.buffers) {
            (64, _) => [1, 3, 9],
            (1024, BufferKind::Window) => [3, 7, 6],
            (1024, BufferKind::Staged) => [3, 5, 9],
            (65_536, _) => [50, 20, 30],
            (_, BufferKind::Window | BufferKind::Registered) => [900, 300, 100],
            (_, BufferKind::Staged) => [900, 100, 300],
        };
        let measured: Vec<_> = cases
            .iter()
            .flat_map(|case| {
                let algorithms = Algorithm::ALL.into_iter().zip(times(case));
                algorithms.map(|(algorithm, took)| measured(case, &algorithm.to_string(), took))
            })
            .collect();
        let best = Thresholds::of(2, &measured);
        let expected = Thresholds {
            ranks: 2,
            packets: Some(1024),
            one_shot_staged: None,
            one_shot_window: Some(65_536),
        };
        assert_eq!(best, expected);
        let words =
            "2 ranks: packets up to 1 KiB; one-shot up to any size staged and up to 64 KiB in windows";
        assert_eq!(best.to_string(), words);
    }
}
