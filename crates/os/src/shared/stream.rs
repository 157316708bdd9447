//! Long copies that go past the caches: what does not fit them need not push everything else out.
//!
//! A store that goes past the caches does not first load what it overwrites, which is a third of the traffic of a plain
//! copy; and four pages at a time keep more of the memory busy than one after the other. On the machine this was written
//! on, 1 GiB took 110 ms so, and 180 ms by the string instruction. Shorter ones are left to the caches.

use super::copy::copy;

/// From this length on the caches are passed by.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const LONG: usize = 1 << 20;

/// Copies `len` bytes, in any order.
///
/// # Safety
/// As [`copy`], and the two ranges do not overlap.
pub(super) unsafe fn copy_apart(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if len >= LONG {
        // SAFETY: passed on from the caller.
        return unsafe { copy_streaming(from, to, len) };
    }
    // SAFETY: passed on from the caller.
    unsafe { copy(from, to, len) };
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
const PAGE: usize = 4096;

/// # Safety
/// As [`copy_apart`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_streaming(from: *const u8, to: *mut u8, len: usize) {
    // A line that is stored whole goes out at once; of one in parts, some may go alone.
    let whole_lines = std::is_x86_feature_detected!("avx512f");
    // SAFETY: passed on from the caller; the processor has the instructions.
    unsafe { copy_blocks(from, to, len, if whole_lines { copy_block_of_lines } else { copy_block }) }
}

/// # Safety
/// As [`copy_apart`]; the processor has the instructions of `copy_block`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_blocks(from: *const u8, to: *mut u8, len: usize, copy_block: unsafe fn(*const u8, *mut u8)) {
    const BLOCK: usize = 4 * PAGE;
    // Whole lines are written at once only where they begin.
    let head = to.align_offset(64).min(len);
    // SAFETY: the head lies within both ranges.
    unsafe { copy(from, to, head) };
    let blocks = (len - head) / BLOCK;
    for block in 0..blocks {
        let at = head + block * BLOCK;
        // SAFETY: a whole block from here on lies within the range.
        let source = unsafe { from.add(at) };
        // SAFETY: a whole block from here on lies within the target too, which is as long as the source.
        let target = unsafe { to.add(at) };
        // SAFETY: both have a block from here on, and the target is at a line.
        unsafe { copy_block(source, target) };
    }
    let done = head + blocks * BLOCK;
    // SAFETY: `done` is at most the length.
    let source = unsafe { from.add(done) };
    // SAFETY: `done` is at most the length of the target, which is as long as the source.
    let target = unsafe { to.add(done) };
    // Stores past the caches come in no order with others; after this they are in order again.
    // SAFETY: the instruction has no operands.
    unsafe { std::arch::x86_64::_mm_sfence() };
    // SAFETY: what is left lies within both ranges.
    unsafe { copy(source, target, len - done) };
}

/// Copies four pages, a line of each in turn.
///
/// # Safety
/// Four pages can be read and written there, and the target is at a multiple of 16.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_block(from: *const u8, to: *mut u8) {
    // SAFETY: each turn moves one line of each page, and there are as many turns as a page has lines.
    unsafe {
        std::arch::asm!(
            "2:",
            "prefetcht0 [{from} + 512]",
            "prefetcht0 [{from} + {page} + 512]",
            "prefetcht0 [{from} + 2*{page} + 512]",
            "prefetcht0 [{from} + 3*{page} + 512]",
            "movups {a}, [{from}]",
            "movups {b}, [{from} + 16]",
            "movups {c}, [{from} + 32]",
            "movups {d}, [{from} + 48]",
            "movups {e}, [{from} + {page}]",
            "movups {f}, [{from} + {page} + 16]",
            "movups {g}, [{from} + {page} + 32]",
            "movups {h}, [{from} + {page} + 48]",
            "movups {i}, [{from} + 2*{page}]",
            "movups {j}, [{from} + 2*{page} + 16]",
            "movups {k}, [{from} + 2*{page} + 32]",
            "movups {l}, [{from} + 2*{page} + 48]",
            "movups {m}, [{from} + 3*{page}]",
            "movups {n}, [{from} + 3*{page} + 16]",
            "movups {o}, [{from} + 3*{page} + 32]",
            "movups {p}, [{from} + 3*{page} + 48]",
            "movntdq [{to}], {a}",
            "movntdq [{to} + 16], {b}",
            "movntdq [{to} + 32], {c}",
            "movntdq [{to} + 48], {d}",
            "movntdq [{to} + {page}], {e}",
            "movntdq [{to} + {page} + 16], {f}",
            "movntdq [{to} + {page} + 32], {g}",
            "movntdq [{to} + {page} + 48], {h}",
            "movntdq [{to} + 2*{page}], {i}",
            "movntdq [{to} + 2*{page} + 16], {j}",
            "movntdq [{to} + 2*{page} + 32], {k}",
            "movntdq [{to} + 2*{page} + 48], {l}",
            "movntdq [{to} + 3*{page}], {m}",
            "movntdq [{to} + 3*{page} + 16], {n}",
            "movntdq [{to} + 3*{page} + 32], {o}",
            "movntdq [{to} + 3*{page} + 48], {p}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {turns}",
            "jnz 2b",
            page = const PAGE,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            turns = inout(reg) PAGE / 64 => _,
            a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, d = out(xmm_reg) _,
            e = out(xmm_reg) _, f = out(xmm_reg) _, g = out(xmm_reg) _, h = out(xmm_reg) _,
            i = out(xmm_reg) _, j = out(xmm_reg) _, k = out(xmm_reg) _, l = out(xmm_reg) _,
            m = out(xmm_reg) _, n = out(xmm_reg) _, o = out(xmm_reg) _, p = out(xmm_reg) _,
            options(nostack)
        );
    }
}

/// The same, each line by one store: by registers that leave the state of the others as it is.
///
/// # Safety
/// As [`copy_block`], at a multiple of 64; the processor has AVX-512.
#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx512f")]
unsafe fn copy_block_of_lines(from: *const u8, to: *mut u8) {
    // SAFETY: each turn moves one line of each page, and there are as many turns as a page has lines; the caller has
    // four pages there, the target at a multiple of 64, and a processor with AVX-512.
    unsafe {
        std::arch::asm!(
            "2:",
            "vmovdqu64 zmm16, [{from}]",
            "vmovdqu64 zmm17, [{from} + {page}]",
            "vmovdqu64 zmm18, [{from} + 2*{page}]",
            "vmovdqu64 zmm19, [{from} + 3*{page}]",
            "vmovntdq [{to}], zmm16",
            "vmovntdq [{to} + {page}], zmm17",
            "vmovntdq [{to} + 2*{page}], zmm18",
            "vmovntdq [{to} + 3*{page}], zmm19",
            "add {from}, 64",
            "add {to}, 64",
            "dec {turns}",
            "jnz 2b",
            page = const PAGE,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            turns = inout(reg) PAGE / 64 => _,
            out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
            options(nostack)
        );
    }
}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn copies_past_the_caches_agree_with_a_plain_one(
            len in 0_usize..10 * PAGE,
            start in 0_usize..70,
            shift in 0_usize..70,
        ) {
            let source: Vec<u8> = (0..start + len).map(|at| (at * 31 % 251).to_le_bytes()[0]).collect();
            let mut ways: Vec<unsafe fn(*const u8, *mut u8)> = vec![copy_block];
            if std::is_x86_feature_detected!("avx512f") {
                ways.push(copy_block_of_lines);
            }
            for way in ways {
                let mut target = vec![0xAA; shift + len + 8];
                let to = target[shift..].as_mut_ptr();
                // SAFETY: the target has `shift` plus the source's length, and eight bytes to spare.
                unsafe { copy_blocks(source[start..].as_ptr(), to, len, way) };
                prop_assert!(target[..shift].iter().all(|&byte| byte == 0xAA));
                prop_assert_eq!(&target[shift..shift + len], &source[start..]);
                prop_assert_eq!(&target[shift + len..], &[0xAA; 8]);
            }
        }
    }

    #[test]
    fn a_copy_is_the_same_on_both_sides_of_what_is_long() {
        for len in [LONG - 1, LONG, LONG + 5000] {
            let source: Vec<u8> = (0..len).map(|at| (at % 253).to_le_bytes()[0]).collect();
            let mut target = vec![0; len];
            // SAFETY: both have the length, and are apart.
            unsafe { copy_apart(source.as_ptr(), target.as_mut_ptr(), len) };
            assert!(source == target, "{len} bytes");
        }
    }
}
