//! Rows moved by the vector instructions of x86-64.

use std::arch::asm;
use std::sync::LazyLock;

/// Whether there are registers of 32 bytes.
static WIDE: LazyLock<bool> = LazyLock::new(|| std::is_x86_feature_detected!("avx"));

/// Whether there are registers of 64 bytes.
static WIDEST: LazyLock<bool> = LazyLock::new(|| std::is_x86_feature_detected!("avx512f"));

/// A load and a store of one register. Short loads fill the whole register: what they left of it would have to wait for
/// whatever was there before.
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

/// Moves `len` bytes.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, as raw memory that others may write meanwhile; they do not
/// overlap.
#[inline]
pub(in crate::host) unsafe fn any(from: *const u8, to: *mut u8, len: usize) {
    if len < 32 || !*WIDE {
        // SAFETY: passed on from the caller.
        return unsafe { any_sse(from, to, len) };
    }
    let whole = len & !31;
    // SAFETY: whole registers within the caller's range; the processor has such registers.
    unsafe {
        asm!(
            "2:",
            "vmovdqu ymm0, [{from} + {at}]",
            "vmovdqu [{to} + {at}], ymm0",
            "add {at}, 32",
            "cmp {at}, {whole}",
            "jb 2b",
            "vzeroupper",
            from = in(reg) from,
            to = in(reg) to,
            whole = in(reg) whole,
            at = inout(reg) 0_usize => _,
            // The lower half, by which the whole register is meant.
            out("xmm0") _,
            options(nostack)
        );
    }
    // SAFETY: the rest of the caller's range.
    unsafe { any_sse(from.wrapping_add(whole), to.wrapping_add(whole), len - whole) }
}

/// Moves `len` bytes to a place that nobody else writes: it may write some of them twice. All loads of a group come
/// before its stores, which would hold up loads from addresses that look like theirs.
///
/// # Safety
/// As [`any`].
#[inline]
pub(in crate::host) unsafe fn alone(from: *const u8, to: *mut u8, len: usize) {
    if len <= 32 || !*WIDE {
        // SAFETY: passed on from the caller.
        return unsafe { any_sse(from, to, len) };
    }
    if *WIDEST {
        // SAFETY: passed on from the caller; the processor has such registers.
        return unsafe { alone_widest(from, to, len) };
    }
    // From the beginning in groups of 128 bytes, and then the last 128, or as many as there are on either side.
    let mut at = 0;
    while len - at > 256 {
        // SAFETY: 128 bytes within the caller's range; the processor has such registers.
        unsafe { group(from.wrapping_add(at), to.wrapping_add(at)) };
        at += 128;
    }
    let (from, to, len) = (from.wrapping_add(at), to.wrapping_add(at), len - at);
    if len > 128 {
        // SAFETY: as above.
        unsafe { group(from, to) };
        let rest = len - 128;
        // SAFETY: as above, to the end.
        unsafe { group(from.wrapping_add(rest), to.wrapping_add(rest)) };
    } else if len > 64 {
        // SAFETY: 64 bytes from the beginning and 64 to the end, within the caller's range.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + 32]",
                "vmovdqu ymm2, [{from} + {len} - 64]",
                "vmovdqu ymm3, [{from} + {len} - 32]",
                "vmovdqu [{to}], ymm0",
                "vmovdqu [{to} + 32], ymm1",
                "vmovdqu [{to} + {len} - 64], ymm2",
                "vmovdqu [{to} + {len} - 32], ymm3",
                from = in(reg) from, to = in(reg) to, len = in(reg) len,
                out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                options(nostack, preserves_flags)
            );
        }
    } else {
        // SAFETY: 32 bytes from the beginning and 32 to the end, within the caller's range.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + {len} - 32]",
                "vmovdqu [{to}], ymm0",
                "vmovdqu [{to} + {len} - 32], ymm1",
                from = in(reg) from, to = in(reg) to, len = in(reg) len,
                out("xmm0") _, out("xmm1") _,
                options(nostack, preserves_flags)
            );
        }
    }
    // SAFETY: it touches no memory; the processor has such registers.
    unsafe { asm!("vzeroupper", out("xmm0") _, options(nomem, nostack, preserves_flags)) };
}

/// Moves more than 32 bytes as [`alone`] does, by registers of 64 bytes.
///
/// # Safety
/// As [`any`]; the processor has registers of 64 bytes.
#[inline]
unsafe fn alone_widest(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while len - at > 512 {
        // SAFETY: 256 bytes within the caller's range; the processor has such registers.
        unsafe { widest_group(from.wrapping_add(at), to.wrapping_add(at), 256) };
        at += 256;
    }
    let (from, to, len) = (from.wrapping_add(at), to.wrapping_add(at), len - at);
    if len > 256 {
        // SAFETY: as above.
        unsafe { widest_group(from, to, 256) };
        let rest = len - 256;
        // SAFETY: as above, to the end.
        unsafe { widest_group(from.wrapping_add(rest), to.wrapping_add(rest), 256) };
    } else if len > 128 {
        // SAFETY: 128 bytes from the beginning and 128 to the end, within the caller's range.
        unsafe { widest_group(from, to, len) };
    } else if len > 64 {
        // SAFETY: 64 bytes from the beginning and 64 to the end, within the caller's range.
        unsafe {
            asm!(
                "vmovdqu64 zmm0, [{from}]",
                "vmovdqu64 zmm1, [{from} + {len} - 64]",
                "vmovdqu64 [{to}], zmm0",
                "vmovdqu64 [{to} + {len} - 64], zmm1",
                from = in(reg) from, to = in(reg) to, len = in(reg) len,
                out("xmm0") _, out("xmm1") _,
                options(nostack, preserves_flags)
            );
        }
    } else {
        // SAFETY: 32 bytes from the beginning and 32 to the end, within the caller's range.
        unsafe {
            asm!(
                "vmovdqu ymm0, [{from}]",
                "vmovdqu ymm1, [{from} + {len} - 32]",
                "vmovdqu [{to}], ymm0",
                "vmovdqu [{to} + {len} - 32], ymm1",
                from = in(reg) from, to = in(reg) to, len = in(reg) len,
                out("xmm0") _, out("xmm1") _,
                options(nostack, preserves_flags)
            );
        }
    }
    // SAFETY: it touches no memory; the processor has such registers.
    unsafe { asm!("vzeroupper", out("xmm0") _, options(nomem, nostack, preserves_flags)) };
}

/// Moves 128 bytes from the beginning and 128 to the end of `len`, which are 128 to 256.
///
/// # Safety
/// As [`any`]; the processor has registers of 64 bytes.
#[inline(always)]
unsafe fn widest_group(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: by the caller's word.
    unsafe {
        asm!(
            "vmovdqu64 zmm0, [{from}]",
            "vmovdqu64 zmm1, [{from} + 64]",
            "vmovdqu64 zmm2, [{from} + {len} - 128]",
            "vmovdqu64 zmm3, [{from} + {len} - 64]",
            "vmovdqu64 [{to}], zmm0",
            "vmovdqu64 [{to} + 64], zmm1",
            "vmovdqu64 [{to} + {len} - 128], zmm2",
            "vmovdqu64 [{to} + {len} - 64], zmm3",
            from = in(reg) from, to = in(reg) to, len = in(reg) len,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            options(nostack, preserves_flags)
        );
    }
}

/// Moves 128 bytes.
///
/// # Safety
/// As [`any`]; the processor has registers of 32 bytes.
#[inline(always)]
unsafe fn group(from: *const u8, to: *mut u8) {
    // SAFETY: by the caller's word.
    unsafe {
        asm!(
            "vmovdqu ymm0, [{from}]",
            "vmovdqu ymm1, [{from} + 32]",
            "vmovdqu ymm2, [{from} + 64]",
            "vmovdqu ymm3, [{from} + 96]",
            "vmovdqu [{to}], ymm0",
            "vmovdqu [{to} + 32], ymm1",
            "vmovdqu [{to} + 64], ymm2",
            "vmovdqu [{to} + 96], ymm3",
            from = in(reg) from, to = in(reg) to,
            out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
            options(nostack, preserves_flags)
        );
    }
}

/// Moves `len` bytes by registers of 16 bytes.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::host) unsafe fn any_sse(from: *const u8, to: *mut u8, len: usize) {
    let mut at = 0;
    while len - at >= 16 {
        // SAFETY: 16 bytes within the caller's range.
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
        // SAFETY: 8 bytes within the caller's range.
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
        // SAFETY: 4 bytes within the caller's range.
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
        // SAFETY: 2 bytes within the caller's range.
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
        // SAFETY: the last byte of the caller's range.
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

/// Moves `LEN` bytes.
///
/// # Safety
/// As [`any`].
#[inline(always)]
pub(in crate::host) unsafe fn exact<const LEN: usize>(from: *const u8, to: *mut u8) {
    // Unrolled, and its questions answered, when it is compiled.
    // SAFETY: passed on from the caller.
    unsafe { any_sse(from, to, LEN) }
}

/// Moves `len` bytes that nobody will look at soon: past the caches, so that lines that are written whole are not read
/// first.
///
/// # Safety
/// As [`any`]; `to` begins a cache line, and `len` is whole lines.
#[inline]
pub(in crate::host) unsafe fn streaming(from: *const u8, to: *mut u8, len: usize) {
    if len == 0 {
        return;
    }
    // SAFETY: whole lines of the caller's range, which are aligned.
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

/// Makes what was streamed visible to others before what follows.
pub(in crate::host) fn finish() {
    // SAFETY: a fence.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) }
}

/// Says that a cache line will be read soon.
#[inline(always)]
pub(in crate::host) fn will_read(line: *const u8) {
    // SAFETY: a hint, which an address that is not mapped leaves without effect.
    unsafe { asm!("prefetcht0 [{line}]", line = in(reg) line, options(nostack, preserves_flags, readonly)) }
}

/// Says that a cache line will be written soon.
#[inline(always)]
pub(in crate::host) fn will_write(line: *const u8) {
    // SAFETY: as above.
    unsafe { asm!("prefetchw [{line}]", line = in(reg) line, options(nostack, preserves_flags, readonly)) }
}
