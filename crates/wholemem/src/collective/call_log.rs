//! Logs how collective calls run: their algorithm, and the path of their memory, at level `debug` and once for each kind of call.
//!
//! If `debug` is off, a call only compares the maximum level of all subscribers. If it is on, a call of a kind that has been logged
//! loads one word. No call takes a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use tracing::level_filters::LevelFilter;

use super::kernel::CollectiveKind;
use super::tuning::{Algorithm, Tuning};
use super::{Buffer, Lane};
use crate::{Dtype, WindowRef};

/// The target of events about collective calls.
pub(super) const TARGET: &str = "wholemem::collective";

/// The numbers of bits by which the kinds of calls are distinguished.
const CLASS_BITS: u32 = 5;
const PATH_BITS: u32 = 2;
const ALGORITHM_BITS: u32 = 2;
const KIND_BITS: u32 = 3;
const WORDS: usize = 1 << (CLASS_BITS + 2 * PATH_BITS + ALGORITHM_BITS + KIND_BITS - u64::BITS.ilog2());

/// The kinds of calls of a lane that have been logged: one bit for each.
#[derive(Debug)]
pub(super) struct CallLog {
    logged: Box<[AtomicU64; WORDS]>,
}

impl Default for CallLog {
    fn default() -> Self {
        Self { logged: Box::new([const { AtomicU64::new(0) }; WORDS]) }
    }
}

impl CallLog {
    /// Records that a call of this kind is logged. Returns true if it is the first one.
    fn is_first(&self, number: u32) -> bool {
        let (word, bit) = (&self.logged[(number / u64::BITS) as usize], 1_u64 << (number % u64::BITS));
        word.load(Ordering::Relaxed) & bit == 0 && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }
}

/// A collective call, as it is logged.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoggedCall<'a> {
    pub(super) kind: CollectiveKind,
    pub(super) dtype: Dtype,
    /// The length in bytes of this rank's input.
    pub(super) len: u64,
    /// The input and the output, each with the addresses at which other ranks can access it.
    pub(super) operands: [(&'a Buffer<'a>, WindowRef); 2],
    pub(super) algorithm: Algorithm,
    pub(super) blocks: u32,
}

/// The path of an operand's bytes between the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MemoryPath {
    /// The other ranks access the operand, which is in a window whose memory was allocated for the window.
    Window,
    /// The other ranks access the operand, which is in registered memory: memory that existed before its window.
    Registered,
    /// The operand is copied to or from a staging buffer, because only its own rank can access it.
    StagedPrivate,
    /// The operand is copied to or from a staging buffer although other ranks could access it: at this length, the copy takes less
    /// time than the barrier that it saves.
    StagedShort,
}

impl MemoryPath {
    fn of((buffer, reference): (&Buffer<'_>, WindowRef), len: u64, tuning: &Tuning) -> Self {
        match buffer {
            _ if reference.is_none() => Self::StagedPrivate,
            _ if !tuning.reads_window(len) => Self::StagedShort,
            Buffer::Window { window, .. } if !window.core().is_registered => Self::Window,
            _ => Self::Registered,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Window => "window",
            Self::Registered => "registered",
            Self::StagedPrivate | Self::StagedShort => "staged",
        }
    }
}

impl LoggedCall<'_> {
    /// Returns the number of the length's class: powers of four, so that a call that is repeated with similar lengths is logged once.
    fn length_class(&self) -> u32 {
        self.len.checked_ilog2().unwrap_or(0) / 2
    }

    /// Returns the number of the kind of this call.
    fn number(&self, [input, output]: [MemoryPath; 2]) -> u32 {
        let parts = [
            (self.kind as u32, KIND_BITS),
            (self.algorithm as u32, ALGORITHM_BITS),
            (input as u32, PATH_BITS),
            (output as u32, PATH_BITS),
            (self.length_class(), CLASS_BITS),
        ];
        parts.into_iter().fold(0, |number, (part, bits)| number << bits | part)
    }

    /// Returns how the input reaches the other ranks, how the results reach the outputs, and why operands are staged, if they are.
    fn paths(
        &self,
        [input, output]: [MemoryPath; 2],
        tuning: &Tuning,
    ) -> (&'static str, &'static str, String) {
        // Only in two-shot does a rank compute results of other ranks. Otherwise it writes its own output.
        let sends_results = self.algorithm == Algorithm::TwoShot;
        let target = if sends_results { output.name() } else { "local" };
        let outside = "in no window, and not registered";
        let reason = match (input, output) {
            _ if self.algorithm == Algorithm::Packets => {
                let reason = match tuning.always {
                    Some(Algorithm::Packets) => "the tuning always uses packets, if they fit".to_owned(),
                    _ => format!("packets carry inputs of up to {} bytes", tuning.packets),
                };
                return ("packets", target, reason);
            }
            (MemoryPath::StagedShort, _) => {
                format!("up to {} bytes, staging an input in a window is faster", tuning.stage_window)
            }
            (MemoryPath::StagedPrivate, MemoryPath::StagedPrivate) if sends_results => {
                format!("input and output are {outside}")
            }
            (MemoryPath::StagedPrivate, _) => format!("the input is {outside}"),
            (_, MemoryPath::StagedPrivate) if sends_results => format!("the output is {outside}"),
            _ => "nothing is staged".to_owned(),
        };
        (input.name(), target, reason)
    }
}

fn name_of(kind: CollectiveKind) -> &'static str {
    match kind {
        CollectiveKind::AllReduce => "all_reduce",
        CollectiveKind::AllGather => "all_gather",
        CollectiveKind::Broadcast => "broadcast",
        CollectiveKind::Barrier => "barrier",
    }
}

impl Lane {
    /// Logs a collective call if it is the first one of its kind and `debug` is on. Otherwise it is not described, because that takes
    /// longer than the comparison.
    #[inline(always)]
    pub(super) fn log_call<'a>(&self, call: impl FnOnce() -> LoggedCall<'a>) {
        if LevelFilter::current() >= LevelFilter::DEBUG {
            self.log_first_call(&call());
        }
    }

    #[cold]
    fn log_first_call(&self, call: &LoggedCall<'_>) {
        let paths = call.operands.map(|operand| MemoryPath::of(operand, call.len, &self.tuning));
        if !tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
            || !self.call_log.is_first(call.number(paths))
        {
            return;
        }
        let (input, output, reason) = call.paths(paths, &self.tuning);
        tracing::debug!(
            target: TARGET,
            rank = %self.group.rank(),
            call = name_of(call.kind),
            dtype = %call.dtype,
            len = call.len,
            algorithm = %call.algorithm,
            input,
            output,
            reason,
            blocks = call.blocks,
            "first collective call of this kind",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_call_is_the_first_one_once() {
        let log = CallLog::default();
        let last = u32::try_from(WORDS * 64 - 1).unwrap();
        for number in [0, 63, 64, last] {
            assert_eq!([log.is_first(number), log.is_first(number)], [true, false], "{number}");
        }
    }
}
