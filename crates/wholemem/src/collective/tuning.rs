//! The choice of an algorithm: a pure function of the call and of thresholds that are equal on all ranks.
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
    /// Every rank sends its elements to all other ranks in packets with flags in them.
    #[doc(alias = "LL")]
    Packets,
    /// Every rank reads the elements of all ranks.
    OneShot,
    /// Every rank reduces one part of the elements, and all ranks gather the parts.
    TwoShot,
}

impl Algorithm {
    /// All algorithms, in the order of call lengths.
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

/// A name that no algorithm has.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no algorithm is called `{name}`: there are packets, one-shot and two-shot")]
pub struct UnknownAlgorithm {
    /// The name.
    pub name: String,
}

/// The most bytes for which each algorithm is used, if the call supports it. The same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// The most bytes in packets.
    pub packets: usize,
    /// The most bytes in one shot, if inputs are staged.
    pub one_shot_staged: usize,
    /// The most bytes in one shot, if inputs are in windows.
    pub one_shot_window: usize,
    /// The most bytes of a window that are staged nevertheless, which costs a copy and saves a barrier.
    pub stage_window: usize,
    /// An algorithm to use for all calls that support it.
    pub always: Option<Algorithm>,
}

impl Tuning {
    /// The thresholds that measured best: on two cores of a server, and on one H200 that all ranks share.
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
                // Among two ranks a byte crosses once either way. In one shot there is one barrier less; in two, a rank stages
                // half as much.
                one_shot_staged: if ranks <= 2 { 128 << 10 } else { 4 << 10 },
                one_shot_window: 4 << 10,
                stage_window: 0,
                always: None,
            },
        }
    }

    /// Whether a call reads inputs in a window directly.
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

/// The properties of a call on which its algorithm depends. The same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) ranks: u32,
    /// The length of every rank's input.
    pub(super) len: u64,
    /// Whether the inputs are in a window.
    pub(super) window: bool,
    /// Whether each output is its input.
    pub(super) in_place: bool,
    /// Whether elements are reduced. Otherwise one shot suffices.
    pub(super) reduces: bool,
}

/// The limits of the devices: the least of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limits {
    /// The most bytes that a rank can send in packets.
    pub(super) packets: u64,
    /// The number of blocks of one rank that run at once.
    pub(super) blocks: u32,
    /// Whether all ranks are on one device.
    pub(super) near: bool,
}

impl Lane {
    /// The algorithm of a call with inputs of `len` bytes, for the reports of measurements.
    #[doc(hidden)]
    #[must_use]
    pub fn algorithm_of(&self, len: usize, window: bool, in_place: bool, reduces: bool) -> Algorithm {
        let window = window && self.tuning.reads_window(len as u64);
        let shape = Shape { ranks: self.group.size(), len: len as u64, window, in_place, reduces };
        choose(&shape, &self.tuning, &self.limits)
    }
}

/// The algorithm of a call.
pub(super) fn choose(shape: &Shape, tuning: &Tuning, limits: &Limits) -> Algorithm {
    let can = |algorithm| match algorithm {
        Algorithm::Packets => shape.len <= limits.packets,
        // A rank would overwrite its input while other ranks read it.
        Algorithm::OneShot => !(shape.window && shape.in_place),
        Algorithm::TwoShot => shape.reduces,
    };
    if let Some(always) = tuning.always.filter(|always| can(*always)) {
        return always;
    }
    let one_shot = if shape.window { tuning.one_shot_window } else { tuning.one_shot_staged };
    if shape.len <= tuning.packets as u64 && can(Algorithm::Packets) {
        Algorithm::Packets
    } else if (shape.len <= one_shot as u64 || !can(Algorithm::TwoShot)) && can(Algorithm::OneShot) {
        Algorithm::OneShot
    } else {
        Algorithm::TwoShot
    }
}

/// The number of blocks of a call: as many as have work, and at most as many as run at once.
pub(super) fn blocks(algorithm: Algorithm, shape: &Shape, limits: &Limits) -> u32 {
    let threads = u64::from(COLLECTIVE_THREADS);
    let tiles = match algorithm {
        Algorithm::Packets => shape.len.div_ceil(8 * threads),
        Algorithm::OneShot => shape.len.div_ceil(16 * threads),
        Algorithm::TwoShot => shape.len.div_ceil(16 * threads * u64::from(shape.ranks.max(1))),
    };
    let most = limits.blocks.clamp(1, MAX_BLOCKS);
    u32::try_from(tiles.clamp(1, most.into())).expect("clamped to a u32")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { ranks: 2, len: 0, window: false, in_place: false, reduces: true };
    const LIMITS: Limits = Limits { packets: 100, blocks: 40, near: false };
    const TUNING: Tuning =
        Tuning { packets: 200, one_shot_staged: 1000, one_shot_window: 500, stage_window: 0, always: None };

    #[test]
    fn longer_calls_take_more_shots() {
        let choose = |len, window| choose(&Shape { len, window, ..SHAPE }, &TUNING, &LIMITS);
        assert_eq!(choose(100, false), Algorithm::Packets);
        assert_eq!(choose(101, false), Algorithm::OneShot);
        assert_eq!([choose(500, true), choose(501, true)], [Algorithm::OneShot, Algorithm::TwoShot]);
        assert_eq!([choose(1000, false), choose(1001, false)], [Algorithm::OneShot, Algorithm::TwoShot]);
    }

    #[test]
    fn what_cannot_be_is_not_chosen_even_if_always_wanted() {
        let in_place = Shape { len: 300, window: true, in_place: true, ..SHAPE };
        let wanted = |always| Tuning { always: Some(always), ..TUNING };
        assert_eq!(choose(&in_place, &wanted(Algorithm::OneShot), &LIMITS), Algorithm::TwoShot);
        assert_eq!(choose(&in_place, &wanted(Algorithm::Packets), &LIMITS), Algorithm::TwoShot);
        let copied = Shape { len: 9999, reduces: false, ..SHAPE };
        assert_eq!(choose(&copied, &wanted(Algorithm::TwoShot), &LIMITS), Algorithm::OneShot);
        assert_eq!(choose(&copied, &TUNING, &LIMITS), Algorithm::OneShot);
    }

    #[test]
    fn blocks_have_something_to_do_and_run_at_once() {
        let blocks = |algorithm, len| blocks(algorithm, &Shape { len, ..SHAPE }, &LIMITS);
        assert_eq!([blocks(Algorithm::Packets, 1), blocks(Algorithm::Packets, 4097)], [1, 2]);
        assert_eq!([blocks(Algorithm::OneShot, 8192), blocks(Algorithm::OneShot, 8193)], [1, 2]);
        assert_eq!([blocks(Algorithm::TwoShot, 16_384), blocks(Algorithm::TwoShot, 1 << 30)], [1, 40]);
    }

    #[test]
    fn names_lead_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        assert_eq!("ring".parse::<Algorithm>(), Err(UnknownAlgorithm { name: "ring".to_owned() }));
    }

    #[test]
    fn every_difference_between_two_tables_shows() {
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
