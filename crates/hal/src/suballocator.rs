//! Dividing one memory among many: offsets handed out and taken back, with all bookkeeping outside the memory.
//!
//! ```text
//!   used   [===A===]      [==B==]                [=====C=====]
//!   free            [----]       [--------------]             [----]     no two of these touch
//! ```
//!
//! It knows numbers only, so it serves device memory, shared windows and files alike, and it can be built again from
//! a list of what is in use ([`Suballocator::reserve_at`]). It keeps the free ranges twice, by offset to join
//! neighbours and by length to find the best fit; no two free ranges touch, and free and used ones together are the
//! whole. It will not move anything, and it does not lock: wrap it where threads share it.
//!
//! Cost: every call is O(log n) in the number of ranges, with one exception. [`Suballocator::allocate`] with an alignment
//! above the granule skips free ranges that are long enough but have no aligned offset with room behind it; there may be
//! as many as there are ranges. Where untrusted callers decide the lengths, choose a granule of the alignment
//! ([`Suballocator::with_granule`]): then the first range that is long enough always fits.
//!
//! ```
//! use wholemem_hal::Suballocator;
//!
//! let mut arena = Suballocator::new(1 << 20);
//! let first = arena.allocate(1000, 256)?;
//! let second = arena.allocate(1000, 256)?;
//! assert_eq!((first, second), (0, 1024));
//!
//! // After a restart: the same state from the list of what is in use.
//! let mut recovered = Suballocator::new(1 << 20);
//! recovered.reserve_at(second, 1000)?;
//! assert_eq!(recovered.allocate(1000, 256)?, 0);
//! # Ok::<(), wholemem_hal::SuballocatorError>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};

use wholemem_os::Size;

use crate::Granule;

/// Why a range could not be handed out or taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SuballocatorError {
    /// A range of no bytes.
    #[error("cannot hand out 0 bytes")]
    ZeroLength,
    /// An alignment that is no power of two.
    #[error("an alignment of {align} is not a power of two")]
    BadAlignment {
        /// The alignment.
        align: usize,
    },
    /// There is not enough room in one piece.
    #[error("cannot hand out {}: the largest free range is {}", Size(*len), Size(*largest))]
    Full {
        /// What was asked for.
        len: usize,
        /// The largest range that is free.
        largest: usize,
    },
    /// A range that is not all free, or not all inside.
    #[error("cannot reserve {} at offset {}: not all of it is free", Size(*len), Size(*offset))]
    Taken {
        /// Where it begins.
        offset: usize,
        /// How long it is.
        len: usize,
    },
    /// An offset at which no range can begin.
    #[error("cannot reserve at offset {offset}: ranges begin at multiples of {granule}")]
    Misaligned {
        /// The offset.
        offset: usize,
        /// The granule of the allocator, in bytes.
        granule: usize,
    },
    /// An offset that was not handed out, or was taken back already.
    #[error("nothing in use begins at offset {offset}")]
    NotInUse {
        /// The offset.
        offset: usize,
    },
}

/// Hands out ranges of a memory of known length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suballocator {
    len: usize,
    /// All ranges, used and free, begin and end at multiples of this.
    granule: Granule,
    /// Length by offset.
    used: BTreeMap<usize, usize>,
    /// Length by offset.
    free: BTreeMap<usize, usize>,
    /// The same ranges as (length, offset).
    by_len: BTreeSet<(usize, usize)>,
    used_len: usize,
}

impl Suballocator {
    /// Creates an allocator of `len` bytes, all free, with a granule of one byte.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self::with_granule(len, Granule::BYTE)
    }

    /// Creates an allocator of `len` bytes, all free, in which every range is a whole number of granules.
    ///
    /// What is left of `len` behind the last granule is never handed out.
    #[must_use]
    pub fn with_granule(len: usize, granule: Granule) -> Self {
        let (used, free, by_len) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut all = Self { len, granule, used, free, by_len, used_len: 0 };
        all.insert_free(0, len - len % granule.len());
        all
    }

    /// Hands out `len` bytes at a multiple of `align`, from the smallest free range that has room, the lowest such.
    ///
    /// The length is rounded up to whole granules.
    ///
    /// # Errors
    /// [`SuballocatorError::ZeroLength`], [`SuballocatorError::BadAlignment`], [`SuballocatorError::Full`].
    pub fn allocate(&mut self, len: usize, align: usize) -> Result<usize, SuballocatorError> {
        if len == 0 {
            return Err(SuballocatorError::ZeroLength);
        }
        if !align.is_power_of_two() {
            return Err(SuballocatorError::BadAlignment { align });
        }
        let full = SuballocatorError::Full { len, largest: self.largest_free() };
        let len = self.granule.round_up(len).ok_or(full)?;
        let fit = self.by_len.range((len, 0)..).find_map(|&(free_len, free)| {
            #[cfg(test)]
            tests::EXAMINED.set(tests::EXAMINED.get() + 1);
            let offset = free.checked_next_multiple_of(align)?;
            (offset.checked_add(len)? <= free + free_len).then_some((free, free_len, offset))
        });
        let (free, free_len, offset) = fit.ok_or(full)?;
        self.carve(free, free_len, offset, len);
        Ok(offset)
    }

    /// Marks exactly this range as in use: how recovery rebuilds what was handed out before.
    ///
    /// The length is rounded up to whole granules, as [`Self::allocate`] rounds it.
    ///
    /// # Errors
    /// [`SuballocatorError::ZeroLength`], [`SuballocatorError::Misaligned`], [`SuballocatorError::Taken`].
    pub fn reserve_at(&mut self, offset: usize, len: usize) -> Result<(), SuballocatorError> {
        if len == 0 {
            return Err(SuballocatorError::ZeroLength);
        }
        if !self.granule.divides(offset) {
            return Err(SuballocatorError::Misaligned { offset, granule: self.granule.len() });
        }
        let taken = SuballocatorError::Taken { offset, len };
        let len = self.granule.round_up(len).ok_or(taken)?;
        let before = self.free.range(..=offset).next_back().map(|(&free, &free_len)| (free, free_len));
        let holds = |(free, free_len): &(usize, usize)| {
            offset.checked_add(len).is_some_and(|end| end <= free + free_len)
        };
        let (free, free_len) = before.filter(holds).ok_or(taken)?;
        self.carve(free, free_len, offset, len);
        Ok(())
    }

    /// Takes back the range that was handed out at `offset`, and returns how long it was, in whole granules.
    ///
    /// # Errors
    /// [`SuballocatorError::NotInUse`].
    pub fn free(&mut self, offset: usize) -> Result<usize, SuballocatorError> {
        let len = self.used.remove(&offset).ok_or(SuballocatorError::NotInUse { offset })?;
        self.used_len -= len;
        let (mut start, mut end) = (offset, offset + len);
        if let Some((&before, &before_len)) = self.free.range(..offset).next_back()
            && before + before_len == start
        {
            self.remove_free(before, before_len);
            start = before;
        }
        if let Some(&after_len) = self.free.get(&end) {
            self.remove_free(end, after_len);
            end += after_len;
        }
        self.insert_free(start, end - start);
        Ok(len)
    }

    /// The whole, in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "emptiness would be ambiguous: see `used_len`")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// How many bytes are in use, in whole granules.
    #[must_use]
    pub fn used_len(&self) -> usize {
        self.used_len
    }

    /// The longest range that could be handed out, alignment aside.
    #[must_use]
    pub fn largest_free(&self) -> usize {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// What is in use, as (offset, length), lowest first.
    pub fn used(&self) -> impl Iterator<Item = (usize, usize)> {
        self.used.iter().map(|(&offset, &len)| (offset, len))
    }

    /// Cuts a used range out of a free one that holds it.
    fn carve(&mut self, free: usize, free_len: usize, offset: usize, len: usize) {
        self.remove_free(free, free_len);
        self.insert_free(free, offset - free);
        self.insert_free(offset + len, free + free_len - (offset + len));
        self.used.insert(offset, len);
        self.used_len += len;
    }

    fn insert_free(&mut self, offset: usize, len: usize) {
        if len > 0 {
            self.free.insert(offset, len);
            self.by_len.insert((len, offset));
        }
    }

    fn remove_free(&mut self, offset: usize, len: usize) {
        self.free.remove(&offset);
        self.by_len.remove(&(len, offset));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WHOLE: usize = 64;

    thread_local! {
        /// How many free ranges `allocate` has looked at.
        pub(super) static EXAMINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    /// Miri is some hundred times slower than the machine.
    const MOST_STEPS: usize = if cfg!(miri) { 10 } else { 80 };

    /// The same by a mark for each byte: slow, and too simple to be wrong.
    struct Naive {
        marks: [bool; WHOLE],
    }

    impl Naive {
        fn runs(&self) -> Vec<(usize, usize)> {
            let mut runs = Vec::new();
            let mut start = 0;
            while start < WHOLE {
                let len = self.marks[start..].iter().take_while(|&&mark| !mark).count();
                if len > 0 {
                    runs.push((len, start));
                }
                start += len.max(1);
            }
            runs.sort_unstable();
            runs
        }

        fn allocate(&mut self, len: usize, align: usize) -> Option<usize> {
            let offset = self.runs().into_iter().find_map(|(run, start)| {
                let offset = start.next_multiple_of(align);
                (offset + len <= start + run).then_some(offset)
            })?;
            self.marks[offset..offset + len].fill(true);
            Some(offset)
        }

        fn reserve_at(&mut self, offset: usize, len: usize) -> bool {
            let free = self.marks.get(offset..offset + len).is_some_and(|range| !range.contains(&true));
            if free {
                self.marks[offset..offset + len].fill(true);
            }
            free
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Allocate(usize, u32),
        ReserveAt(usize, usize),
        Free(prop::sample::Index),
        FreeWrong(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..WHOLE / 3, 0..5_u32).prop_map(|(len, shift)| Step::Allocate(len, shift)),
            (0..WHOLE + 4, 1..WHOLE / 3).prop_map(|(offset, len)| Step::ReserveAt(offset, len)),
            any::<prop::sample::Index>().prop_map(Step::Free),
            (0..WHOLE + 4).prop_map(Step::FreeWrong),
        ]
    }

    proptest! {
        #[test]
        fn every_step_agrees_with_a_mark_for_each_byte(
            steps in prop::collection::vec(step(), 0..MOST_STEPS),
            granule in (0..4_u32).prop_map(|shift| Granule::new(1 << shift).unwrap()),
        ) {
            let new = || Suballocator::with_granule(WHOLE, granule);
            let (mut fast, mut naive) = (new(), Naive { marks: [false; WHOLE] });
            for step in steps {
                match step {
                    Step::Allocate(len, shift) => {
                        let full = SuballocatorError::Full { len, largest: fast.largest_free() };
                        let whole = granule.round_up(len).unwrap();
                        let expected = naive.allocate(whole, 1 << shift).ok_or(full);
                        prop_assert_eq!(fast.allocate(len, 1 << shift), expected);
                    }
                    Step::ReserveAt(offset, len) => {
                        let misaligned = SuballocatorError::Misaligned { offset, granule: granule.len() };
                        let taken = SuballocatorError::Taken { offset, len };
                        let expected = match granule.divides(offset) {
                            true if naive.reserve_at(offset, granule.round_up(len).unwrap()) => Ok(()),
                            true => Err(taken),
                            false => Err(misaligned),
                        };
                        prop_assert_eq!(fast.reserve_at(offset, len), expected);
                    }
                    Step::Free(index) if !fast.used.is_empty() => {
                        let used: Vec<_> = fast.used().collect();
                        let (offset, len) = *index.get(&used);
                        naive.marks[offset..offset + len].fill(false);
                        prop_assert_eq!(fast.free(offset), Ok(len));
                    }
                    Step::FreeWrong(offset) if !fast.used.contains_key(&offset) => {
                        prop_assert_eq!(fast.free(offset), Err(SuballocatorError::NotInUse { offset }));
                    }
                    Step::Free(_) | Step::FreeWrong(_) => {}
                }
                prop_assert_eq!(fast.by_len.iter().copied().collect::<Vec<_>>(), naive.runs());
                prop_assert_eq!(fast.largest_free(), naive.runs().last().map_or(0, |&(len, _)| len));
                prop_assert_eq!(fast.used_len(), naive.marks.iter().filter(|&&mark| mark).count());

                // What is in use says everything: rebuilding from it gives the same allocator.
                let mut rebuilt = new();
                for (offset, len) in fast.used() {
                    rebuilt.reserve_at(offset, len).expect("used ranges do not overlap");
                }
                prop_assert_eq!(&rebuilt, &fast);
            }
        }
    }

    #[test]
    fn nonsense_is_refused_and_changes_nothing() {
        let mut arena = Suballocator::new(WHOLE);
        let before = arena.clone();
        assert_eq!(arena.allocate(0, 1), Err(SuballocatorError::ZeroLength));
        assert_eq!(arena.reserve_at(0, 0), Err(SuballocatorError::ZeroLength));
        assert_eq!(arena.allocate(1, 3), Err(SuballocatorError::BadAlignment { align: 3 }));
        assert_eq!(arena.allocate(1, 0), Err(SuballocatorError::BadAlignment { align: 0 }));
        let full = SuballocatorError::Full { len: usize::MAX, largest: WHOLE };
        assert_eq!(arena.allocate(usize::MAX, 1), Err(full));
        let offset = usize::MAX;
        assert_eq!(arena.reserve_at(offset, 2), Err(SuballocatorError::Taken { offset, len: 2 }));
        assert_eq!(arena, before);
        let mut arena = Suballocator::with_granule(WHOLE, Granule::new(16).unwrap());
        let (before, len) = (arena.clone(), usize::MAX);
        assert_eq!(arena.allocate(len, 1), Err(SuballocatorError::Full { len, largest: WHOLE }));
        assert_eq!(arena.reserve_at(0, len), Err(SuballocatorError::Taken { offset: 0, len }));
        let misaligned = SuballocatorError::Misaligned { offset: 8, granule: 16 };
        assert_eq!(arena.reserve_at(8, 16), Err(misaligned));
        assert_eq!(misaligned.to_string(), "cannot reserve at offset 8: ranges begin at multiples of 16");
        assert_eq!(arena, before);
    }

    #[test]
    fn an_empty_arena_has_no_room() {
        let full = SuballocatorError::Full { len: 1, largest: 0 };
        assert_eq!(Suballocator::new(0).allocate(1, 1), Err(full));
        assert_eq!(Suballocator::with_granule(15, Granule::new(16).unwrap()).allocate(1, 1), Err(full));
    }

    #[test]
    fn allocation_looks_at_one_free_range_however_many_there_are() {
        for fragments in [10, 1000] {
            let mut arena = Suballocator::with_granule((fragments + 1) * 256, Granule::new(256).unwrap());
            for _ in 0..fragments {
                arena.allocate(1, 256).unwrap();
            }
            EXAMINED.set(0);
            assert_eq!(arena.allocate(1, 256), Ok(fragments * 256));
            assert_eq!(EXAMINED.get(), 1, "beside {fragments} ranges in use");
        }
    }
}
