//! Chooses the algorithm of a collective call: a pure function of the call and of thresholds that are equal on all ranks.
//!
//! ```text
//!   packets     data and flags in the same words; no barrier                           shortest calls
//!   one-shot    every rank reads all inputs                                            short calls
//!   two-shot    every rank reduces one part of all inputs; all ranks gather the parts  long calls
//! ```

use std::fmt;
use std::str::FromStr;

use wholemem_hal::BackendKind;

use super::Lane;
use crate::abi::{COLLECTIVE_THREADS, MAX_BLOCKS};

/// The algorithm of a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank sends its elements to all other ranks in packets, which have data and flag in one machine word.
    #[doc(alias = "LL")]
    Packets,
    /// Every rank reads the elements of all ranks and reduces all of them.
    OneShot,
    /// Every rank reduces one part of the elements of all ranks, and all ranks gather the reduced parts.
    TwoShot,
}

impl Algorithm {
    /// All algorithms, from the one for the shortest calls to the one for the longest.
    pub const ALL: [Self; 3] = [Self::Packets, Self::OneShot, Self::TwoShot];
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Packets => "packets",
            Self::OneShot => "one-shot",
            Self::TwoShot => "two-shot",
        })
    }
}

impl FromStr for Algorithm {
    type Err = UnknownAlgorithm;

    fn from_str(name: &str) -> Result<Self, UnknownAlgorithm> {
        let found = Self::ALL.into_iter().find(|algorithm| algorithm.to_string() == name);
        found.ok_or_else(|| UnknownAlgorithm { name: name.to_owned() })
    }
}

/// The error for an unknown name of a collective algorithm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown collective algorithm `{name}`: use `packets`, `one-shot` or `two-shot`")]
pub struct UnknownAlgorithm {
    /// The unknown name of a collective algorithm.
    pub name: String,
}

/// The input lengths up to which a collective call uses each algorithm, if the call supports the algorithm. They must be equal on
/// all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// The maximum input length in bytes for the packets algorithm.
    pub packets: usize,
    /// The maximum input length in bytes for the one-shot algorithm, if inputs are staged.
    pub one_shot_staged: usize,
    /// The maximum input length in bytes for the one-shot algorithm, if inputs are in windows.
    pub one_shot_window: usize,
    /// The maximum input length in bytes for which an input in a window is staged like other memory: staging costs a copy and
    /// saves a barrier.
    pub stage_window: usize,
    /// The algorithm for all calls that support it, whatever their length; `None` to choose by length.
    pub always: Option<Algorithm>,
}

impl Tuning {
    /// Returns the thresholds with which collective calls were fastest in measurements: on a CPU with two cores of a server, on a
    /// GPU with one H200 that all ranks shared.
    #[must_use]
    pub fn measured(backend: BackendKind, ranks: u32) -> Self {
        let ranks = ranks.max(1) as usize;
        match backend {
            BackendKind::Cuda => Self {
                packets: (512 << 10) / ranks,
                one_shot_staged: if ranks <= 2 { usize::MAX } else { (4 << 20) / ranks },
                one_shot_window: (1 << 20) / ranks,
                stage_window: (8 << 20) / ranks.saturating_mul(ranks),
                always: None,
            },
            _ => Self {
                packets: 2 << 10,
                // With two ranks, one-shot and two-shot move each byte between the ranks once. One-shot has one barrier less; in
                // two-shot, a rank stages half as much.
                one_shot_staged: if ranks <= 2 { 128 << 10 } else { 4 << 10 },
                one_shot_window: 4 << 10,
                stage_window: 0,
                always: None,
            },
        }
    }

    /// Returns true if collective calls of this length read inputs in a window directly, without staging them.
    pub(super) fn reads_window(&self, len: u64) -> bool {
        len > self.stage_window as u64
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        let always = self.always.map_or(0, |always| 1 + always as u64);
        let [packets, staged] = [self.packets as u64, self.one_shot_staged as u64];
        let words = [packets, staged, self.one_shot_window as u64, self.stage_window as u64, always];
        words.into_iter().flat_map(u64::to_le_bytes).collect()
    }
}

/// The properties of a collective call on which the choice of its algorithm depends. They are equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CallProperties {
    pub(super) ranks: u32,
    /// The length in bytes of every rank's input.
    pub(super) len: u64,
    /// True if the inputs are in a window and are read there.
    pub(super) window: bool,
    /// True if the call is in place: the output of each rank is its input.
    pub(super) in_place: bool,
    /// True if the call reduces elements. Calls that only copy never use two-shot.
    pub(super) reduces: bool,
}

/// Limits of the ranks' devices for collective calls: the smallest of all ranks, so that they are equal on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DeviceLimits {
    /// The maximum number of bytes that a rank can send in packets in one collective call.
    pub(super) packets: u64,
    /// The number of blocks of one rank's collective call that can be resident at once.
    pub(super) blocks: u32,
    /// True if all ranks are on one device.
    pub(super) near: bool,
}

impl Lane {
    /// Returns the algorithm of a collective call with inputs of `len` bytes, for reports of benchmarks.
    #[doc(hidden)]
    #[must_use]
    pub fn algorithm_of(&self, len: usize, window: bool, in_place: bool, reduces: bool) -> Algorithm {
        let window = window && self.tuning.reads_window(len as u64);
        let properties =
            CallProperties { ranks: self.group.size(), len: len as u64, window, in_place, reduces };
        choose(&properties, &self.tuning, &self.limits)
    }
}

/// Chooses the algorithm of a collective call. A call without elements uses packets, because the other algorithms synchronize once
/// for each piece of the elements.
pub(super) fn choose(properties: &CallProperties, tuning: &Tuning, limits: &DeviceLimits) -> Algorithm {
    let can = |algorithm| match algorithm {
        Algorithm::Packets => properties.len <= limits.packets,
        // One-shot is impossible in place in a window, because a rank would overwrite its input while other ranks read it.
        Algorithm::OneShot => !(properties.window && properties.in_place),
        Algorithm::TwoShot => properties.reduces,
    };
    if properties.len == 0 {
        return Algorithm::Packets;
    }
    if let Some(always) = tuning.always.filter(|always| can(*always)) {
        return always;
    }
    let one_shot = if properties.window { tuning.one_shot_window } else { tuning.one_shot_staged };
    if properties.len <= tuning.packets as u64 && can(Algorithm::Packets) {
        Algorithm::Packets
    } else if (properties.len <= one_shot as u64 || !can(Algorithm::TwoShot)) && can(Algorithm::OneShot) {
        Algorithm::OneShot
    } else {
        Algorithm::TwoShot
    }
}

/// Returns the number of blocks of a collective call: one for each tile of the input, and at most as many as can be resident at
/// once.
pub(super) fn blocks(algorithm: Algorithm, properties: &CallProperties, limits: &DeviceLimits) -> u32 {
    let threads = u64::from(COLLECTIVE_THREADS);
    let tiles = match algorithm {
        Algorithm::Packets => properties.len.div_ceil(8 * threads),
        Algorithm::OneShot => properties.len.div_ceil(16 * threads),
        Algorithm::TwoShot => properties.len.div_ceil(16 * threads * u64::from(properties.ranks.max(1))),
    };
    let most = limits.blocks.clamp(1, MAX_BLOCKS);
    u32::try_from(tiles.clamp(1, most.into())).expect("clamped to a u32")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROPERTIES: CallProperties =
        CallProperties { ranks: 2, len: 0, window: false, in_place: false, reduces: true };
    const LIMITS: DeviceLimits = DeviceLimits { packets: 100, blocks: 40, near: false };
    const TUNING: Tuning =
        Tuning { packets: 200, one_shot_staged: 1000, one_shot_window: 500, stage_window: 0, always: None };

    #[test]
    fn the_algorithm_follows_the_length_of_the_call() {
        let choose = |len, window| choose(&CallProperties { len, window, ..PROPERTIES }, &TUNING, &LIMITS);
        assert_eq!(choose(100, false), Algorithm::Packets);
        assert_eq!(choose(101, false), Algorithm::OneShot);
        assert_eq!([choose(500, true), choose(501, true)], [Algorithm::OneShot, Algorithm::TwoShot]);
        assert_eq!([choose(1000, false), choose(1001, false)], [Algorithm::OneShot, Algorithm::TwoShot]);
    }

    #[test]
    fn an_unsupported_algorithm_is_not_chosen_even_if_requested() {
        let in_place = CallProperties { len: 300, window: true, in_place: true, ..PROPERTIES };
        let wanted = |always| Tuning { always: Some(always), ..TUNING };
        assert_eq!(choose(&in_place, &wanted(Algorithm::OneShot), &LIMITS), Algorithm::TwoShot);
        assert_eq!(choose(&in_place, &wanted(Algorithm::Packets), &LIMITS), Algorithm::TwoShot);
        let copied = CallProperties { len: 9999, reduces: false, ..PROPERTIES };
        assert_eq!(choose(&copied, &wanted(Algorithm::TwoShot), &LIMITS), Algorithm::OneShot);
        assert_eq!(choose(&copied, &TUNING, &LIMITS), Algorithm::OneShot);
    }

    #[test]
    fn the_grid_has_no_idle_and_no_non_resident_blocks() {
        let blocks = |algorithm, len| blocks(algorithm, &CallProperties { len, ..PROPERTIES }, &LIMITS);
        assert_eq!([blocks(Algorithm::Packets, 1), blocks(Algorithm::Packets, 4097)], [1, 2]);
        assert_eq!([blocks(Algorithm::OneShot, 8192), blocks(Algorithm::OneShot, 8193)], [1, 2]);
        assert_eq!([blocks(Algorithm::TwoShot, 16_384), blocks(Algorithm::TwoShot, 1 << 30)], [1, 40]);
    }

    #[test]
    fn algorithm_names_round_trip() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        assert_eq!("ring".parse::<Algorithm>(), Err(UnknownAlgorithm { name: "ring".to_owned() }));
    }

    #[test]
    fn encodings_of_different_tunings_differ() {
        let others = [
            Tuning { packets: 1, ..TUNING },
            Tuning { one_shot_staged: 1, ..TUNING },
            Tuning { one_shot_window: 1, ..TUNING },
            Tuning { stage_window: 1, ..TUNING },
            Tuning { always: Some(Algorithm::Packets), ..TUNING },
        ];
        assert!(others.iter().all(|other| other.to_bytes() != TUNING.to_bytes()));
    }
}
