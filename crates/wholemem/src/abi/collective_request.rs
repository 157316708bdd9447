//! The request of a collective call: the argument of its kernels.

use crate::dtype::{Dtype, ReduceOp};

/// The addresses of every rank's part of a window. All zero if there is no window.
///
/// ```
/// use wholemem::WindowRef;
///
/// let window = WindowRef { base: 0x1000_0000, stride: 0x100_0000, table: 0 };
/// assert_eq!(window.base + 3 * window.stride, 0x1300_0000); // where rank 3's part begins
/// ```
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WindowRef {
    /// The address of rank 0's part; with a table, the offset from each address of the table.
    pub base: u64,
    /// Bytes from one rank's part to the next rank's.
    pub stride: u64,
    /// The address of a table with each rank's address, if the parts are not `stride` bytes apart; otherwise zero.
    pub table: u64,
}

/// A lane as kernels see it: the memory through which its ranks synchronize and exchange data.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
    /// The offset of the notices, in which ranks store why they have aborted.
    pub notices_at: u64,
    /// The offset of the packet slots.
    pub ll_at: u64,
    /// The most bytes that a rank can send in packets.
    pub ll_len: u64,
    /// The offset of the two staging buffers.
    pub staging_at: u64,
    /// The length of each staging buffer.
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
    pub spare: u32,
}

/// One rank's part of one collective call.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CollectiveRequest {
    /// The lane.
    pub lane: LaneRef,
    /// This rank's input.
    pub input: u64,
    /// This rank's output.
    pub output: u64,
    /// The number of elements of the input.
    pub count: u64,
    /// Every rank's input, if the other ranks read it directly.
    pub inputs: WindowRef,
    /// Every rank's output, if the other ranks write it directly.
    pub outputs: WindowRef,
    /// The [code](Dtype::code) of the elements' type.
    pub dtype: u32,
    /// The [code](ReduceOp::code) of the reduction.
    pub op: u32,
    /// The root of a broadcast.
    pub root: u32,
    /// Nonzero for a programmatic launch: the kernel starts while the previous one runs, and permits the next one to start.
    pub early: u32,
}

const _: () = assert!(size_of::<LaneRef>() == LaneRef::LEN);
const _: () = assert!(size_of::<CollectiveRequest>() == CollectiveRequest::LEN);

impl WindowRef {
    fn words(&self) -> [u64; 3] {
        [self.base, self.stride, self.table]
    }

    /// Whether there is no window.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl LaneRef {
    /// Its length in bytes.
    pub const LEN: usize = 104;

    /// Encodes it as a kernel reads it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let Self { base, stride, control, report, debug, notices_at, ll_at, ll_len, .. } = *self;
        let Self { staging_at, staging_len, result_at, rank, ranks, near, spare, .. } = *self;
        let words = [base, stride, control, report, debug, notices_at, ll_at, ll_len];
        let mut bytes = [0; Self::LEN];
        let rest = [staging_at, staging_len, result_at, pair(rank, ranks), pair(near, spare)];
        put(&mut bytes, words.into_iter().chain(rest));
        bytes
    }
}

impl CollectiveRequest {
    /// Its length in bytes.
    pub const LEN: usize = 192;

    /// Encodes it as a kernel reads it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let Self { lane, input, output, count, inputs, outputs, dtype, op, root, early } = self;
        let mut bytes = [0; Self::LEN];
        bytes[..LaneRef::LEN].copy_from_slice(&lane.to_bytes());
        let words = [*input, *output, *count].into_iter().chain(inputs.words()).chain(outputs.words());
        put(&mut bytes[LaneRef::LEN..], words.chain([pair(*dtype, *op), pair(*root, *early)]));
        bytes
    }

    /// Decodes a request; `None` if there are too few bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.first_chunk()?;
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
            u64::from_ne_bytes(word)
        };
        let half = |at: usize| {
            let mut half = [0; 4];
            half.copy_from_slice(&bytes[at * 4..at * 4 + 4]);
            u32::from_ne_bytes(half)
        };
        let window = |at| WindowRef { base: word(at), stride: word(at + 1), table: word(at + 2) };
        let lane = LaneRef {
            base: word(0),
            stride: word(1),
            control: word(2),
            report: word(3),
            debug: word(4),
            notices_at: word(5),
            ll_at: word(6),
            ll_len: word(7),
            staging_at: word(8),
            staging_len: word(9),
            result_at: word(10),
            rank: half(22),
            ranks: half(23),
            near: half(24),
            spare: half(25),
        };
        Some(Self {
            lane,
            input: word(13),
            output: word(14),
            count: word(15),
            inputs: window(16),
            outputs: window(19),
            dtype: half(44),
            op: half(45),
            root: half(46),
            early: half(47),
        })
    }

    /// The type of the elements and the reduction.
    #[must_use]
    pub fn elements(&self) -> Option<(Dtype, ReduceOp)> {
        Some((Dtype::from_code(self.dtype)?, ReduceOp::from_code(self.op)?))
    }
}

fn put(bytes: &mut [u8], words: impl Iterator<Item = u64>) {
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
}

/// Two halves in the order in which they lie in memory, as a word.
fn pair(first: u32, second: u32) -> u64 {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&first.to_ne_bytes());
    bytes[4..].copy_from_slice(&second.to_ne_bytes());
    u64::from_ne_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_are_read_as_they_were_written(words: [u64; 20], halves: [u32; 8]) {
            let window = |at: usize| WindowRef { base: words[at], stride: words[at + 1], table: words[at + 2] };
            let lane = LaneRef {
                base: words[0], stride: words[1], control: words[2], report: words[3], debug: words[4],
                notices_at: words[5], ll_at: words[6], ll_len: words[7], staging_at: words[8],
                staging_len: words[9], result_at: words[10], rank: halves[0], ranks: halves[1], near: halves[6], spare: halves[7],
            };
            let request = CollectiveRequest {
                lane, input: words[11], output: words[12], count: words[13], inputs: window(14),
                outputs: window(17), dtype: halves[2], op: halves[3], root: halves[4], early: halves[5],
            };
            let bytes = request.to_bytes();
            prop_assert_eq!(CollectiveRequest::from_bytes(&bytes), Some(request));
            prop_assert_eq!(CollectiveRequest::from_bytes(&bytes[..191]), None);
            prop_assert_eq!(&bytes[..LaneRef::LEN], &lane.to_bytes());
        }
    }
}
