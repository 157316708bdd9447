//! Reduction of the elements of several ranks on the CPU, while other ranks may write the elements.
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

/// The number of elements that a reduction loads from each source at a time. The accumulators fill at most half of sixteen
/// registers of 32 bytes.
const BLOCK: usize = 32;

/// The length in bytes of the small blocks that a reduction loads before and after its blocks of full length.
const SMALL: usize = 16;

/// The length in bytes of a cache line.
const LINE: usize = 64;

/// The kind of stores with which a reduction writes its results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StorePolicy {
    /// Stores results in the caches, because they are read soon.
    Cached,
    /// Stores results past the caches, because they do not fit in them.
    Streaming,
}

/// The instruction set with which a reduction combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IsaLevel {
    /// Only instructions that every CPU of the architecture has.
    Portable,
    /// The vector instructions AVX2 and F16C.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    Avx2,
}

impl IsaLevel {
    /// Returns the best instruction set that this CPU has for reductions. The standard library caches the detection.
    #[inline]
    fn best() -> Self {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("f16c") {
            return Self::Avx2;
        }
        Self::Portable
    }
}

/// The operands and options of one reduction.
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
    // SAFETY: the caller of `combine` guarantees that `sources` and `targets` are valid for `count` elements; the CPU supports
    // the instruction set `isa`.
    unsafe { combine_by(&ReduceCall { sources, targets, count, store_policy, isa }, dtype, op) }
}

/// Reduces elements as [`combine`] does, with the instruction set of the call.
///
/// # Safety
/// As [`combine`]; the CPU supports the instruction set of the call.
#[inline]
unsafe fn combine_by(call: &ReduceCall<'_>, dtype: Dtype, op: ReduceOp) {
    assert!(!call.sources.is_empty(), "there must be at least one source");
    let done = if dtype.is_float() {
        // SAFETY: the caller of `combine_by` guarantees that all sources and targets are valid, and that the CPU supports the
        // instruction set.
        with_floats!(dtype, Type => unsafe {
 combine_numbers::<Type, { SMALL / size_of::<Type>() }>(call, op) })
    } else {
        // SAFETY: the caller of `combine_by` guarantees that all sources and targets are valid, and that the CPU supports the
        // instruction set.
        with_integers!(dtype, Type => unsafe {
 combine_integers::<Type, { SMALL / size_of::<Type>() }>(call, op) })
    };
    assert!(done.is_some(), "{op} does not apply to {dtype}");
    if call.store_policy == StorePolicy::Streaming {
        copy::native::finish();
    }
}

/// Reduces integers with any operation; returns `None` if the operation does not apply to integers.
///
/// # Safety
/// As [`combine_by`].
unsafe fn combine_integers<T: ReduceElement<Accumulator: Arithmetic + BitwiseOps>, const FEW: usize>(
    call: &ReduceCall<'_>,
    op: ReduceOp,
) -> Option<()> {
    match op {
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::And => unsafe { choose::<T, And, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Or => unsafe { choose::<T, Or, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Xor => unsafe { choose::<T, Xor, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        _ => unsafe { return combine_numbers::<T, FEW>(call, op) },
    }
    Some(())
}

/// Reduces numbers with an operation that is not bitwise; returns `None` for a bitwise operation.
///
/// # Safety
/// As [`combine_by`].
unsafe fn combine_numbers<T: ReduceElement<Accumulator: Arithmetic>, const FEW: usize>(
    call: &ReduceCall<'_>,
    op: ReduceOp,
) -> Option<()> {
    match op {
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Sum => unsafe { choose::<T, Sum, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Avg => unsafe { choose::<T, Avg, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Min => unsafe { choose::<T, Min, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Max => unsafe { choose::<T, Max, FEW>(call) },
        // SAFETY: the caller guarantees that the sources and targets of `call` are valid and that the CPU supports the
        // instruction set.
        ReduceOp::Prod => unsafe { choose::<T, Prod, FEW>(call) },
        ReduceOp::And | ReduceOp::Or | ReduceOp::Xor => return None,
    }
    Some(())
}

/// Chooses the function for the instruction set of the call, and reduces all elements with it.
///
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
        // SAFETY: `start` is at most `call.count`, so the elements from 0 to `start` belong to the call; the caller of `choose`
        // guarantees that the sources and targets are valid and that the CPU supports the instruction set of the call.
        unsafe { run(call, 0, start) };
    }
    // SAFETY: the elements from `start` to `call.count` belong to the call; the caller of `choose` guarantees that the sources
    // and targets are valid and that the CPU supports the instruction set of the call.
    unsafe { run(call, start, call.count) };
}

/// Returns the number of elements before the first cache line boundary of the first target.
fn to_line<T>(targets: &[*mut u8]) -> usize {
    targets.first().map_or(0, |target| target.addr().wrapping_neg() % LINE / size_of::<T>())
}

/// Reduces the elements from `at` to `end` with instructions that every CPU has.
///
/// # Safety
/// As [`combine_by`]; the elements are among those of the call.
unsafe fn with_portable<T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    at: usize,
    end: usize,
) {
    // SAFETY: the caller of `with_portable` guarantees that the elements from `at` to `end` belong to the call, whose sources and
    // targets are valid; every CPU has the portable instructions.
    unsafe { blocks::<PortableIsa, T, O, FEW>(call, at, end) }
}

/// Reduces the elements from `at` to `end` with AVX2 and F16C.
///
/// # Safety
/// As [`with_portable`]; the CPU supports AVX2 and F16C.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2,f16c")]
unsafe fn with_avx2<T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    at: usize,
    end: usize,
) {
    // SAFETY: the caller of `with_avx2` guarantees that the elements from `at` to `end` belong to the call, whose sources and
    // targets are valid, and that the CPU has AVX2 and F16C.
    unsafe { blocks::<x86_64::Avx2, T, O, FEW>(call, at, end) }
}

/// Reduces the elements from `at` to `end` block by block.
///
/// # Safety
/// As [`with_portable`]; the CPU supports the instruction set `M`, and `FEW` elements are a small block.
#[inline(always)]
unsafe fn blocks<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    mut at: usize,
    end: usize,
) {
    while end - at >= BLOCK {
        // SAFETY: the call has at least `BLOCK` more elements from `at` on; the caller of `blocks` guarantees the rest.
        unsafe { block::<M, T, O, BLOCK>(call, at) };
        at += BLOCK;
    }
    while end - at >= FEW {
        // SAFETY: the call has at least `FEW` more elements from `at` on; the caller of `blocks` guarantees the rest.
        unsafe { block::<M, T, O, FEW>(call, at) };
        at += FEW;
    }
    if at < end {
        // SAFETY: the call has `end - at` more elements from `at` on, which are fewer than `FEW`; the caller of `blocks` guarantees
        // the rest.
        unsafe { tail::<M, T, O, FEW>(call, at, end - at) };
    }
}

/// Reduces one block of `COUNT` elements from `at` on.
///
/// # Safety
/// As [`blocks`]; there are `COUNT` elements from `at` on.
#[inline(always)]
unsafe fn block<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const COUNT: usize>(
    call: &ReduceCall<'_>,
    at: usize,
) {
    let at = at * size_of::<T>();
    // SAFETY: the caller of `block` guarantees that each source is readable for `COUNT` elements from `at` on, and that the CPU
    // supports the instruction set `M`.
    let load = |source: *const u8| unsafe { T::load::<M, COUNT>(source.wrapping_add(at)) };
    // SAFETY: the caller of `block` guarantees that the CPU supports the instruction set `M`.
    let result = unsafe { combined::<M, T, O, COUNT>(call.sources, load) };
    for target in call.targets {
        let target = target.wrapping_add(at);
        if COUNT == BLOCK && call.store_policy == StorePolicy::Streaming && target.addr().is_multiple_of(32) {
            // SAFETY: the caller of `block` guarantees that the target is writable for `COUNT` elements from `at` on, and that
            // the CPU supports the instruction set `M`; the target was checked to be aligned to 32 bytes.
            unsafe { M::stream(result, target) };
        } else {
            // SAFETY: the caller of `block` guarantees that the target is writable for `COUNT` elements from `at` on, and that
            // the CPU supports the instruction set `M`.
            unsafe { M::store(result, target) };
        }
    }
}

/// Reduces the last elements of a call, which are too few for a block.
///
/// # Safety
/// As [`blocks`]; there are `count` elements from `at` on, fewer than `FEW`.
#[inline(always)]
unsafe fn tail<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const FEW: usize>(
    call: &ReduceCall<'_>,
    at: usize,
    count: usize,
) {
    let (at, len) = (at * size_of::<T>(), count * size_of::<T>());
    // SAFETY: the caller of `tail` guarantees that each source is readable for `count` elements from `at` on, which have `len`
    // bytes, fewer than 16, and that the CPU supports the instruction set `M`.
    let load_some = |source: *const u8| unsafe { M::load_some(source.wrapping_add(at), len) };
    // SAFETY: the caller of `tail` guarantees that the CPU supports the instruction set `M`.
    let load = |source: *const u8| unsafe { T::widen::<M, FEW>(load_some(source)) };
    // SAFETY: the caller of `tail` guarantees that the CPU supports the instruction set `M`.
    let result = unsafe { combined::<M, T, O, FEW>(call.sources, load) };
    for target in call.targets {
        // SAFETY: the caller of `tail` guarantees that the target is writable for `count` elements from `at` on, which have `len`
        // bytes, fewer than 16, and that the CPU supports the instruction set `M`.
        unsafe { M::store_some(result, target.wrapping_add(at), len) };
    }
}

/// Loads the block of every source with `load`, and combines the blocks in the order of the sources. There is at least one
/// source.
///
/// # Safety
/// The CPU supports the instruction set `M`.
#[inline(always)]
unsafe fn combined<M: VectorIsa, T: ReduceElement, O: ReduceOperation<T::Accumulator>, const COUNT: usize>(
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
    // SAFETY: the caller of `combined` guarantees that the CPU supports the instruction set `M`.
    unsafe { T::narrow::<M, COUNT>(totals) }
}
