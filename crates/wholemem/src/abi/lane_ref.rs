//! `LaneRef`: the memory through which the ranks of a lane synchronize and exchange data.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The most blocks of a call. Each block has signals and a sequence number of its own.
pub const MAX_BLOCKS: u32 = 128;

/// Bytes from one signal to the next: no two of them share a cache line.
pub const SIGNAL_STRIDE: u64 = 128;

/// The position of the call's number in a signal; below it is the phase that the rank has reached in the call.
pub const PHASE_BITS: u32 = 16;

/// A lane as kernels see it: the memory through which its ranks synchronize and exchange data.
///
/// ```text
///   the memory of each rank, from base + rank * stride on:
///
///   0          notices_at   ll_at                       staging_at                 result_at
///   [ signals ][ notices ]..[ slots: parity 0, then 1 ]..[ parity 0 ][ parity 1 ]..[ reduced tiles ]
/// ```
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct LaneRef {
    /// The address of rank 0's memory of the lane.
    pub base: u64,
    /// Bytes from one rank's memory to the next rank's.
    pub stride: u64,
    /// The address of this rank's control words, which no other rank accesses.
    pub control: u64,
    /// The address of the report, which this rank's kernels share with its host.
    pub report: u64,
    /// The address of the debug words of a test; zero outside tests.
    pub debug: u64,
    /// The offset of the notices, in which ranks store why they have aborted: a word for each rank.
    pub notices_at: u64,
    /// The offset of the packet slots.
    pub ll_at: u64,
    /// The most bytes that a rank can send in packets, a multiple of 16.
    pub ll_len: u64,
    /// The offset of the two staging buffers.
    pub staging_at: u64,
    /// The length of each staging buffer, a multiple of 4096.
    pub staging_len: u64,
    /// The offset of the buffer for reduced elements.
    pub result_at: u64,
    /// This rank.
    pub rank: u32,
    /// The number of ranks.
    pub ranks: u32,
    /// Nonzero if all ranks are on one device.
    pub near: u32,
    /// Zero.
    pub reserved: u32,
}

layout!(LaneRef: 104 {
    base: 0, stride: 8, control: 16, report: 24, debug: 32, notices_at: 40, ll_at: 48, ll_len: 56, staging_at: 64,
    staging_len: 72, result_at: 80, rank: 88, ranks: 92, near: 96, reserved: 100,
});
