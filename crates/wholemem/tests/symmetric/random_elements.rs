//! Random elements for tests of reductions, with special values: NaN, infinities, subnormal numbers, and arbitrary bits.

use wholemem::Dtype;

/// A pseudo-random generator with a seed (SplitMix64).
#[derive(Debug, Clone)]
pub(crate) struct TestRandom(pub(crate) u64);

impl TestRandom {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}

/// Returns `count` random elements of a type, as bytes.
pub(crate) fn elements(dtype: Dtype, count: usize, seed: u64) -> Vec<u8> {
    let mut random = TestRandom(seed);
    let mut bytes = Vec::with_capacity(count * dtype.len());
    for _ in 0..count {
        bytes.extend_from_slice(&element(dtype, &mut random).to_ne_bytes()[..dtype.len()]);
    }
    bytes
}

/// Returns `len` random bytes.
pub(crate) fn bytes(len: usize, seed: u64) -> Vec<u8> {
    elements(Dtype::U64, len.div_ceil(8), seed)[..len].to_vec()
}

/// Returns a random element, in the lowest bytes of a word.
fn element(dtype: Dtype, random: &mut TestRandom) -> u64 {
    let bits = random.next();
    let special = random.below(4) == 0;
    match dtype {
        Dtype::F16 if special => {
            [0x7e01, 0xfe00, 0x7c00, 0xfc00, 0x0001, 0x83ff, 0x8000, 0, 0x7bff][random.below(9)]
        }
        Dtype::Bf16 if special => {
            [0x7fc1, 0xffc0, 0x7f80, 0xff80, 0x0001, 0x807f, 0x8000, 0, 0x7f7f][random.below(9)]
        }
        Dtype::F32 if special => {
            [0x7fc0_0001, 0xffc0_0000, 0x7f80_0000, 0xff80_0000, 1, 0x807f_ffff, 0x8000_0000, 0, 0x7f7f_ffff]
                [random.below(9)]
        }
        Dtype::F64 if special => [
            0x7ff8_0000_0000_0001,
            0xfff8 << 48,
            0x7ff << 52,
            0xfff << 52,
            1,
            0x800f << 48,
            1 << 63,
            0,
            0x7fef << 48,
        ][random.below(9)],
        // These floats have moderate size, so that sums and products are usually finite.
        Dtype::F32 => u64::from(((bits % 2_000_001) as f32 / 1e5 - 10.0).to_bits()),
        Dtype::F64 => ((bits % 2_000_001) as f64 / 1e5 - 10.0).to_bits(),
        Dtype::F16 => bits & 0x8000 | (0x3000 + bits % 0x1800),
        Dtype::Bf16 => bits & 0x8000 | (0x3e00 + bits % 0x0400),
        _ => bits,
    }
}
