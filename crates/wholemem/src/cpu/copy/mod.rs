//! Copies of the bytes of one row, by assembly or volatile accesses.
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
pub(super) use portable as machine;
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(super) use x86_64 as machine;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    /// Every way to move a row of any length, and whether it asks for whole cache lines.
    fn copies() -> Vec<(Copy, bool)> {
        let mut copies: Vec<(Copy, bool)> = vec![(portable::any, false), (machine::any, false)];
        // Hints change nothing that can be seen.
        [portable::will_read, portable::will_write, machine::will_read, machine::will_write]
            .iter()
            .for_each(|hint| hint(std::ptr::null()));
        portable::finish();
        portable::leave();
        assert!(portable::widest() <= machine::widest());
        copies.extend([(portable::over as Copy, false), (machine::over, false)]);
        copies.push((machine::streaming, true));
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
        // Where a cache line begins, and `to` bytes behind.
        let start = ROOM + target[ROOM..].as_ptr().align_offset(64) + to;
        // SAFETY: the source has `len` bytes from there on, the target room on both sides.
        unsafe { copy(source[from..].as_ptr(), target[start..].as_mut_ptr(), len) };
        machine::finish();
        machine::leave();
        prop_assert_eq!(&target[start..start + len], &source[from..]);
        prop_assert!(target[..start].iter().chain(&target[start + len..]).all(|byte| *byte == 0xAA));
        Ok(())
    }

    proptest! {
        #[test]
        fn every_copy_moves_its_bytes_and_no_others(
            len in prop_oneof![0_usize..70, 0_usize..700, 4000_usize..4300],
            from in 0_usize..65,
            to in 0_usize..64,
            seed: u8,
        ) {
            // Every byte takes Miri a microsecond.
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
        fn a_group_of_registers_moves_every_length_that_it_is_for(
            extra in 0_usize..=128,
            from in 0_usize..65,
            to in 0_usize..64,
            seed: u8,
        ) {
            macro_rules! ends {
                ($($width:literal $count:literal)*) => {$(
                    let len = $width * $count + extra % ($width * $count + 1);
                    check(portable::ends::<$width, $count>, len, from, to, seed)?;
                    if machine::widest() >= $width {
                        check(machine::ends::<$width, $count>, len, from, to, seed)?;
                    }
                )*};
            }
            ends!(16 1 32 1 32 2 64 1 64 2);
        }

        #[test]
        fn groups_of_registers_move_long_rows(
            len in prop_oneof![256_usize..1100, 4000_usize..4300],
            from in 0_usize..65,
            to in 0_usize..64,
            seed: u8,
        ) {
            let len = if cfg!(miri) { 256 + len % 100 } else { len };
            macro_rules! long {
                ($($width:literal)*) => {$(
                    check(portable::long::<$width>, len, from, to, seed)?;
                    if machine::widest() >= $width {
                        check(machine::long::<$width>, len, from, to, seed)?;
                        check(machine::long::<$width>, 4 * $width, from, to, seed)?;
                    }
                )*};
            }
            long!(32 64);
        }

        #[test]
        fn rows_of_a_fixed_length_are_moved_whole(from in 0_usize..65, to in 0_usize..64, seed: u8) {
            macro_rules! exact {
                ($($len:literal)*) => {$(
                    // SAFETY: `check` passes ranges of the length that it is given.
                    let copy: Copy = |from, to, _| unsafe { machine::exact::<$len>(from, to) };
                    check(copy, $len, from, to, seed)?;
                    // SAFETY: `check` passes ranges of the length that it is given.
                    let copy: Copy = |from, to, _| unsafe { portable::exact::<$len>(from, to) };
                    check(copy, $len, from, to, seed)?;
                )*};
            }
            exact!(1 2 4 8 12 16 32 48 64 128);
        }
    }
}
