//! Which window is where: a book that every rank keeps for itself, and that says the same on all of them.
//!
//! ```text
//!   one rank's share of the addresses, `stride` long, the same offsets on every rank
//!   [ heap: slots of small windows ][ window 2 ][ window 3 ]--------- next ---------->                     ]
//! ```
//!
//! A window's offset is decided by what all ranks have said in the same meeting, so nobody has to be told of it. Ranks drop
//! windows whenever they like; each says so in the next meeting, and when all have, its place is free. Places of whole maps
//! are taken anew only when there are no others left: work that still runs may keep a map for some time.

use std::collections::BTreeMap;

use wholemem_hal::{Granule, Suballocator};

use crate::{Error, Result};

/// Slots of the heap begin on such multiples, for wide accesses and whole cache lines.
const SLOT: usize = 256;

/// The number of a window.
pub(crate) type WindowId = u64;

/// Where a window is, in each rank's share of the addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Maps of its own, from this offset on.
    Own(usize),
    /// A slot of the heap, at this offset in it.
    Slot(usize),
}

#[derive(Debug)]
struct Entry {
    place: Place,
    /// How many ranks have dropped it.
    dropped: u32,
}

/// All windows of one group, and the places that are free.
#[derive(Debug)]
pub(crate) struct Book {
    ranks: u32,
    granule: Granule,
    space: Suballocator,
    /// Where the addresses begin that no window ever had.
    fresh: usize,
    heap: Suballocator,
    next: WindowId,
    entries: BTreeMap<WindowId, Entry>,
}

impl Book {
    /// An empty book for shares of `stride` addresses, and a heap of `heap_len` bytes.
    pub(crate) fn new(ranks: u32, granule: Granule, stride: usize, heap_len: usize) -> Self {
        let (space, heap) = (Suballocator::new(stride), Suballocator::new(heap_len));
        Self { ranks, granule, space, fresh: 0, heap, next: 0, entries: BTreeMap::new() }
    }

    /// Whether a window of at most `len` bytes on each rank belongs into the heap: what is left of a granule would be
    /// most of it.
    pub(crate) fn is_small(&self, len: usize) -> bool {
        len <= self.granule.len() / 2 && len <= self.heap.largest_free().saturating_sub(SLOT)
    }

    /// A place in the heap.
    pub(crate) fn enter_slot(&mut self, len: usize) -> Result<(WindowId, usize)> {
        let offset = self.heap.allocate(len.max(1), SLOT).map_err(|_| self.full(len))?;
        Ok((self.enter(Place::Slot(offset)), offset))
    }

    /// A place for maps of its own, `len` bytes on the rank that has most.
    pub(crate) fn enter_own(&mut self, len: usize) -> Result<(WindowId, usize)> {
        let len = self.granule.round_up(len.max(1)).ok_or_else(|| self.full(len))?;
        let fresh = self.fresh;
        let offset = match self.space.reserve_at(fresh, len) {
            Ok(()) => {
                self.fresh += len;
                fresh
            }
            Err(_) => self.space.allocate(len, self.granule.len()).map_err(|_| self.full(len))?,
        };
        Ok((self.enter(Place::Own(offset)), offset))
    }

    /// Takes in that a rank has dropped a window.
    pub(crate) fn hear_dropped(&mut self, id: WindowId) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        entry.dropped += 1;
        if entry.dropped >= self.ranks {
            self.strike(id);
        }
    }

    /// Strikes out a window that did not come to be.
    pub(crate) fn strike(&mut self, id: WindowId) {
        // Offsets of entries are in use, by the book itself.
        let _ = match self.entries.remove(&id).map(|entry| entry.place) {
            Some(Place::Own(offset)) => self.space.free(offset),
            Some(Place::Slot(offset)) => self.heap.free(offset),
            None => Ok(0),
        };
    }

    fn enter(&mut self, place: Place) -> WindowId {
        let id = self.next;
        self.next += 1;
        self.entries.insert(id, Entry { place, dropped: 0 });
        id
    }

    fn full(&self, len: usize) -> Error {
        Error::NoWindowSpace { len, free: self.space.largest_free() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: usize = 64 << 10;

    fn book() -> Book {
        Book::new(2, Granule::new(GRANULE).unwrap(), 8 * GRANULE, GRANULE)
    }

    #[test]
    fn a_place_is_free_when_all_ranks_have_dropped_the_window() {
        let mut book = book();
        let (first, at) = book.enter_own(1).unwrap();
        assert_eq!(at, 0);
        assert_eq!(book.enter_own(7 * GRANULE).unwrap().1, GRANULE);
        let full = Error::NoWindowSpace { len: GRANULE, free: 0 };
        assert_eq!(book.enter_own(1), Err(full.clone()));
        book.hear_dropped(first);
        assert_eq!(book.enter_own(1), Err(full));
        book.hear_dropped(first);
        assert_eq!(book.enter_own(GRANULE).unwrap().1, 0);
    }

    #[test]
    fn places_that_no_window_had_come_first() {
        let mut book = book();
        let (first, _) = book.enter_own(1).unwrap();
        (0..2).for_each(|_| book.hear_dropped(first));
        assert_eq!(book.enter_own(1).unwrap().1, GRANULE);
        let (struck, at) = book.enter_own(6 * GRANULE).unwrap();
        assert_eq!(at, 2 * GRANULE);
        book.strike(struck);
        assert_eq!(book.enter_own(6 * GRANULE).unwrap().1, 2 * GRANULE);
    }

    #[test]
    fn small_windows_share_the_heap_while_there_is_room() {
        let mut book = book();
        assert!(book.is_small(GRANULE / 2) && !book.is_small(GRANULE / 2 + 1));
        let (first, at) = book.enter_slot(100).unwrap();
        assert_eq!((at, book.enter_slot(GRANULE / 2).unwrap().1), (0, SLOT));
        assert!(!book.is_small(GRANULE / 2));
        (0..2).for_each(|_| book.hear_dropped(first));
        assert_eq!(book.enter_slot(100).unwrap().1, 0);
    }
}
