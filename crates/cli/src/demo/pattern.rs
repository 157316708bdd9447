//! Test data that depends on a seed and on the offset of each byte, so that lost, moved and stale bytes are detected.

use anyhow::{Result, bail};
use wholemem_command::progress::ProgressDisplay;
use wholemem_hal::{Mapping, Stream};

const WORD: usize = size_of::<u64>();

/// The number of bytes that are generated and compared at a time, few enough for the cache.
const STEP: usize = 256 << 10;

/// A pseudorandom sequence of bytes. Each word is a hash of the seed and the word's index, so that any part can be generated
/// without the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Pattern {
    seed: u64,
}

impl Pattern {
    pub(super) fn new(seed: u64) -> Self {
        Self { seed }
    }

    pub(super) fn seed(self) -> u64 {
        self.seed
    }

    /// Fills `target` with the bytes of the pattern from `offset` on. `offset` is a multiple of 8.
    pub(super) fn generate(self, offset: usize, target: &mut [u8]) {
        debug_assert!(offset.is_multiple_of(WORD));
        let mut words = (offset as u64 / WORD as u64..).map(|index| self.word(index).to_ne_bytes());
        let (whole, rest) = target.as_chunks_mut::<WORD>();
        // `zip` takes a word only after an item of `whole`, so no word is lost when `whole` ends.
        for (bytes, word) in whole.iter_mut().zip(&mut words) {
            *bytes = word;
        }
        for (byte, value) in rest.iter_mut().zip(words.flatten()) {
            *byte = value;
        }
    }

    fn word(self, index: u64) -> u64 {
        let mut x = self.seed.wrapping_add(index).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Fills a mapping with the pattern.
    pub(super) fn write(self, stream: &Stream, map: &Mapping) -> Result<()> {
        let mut bytes = vec![0; STEP];
        for offset in (0..map.len()).step_by(STEP) {
            let len = STEP.min(map.len() - offset);
            self.generate(offset, &mut bytes[..len]);
            stream.write(&map.span(offset, len)?, &bytes[..len])?;
        }
        Ok(())
    }

    /// Compares every byte of a mapping with the pattern.
    ///
    /// # Errors
    /// The offset of the first byte that differs, and both values.
    pub(super) fn check(self, stream: &Stream, map: &Mapping, label: &str) -> Result<()> {
        let progress = ProgressDisplay::bytes(label, map.len());
        let (mut seen, mut expected) = (vec![0; STEP], vec![0; STEP]);
        for offset in (0..map.len()).step_by(STEP) {
            let len = STEP.min(map.len() - offset);
            let (seen, expected) = (&mut seen[..len], &mut expected[..len]);
            stream.read(&map.span(offset, len)?, seen)?;
            self.generate(offset, expected);
            if seen != expected {
                let wrong = seen.iter().zip(&*expected).position(|(seen, expected)| seen != expected);
                let at = wrong.unwrap_or_default();
                let (seen, expected, seed) = (seen[at], expected[at], self.seed);
                bail!(
                    "the byte at offset {position} is {seen:#04x}, expected {expected:#04x} (seed {seed})",
                    position = offset + at
                );
            }
            progress.advance(len);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig, Rights};

    use super::*;

    #[test]
    fn a_part_equals_the_same_range_of_the_whole_pattern() {
        let pattern = Pattern::new(42);
        let mut whole = vec![0; 1000];
        pattern.generate(0, &mut whole);
        for (offset, len) in [(0, 8), (8, 1), (16, 13), (992, 8), (504, 496)] {
            let mut part = vec![0; len];
            pattern.generate(offset, &mut part);
            assert_eq!(part, &whole[offset..offset + len]);
        }
    }

    #[test]
    fn the_offset_of_a_wrong_byte_is_reported() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let stream = device.stream().unwrap();
        let map = device.allocate(STEP + (64 << 10)).unwrap().map(Rights::ReadWrite).unwrap();
        let pattern = Pattern::new(7);
        pattern.write(&stream, &map).unwrap();
        pattern.check(&stream, &map, "test").unwrap();

        for offset in [0, 4095, STEP - 1, STEP, map.len() - 1] {
            let mut byte = [0];
            stream.read(&map.span(offset, 1).unwrap(), &mut byte).unwrap();
            stream.write(&map.span(offset, 1).unwrap(), &[!byte[0]]).unwrap();
            let error = pattern.check(&stream, &map, "test").unwrap_err();
            let (seen, expected) = (!byte[0], byte[0]);
            let text =
                format!("the byte at offset {offset} is {seen:#04x}, expected {expected:#04x} (seed 7)");
            assert_eq!(error.to_string(), text);
            stream.write(&map.span(offset, 1).unwrap(), &byte).unwrap();
        }
        assert!(Pattern::new(8).check(&stream, &map, "test").is_err());
    }
}
