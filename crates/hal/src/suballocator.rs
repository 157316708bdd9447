//! A best-fit allocator of ranges within one memory. All its bookkeeping is outside of the memory.
//!
//! ```text
//!   used   [===A===]      [==B==]                [=====C=====]
//!   free            [----]       [--------------]             [----]     no two of these touch
//! ```
//!
//! It computes with offsets only, so it serves device memory, shared windows and files alike, and its state can be rebuilt from a
//! list of used ranges ([`Suballocator::reserve_at`]). It indexes free ranges by offset, to merge neighbours, and by length, to
//! find the best fit. No two free ranges are adjacent; free and used ranges together cover the memory. It never moves a range and
//! does not lock: callers that share it between threads wrap it in a lock.
//!
//! Cost: every call is O(log n) in the number of ranges, with one exception. If the alignment exceeds the granule,
//! [`Suballocator::allocate`] skips free ranges that are long enough but too short after alignment; it may have to skip all of
//! them. If untrusted callers choose the lengths, use a granule of the size of the alignment ([`Suballocator::with_granule`]):
//! then the first range that is long enough always fits.
//!
//! ```
//! use wholemem_hal::Suballocator;
//!
//! let mut suballocator = Suballocator::new(1 << 20);
//! let first = suballocator.allocate(1000, 256)?;
//! let second = suballocator.allocate(1000, 256)?;
//! assert_eq!((first, second), (0, 1024));
//!
//! // After a restart, rebuild the state from the list of used ranges.
//! let mut recovered = Suballocator::new(1 << 20);
//! recovered.reserve_at(second, 1000)?;
//! assert_eq!(recovered.allocate(1000, 256)?, 0);
//! # Ok::<(), wholemem_hal::SuballocatorError>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};

use wholemem_os::Size;

use crate::Granule;

/// The error of allocating, reserving or freeing a range with a [`Suballocator`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SuballocatorError {
    /// The length of the requested range is zero.
    #[error("cannot allocate or reserve 0 bytes")]
    ZeroLength,
    /// The requested alignment is not a power of two.
    #[error("cannot allocate: an alignment of {align} is not a power of two")]
    BadAlignment {
        /// The requested alignment in bytes.
        align: usize,
    },
    /// No free range is large enough for the requested length.
    #[error(
        "cannot allocate {requested}: the largest free range is {free}",
        requested = Size(*len), free = Size(*largest)
    )]
    Full {
        /// The requested length in bytes.
        len: usize,
        /// The length of the largest free range in bytes.
        largest: usize,
    },
    /// The range to reserve is not entirely free, or not inside the memory.
    #[error(
        "cannot reserve {size} at offset {at}: part of the range is not free, or not inside the memory",
        size = Size(*len), at = Size(*offset)
    )]
    Taken {
        /// The offset of the range to reserve, in bytes.
        offset: usize,
        /// The length of the range to reserve in bytes.
        len: usize,
    },
    /// The offset of the range to reserve is not a multiple of the granule.
    #[error("cannot reserve at offset {offset}: the offset is not a multiple of the granule, {granule}")]
    Misaligned {
        /// The offset of the range to reserve, in bytes.
        offset: usize,
        /// The granule of the allocator, in bytes.
        granule: usize,
    },
    /// No used range begins at the offset of the range to free.
    #[error("cannot free the range at offset {offset}: no used range begins there")]
    NotInUse {
        /// The offset of the range to free, in bytes.
        offset: usize,
    },
}

/// An allocator of ranges in one memory of fixed length, which it never accesses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suballocator {
    len: usize,
    /// The granule: used and free ranges begin and end at its multiples.
    granule: Granule,
    /// The used ranges of the memory: length by offset.
    used: BTreeMap<usize, usize>,
    /// The free ranges of the memory: length by offset.
    free: BTreeMap<usize, usize>,
    /// The free ranges of the memory as (length, offset), shortest first.
    by_len: BTreeSet<(usize, usize)>,
    used_len: usize,
}

impl Suballocator {
    /// Creates an allocator for a memory of `len` bytes, all free, with a granule of one byte.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self::with_granule(len, Granule::BYTE)
    }

    /// Creates an allocator for a memory of `len` bytes, all free, whose ranges are multiples of `granule`.
    ///
    /// The remainder of `len` after the last whole granule is never allocated.
    #[must_use]
    pub fn with_granule(len: usize, granule: Granule) -> Self {
        let (used, free, by_len) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let mut all = Self { len, granule, used, free, by_len, used_len: 0 };
        all.insert_free(0, len - len % granule.len());
        all
    }

    /// Allocates `len` bytes at a multiple of `align`, from the smallest free range that fits; among ranges of equal length, from
    /// the lowest.
    ///
    /// The length is rounded up to a multiple of the granule.
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

    /// Marks exactly the range of `len` bytes at `offset` as used, to rebuild the state of an allocator after a restart.
    ///
    /// The length is rounded up to a multiple of the granule, as by [`Self::allocate`].
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

    /// Frees the used range at `offset` and returns its length, a multiple of the granule.
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

    /// Returns the length of the memory in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "emptiness would be ambiguous: see `used_len`")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of used bytes of the memory, a multiple of the granule.
    #[must_use]
    pub fn used_len(&self) -> usize {
        self.used_len
    }

    /// Returns the length of the largest free range, regardless of alignment.
    #[must_use]
    pub fn largest_free(&self) -> usize {
        self.by_len.last().map_or(0, |&(len, _)| len)
    }

    /// Returns the used ranges as (offset, length), in the order of their offsets.
    pub fn used(&self) -> impl Iterator<Item = (usize, usize)> {
        self.used.iter().map(|(&offset, &len)| (offset, len))
    }

    /// Cuts a used range out of the free range that contains it.
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
        /// The number of free ranges that `allocate` has examined.
        pub(super) static EXAMINED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    /// The maximum number of steps in a test. Miri is some hundred times slower than native code.
    const MAX_STEPS: usize = if cfg!(miri) { 10 } else { 80 };

    /// A reference implementation of the suballocator, with one flag per byte.
    struct NaiveSuballocator {
        flags: [bool; WHOLE],
    }

    impl NaiveSuballocator {
        fn runs(&self) -> Vec<(usize, usize)> {
            let mut runs = Vec::new();
            let mut start = 0;
            while start < WHOLE {
                let len = self.flags[start..].iter().take_while(|&&flag| !flag).count();
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
            self.flags[offset..offset + len].fill(true);
            Some(offset)
        }

        fn reserve_at(&mut self, offset: usize, len: usize) -> bool {
            let free = self.flags.get(offset..offset + len).is_some_and(|range| !range.contains(&true));
            if free {
                self.flags[offset..offset + len].fill(true);
            }
            free
        }
    }

    #[derive(Debug, Clone)]
    enum AllocatorStep {
        Allocate(usize, u32),
        ReserveAt(usize, usize),
        Free(prop::sample::Index),
        FreeUnused(usize),
    }

    fn step() -> impl Strategy<Value = AllocatorStep> {
        prop_oneof![
            (1..WHOLE / 3, 0..5_u32).prop_map(|(len, shift)| AllocatorStep::Allocate(len, shift)),
            (0..WHOLE + 4, 1..WHOLE / 3).prop_map(|(offset, len)| AllocatorStep::ReserveAt(offset, len)),
            any::<prop::sample::Index>().prop_map(AllocatorStep::Free),
            (0..WHOLE + 4).prop_map(AllocatorStep::FreeUnused),
        ]
    }

    proptest! {
        #[test]
        fn every_step_agrees_with_one_flag_per_byte(
            steps in prop::collection::vec(step(), 0..MAX_STEPS),
            granule in (0..4_u32).prop_map(|shift| Granule::new(1 << shift).unwrap()),
        ) {
            let new = || Suballocator::with_granule(WHOLE, granule);
            let (mut fast, mut naive) = (new(), NaiveSuballocator { flags: [false; WHOLE] });
            for step in steps {
                match step {
                    AllocatorStep::Allocate(len, shift) => {
                        let full = SuballocatorError::Full { len, largest: fast.largest_free() };
                        let whole = granule.round_up(len).unwrap();
                        let expected = naive.allocate(whole, 1 << shift).ok_or(full);
                        prop_assert_eq!(fast.allocate(len, 1 << shift), expected);
                    }
                    AllocatorStep::ReserveAt(offset, len) => {
                        let misaligned = SuballocatorError::Misaligned { offset, granule: granule.len() };
                        let taken = SuballocatorError::Taken { offset, len };
                        let expected = match granule.divides(offset) {
                            true if naive.reserve_at(offset, granule.round_up(len).unwrap()) => Ok(()),
                            true => Err(taken),
                            false => Err(misaligned),
                        };
                        prop_assert_eq!(fast.reserve_at(offset, len), expected);
                    }
                    AllocatorStep::Free(index) if !fast.used.is_empty() => {
                        let used: Vec<_> = fast.used().collect();
                        let (offset, len) = *index.get(&used);
                        naive.flags[offset..offset + len].fill(false);
                        prop_assert_eq!(fast.free(offset), Ok(len));
                    }
                    AllocatorStep::FreeUnused(offset) if !fast.used.contains_key(&offset) => {
                        prop_assert_eq!(fast.free(offset), Err(SuballocatorError::NotInUse { offset }));
                    }
                    AllocatorStep::Free(_) | AllocatorStep::FreeUnused(_) => {}
                }
                prop_assert_eq!(fast.by_len.iter().copied().collect::<Vec<_>>(), naive.runs());
                prop_assert_eq!(fast.largest_free(), naive.runs().last().map_or(0, |&(len, _)| len));
                prop_assert_eq!(fast.used_len(), naive.flags.iter().filter(|&&flag| flag).count());

                // The used ranges determine the state of an allocator: rebuilding it from them gives an equal one.
                let mut rebuilt = new();
                for (offset, len) in fast.used() {
                    rebuilt.reserve_at(offset, len).expect("used ranges do not overlap");
                }
                prop_assert_eq!(&rebuilt, &fast);
            }
        }
    }

    #[test]
    fn invalid_requests_are_rejected_without_side_effects() {
        let mut suballocator = Suballocator::new(WHOLE);
        let before = suballocator.clone();
        assert_eq!(suballocator.allocate(0, 1), Err(SuballocatorError::ZeroLength));
        assert_eq!(suballocator.reserve_at(0, 0), Err(SuballocatorError::ZeroLength));
        assert_eq!(suballocator.allocate(1, 3), Err(SuballocatorError::BadAlignment { align: 3 }));
        assert_eq!(suballocator.allocate(1, 0), Err(SuballocatorError::BadAlignment { align: 0 }));
        let full = SuballocatorError::Full { len: usize::MAX, largest: WHOLE };
        assert_eq!(suballocator.allocate(usize::MAX, 1), Err(full));
        let offset = usize::MAX;
        assert_eq!(suballocator.reserve_at(offset, 2), Err(SuballocatorError::Taken { offset, len: 2 }));
        assert_eq!(suballocator, before);
        let mut suballocator = Suballocator::with_granule(WHOLE, Granule::new(16).unwrap());
        let (before, len) = (suballocator.clone(), usize::MAX);
        assert_eq!(suballocator.allocate(len, 1), Err(SuballocatorError::Full { len, largest: WHOLE }));
        assert_eq!(suballocator.reserve_at(0, len), Err(SuballocatorError::Taken { offset: 0, len }));
        let misaligned = SuballocatorError::Misaligned { offset: 8, granule: 16 };
        assert_eq!(suballocator.reserve_at(8, 16), Err(misaligned));
        assert_eq!(
            misaligned.to_string(),
            "cannot reserve at offset 8: the offset is not a multiple of the granule, 16"
        );
        assert_eq!(suballocator, before);
    }

    #[test]
    fn an_empty_suballocator_is_full() {
        let full = SuballocatorError::Full { len: 1, largest: 0 };
        assert_eq!(Suballocator::new(0).allocate(1, 1), Err(full));
        assert_eq!(Suballocator::with_granule(15, Granule::new(16).unwrap()).allocate(1, 1), Err(full));
    }

    #[test]
    fn allocation_examines_one_free_range_regardless_of_their_number() {
        for fragments in [10, 1000] {
            let mut suballocator =
                Suballocator::with_granule((fragments + 1) * 256, Granule::new(256).unwrap());
            for _ in 0..fragments {
                suballocator.allocate(1, 256).unwrap();
            }
            EXAMINED.set(0);
            assert_eq!(suballocator.allocate(1, 256), Ok(fragments * 256));
            assert_eq!(EXAMINED.get(), 1, "with {fragments} used ranges");
        }
    }
}
