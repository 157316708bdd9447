//! Test data of the collective benchmarks, and the expected results.
//!
//! The elements are small numbers with a prime period, so that elements at wrong positions are detected, and the expected
//! result is known without a second buffer.

use anyhow::{Result, bail};
use half::{bf16, f16};
use wholemem::{Dtype, ReduceOp, combine_naive};
use wholemem_hal::pattern::word;
use wholemem_hal::{Span, Stream};

const SEED: u64 = 0x0b57_ac1e_0000_0006;

/// The number of elements after which the test data repeats, a prime.
const PERIOD: usize = 1021;

/// Approximate number of bytes of test data that are written or compared at a time. They are few enough to stay in the caches;
/// longer copies would use non-temporal stores.
const PIECE: usize = 64 << 10;

/// The bytes of one period of the elements that fill a buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ElementPeriod(Vec<u8>);

impl ElementPeriod {
    /// Returns the test data that a rank contributes to the collective calls of a round.
    pub(super) fn of(dtype: Dtype, round: u64, rank: u32) -> Self {
        let seed = word(word(SEED, round), u64::from(rank));
        let number = |at: u64| u8::try_from(word(seed, at) >> 61).unwrap_or(0) + 1;
        Self((0..PERIOD as u64).flat_map(|at| element(dtype, number(at))).collect())
    }

    /// Returns the expected content of the buffers after `times` in-place reductions, each of which has the result of the
    /// previous one as its input.
    pub(super) fn combined(all: &[Self], dtype: Dtype, op: ReduceOp, times: u32) -> Self {
        let sources: Vec<&[u8]> = all.iter().map(|period| &period.0[..]).collect();
        let mut once = combine_naive(&sources, dtype, op);
        // The inputs have few distinct values, so repeated reductions are computed only once for each value.
        let mut numbers: Vec<&[u8]> = once.chunks_exact(dtype.len()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut outcomes = numbers.concat();
        for _ in 1..times {
            outcomes = combine_naive(&vec![&outcomes[..]; all.len()], dtype, op);
        }
        let numbers: Vec<Vec<u8>> = numbers.into_iter().map(<[u8]>::to_vec).collect();
        for element in once.chunks_exact_mut(dtype.len()) {
            if let Ok(at) = numbers.binary_search_by(|number| number[..].cmp(element)) {
                element.copy_from_slice(&outcomes[at * dtype.len()..(at + 1) * dtype.len()]);
            }
        }
        Self(once)
    }

    /// Repeats the period of test data up to about `PIECE` bytes or `len` bytes, whichever is less.
    fn repeated(&self, len: usize) -> Vec<u8> {
        let count = len.min(PIECE).div_ceil(self.0.len()).max(1);
        self.0.repeat(count)
    }

    /// Fills `to` with repetitions of the period.
    pub(super) fn write(&self, stream: &Stream, to: &Span) -> Result<()> {
        let piece = self.repeated(to.len());
        for at in (0..to.len()).step_by(piece.len()) {
            let len = piece.len().min(to.len() - at);
            stream.write(&to.part(at, len)?, &piece[..len])?;
        }
        Ok(())
    }

    /// Checks that `from` contains repetitions of the period.
    pub(super) fn check(&self, stream: &Stream, from: &Span) -> Result<()> {
        let piece = self.repeated(from.len());
        let mut seen = vec![0; piece.len().min(from.len())];
        for at in (0..from.len()).step_by(piece.len()) {
            let len = piece.len().min(from.len() - at);
            stream.read(&from.part(at, len)?, &mut seen[..len])?;
            if seen[..len] != piece[..len] {
                let wrong = seen.iter().zip(&piece).position(|(seen, expected)| seen != expected);
                bail!(
                    "byte {position} of the result of a collective is wrong",
                    position = at + wrong.unwrap_or(0)
                );
            }
        }
        Ok(())
    }
}

/// Encodes a small number as an element of type `dtype`.
fn element(dtype: Dtype, number: u8) -> Vec<u8> {
    match dtype {
        Dtype::F16 => f16::from(number).to_ne_bytes().to_vec(),
        Dtype::Bf16 => bf16::from(number).to_ne_bytes().to_vec(),
        Dtype::F32 => f32::from(number).to_ne_bytes().to_vec(),
        Dtype::F64 => f64::from(number).to_ne_bytes().to_vec(),
        integer => {
            let mut bytes = vec![0; integer.len()];
            let lowest = if cfg!(target_endian = "little") { 0 } else { bytes.len() - 1 };
            bytes[lowest] = number;
            bytes
        }
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig, PinnedBuffer};

    use super::*;

    #[test]
    fn repeated_combining_equals_combining_one_by_one() {
        for (dtype, op) in
            [(Dtype::F32, ReduceOp::Sum), (Dtype::Bf16, ReduceOp::Avg), (Dtype::U16, ReduceOp::Prod)]
        {
            let all: Vec<_> = (0..3).map(|rank| ElementPeriod::of(dtype, 5, rank)).collect();
            let mut expected = ElementPeriod::combined(&all, dtype, op, 1);
            for times in 2..6 {
                expected = ElementPeriod::combined(&vec![expected; 3], dtype, op, 1);
                assert_eq!(ElementPeriod::combined(&all, dtype, op, times), expected, "{dtype} {op} {times}");
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_reported_at_any_length() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let stream = device.stream().unwrap();
        let period = ElementPeriod::of(Dtype::F32, 1, 0);
        for len in [4, 4084, 3 << 20] {
            let buffer = PinnedBuffer::create(&device, len).unwrap();
            period.write(&stream, &buffer.all()).unwrap();
            period.check(&stream, &buffer.all()).unwrap();
            buffer.bytes().unwrap().write_at(len - 3, &[0xEE]).unwrap();
            let error = period.check(&stream, &buffer.all()).unwrap_err();
            assert_eq!(error.to_string(), format!("byte {} of the result of a collective is wrong", len - 3));
        }
    }

    #[test]
    fn inputs_differ_between_rounds_and_ranks() {
        let first = ElementPeriod::of(Dtype::U8, 1, 0);
        assert!(first != ElementPeriod::of(Dtype::U8, 2, 0) && first != ElementPeriod::of(Dtype::U8, 1, 1));
    }
}
