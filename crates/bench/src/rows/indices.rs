//! Random row indices that are a function of their position, so that they can be generated again and need not be stored.

use wholemem_hal::pattern::word;
use wholemem_os::width::to_usize;

use super::content::in_parallel;
use crate::args::{IndexChoice, IndexDistribution};

/// Exponent of the Zipf distribution, as in the Yahoo! Cloud Serving Benchmark (YCSB).
const EXPONENT: f64 = 0.99;

/// A prime larger than any number of rows, so that multiplying 0..rows by it modulo the number of rows gives a permutation of
/// 0..rows.
const STRIDE: u64 = (1 << 61) - 1;

/// The random row indices of one benchmark round.
#[derive(Debug, Clone, Copy)]
pub(super) struct IndexSequence {
    seed: u64,
    /// The exclusive upper bound of the row indices.
    row_bound: u64,
    zipf: Option<ZipfSampler>,
}

impl IndexSequence {
    pub(super) fn new(spread: IndexDistribution, row_bound: u64, seed: u64) -> Self {
        let zipf = (spread == IndexDistribution::Zipf).then(|| ZipfSampler::new(row_bound));
        Self { seed, row_bound, zipf }
    }

    /// Returns the row index at a position of the sequence.
    pub(super) fn at(&self, position: u64) -> u64 {
        let random = word(self.seed, position);
        match &self.zipf {
            None => below(random, self.row_bound),
            // The permutation spreads the frequent rows over the whole table.
            Some(zipf) => {
                let place = u128::from(zipf.pick(random)) * u128::from(STRIDE % self.row_bound);
                u64::try_from(place % u128::from(self.row_bound)).unwrap_or(0)
            }
        }
    }

    /// Returns the first `count` row indices as bytes.
    pub(super) fn bytes(&self, kind: IndexChoice, count: u64) -> Vec<u8> {
        let len = match kind {
            IndexChoice::I32 => size_of::<i32>(),
            IndexChoice::I64 => size_of::<i64>(),
        };
        let mut bytes = vec![0; to_usize(count).saturating_mul(len)];
        in_parallel(&mut bytes, len, |first, part| {
            for (position, place) in (first..).zip(part.chunks_exact_mut(len)) {
                // For 32-bit indices only the low bytes are copied. They contain the whole index, because every index is then
                // below 2^31.
                place.copy_from_slice(&self.at(position).to_le_bytes()[..len]);
            }
        });
        bytes
    }
}

/// Maps a random 64-bit word to a number below `bound`.
fn below(random: u64, bound: u64) -> u64 {
    u64::try_from((u128::from(random) * u128::from(bound)) >> 64).unwrap_or(0)
}

/// Samples numbers from 0 with a Zipf distribution, by rejection inversion (Hörmann and Derflinger, 1996). The method needs no
/// table, and little more than one attempt on average.
#[derive(Debug, Clone, Copy)]
struct ZipfSampler {
    count: f64,
    /// The integrals of the Zipf density up to the first and up to the last number.
    areas: [f64; 2],
    /// A sample that is at most this far below the number that it is rounded to is always accepted.
    near: f64,
}

/// Returns the integral of `x^-EXPONENT` up to `x`. Its inverse is `area_to`.
fn area(x: f64) -> f64 {
    x.powf(1.0 - EXPONENT) / (1.0 - EXPONENT)
}

fn area_to(area: f64) -> f64 {
    (area * (1.0 - EXPONENT)).powf(1.0 / (1.0 - EXPONENT))
}

impl ZipfSampler {
    fn new(count: u64) -> Self {
        let count = count as f64;
        let near = 2.0 - area_to(area(2.5) - 2_f64.powf(-EXPONENT));
        Self { count, areas: [area(1.5) - 1.0, area(count + 0.5)], near }
    }

    /// Returns the Zipf-distributed number for a random 64-bit word.
    fn pick(&self, random: u64) -> u64 {
        let [least, most] = self.areas;
        for attempt in 0.. {
            // The fraction has 53 random bits, as many as a double has.
            let fraction = (word(random, attempt) >> 11) as f64 / (1_u64 << 53) as f64;
            let under = most + fraction * (least - most);
            let x = area_to(under);
            let number = x.round().clamp(1.0, self.count);
            if number - x <= self.near || under >= area(number + 0.5) - number.powf(-EXPONENT) {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "at least 1, and whole"
                )]
                return number as u64 - 1;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_a_function_of_seed_and_position() {
        for spread in [IndexDistribution::Uniform, IndexDistribution::Zipf] {
            let draw = IndexSequence::new(spread, 1000, 7);
            let bytes = draw.bytes(IndexChoice::I64, 500);
            let indices: Vec<_> =
                bytes.chunks_exact(8).map(|index| u64::from_le_bytes(index.try_into().unwrap())).collect();
            assert!(indices.iter().zip(0..).all(|(index, position)| *index == draw.at(position)));
            assert!(indices.iter().all(|index| *index < 1000));
            assert_ne!(bytes, IndexSequence::new(spread, 1000, 8).bytes(IndexChoice::I64, 500));
            let short = draw.bytes(IndexChoice::I32, 500);
            let widened: Vec<_> = short
                .chunks_exact(4)
                .map(|index| u64::from(u32::from_le_bytes(index.try_into().unwrap())))
                .collect();
            assert_eq!(widened, indices);
        }
    }

    /// Counts how often each of `row_bound` rows occurs in `draws` random indices.
    fn counts(spread: IndexDistribution, row_bound: u64, draws: u64) -> Vec<u64> {
        let draw = IndexSequence::new(spread, row_bound, 3);
        let mut counts = vec![0; usize::try_from(row_bound).unwrap()];
        (0..draws).for_each(|position| counts[usize::try_from(draw.at(position)).unwrap()] += 1);
        counts
    }

    #[test]
    fn uniform_indices_are_equally_frequent() {
        let counts = counts(IndexDistribution::Uniform, 10, 100_000);
        assert!(counts.iter().all(|count| count.abs_diff(10_000) < 500), "{counts:?}");
    }

    #[test]
    fn zipf_indices_have_the_expected_frequencies() {
        let (row_bound, draws) = (100_u64, 1_000_000_u64);
        let mut counts = counts(IndexDistribution::Zipf, row_bound, draws);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let all: f64 = (1..=row_bound).map(|n| (n as f64).powf(-EXPONENT)).sum();
        for n in [1_u32, 2, 10, 50] {
            let expected = f64::from(n).powf(-EXPONENT) / all * draws as f64;
            let seen = counts[n as usize - 1] as f64;
            assert!((seen - expected).abs() < 0.05 * expected, "number {n}: {seen} and not {expected}");
        }
    }

    #[test]
    fn the_permutation_covers_all_rows() {
        let seen: std::collections::BTreeSet<_> =
            (0..1000_u64).map(|number| u128::from(number) * u128::from(STRIDE % 1000) % 1000).collect();
        assert_eq!(seen.len(), 1000);
    }
}
