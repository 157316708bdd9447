//! Loads and stores of blocks of elements in the vector registers of x86-64, by assembly. Compiled code combines the elements.

use std::arch::asm;
use std::arch::x86_64::{
    __m128i, __m256, __m256i, _MM_FROUND_TO_NEAREST_INT, _mm256_add_epi32, _mm256_and_si256,
    _mm256_blend_epi16, _mm256_cvtph_ps, _mm256_cvtps_ph, _mm256_set1_epi32, _mm256_setzero_si256,
    _mm256_slli_epi32, _mm256_srli_epi32,
};
use std::mem::{MaybeUninit, transmute_copy};

use half::{bf16, f16};

use super::halves::{narrow_pairs, widen_pairs};
use super::vector_isa::VectorIsa;

/// The vector instructions AVX2 and F16C, as a type. A value of it does not prove that the CPU has them.
pub(super) struct Avx2;

/// Loads 32 bytes into a vector register.
///
/// # Safety
/// `from` is readable for 32 bytes, as raw memory that others may write concurrently.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load(from: *const u8) -> __m256i {
    let register;
    // SAFETY: the caller of `load` guarantees that `from` is readable for 32 bytes; the asm loads them and writes no memory.
    unsafe {
        asm!(
            "vmovdqu {register}, [{from}]",
            from = in(reg) from,
            register = out(ymm_reg) register,
            options(nostack, preserves_flags, readonly)
        );
    }
    register
}

/// Loads eight half-precision floats as single-precision floats.
///
/// # Safety
/// `from` is readable for 16 bytes, as raw memory that others may write concurrently.
#[inline]
#[target_feature(enable = "avx2,f16c")]
unsafe fn load_halves(from: *const u8) -> __m256 {
    let register;
    // SAFETY: the caller of `load_halves` guarantees that `from` is readable for 16 bytes; the asm loads them and writes no
    // memory.
    unsafe {
        asm!(
            "vcvtph2ps {register}, xmmword ptr [{from}]",
            from = in(reg) from,
            register = out(ymm_reg) register,
            options(nostack, preserves_flags, readonly)
        );
    }
    register
}

/// Stores a vector register of 32 bytes.
///
/// # Safety
/// `to` is writable for 32 bytes, as raw memory.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(register: __m256i, to: *mut u8) {
    // SAFETY: the caller of `store` guarantees that `to` is writable for the 32 bytes that the asm stores.
    unsafe {
        asm!(
            "vmovdqu [{to}], {register}",
            to = in(reg) to,
            register = in(ymm_reg) register,
            options(nostack, preserves_flags)
        );
    }
}

/// Stores a vector register of 32 bytes with a store that bypasses the caches.
///
/// # Safety
/// `to` is writable for 32 bytes, as raw memory, and a multiple of as many.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn stream(register: __m256i, to: *mut u8) {
    // SAFETY: the caller of `stream` guarantees that `to` is writable for the 32 bytes that the asm stores, and aligned to 32.
    unsafe {
        asm!(
            "vmovntdq [{to}], {register}",
            to = in(reg) to,
            register = in(ymm_reg) register,
            options(nostack, preserves_flags)
        );
    }
}

/// Loads 16 bytes into a vector register.
///
/// # Safety
/// As [`load`], for 16 bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_half(from: *const u8) -> __m128i {
    let register;
    // SAFETY: the caller of `load_half` guarantees that `from` is readable for 16 bytes; the asm loads them and writes no memory.
    unsafe {
        asm!(
            "vmovdqu {register}, [{from}]",
            from = in(reg) from,
            register = out(xmm_reg) register,
            options(nostack, preserves_flags, readonly)
        );
    }
    register
}

/// Stores a vector register of 16 bytes.
///
/// # Safety
/// As [`store`], for 16 bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store_half(register: __m128i, to: *mut u8) {
    // SAFETY: the caller of `store_half` guarantees that `to` is writable for the 16 bytes that the asm stores.
    unsafe {
        asm!(
            "vmovdqu [{to}], {register}",
            to = in(reg) to,
            register = in(xmm_reg) register,
            options(nostack, preserves_flags)
        );
    }
}

/// Defines loads and stores of 1 to 8 bytes through general registers. A vector load of bytes that were just stored piece by
/// piece would wait until all of them are in the cache.
macro_rules! pieces {
    ($($load:ident, $store:ident: $type:ident, $read:literal, $write:literal, $register:ident;)*) => {$(
        /// Loads an integer from shared memory.
        ///
        /// # Safety
        /// `from` is readable for a number of this type, as raw memory that others may write concurrently.
        #[inline(always)]
        unsafe fn $load(from: *const u8) -> u128 {
            let value: u64;
            // SAFETY: the caller guarantees that `from` is readable for an integer of this type; the asm loads it and writes no
            // memory.
            unsafe {
                asm!($read, from = in(reg) from, value = out(reg) value, options(nostack, preserves_flags, readonly));
            }
            value.into()
        }

        /// Stores the lower bits of `value` as an integer in shared memory.
        ///
        /// # Safety
        /// `to` is writable for a number of this type, as raw memory.
        #[inline(always)]
        #[expect(clippy::allow_attributes, reason = "the cast changes nothing for some of the types")]
        #[allow(clippy::cast_possible_truncation, reason = "only the lower bits are stored")]
        unsafe fn $store(value: u128, to: *mut u8) {
            // SAFETY: the caller guarantees that `to` is writable for an integer of this type, which is what the asm stores.
            unsafe {
                asm!($write, to = in(reg) to, value = in($register) value as $type, options(nostack, preserves_flags));
            }
        }
    )*};
}

pieces! {
    load_8, store_8: u64, "mov {value}, [{from}]", "mov [{to}], {value}", reg;
    load_4, store_4: u32, "mov {value:e}, [{from}]", "mov [{to}], {value:e}", reg;
    load_2, store_2: u16, "movzx {value:e}, word ptr [{from}]", "mov [{to}], {value:x}", reg;
    load_1, store_1: u8, "movzx {value:e}, byte ptr [{from}]", "mov [{to}], {value}", reg_byte;
}

/// Calls `wide` with the offset of each 32-byte register of an array of elements, or `half` with offset 0 if the array has 16
/// bytes.
#[inline(always)]
fn for_registers<T, const COUNT: usize>(wide: impl Fn(usize), half: impl Fn(usize)) {
    const { assert!(size_of::<[T; COUNT]>().is_multiple_of(32) || size_of::<[T; COUNT]>() == 16) };
    for at in (0..size_of::<[T; COUNT]>() & !31).step_by(32) {
        wide(at);
    }
    if size_of::<[T; COUNT]>() == 16 {
        half(0);
    }
}

impl VectorIsa for Avx2 {
    #[inline(always)]
    unsafe fn load<T: Copy, const COUNT: usize>(from: *const u8) -> [T; COUNT] {
        let mut elements = MaybeUninit::<[T; COUNT]>::uninit();
        let place: *mut u8 = elements.as_mut_ptr().cast();
        for_registers::<T, COUNT>(
            |at| {
                // SAFETY: the caller of `load` guarantees that `from` is readable for all elements, and the 32 bytes at `at`
                // are among them; that caller also guarantees that the CPU has AVX2.
                let register = unsafe { load(from.wrapping_add(at)) };
                // SAFETY: the 32 bytes at offset `at` are within the local `elements`.
                unsafe { place.wrapping_add(at).cast::<__m256i>().write_unaligned(register) };
            },
            |at| {
                // SAFETY: the elements have 16 bytes, and the caller of `load` guarantees that `from` is readable for all of
                // them; that caller also guarantees that the CPU has AVX2.
                let register = unsafe { load_half(from.wrapping_add(at)) };
                // SAFETY: the elements have 16 bytes, and `place` is the address of the local `elements`.
                unsafe { place.wrapping_add(at).cast::<__m128i>().write_unaligned(register) };
            },
        );
        // SAFETY: the loop has written every byte of `elements`, and every bit pattern is a valid element.
        unsafe { elements.assume_init() }
    }

    #[inline(always)]
    unsafe fn store<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        let place: *const u8 = elements.as_ptr().cast();
        for_registers::<T, COUNT>(
            |at| {
                // SAFETY: the 32 bytes at offset `at` are within the local `elements`.
                let register = unsafe { place.wrapping_add(at).cast::<__m256i>().read_unaligned() };
                // SAFETY: the caller of `store` guarantees that `to` is writable for all elements, and the 32 bytes at `at`
                // are among them; that caller also guarantees that the CPU has AVX2.
                unsafe { store(register, to.wrapping_add(at)) };
            },
            |at| {
                // SAFETY: the elements have 16 bytes, and `place` is the address of the local `elements`.
                let register = unsafe { place.wrapping_add(at).cast::<__m128i>().read_unaligned() };
                // SAFETY: the elements have 16 bytes, and the caller of `store` guarantees that `to` is writable for all of
                // them; that caller also guarantees that the CPU has AVX2.
                unsafe { store_half(register, to.wrapping_add(at)) };
            },
        );
    }

    #[inline(always)]
    unsafe fn stream<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8) {
        debug_assert!(size_of::<[T; COUNT]>().is_multiple_of(32));
        for at in (0..size_of::<[T; COUNT]>()).step_by(32) {
            // SAFETY: the 32 bytes at offset `at` are within the local `elements`.
            let register =
                unsafe { elements.as_ptr().wrapping_byte_add(at).cast::<__m256i>().read_unaligned() };
            // SAFETY: the caller of `stream` guarantees that `to` is writable for all elements and aligned to 32 bytes, and
            // `at` is a multiple of 32; that caller also guarantees that the CPU has AVX2.
            unsafe { stream(register, to.wrapping_add(at)) };
        }
    }

    #[inline(always)]
    unsafe fn load_some<T: Copy, const COUNT: usize>(from: *const u8, len: usize) -> [T; COUNT] {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        let (mut bits, mut at) = (0, 0);
        if len & 8 != 0 {
            // SAFETY: `len` is at least 8, and the caller of `load_some` guarantees that `from` is readable for `len` bytes.
            bits = unsafe { load_8(from) };
            at = 8;
        }
        if len & 4 != 0 {
            // SAFETY: `len` is at least `at + 4`, and the caller of `load_some` guarantees that `from` is readable for `len`
            // bytes.
            bits |= unsafe { load_4(from.wrapping_add(at)) } << (8 * at);
            at += 4;
        }
        if len & 2 != 0 {
            // SAFETY: `len` is at least `at + 2`, and the caller of `load_some` guarantees that `from` is readable for `len`
            // bytes.
            bits |= unsafe { load_2(from.wrapping_add(at)) } << (8 * at);
            at += 2;
        }
        if len & 1 != 0 {
            // SAFETY: `len` is `at + 1`, and the caller of `load_some` guarantees that `from` is readable for `len` bytes.
            bits |= unsafe { load_1(from.wrapping_add(at)) } << (8 * at);
        }
        // SAFETY: `u128` and the array of elements have 16 bytes, and every bit pattern is a valid element.
        unsafe { transmute_copy::<u128, [T; COUNT]>(&bits) }
    }

    #[inline(always)]
    unsafe fn store_some<T: Copy, const COUNT: usize>(elements: [T; COUNT], to: *mut u8, len: usize) {
        const { assert!(size_of::<[T; COUNT]>() == 16) };
        // SAFETY: `u128` and the array of elements have 16 bytes, and elements have no padding.
        let bits = unsafe { transmute_copy::<[T; COUNT], u128>(&elements) };
        let mut at = 0;
        if len & 8 != 0 {
            // SAFETY: `len` is at least 8, and the caller of `store_some` guarantees that `to` is writable for `len` bytes.
            unsafe { store_8(bits, to) };
            at = 8;
        }
        if len & 4 != 0 {
            // SAFETY: `len` is at least `at + 4`, and the caller of `store_some` guarantees that `to` is writable for `len`
            // bytes.
            unsafe { store_4(bits >> (8 * at), to.wrapping_add(at)) };
            at += 4;
        }
        if len & 2 != 0 {
            // SAFETY: `len` is at least `at + 2`, and the caller of `store_some` guarantees that `to` is writable for `len`
            // bytes.
            unsafe { store_2(bits >> (8 * at), to.wrapping_add(at)) };
            at += 2;
        }
        if len & 1 != 0 {
            // SAFETY: `len` is `at + 1`, and the caller of `store_some` guarantees that `to` is writable for `len` bytes.
            unsafe { store_1(bits >> (8 * at), to.wrapping_add(at)) };
        }
    }

    #[inline(always)]
    unsafe fn load_halves<const COUNT: usize>(from: *const u8) -> [f32; COUNT] {
        const { assert!(COUNT.is_multiple_of(8)) };
        let mut singles = [0.0; COUNT];
        for at in (0..COUNT).step_by(8) {
            // SAFETY: the caller guarantees that `from` is readable for `COUNT` half-precision floats, and the eight from `at`
            // on are among them; that caller also guarantees that the CPU has F16C.
            let wide = unsafe { load_halves(from.wrapping_add(at * size_of::<f16>())) };
            // SAFETY: the eight floats are within `singles`.
            unsafe { singles.as_mut_ptr().wrapping_add(at).cast::<__m256>().write_unaligned(wide) };
        }
        singles
    }

    #[inline(always)]
    unsafe fn widen_halves<const COUNT: usize>(halves: [f16; COUNT]) -> [f32; COUNT] {
        const { assert!(COUNT.is_multiple_of(8)) };
        let mut singles = [0.0; COUNT];
        for at in (0..COUNT).step_by(8) {
            // SAFETY: the eight half-precision floats from `at` on are within `halves`.
            let eight = unsafe { halves.as_ptr().wrapping_add(at).cast::<__m128i>().read_unaligned() };
            // SAFETY: the caller of `widen_halves` guarantees that the CPU has F16C.
            let wide = unsafe { _mm256_cvtph_ps(eight) };
            // SAFETY: the eight floats are within `singles`.
            unsafe { singles.as_mut_ptr().wrapping_add(at).cast::<__m256>().write_unaligned(wide) };
        }
        singles
    }

    #[inline(always)]
    unsafe fn narrow_to_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [f16; COUNT] {
        const { assert!(COUNT.is_multiple_of(8)) };
        let mut halves = [f16::ZERO; COUNT];
        for at in (0..COUNT).step_by(8) {
            // SAFETY: the eight floats are within `singles`.
            let eight = unsafe { singles.as_ptr().wrapping_add(at).cast::<__m256>().read_unaligned() };
            // SAFETY: the caller of `narrow_to_halves` guarantees that the CPU has F16C.
            let narrow = unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(eight) };
            // SAFETY: the eight half-precision floats from `at` on are within `halves`.
            unsafe { halves.as_mut_ptr().wrapping_add(at).cast::<__m128i>().write_unaligned(narrow) };
        }
        halves
    }

    // Without explicit intrinsics for this conversion of bfloat16, the compiler permutes the words twice.
    #[inline(always)]
    unsafe fn widen_upper_halves<const COUNT: usize>(halves: [bf16; COUNT]) -> [f32; COUNT] {
        if !COUNT.is_multiple_of(16) {
            return widen_pairs(halves);
        }
        let mut singles = [0.0; COUNT];
        for at in (0..COUNT / 2).step_by(8) {
            // SAFETY: the eight pairs of bfloat16 are within `halves`.
            let words = unsafe { halves.as_ptr().wrapping_add(2 * at).cast::<__m256i>().read_unaligned() };
            // SAFETY: the caller of `widen_upper_halves` guarantees that the CPU has AVX2.
            let (lower, upper) = unsafe { unpack(words) };
            let place = singles.as_mut_ptr().wrapping_add(at);
            // SAFETY: the eight floats are within `singles`.
            unsafe { place.cast::<__m256i>().write_unaligned(lower) };
            // SAFETY: the eight floats are within the second half of `singles`.
            unsafe { place.wrapping_add(COUNT / 2).cast::<__m256i>().write_unaligned(upper) };
        }
        singles
    }

    #[inline(always)]
    unsafe fn narrow_to_upper_halves<const COUNT: usize>(singles: [f32; COUNT]) -> [bf16; COUNT] {
        if !COUNT.is_multiple_of(16) {
            return narrow_pairs(singles);
        }
        let mut halves = [bf16::ZERO; COUNT];
        for at in (0..COUNT / 2).step_by(8) {
            let place = singles.as_ptr().wrapping_add(at);
            // SAFETY: the eight floats are within `singles`.
            let lower = unsafe { place.cast::<__m256i>().read_unaligned() };
            // SAFETY: the eight floats are within the second half of `singles`.
            let upper = unsafe { place.wrapping_add(COUNT / 2).cast::<__m256i>().read_unaligned() };
            // SAFETY: the caller of `narrow_to_upper_halves` guarantees that the CPU has AVX2.
            let words = unsafe { pack(lower, upper) };
            // SAFETY: the eight pairs of bfloat16 are within `halves`.
            unsafe { halves.as_mut_ptr().wrapping_add(2 * at).cast::<__m256i>().write_unaligned(words) };
        }
        halves
    }
}

/// Returns two vectors: the lower halves of the 32-bit words, moved to the upper halves, and the upper halves, both with zeros
/// below.
#[inline]
#[target_feature(enable = "avx2")]
fn unpack(words: __m256i) -> (__m256i, __m256i) {
    (_mm256_slli_epi32::<16>(words), _mm256_blend_epi16::<0xaa>(_mm256_setzero_si256(), words))
}

/// Rounds single-precision floats to bfloat16 and packs pairs of them into words, as [`narrow_pairs`] does.
#[inline]
#[target_feature(enable = "avx2")]
fn pack(lower: __m256i, upper: __m256i) -> __m256i {
    let rounded = |bits: __m256i| {
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd)
    };
    _mm256_blend_epi16::<0xaa>(_mm256_srli_epi32::<16>(rounded(lower)), rounded(upper))
}
