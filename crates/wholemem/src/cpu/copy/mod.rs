//! Functions that copy the bytes of one row between a table and other memory, by assembly or volatile accesses.
//!
//! A race of ordinary loads with a writer in another process is undefined behaviour, so there are none here: assembly on
//! x86-64, volatile accesses elsewhere. Into a table, pieces of 16 bytes are copied in ascending order, and the rest in pieces
//! of 8, 4, 2 and 1. No byte is written twice, so if two rows are written to one place, every piece comes from one of them. A
//! piece across two cache lines may be torn at the line, which no element crosses.

#[cfg(any(test, not(target_arch = "x86_64"), miri))]
pub(super) mod portable;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) mod x86_64;

#[cfg(any(not(target_arch = "x86_64"), miri))]
pub(super) use portable as native;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86_64 as native;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    /// Returns every function that copies a row of any length, and true if it requires whole cache lines.
    fn copies() -> Vec<(Copy, bool)> {
        let mut copies: Vec<(Copy, bool)> = vec![(portable::any, false), (native::any, false)];
        // The prefetch functions have no effect that a test can check, so the test only calls them.
        [portable::will_read, portable::will_write, native::will_read, native::will_write]
            .iter()
            .for_each(|hint| hint(std::ptr::null()));
        portable::finish();
        portable::leave();
        assert!(portable::widest() <= native::widest());
        copies.extend([(portable::over as Copy, false), (native::over, false)]);
        copies.push((native::streaming, true));
        copies.push((portable::streaming, true));
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        copies.push((x86_64::any_sse, false));
        copies
    }

    fn pattern(len: usize, seed: u8) -> Vec<u8> {
        let byte = |at: usize| u8::try_from(at % 251).unwrap().wrapping_add(seed);
        (0..len).map(byte).collect()
    }

    fn check(copy: Copy, len: usize, from: usize, to: usize, seed: u8) -> Result<(), TestCaseError> {
        const ROOM: usize = 128;
        let source = pattern(from + len, seed);
        let mut target = vec![0xAA_u8; len + 3 * ROOM];
        // The target begins `to` bytes after the start of a cache line.
        let start = ROOM + target[ROOM..].as_ptr().align_offset(64) + to;
        // SAFETY: the source has `len` bytes from `from` on, and the target has `len` bytes from `start` on.
        unsafe { copy(source[from..].as_ptr(), target[start..].as_mut_ptr(), len) };
        native::finish();
        native::leave();
        prop_assert_eq!(&target[start..start + len], &source[from..]);
        prop_assert!(target[..start].iter().chain(&target[start + len..]).all(|byte| *byte == 0xAA));
        Ok(())
    }

    proptest! {
        #[test]
        fn copies_write_exactly_their_bytes(
            len in prop_oneof![0_usize..70, 0_usize..700, 4000_usize..4300],
            from in 0_usize..65,
            to in 0_usize..64,
            seed: u8,
        ) {
            // Miri needs a microsecond for each copied byte, so rows are shorter.
            let len = if cfg!(miri) { len % 200 } else { len };
            for (copy, whole_lines) in copies() {
                if whole_lines {
                    check(copy, len & !63, from, 0, seed)?;
                } else {
                    check(copy, len, from, to, seed)?;
                }
            }
        }

        #[test]
        fn register_groups_copy_every_supported_length(
            extra in 0_usize..=128,
            from in 0_usize..65,
            to in 0_usize..64,
            seed: u8,
        ) {
            macro_rules! ends {
                ($($width:literal $count:literal)*) => {$(
                    let len = $width * $count + extra % ($width * $count + 1);
                    check(portable::ends::<$width, $count>, len, from, to, seed)?;
                    if native::widest() >= $width {
                        check(native::ends::<$width, $count>, len, from, to, seed)?;
                    }
                )*};
            }
            ends!(16 1 32 1 32 2 64 1 64 2);
        }

        #[test]
        fn register_groups_copy_long_rows(
            len in prop_oneof![256_usize..1100, 4000_usize..4300],
            from in 0_usize..65,
            to in 0_usize..64,
            seed: u8,
        ) {
            let len = if cfg!(miri) { 256 + len % 100 } else { len };
            macro_rules! long {
                ($($width:literal)*) => {$(
                    check(portable::long::<$width>, len, from, to, seed)?;
                    if native::widest() >= $width {
                        check(native::long::<$width>, len, from, to, seed)?;
                        check(native::long::<$width>, 4 * $width, from, to, seed)?;
                    }
                )*};
            }
            long!(32 64);
        }

        #[test]
        fn rows_of_a_fixed_length_are_copied(from in 0_usize..65, to in 0_usize..64, seed: u8) {
            macro_rules! exact {
                ($($len:literal)*) => {$(
                    // SAFETY: `check` passes a source and a target with the length of the copied row.
                    let copy: Copy = |from, to, _| unsafe { native::exact::<$len>(from, to) };
                    check(copy, $len, from, to, seed)?;
                    // SAFETY: `check` passes a source and a target with the length of the copied row.
                    let copy: Copy = |from, to, _| unsafe { portable::exact::<$len>(from, to) };
                    check(copy, $len, from, to, seed)?;
                )*};
            }
            exact!(1 2 4 8 12 16 32 48 64 128);
        }
    }
}
