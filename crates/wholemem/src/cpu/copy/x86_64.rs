//! Copies of rows by the vector instructions of x86-64.

use std::arch::asm;
use std::sync::LazyLock;

/// True if the CPU has vector registers of 32 bytes (AVX).
static WIDE: LazyLock<bool> = LazyLock::new(|| std::is_x86_feature_detected!("avx"));

/// True if the CPU has vector registers of 64 bytes (AVX-512).
static WIDEST: LazyLock<bool> = LazyLock::new(|| std::is_x86_feature_detected!("avx512f"));

/// True if the `rep movsb` instruction of the CPU copies whole cache lines (ERMSB).
static STRINGS: LazyLock<bool> = LazyLock::new(|| std::is_x86_feature_detected!("ermsb"));

/// The minimum number of bytes that are copied with `rep movsb`, which acquires lines without reading them. That is worth more
/// than prefetches if the bytes do not fit in the inner caches.
const STRING: usize = 1 << 20;

/// The distance in bytes at which a copy prefetches lines that it will write.
const AHEAD: usize = 512;

/// Loads and stores one register. Loads of 1 or 2 bytes zero-extend, which avoids a dependency on the previous value of the
/// register.
macro_rules! step {
    ($load:literal, $store:literal, $register:ident, $from:expr, $to:expr) => {
        asm!(
            $load,
            $store,
            from = in(reg) $from,
            to = in(reg) $to,
            value = out($register) _,
            options(nostack, preserves_flags)
        )
    };
}

/// Copies `len` bytes of shared memory by vector registers.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, as raw memory that others may write concurrently; they do not
/// overlap.
#[inline]
pub(in crate::cpu) unsafe fn any(from: *const u8, to: *mut u8, len: usize) {
    if len < 32 || !*WIDE {
        // SAFETY: the caller of `any` guarantees that `from` and `to` are valid for `len` bytes and do not overlap.
        return unsafe { any_sse(from, to, len) };
    }
    let whole = len & !31;
    // SAFETY: `whole` is at most `len`, for which the caller guarantees that `from` and `to` are valid; the CPU has registers of
    // 32 bytes.
    unsafe {
        asm!(
            "2:",
            "vmovdqu ymm0, [{from} + {at}]",
            "vmovdqu [{to} + {at}], ymm0",
            "add {at}, 32",
            "cmp {at}, {whole}",
            "jb 2b",
            from = in(reg) from,
            to = in(reg) to,
            whole = in(reg) whole,
            at = inout(reg) 0_usize => _,
            // `xmm0`, the name of the lower half, clobbers the whole register `ymm0`.
            out("xmm0") _,
            options(nostack)
        );
    }
    leave();
    // SAFETY: the remaining `len - whole` bytes are within the `len` bytes for which the caller guarantees that `from` and `to`
    // are valid.
    unsafe { any_sse(from.wrapping_add(whole), to.wrapping_add(whole), len - whole) }
}

/// Returns the width in bytes of the widest vector registers that the CPU has.
#[inline]
pub(in crate::cpu) fn widest() -> usize {
    match (*WIDEST, *WIDE) {
        (true, _) => 64,
        (false, true) => 32,
        (false, false) => 16,
    }
}

/// Copies `$len` bytes with two registers: one for the first bytes and one for the last. The registers may overlap.
macro_rules! two {
    ($move:literal, $register:literal, $width:literal, $from:ident, $to:ident, $len:ident) => {
        asm!(
            concat!($move, " ", $register, "0, [{from}]"),
            concat!($move, " ", $register, "1, [{from} + {len} - ", $width, "]"),
            concat!($move, " [{to}], ", $register, "0"),
            concat!($move, " [{to} + {len} - ", $width, "], ", $register, "1"),
            from = in(reg) $from, to = in(reg) $to, len = in(reg) $len,
            // The names of the lower parts (`xmm`) clobber the whole registers.
            out("xmm0") _, out("xmm1") _,
            options(nostack, preserves_flags)
        )
    };
}

/// Copies `$len` bytes with four registers: two for the first bytes and two for the last. The registers may overlap.
macro_rules! four {
    ($move:literal, $register:literal, $width:literal, $twice:literal, $from:ident, $to:ident, $len:ident) => {
        asm!(
            concat!($move, " ", $register, "0, [{from}]"),
            concat!($move, " ", $register, "1, [{from} + ", $width, "]"),
            concat!($move, " ", $register, "2, [{from} + {len} - ", $twice, "]"),
            concat!($move, " ", $register, "3, [{from} + {len} - ", $width, "]"),
            concat!($move, " [{to}], ", $register, "0"),
            concat!($move, " [{to} + ", $width, "], ", $register, "1"),
            concat!($move, " [{to} + {len} - ", $twice, "], ", $register, "2"),
            concat!($move, " [{to} + {len} - ", $width, "], ", $register, "3"),
            from = in(reg) $from, to = in(reg) $to, len = in(reg) $len,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            options(nostack, preserves_flags)
        )
    };
}

/// Copies `len` bytes to memory that has no other writer, with `COUNT` registers of `WIDTH` bytes at the start and as many at the
/// end, so that some bytes may be copied twice. All loads come before all stores, because a store delays later loads from
/// addresses with the same lower bits. The caller calls [`leave`] after the last row.
///
/// # Safety
/// As [`any`]; `len` is `WIDTH * COUNT` to twice that; the CPU has such registers.
#[inline(always)]
pub(in crate::cpu) unsafe fn ends<const WIDTH: usize, const COUNT: usize>(
    from: *const u8,
    to: *mut u8,
    len: usize,
) {
    const { assert!(matches!((WIDTH, COUNT), (16 | 32 | 64, 1) | (32 | 64, 2)), "no such group of registers") };
    debug_assert!((WIDTH * COUNT..=2 * WIDTH * COUNT).contains(&len) && WIDTH <= widest());
    match (WIDTH, COUNT) {
        // SAFETY: the caller of `ends` guarantees `len` valid bytes on both sides, and 16 to 32 of them, so both registers are
        // within them.
        (16, _) => unsafe { two!("movdqu", "xmm", "16", from, to, len) },
        // SAFETY: the caller of `ends` guarantees `len` valid bytes on both sides, 32 to 64 of them, and a CPU with registers of
        // 32 bytes.
        (32, 1) => unsafe { two!("vmovdqu", "ymm", "32", from, to, len) },
        // SAFETY: the caller of `ends` guarantees `len` valid bytes on both sides, 64 to 128 of them, and a CPU with registers of
        // 32 bytes.
        (32, _) => unsafe { four!("vmovdqu", "ymm", "32", "64", from, to, len) },
        // SAFETY: the caller of `ends` guarantees `len` valid bytes on both sides, 64 to 128 of them, and a CPU with registers of
        // 64 bytes.
        (_, 1) => unsafe { two!("vmovdqu64", "zmm", "64", from, to, len) },
        // SAFETY: the caller of `ends` guarantees `len` valid bytes on both sides, 128 to 256 of them, and a CPU with registers
        // of 64 bytes.
        _ => unsafe { four!("vmovdqu64", "zmm", "64", "128", from, to, len) },
    }
}

/// Copies `len` bytes, more than [`ends`] can copy, in groups of four registers. The target has no other writer.
///
/// # Safety
/// As [`any`]; `len` is at least `4 * WIDTH`; the CPU has such registers.
#[inline(always)]
pub(in crate::cpu) unsafe fn long<const WIDTH: usize>(from: *const u8, to: *mut u8, len: usize) {
    let group = 4 * WIDTH;
    let mut at = 0;
    while len - at > group {
        // SAFETY: the group is within the `len` bytes for which the caller of `long` guarantees that `from` and `to` are valid;
        // the CPU has registers of `WIDTH` bytes.
        unsafe { ends::<WIDTH, 2>(from.wrapping_add(at), to.wrapping_add(at), group) };
        at += group;
    }
    let rest = len - group;
    // SAFETY: the last group is within the `len` bytes for which the caller of `long` guarantees that `from` and `to` are valid;
    // the CPU has registers of `WIDTH` bytes.
    unsafe { ends::<WIDTH, 2>(from.wrapping_add(rest), to.wrapping_add(rest), group) };
}

/// Ends the use of wide vector registers, because legacy SSE code would be slow while their upper halves are in use.
#[inline]
pub(in crate::cpu) fn leave() {
    if *WIDE {
        // SAFETY: `vzeroupper` accesses no memory, all registers that it changes are clobbered, and the CPU has AVX.
        unsafe {
            asm!(
                "vzeroupper",
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                options(nomem, nostack, preserves_flags)
            );
        }
    }
}

/// Copies `len` bytes of shared memory by registers of 16 bytes.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::cpu) unsafe fn any_sse(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while len - at >= 16 {
        // SAFETY: `len - at` is at least 16, and the caller guarantees that `from` and `to` are valid for `len` bytes.
        unsafe {
            step!(
                "movdqu {value}, [{from}]",
                "movdqu [{to}], {value}",
                xmm_reg,
                from.wrapping_add(at),
                to.wrapping_add(at)
            )
        };
        at += 16;
    }
    if len & 8 != 0 {
        // SAFETY: `len - at` is at least 8, and the caller guarantees that `from` and `to` are valid for `len` bytes.
        unsafe {
            step!(
                "mov {value}, [{from}]",
                "mov [{to}], {value}",
                reg,
                from.wrapping_add(at),
                to.wrapping_add(at)
            )
        };
        at += 8;
    }
    if len & 4 != 0 {
        // SAFETY: `len - at` is at least 4, and the caller guarantees that `from` and `to` are valid for `len` bytes.
        unsafe {
            step!(
                "mov {value:e}, [{from}]",
                "mov [{to}], {value:e}",
                reg,
                from.wrapping_add(at),
                to.wrapping_add(at)
            )
        };
        at += 4;
    }
    if len & 2 != 0 {
        // SAFETY: `len - at` is at least 2, and the caller guarantees that `from` and `to` are valid for `len` bytes.
        unsafe {
            step!(
                "movzx {value:e}, word ptr [{from}]",
                "mov [{to}], {value:x}",
                reg,
                from.wrapping_add(at),
                to.wrapping_add(at)
            )
        };
        at += 2;
    }
    if len & 1 != 0 {
        // SAFETY: `len - at` is 1, and the caller guarantees that `from` and `to` are valid for `len` bytes.
        unsafe {
            step!(
                "movzx {value:e}, byte ptr [{from}]",
                "mov [{to}], {value:l}",
                reg,
                from.wrapping_add(at),
                to.wrapping_add(at)
            )
        };
    }
}

/// Copies `len` bytes to cache lines that another core has read or will read. The lines of longer copies are prefetched for
/// writing, because a store that waits for its line delays all later stores.
///
/// # Safety
/// As [`any`].
#[inline]
pub(in crate::cpu) unsafe fn over(from: *const u8, to: *mut u8, len: usize) {
    if len < AHEAD || !*WIDE {
        // SAFETY: the caller of `over` guarantees that `from` and `to` are valid for `len` bytes and do not overlap.
        return unsafe { any(from, to, len) };
    }
    if len >= STRING && *STRINGS {
        // Stores after `rep movsb` are ordered after it.
        // SAFETY: the caller of `over` guarantees that `from` and `to` are valid for `len` bytes and do not overlap; the direction
        // flag is clear.
        unsafe {
            asm!(
                "rep movsb",
                inout("rsi") from => _,
                inout("rdi") to => _,
                inout("rcx") len => _,
                options(nostack, preserves_flags)
            );
        }
        return;
    }
    let whole = len & !127;
    // SAFETY: `whole` is at most `len`, for which the caller of `over` guarantees that `from` and `to` are valid; the CPU has
    // registers of 32 bytes. A prefetch may be outside these bytes, and has no effect there.
    unsafe {
        asm!(
            "2:",
            "prefetchw [{to} + {at} + {ahead}]",
            "prefetchw [{to} + {at} + {ahead} + 64]",
            "vmovdqu ymm0, [{from} + {at}]",
            "vmovdqu ymm1, [{from} + {at} + 32]",
            "vmovdqu ymm2, [{from} + {at} + 64]",
            "vmovdqu ymm3, [{from} + {at} + 96]",
            "vmovdqu [{to} + {at}], ymm0",
            "vmovdqu [{to} + {at} + 32], ymm1",
            "vmovdqu [{to} + {at} + 64], ymm2",
            "vmovdqu [{to} + {at} + 96], ymm3",
            "add {at}, 128",
            "cmp {at}, {whole}",
            "jb 2b",
            from = in(reg) from,
            to = in(reg) to,
            whole = in(reg) whole,
            at = inout(reg) 0_usize => _,
            ahead = const AHEAD,
            // The names of the lower halves (`xmm`) clobber the whole registers.
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            options(nostack)
        );
    }
    leave();
    // SAFETY: the remaining `len - whole` bytes are within the `len` bytes for which the caller of `over` guarantees that `from`
    // and `to` are valid.
    unsafe { any(from.wrapping_add(whole), to.wrapping_add(whole), len - whole) }
}

/// Copies `LEN` bytes of shared memory, a constant length.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::cpu) unsafe fn exact<const LEN: usize>(from: *const u8, to: *mut u8) {
    // The loop of `any_sse` is unrolled and its conditions are folded at compile time.
    // SAFETY: the caller of `exact` guarantees that `from` and `to` are valid for `LEN` bytes and do not overlap.
    unsafe { any_sse(from, to, LEN) }
}

/// Copies `len` bytes to memory that is not read soon, by stores that bypass the caches: whole lines are written without being
/// read.
///
/// # Safety
/// As [`any`]; `to` begins a cache line, and `len` is whole lines.
#[inline]
pub(in crate::cpu) unsafe fn streaming(from: *const u8, to: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: the caller of `streaming` guarantees that `from` and `to` are valid for `len` bytes, and that `to` and `len` are
    // multiples of a cache line, so all registers are within the bytes and all stores are aligned.
    unsafe {
        asm!(
            "2:",
            "movdqu {a}, [{from} + {at}]",
            "movdqu {b}, [{from} + {at} + 16]",
            "movdqu {c}, [{from} + {at} + 32]",
            "movdqu {d}, [{from} + {at} + 48]",
            "movntdq [{to} + {at}], {a}",
            "movntdq [{to} + {at} + 16], {b}",
            "movntdq [{to} + {at} + 32], {c}",
            "movntdq [{to} + {at} + 48], {d}",
            "add {at}, 64",
            "cmp {at}, {len}",
            "jb 2b",
            from = in(reg) from,
            to = in(reg) to,
            len = in(reg) len,
            at = inout(reg) 0_usize => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack)
        );
    }
}

/// Orders streaming stores before later stores.
pub(in crate::cpu) fn finish() {
    // SAFETY: `sfence` accesses no memory.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) }
}

/// Prefetches a cache line for a read.
#[inline(always)]
pub(in crate::cpu) fn will_read(line: *const u8) {
    // SAFETY: a prefetch is a hint, which has no effect for an address that is not mapped.
    unsafe { asm!("prefetcht0 [{line}]", line = in(reg) line, options(nostack, preserves_flags, readonly)) }
}

/// Prefetches a cache line for a write.
#[inline(always)]
pub(in crate::cpu) fn will_write(line: *const u8) {
    // SAFETY: a prefetch is a hint, which has no effect for an address that is not mapped.
    unsafe { asm!("prefetchw [{line}]", line = in(reg) line, options(nostack, preserves_flags, readonly)) }
}
