//! Finds the window in which an address of this rank lies, so that a call on an array in registered memory needs no staging copy.
//!
//! ```text
//!   addresses of this rank   --[ window 3 ]------[ window 7      ]--[ window 4 ]--->    sorted; a lookup is a binary search
//! ```
//!
//! Lookups are on the path of every collective call, changes are rare. So the sorted list is immutable: a change replaces it and
//! increments a generation. Each thread caches the list of the last generation that it has seen, and a lookup takes no lock unless
//! the generation has changed.
//!
//! All ranks must come to the same result. A rank's part of a window may be longer than those of others, so only the bytes that
//! every rank has are found; and of several windows that contain the bytes, the one that was created last is found on every rank.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::window_table::WindowId;

/// The number of indexes whose lists a thread caches.
const CACHED: usize = 8;

/// An index of address ranges, each of which refers to a value of type `T` without keeping it alive.
#[derive(Debug)]
pub(super) struct AddressIndex<T> {
    /// Identifies this index among all indexes of the process.
    number: u64,
    generation: AtomicU64,
    current: Mutex<Arc<SortedRanges<T>>>,
}

/// A range of addresses of this rank, and the window to which it belongs.
#[derive(Debug)]
pub(super) struct IndexEntry<T> {
    pub(super) start: u64,
    pub(super) len: usize,
    pub(super) id: WindowId,
    pub(super) value: Weak<T>,
}

impl<T> Clone for IndexEntry<T> {
    fn clone(&self) -> Self {
        Self { start: self.start, len: self.len, id: self.id, value: Weak::clone(&self.value) }
    }
}

#[derive(Debug)]
struct SortedRanges<T> {
    /// The ranges in the order of their first address.
    entries: Vec<IndexEntry<T>>,
    /// For each entry, the highest end address of that entry and of all entries before it.
    highest_end: Vec<u64>,
}

impl<T> SortedRanges<T> {
    fn new(mut entries: Vec<IndexEntry<T>>) -> Self {
        entries.sort_by_key(|entry| (entry.start, entry.id));
        let mut highest = 0;
        let end = |entry: &IndexEntry<T>| {
            highest = entry.start.saturating_add(entry.len as u64).max(highest);
            highest
        };
        let highest_end = entries.iter().map(end).collect();
        Self { entries, highest_end }
    }

    /// Returns the value of the entry with the highest id that contains `len` bytes at `address`, and their offset in it. Entries whose
    /// values have been dropped are skipped. Takes O(log n) steps, and one for each further entry that overlaps the bytes.
    fn find(&self, address: u64, len: usize) -> Option<(Arc<T>, usize)> {
        let end = address.checked_add(len as u64)?;
        let first_behind = self.entries.partition_point(|entry| entry.start <= address);
        let candidates = self.entries[..first_behind].iter().zip(&self.highest_end[..first_behind]).rev();
        candidates
            .take_while(|(_, highest_end)| **highest_end >= end)
            .map(|(entry, _)| entry)
            .filter(|entry| entry.start + entry.len as u64 >= end)
            .filter_map(|entry| Some((entry, entry.value.upgrade()?)))
            .max_by_key(|(entry, _)| entry.id)
            .map(|(entry, value)| (value, usize::try_from(address - entry.start).expect("less than `len`")))
    }
}

thread_local! {
    /// The lists that this thread has seen last, each with the number and the generation of its index. The type of their values is
    /// that of the only index type in use; a list of another type does not match and is replaced.
    static SEEN: RefCell<Vec<SeenList>> = const { RefCell::new(Vec::new()) };
}

struct SeenList {
    number: u64,
    generation: u64,
    list: Arc<dyn std::any::Any + Send + Sync>,
}

impl<T: Send + Sync + 'static> AddressIndex<T> {
    pub(super) fn new() -> Self {
        static CREATED: AtomicU64 = AtomicU64::new(0);
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let current = Mutex::new(Arc::new(SortedRanges::new(Vec::new())));
        Self { number, generation: AtomicU64::new(0), current }
    }

    /// Adds an address range to the index. Ranges whose values have been dropped are removed.
    pub(super) fn insert(&self, entry: IndexEntry<T>) {
        self.replace(|entries| entries.push(entry));
    }

    /// Removes the address range of a window from the index.
    pub(super) fn remove(&self, id: WindowId) {
        self.replace(|entries| entries.retain(|entry| entry.id != id));
    }

    /// Returns the value of the newest range that contains `len` bytes at `address`, and their offset in the range. An empty range
    /// of bytes is in no window.
    pub(super) fn find(&self, address: u64, len: usize) -> Option<(Arc<T>, usize)> {
        let generation = self.generation.load(Ordering::Acquire);
        if generation == 0 || len == 0 {
            return None;
        }
        // If the thread-local list has been dropped because the thread ends, the current list is used.
        let cached = SEEN.try_with(|seen| {
            let mut seen = seen.borrow_mut();
            let known = seen.iter().position(|list| list.number == self.number);
            if let Some(list) = known.map(|at| &seen[at]).filter(|list| list.generation == generation)
                && let Some(list) = list.list.downcast_ref::<SortedRanges<T>>()
            {
                return list.find(address, len);
            }
            let (list, generation) = self.current();
            let result = list.find(address, len);
            known.map(|at| seen.swap_remove(at));
            seen.truncate(CACHED - 1);
            seen.insert(0, SeenList { number: self.number, generation, list });
            result
        });
        cached.unwrap_or_else(|_| self.current().0.find(address, len))
    }

    /// Returns the current list and its generation.
    fn current(&self) -> (Arc<SortedRanges<T>>, u64) {
        let current = self.lock();
        // The load may be relaxed, because the generation changes only while this lock is held.
        (Arc::clone(&current), self.generation.load(Ordering::Relaxed))
    }

    fn replace(&self, change: impl FnOnce(&mut Vec<IndexEntry<T>>)) {
        let mut current = self.lock();
        let mut entries = current.entries.clone();
        entries.retain(|entry| entry.value.strong_count() > 0);
        change(&mut entries);
        *current = Arc::new(SortedRanges::new(entries));
        self.generation.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<SortedRanges<T>>> {
        // A change replaces the whole list at once, so the list is consistent after a panic.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Adds a range and returns its value, which keeps it in the index.
    fn insert(index: &AddressIndex<u64>, id: WindowId, start: u64, len: usize) -> Arc<u64> {
        let value = Arc::new(id);
        index.insert(IndexEntry { start, len, id, value: Arc::downgrade(&value) });
        value
    }

    fn find(index: &AddressIndex<u64>, address: u64, len: usize) -> Option<(u64, usize)> {
        index.find(address, len).map(|(id, offset)| (*id, offset))
    }

    #[test]
    fn only_bytes_inside_one_range_are_found() {
        let index = AddressIndex::new();
        assert_eq!(find(&index, 100, 1), None);
        let _values = [insert(&index, 1, 100, 50), insert(&index, 2, 150, 50)];
        assert_eq!(find(&index, 100, 50), Some((1, 0)));
        assert_eq!(find(&index, 149, 1), Some((1, 49)));
        assert_eq!(find(&index, 150, 50), Some((2, 0)));
        for (address, len) in [(99, 2), (149, 2), (150, 51), (200, 1), (u64::MAX, 1), (120, 0)] {
            assert_eq!(find(&index, address, len), None, "{len} bytes at {address}");
        }
    }

    #[test]
    fn the_newest_of_overlapping_ranges_is_found() {
        let index = AddressIndex::new();
        let _values = [insert(&index, 5, 100, 100), insert(&index, 6, 120, 20), insert(&index, 4, 110, 80)];
        assert_eq!(find(&index, 125, 5), Some((6, 5)));
        assert_eq!(find(&index, 125, 50), Some((5, 25)));
        index.remove(5);
        assert_eq!(find(&index, 125, 50), Some((4, 15)));
        assert_eq!(find(&index, 100, 1), None);
    }

    #[test]
    fn a_range_ends_with_its_value() {
        let index = AddressIndex::new();
        let value = insert(&index, 1, 100, 50);
        assert_eq!(find(&index, 100, 1), Some((1, 0)));
        let newer = insert(&index, 3, 100, 10);
        assert_eq!(find(&index, 100, 1), Some((3, 0)));
        drop(newer);
        assert_eq!(find(&index, 100, 1), Some((1, 0)), "an older range contains the byte");
        drop(value);
        assert_eq!(find(&index, 100, 1), None);
        let _later = insert(&index, 2, 100, 50);
        assert_eq!(index.current().0.entries.len(), 1, "a change removes ended ranges");
        assert_eq!(find(&index, 100, 1), Some((2, 0)));
    }

    #[test]
    fn other_threads_and_indexes_see_their_own_changes() {
        let all: Vec<_> = (0..CACHED as u64 + 3).map(|_| AddressIndex::new()).collect();
        let values: Vec<_> = all.iter().zip(0..).map(|(index, id)| insert(index, id, 100, 50)).collect();
        for _ in 0..2 {
            for (index, id) in all.iter().zip(0..) {
                assert_eq!(find(index, 110, 1), Some((id, 10)));
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| all[3].remove(3)).join().unwrap();
            assert_eq!(find(&all[3], 110, 1), None);
            scope.spawn(|| assert_eq!(find(&all[4], 110, 1), Some((4, 10))));
        });
        drop(values);
    }

    proptest! {
        #[test]
        fn a_lookup_matches_a_search_through_all_ranges(
            ranges in proptest::collection::vec((0..200_u64, 1..60_usize), 0..20),
            asked in proptest::collection::vec((0..260_u64, 1..40_usize), 1..40),
        ) {
            let index = AddressIndex::new();
            let values: Vec<_> =
                (0..).zip(&ranges).map(|(id, (start, len))| insert(&index, id, *start, *len)).collect();
            for (address, len) in asked {
                let inside = |(start, has): &(u64, usize)| {
                    *start <= address && address + len as u64 <= start + *has as u64
                };
                let naive = ranges.iter().rposition(inside);
                let naive = naive.map(|at| (at as u64, usize::try_from(address - ranges[at].0).unwrap()));
                prop_assert_eq!(find(&index, address, len), naive);
            }
            drop(values);
        }
    }
}
