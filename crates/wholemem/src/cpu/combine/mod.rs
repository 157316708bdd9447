//! Reduction of the elements of several ranks, which other ranks may write concurrently.
//!
//! A block of each source is loaded by assembly or volatile accesses, the loaded values are combined by ordinary arithmetic,
//! and the result is stored to every target. With vector registers, a block never leaves them. Sources are combined in
//! order, and the result is bitwise what [`ReduceOp`] describes, on every CPU.

mod halves;
mod reduce_element;
#[cfg(test)]
mod tests;
mod vector_isa;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

use self::reduce_element::{
    And, Arithmetic, Avg, BitwiseOps, Max, Min, Or, Prod, ReduceElement, ReduceOperation, Sum, Xor,
};
use self::vector_isa::{PortableIsa, VectorIsa};
use super::copy;
use crate::dtype::{Dtype, ReduceOp, with_floats, with_integers};

/// The number of elements of a block. The accumulators of a block fill at most half of sixteen registers of 32 bytes.
const BLOCK: usize = 32;

/// The length in bytes of a small block, for the elements before and after the blocks.
const SMALL: usize = 16;

/// A cache line.
const LINE: usize = 64;

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StorePolicy {
    /// In the caches, for results that are read soon.
    Cached,
    /// Bypassing the caches, for results that do not fit in them.
    Streaming,
}

/// The instruction set that a reduction uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IsaLevel {
    /// Instructions that every CPU of the architecture has.
    Portable,
    /// AVX2 and F16C.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx2,
}

impl IsaLevel {
    /// The best instruction set of this CPU. The standard library caches the detection.
    #[inline]
    fn best() -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        Self::Portable
    }
}

/// The operands and options of a reduction.
#[derive(Clone, Copy)]
struct ReduceCall<'a> {
    sources: &'a [*const u8],
    targets: &'a [*mut u8],
    count: usize,
    store_policy: StorePolicy,
    isa: IsaLevel,
}

/// Combines `count` elements of every source, in the order of the sources, and stores the result to every target.
///
/// # Panics
/// If there is no source, or the operation does not [apply](ReduceOp::applies_to) to the type.
///
/// # Safety
/// Sources are readable and targets writable for `count` elements, as raw memory that others may write concurrently. A target
/// is one of the sources, or overlaps with none. Targets do not overlap.
pub(crate) unsafe fn combine(
    sources: &[*const u8],
    targets: &[*mut u8],
    count: usize,
    dtype: Dtype,
    op: ReduceOp,
    store_policy: StorePolicy,
) {
    let isa = IsaLevel::best();
    // SAFETY: the caller guarantees the same preconditions; the CPU has these instructions.
    unsafe { combine_by(&ReduceCall { sources, targets, count, store_policy, isa }, dtype, op) }
}

/// # Safety
/// As [`combine`]; the CPU has the instructions of the call.
#[inline]
unsafe fn combine_by(call: &ReduceCall<'_>, dtype: Dtype, op: ReduceOp) {
    assert!(!call.sources.is_empty(), "there must be at least one source");
    let done = if dtype.is_float() {
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        with_floats!(dtype, Type => unsafe {
 combine_numbers::<Type, { SMALL / size_of::<Type>() }>(call, op) })
    } else {
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        with_integers!(dtype, Type => unsafe {
 combine_integers::<Type, { SMALL / size_of::<Type>() }>(call, op) })
    };
    assert!(done.is_some(), "{op} does not apply to {dtype}");
    if call.store_policy == StorePolicy::Streaming {
        copy::native::finish();
    }
}

/// # Safety
/// As [`combine_by`].
unsafe fn combine_integers<T: ReduceElement<Accumulator: Arithmetic + BitwiseOps>, const FEW: usize>(
    call: &ReduceCall<'_>,
    op: ReduceOp,
) -> Option<()> {
    match op {
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::And => unsafe { choose::<T, And, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Or => unsafe { choose::<T, Or, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Xor => unsafe { choose::<T, Xor, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        _ => unsafe { return combine_numbers::<T, FEW>(call, op) },
    }
    Some(())
}

/// # Safety
/// As [`combine_by`].
unsafe fn combine_numbers<T: ReduceElement<Accumulator: Arithmetic>, const FEW: usize>(
    call: &ReduceCall<'_>,
    op: ReduceOp,
) -> Option<()> {
    match op {
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Sum => unsafe { choose::<T, Sum, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Avg => unsafe { choose::<T, Avg, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Min => unsafe { choose::<T, Min, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Max => unsafe { choose::<T, Max, FEW>(call) },
        // SAFETY: the preconditions are those of `combine_by`, which the caller guarantees.
        ReduceOp::Prod => unsafe { choose::<T, Prod, FEW>(call) },
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => return None,
    }
    Some(())
}

/// # Safety
/// As [`combine_by`].
unsafe fn choose<T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
) {
    let run = match call.isa {
        IsaLevel::Portable => with_portable::<T, O, FEW>,
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        IsaLevel::Avx2 => with_avx2::<T, O, FEW>,
    };
    let mut start = 0;
    if call.store_policy == StorePolicy::Streaming {
        start = to_line::<T>(call.targets).min(call.count);
        // SAFETY: `start` is at most `call.count`; the caller guarantees the preconditions of `combine_by`, and the CPU has the
        // instructions of the call.
        unsafe { run(call, 0, start) };
    }
    // SAFETY: `start` is at most `call.count`; the caller guarantees the preconditions of `combine_by`, and the CPU has the
    // instructions of the call.
    unsafe { run(call, start, call.count) };
}

/// The number of elements before the first cache line of the first target.
fn to_line<T>(targets: &[*mut u8]) -> usize {
    targets.first().map_or(0, |target| target.addr().wrapping_neg() % LINE / size_of::<T>())
}

/// # Safety
/// As [`combine_by`]; the elements are among those of the call.
unsafe fn with_portable<T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    at: usize,
    end: usize,
) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { blocks::<PortableIsa, T, O, FEW>(call, at, end) }
}

/// # Safety
/// As [`with_portable`]; the CPU has these instructions.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2,f16c")]
unsafe fn with_avx2<T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    at: usize,
    end: usize,
) {
    // SAFETY: the caller guarantees the same preconditions.
    unsafe { blocks::<x86_64::Avx2, T, O, FEW>(call, at, end) }
}

/// # Safety
/// As [`with_portable`]; the CPU has the instructions `M`, and `FEW` elements are a small block.
#[inline(always)]
unsafe fn blocks<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    mut at: usize,
    end: usize,
) {
    while end - at >= BLOCK {
        // SAFETY: at least `BLOCK` elements of the call are left from `at` on.
        unsafe { block::<M, T, O, BLOCK>(call, at) };
        at += BLOCK;
    }
    while end - at >= FEW {
        // SAFETY: at least `FEW` elements of the call are left from `at` on.
        unsafe { block::<M, T, O, FEW>(call, at) };
        at += FEW;
    }
    if at < end {
        // SAFETY: `end - at` elements of the call are left from `at` on, fewer than `FEW`.
        unsafe { tail::<M, T, O, FEW>(call, at, end - at) };
    }
}

/// # Safety
/// As [`blocks`]; there are `COUNT` elements from `at` on.
#[inline(always)]
unsafe fn block<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const COUNT: usize>(
    call: &ReduceCall<'_>,
    at: usize,
) {
    let at = at * size_of::<T>();
    // SAFETY: a block within the caller's range.
    let load = |source: *const u8| unsafe { T::load::<M, COUNT>(source.wrapping_add(at)) };
    let result = combined::<M, T, O, COUNT>(call.sources, load);
    for target in call.targets {
        let target = target.wrapping_add(at);
        if COUNT == BLOCK && call.store_policy == StorePolicy::Streaming && target.addr().is_multiple_of(32) {
            // SAFETY: a block within the caller's range, and aligned.
            unsafe { M::stream(result, target) };
        } else {
            // SAFETY: the caller guarantees that the target is writable for `COUNT` elements from `at` on, and that the CPU has the
            // instructions `M`.
            unsafe { M::store(result, target) };
        }
    }
}

/// # Safety
/// As [`blocks`]; there are `count` elements from `at` on, fewer than `FEW`.
#[inline(always)]
unsafe fn tail<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    at: usize,
    count: usize,
) {
    let (at, len) = (at * size_of::<T>(), count * size_of::<T>());
    // SAFETY: within the caller's range.
    let load = |source: *const u8| T::widen::<M, FEW>(unsafe { M::load_some(source.wrapping_add(at), len) });
    let result = combined::<M, T, O, FEW>(call.sources, load);
    for target in call.targets {
        // SAFETY: the caller guarantees that the target is writable for `count` elements from `at` on, which have `len` bytes,
        // fewer than 16, and that the CPU has the instructions `M`.
        unsafe { M::store_some(result, target.wrapping_add(at), len) };
    }
}

/// Combines the blocks of all sources. There is at least one source.
#[inline(always)]
fn combined<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const COUNT: usize>(
    sources: &[*const u8],
    load: impl Fn(*const u8) -> [T::Accumulator; COUNT],
) -> [T; COUNT] {
    let mut totals = load(sources[0]);
    for source in &sources[1..] {
        for (total, next) in totals.iter_mut().zip(load(*source)) {
            *total = O::with(*total, next);
        }
    }
    for total in &mut totals {
        *total = O::of_all(*total, sources.len());
    }
    T::narrow::<M, COUNT>(totals)
}
