//! Tests that compare every implementation of a reduction with a naive one.

use std::hint::black_box;
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::dtype::combine_naive;

/// The number of guard bytes on both sides of a target, which must not change.
const GUARD: usize = 160;
const UNTOUCHED: u8 = 0xA5;

/// A pseudo-random generator (xorshift).
struct TestRandom(u64);

impl TestRandom {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(end).unwrap()).unwrap()
    }
}

/// Returns the bits of a random element: arbitrary bits, a float at a limit, or a small number, whose sums cancel.
fn element(dtype: Dtype, random: &mut TestRandom) -> [u8; 8] {
    let (exponents, fraction): (u64, u32) = match dtype {
        Dtype::F16 => (31, 10),
        Dtype::Bf16 => (255, 7),
        Dtype::F32 => (255, 23),
        Dtype::F64 => (2047, 52),
        _ => return random.next().to_le_bytes(),
    };
    let sign = (random.next() & 1) << (dtype.len() * 8 - 1);
    let digits = random.next() & ((1 << fraction) - 1);
    let reduce_element = |exponent: u64, digits: u64| sign | exponent << fraction | digits;
    let bits = match random.next() % 8 {
        0 => reduce_element(0, 0),
        1 => reduce_element(0, digits),
        2 => reduce_element(exponents, 0),
        3 if random.next().is_multiple_of(4) => reduce_element(exponents, digits | 1),
        4 => reduce_element(exponents - 1, digits),
        5 | 6 => reduce_element(exponents / 2 + random.next() % 4, digits),
        _ => random.next(),
    };
    bits.to_le_bytes()
}

/// The elements of one rank with guard bytes around them. The elements begin at a given offset in a cache line.
#[derive(Clone)]
struct GuardedBuffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl GuardedBuffer {
    fn new(len: usize, offset: usize) -> Self {
        let bytes = vec![UNTOUCHED; len + 2 * GUARD + 2 * LINE];
        let start = GUARD + bytes[GUARD..].as_ptr().align_offset(LINE) + offset % LINE;
        Self { bytes, start, len }
    }

    fn random(dtype: Dtype, count: usize, random: &mut TestRandom) -> Self {
        let mut buffer = Self::new(count * dtype.len(), random.below(LINE));
        for place in buffer.elements_mut().chunks_exact_mut(dtype.len()) {
            place.copy_from_slice(&element(dtype, random)[..dtype.len()]);
        }
        buffer
    }

    fn elements(&self) -> &[u8] {
        &self.bytes[self.start..][..self.len]
    }

    fn elements_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..][..self.len]
    }

    fn is_guarded(&self) -> bool {
        // Whole slices are compared instead of single bytes, because Miri is slow for each comparison.
        let whole = |guard: &[u8]| guard == vec![UNTOUCHED; guard.len()];
        let (before, tail) = self.bytes.split_at(self.start);
        whole(before) && whole(&tail[self.len..])
    }
}

/// Returns every supported pair of an element type and a reduction operation.
fn operations() -> impl Iterator<Item = (Dtype, ReduceOp)> {
    let pairs = Dtype::NUMBERS.into_iter().flat_map(|dtype| ReduceOp::ALL.map(|op| (dtype, op)));
    pairs.filter(|(dtype, op)| op.applies_to(*dtype))
}

/// Returns every instruction set for reductions that this CPU has.
fn isa_levels() -> Vec<IsaLevel> {
    let mut all = vec![IsaLevel::Portable, IsaLevel::best()];
    all.dedup();
    all
}

/// Reduces random elements at random alignments into one to three targets, sometimes one of them in place, and compares the result
/// with the naive implementation.
fn check(dtype: Dtype, op: ReduceOp, ranks: usize, count: usize, seed: u64) -> Result<(), TestCaseError> {
    let random = &mut TestRandom(seed);
    let sources: Vec<_> = (0..ranks).map(|_| GuardedBuffer::random(dtype, count, random)).collect();
    let of_each: Vec<_> = sources.iter().map(GuardedBuffer::elements).collect();
    let expected = combine_naive(&of_each, dtype, op);
    let in_place = Some(random.below(2 * ranks)).filter(|rank| *rank < ranks);
    let others = random.below(3) + usize::from(in_place.is_none());
    let offsets: Vec<_> =
        (0..others).map(|_| random.below(LINE / 8) * 8 + random.below(2) * random.below(8)).collect();
    let store_policy = [StorePolicy::Cached, StorePolicy::Streaming][random.below(2)];
    for isa in isa_levels() {
        let mut buffers = sources.clone();
        let mut targets: Vec<_> =
            offsets.iter().map(|offset| GuardedBuffer::new(count * dtype.len(), *offset)).collect();
        // Until the results are compared, each buffer is accessed only through one pointer.
        let all: Vec<_> =
            buffers.iter_mut().chain(&mut targets).map(|buffer| buffer.elements_mut().as_mut_ptr()).collect();
        let from: Vec<_> = all[..ranks].iter().map(|source| source.cast_const()).collect();
        let to: Vec<_> =
            in_place.map(|rank| all[rank]).into_iter().chain(all[ranks..].iter().copied()).collect();
        let call = ReduceCall { sources: &from, targets: &to, count, store_policy, isa };
        // SAFETY: all buffers have `count` elements, and each target is a whole source or a separate buffer.
        unsafe { combine_by(&call, dtype, op) };

        let context =
            format!("{op} of {ranks} x {count} {dtype} by {isa:?} and {store_policy:?}, seed {seed}");
        for (rank, (after, before)) in buffers.iter().zip(&sources).enumerate() {
            let right = if in_place == Some(rank) { &expected[..] } else { before.elements() };
            prop_assert_eq!(
                after.elements(),
                right,
                "source {}, in place {:?}: {}",
                rank,
                in_place,
                &context
            );
            prop_assert!(after.is_guarded(), "source {}: {}", rank, &context);
        }
        for target in &targets {
            prop_assert_eq!(target.elements(), &expected[..], "{}", &context);
            prop_assert!(target.is_guarded(), "{}", &context);
        }
    }
    Ok(())
}

#[test]
fn short_reductions_match_the_naive_implementation() {
    // Miri is slow, so it reduces fewer elements.
    let (all_ranks, step) = if cfg!(miri) { (2..=2, BLOCK + 5) } else { (1..=9, 1) };
    for (dtype, op) in operations() {
        for ranks in all_ranks.clone() {
            for count in (0..=2 * BLOCK + 3).step_by(step) {
                let seed = u64::try_from(ranks * 100 + count).unwrap();
                check(dtype, op, ranks, count, seed).unwrap();
            }
        }
    }
}

#[test]
fn reductions_of_many_ranks_match_the_naive_implementation() {
    for dtype in Dtype::NUMBERS {
        check(dtype, ReduceOp::Avg, 129, 3, 1).unwrap();
        check(dtype, ReduceOp::Avg, 300, BLOCK + 1, 2).unwrap();
    }
}

#[test]
#[should_panic(expected = "xor does not apply to f32")]
fn bitwise_reductions_of_floats_panic() {
    let place = [0_u8; 4].as_mut_ptr();
    // SAFETY: `combine` panics before it accesses memory.
    unsafe { combine(&[place], &[place], 0, Dtype::F32, ReduceOp::Xor, StorePolicy::Cached) };
}

proptest! {
    #[test]
    fn random_reductions_match_the_naive_implementation(
        pair in proptest::sample::select(operations().collect::<Vec<_>>()),
        ranks in 1_usize..10,
        count in prop_oneof![0_usize..300, 4000_usize..4200],
        seed: u64,
    ) {
        let count = if cfg!(miri) { count % 70 } else { count };
        check(pair.0, pair.1, ranks, count, seed)?;
    }
}

#[test]
fn reductions_of_every_16_bit_float_match_the_naive_implementation() {
    // One rank has all bit patterns, and the other has random ones.
    let random = &mut TestRandom(7);
    let count = if cfg!(miri) { 64 } else { 1 << 16 };
    let every: Vec<_> = (0..count).flat_map(|bits: u32| bits.to_le_bytes().into_iter().take(2)).collect();
    let other: Vec<_> = (0..count).flat_map(|_| random.next().to_le_bytes().into_iter().take(2)).collect();
    for (dtype, op) in operations().filter(|(dtype, _)| matches!(dtype, Dtype::F16 | Dtype::Bf16)) {
        let mut result = vec![0; every.len()];
        let (from, to) = ([every.as_ptr(), other.as_ptr()], [result.as_mut_ptr()]);
        // SAFETY: the pointers in `from` and `to` are those of vectors of `every.len()` bytes, which are `every.len() / 2`
        // elements.
        unsafe { combine(&from, &to, every.len() / 2, dtype, op, StorePolicy::Cached) };
        assert!(result == combine_naive(&[&every, &other], dtype, op), "{op} of {dtype}");
    }
}

/// Returns the shortest time of several measurements of a reduction, in nanoseconds per call.
fn time_of(
    sources: &[*const u8],
    target: *mut u8,
    count: usize,
    dtype: Dtype,
    op: ReduceOp,
    store_policy: StorePolicy,
) -> f64 {
    let calls = (16 << 20) / (count * dtype.len() + 1000) + 1;
    let round = || {
        let start = Instant::now();
        for _ in 0..calls {
            // SAFETY: the buffers that the caller of `time_of` passes have `count` elements.
            unsafe {
                combine(black_box(sources), black_box(&[target]), black_box(count), dtype, op, store_policy)
            };
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(u32::try_from(calls).unwrap())
    };
    (0..7).map(|_| round()).fold(f64::INFINITY, f64::min)
}

/// Prints the throughput of reductions. Run this test in a release build on an idle machine.
#[test]
#[ignore = "a measurement"]
fn print_throughput() {
    let listed = [Dtype::U8, Dtype::I32, Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];
    let listed: Vec<_> = operations().filter(|(dtype, _)| listed.contains(dtype)).collect();
    for ((dtype, op), ranks) in listed.into_iter().flat_map(|pair| [(pair, 2), (pair, 4)]) {
        print!("{dtype:>4} {op:<4} of {ranks}");
        let measure = |len: usize, store_policy| {
            let mut buffers = vec![GuardedBuffer::new(len, 0); ranks + 1];
            let places: Vec<_> =
                buffers.iter_mut().map(|buffer| buffer.elements_mut().as_mut_ptr()).collect();
            let sources: Vec<_> = places[1..].iter().map(|place| place.cast_const()).collect();
            time_of(&sources, places[0], len / dtype.len(), dtype, op, store_policy)
        };
        for count in [1, 4, 8, 16] {
            print!("  {count}: {:.1} ns", measure(count * dtype.len(), StorePolicy::Cached));
        }
        for kib in [16, 64, 256, 1024, 32 << 10] {
            let len = f64::from(kib) * 1024.0;
            let bytes = usize::try_from(kib << 10).unwrap();
            print!("  {kib} KiB: {:.1}", len / measure(bytes, StorePolicy::Cached));
            if kib > 1024 {
                print!("  streaming: {:.1}", len / measure(bytes, StorePolicy::Streaming));
            }
        }
        println!(" GB/s");
    }
}
