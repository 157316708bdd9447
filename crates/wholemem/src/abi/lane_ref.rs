//! `LaneRef`: the memory through which the ranks of a lane (a sequence of collective calls) synchronize and exchange data.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The maximum number of blocks in one collective call. Each block has its own signals and sequence number.
pub const MAX_BLOCKS: u32 = 128;

/// The number of bytes from one rank's signal to the next, so that no two signals share a cache line.
pub const SIGNAL_STRIDE: u64 = 128;

/// The number of low bits of a signal that hold the phase that the rank has reached in a collective call. The bits above hold the
/// number of the call.
pub const PHASE_BITS: u32 = 16;

/// A lane (a sequence of collective calls) as kernels see it: the memory through which its ranks synchronize and exchange data.
///
/// ```text
///   the memory of each rank, from base + rank * stride on:
///
///   0          notices_at            ll_at                       staging_at                 result_at
///   [ signals ][ notices ][ terms ]..[ slots: parity 0, then 1 ]..[ parity 0 ][ parity 1 ]..[ reduced tiles ]
/// ```
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, IntoBytes, FromBytes, Immutable, KnownLayout)]
pub struct LaneRef {
    /// The address of the memory that rank 0 has for the lane.
    pub base: u64,
    /// The number of bytes from the memory of one rank to the memory of the next rank.
    pub stride: u64,
    /// The address of this rank's control words of the lane, which no other rank accesses.
    pub control: u64,
    /// The address of the report words, which this rank's kernels share with the host.
    pub report: u64,
    /// The address of the debug words with which a test injects faults; zero outside tests.
    pub debug: u64,
    /// The offset in a rank's memory of the notices: one word for each rank, in which the rank stores why it has aborted.
    pub notices_at: u64,
    /// The offset in a rank's memory of the words in which the rank publishes the terms of its call.
    pub terms_at: u64,
    /// The offset in a rank's memory of the slots in which other ranks store packets (data and flag in one machine word).
    pub ll_at: u64,
    /// The maximum number of bytes that a rank can send in packets in one call, a multiple of 16.
    pub ll_len: u64,
    /// The offset in a rank's memory of the two staging buffers, which calls use alternately.
    pub staging_at: u64,
    /// The length of each staging buffer, a multiple of 4096.
    pub staging_len: u64,
    /// The offset in a rank's memory of the buffer for reduced elements.
    pub result_at: u64,
    /// The number of this rank.
    pub rank: u32,
    /// The number of ranks in the group.
    pub ranks: u32,
    /// Nonzero if all ranks of the group are on one device.
    pub near: u32,
    /// Padding, which must be zero.
    pub reserved: u32,
}

layout!(LaneRef: 112 {
    base: 0, stride: 8, control: 16, report: 24, debug: 32, notices_at: 40, terms_at: 48, ll_at: 56, ll_len: 64,
    staging_at: 72, staging_len: 80, result_at: 88, rank: 96, ranks: 100, near: 104, reserved: 108,
});
