//! The table of the offsets of all windows of a group. Every rank has a table, and the tables are equal on all ranks.
//!
//! ```text
//!   one rank's share of the addresses, `stride` long, the same offsets on every rank
//!   [ heap: slots of small windows ][ window 2 ][ window 3 ]--------- next ---------->                     ]
//! ```
//!
//! The offset of a window depends only on data that all ranks have exchanged, so no rank has to send it. Ranks drop windows at
//! any time and report the drop in the next exchange. After all ranks have dropped a window, its addresses are free. Addresses that
//! no window has used are used first, because work in flight may keep the mapping of a dropped window for some time.

use std::collections::BTreeMap;

use wholemem_hal::{Granule, Suballocator};

use crate::{Error, Result};

/// The alignment in bytes of the windows in the heap of small windows: whole cache lines.
const SLOT: usize = 256;

/// The id of a window, which is equal on all ranks.
pub(crate) type WindowId = u64;

/// The offset of a window: in each rank's share of the window addresses, or in the heap of small windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowOffset {
    /// The window has its own mappings, at this offset in each rank's share of the addresses.
    Mapped(usize),
    /// The window is at this offset in the heap of small windows.
    Heap(usize),
    /// The window has no window addresses: its memory is elsewhere.
    Elsewhere,
}

#[derive(Debug)]
struct WindowEntry {
    offset_kind: WindowOffset,
    /// The number of ranks that have dropped the window.
    dropped: u32,
}

/// The table of all windows of one group, and of the free addresses.
#[derive(Debug)]
pub(crate) struct WindowTable {
    ranks: u32,
    granule: Granule,
    space: Suballocator,
    /// The lowest offset from which on no window has used the addresses.
    fresh: usize,
    heap: Suballocator,
    next: WindowId,
    entries: BTreeMap<WindowId, WindowEntry>,
}

impl WindowTable {
    /// Creates a table without windows. Each rank has `stride` bytes of addresses and a heap of `heap_len` bytes for small
    /// windows.
    pub(crate) fn new(ranks: u32, granule: Granule, stride: usize, heap_len: usize) -> Self {
        let (space, heap) = (Suballocator::new(stride), Suballocator::new(heap_len));
        Self { ranks, granule, space, fresh: 0, heap, next: 0, entries: BTreeMap::new() }
    }

    /// Returns true if a window of at most `len` bytes on each rank belongs in the heap of small windows, because mappings of its
    /// own would leave most of a granule unused, and if the heap has space for it.
    pub(crate) fn is_small(&self, len: usize) -> bool {
        len <= self.granule.len() / 2 && len <= self.heap.largest_free().saturating_sub(SLOT)
    }

    /// Adds a window to the heap of small windows. Returns its id and its offset in the heap.
    pub(crate) fn insert_in_heap(&mut self, len: usize) -> Result<(WindowId, usize)> {
        let offset = self.heap.allocate(len.max(1), SLOT).map_err(|_| self.full(len))?;
        Ok((self.insert(WindowOffset::Heap(offset)), offset))
    }

    /// Adds a window that has its own mappings, where `len` is the maximum length of a rank's part. Returns its id and its
    /// offset.
    pub(crate) fn insert_mapped(&mut self, len: usize) -> Result<(WindowId, usize)> {
        let len = self.granule.round_up(len.max(1)).ok_or_else(|| self.full(len))?;
        let fresh = self.fresh;
        let offset = match self.space.reserve_at(fresh, len) {
            Ok(()) => {
                self.fresh += len;
                fresh
            }
            Err(_) => self.space.allocate(len, self.granule.len()).map_err(|_| self.full(len))?,
        };
        Ok((self.insert(WindowOffset::Mapped(offset)), offset))
    }

    /// Adds a window without window addresses, of memory that each rank uses where it is. Returns its id.
    pub(crate) fn insert_unmapped(&mut self) -> WindowId {
        self.insert(WindowOffset::Elsewhere)
    }

    /// Records that one rank has dropped a window. Removes the window after all ranks have dropped it, and then returns true.
    pub(crate) fn record_drop(&mut self, id: WindowId) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        entry.dropped += 1;
        let is_last = entry.dropped >= self.ranks;
        if is_last {
            self.remove(id);
        }
        is_last
    }

    /// Removes a window and frees its addresses.
    pub(crate) fn remove(&mut self, id: WindowId) {
        // The address range of a window is allocated as long as the window is in the table, so freeing the range succeeds.
        let _ = match self.entries.remove(&id).map(|entry| entry.offset_kind) {
            Some(WindowOffset::Mapped(offset)) => self.space.free(offset),
            Some(WindowOffset::Heap(offset)) => self.heap.free(offset),
            Some(WindowOffset::Elsewhere) | None => Ok(0),
        };
    }

    fn insert(&mut self, offset_kind: WindowOffset) -> WindowId {
        let id = self.next;
        self.next += 1;
        self.entries.insert(id, WindowEntry { offset_kind, dropped: 0 });
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

    fn table() -> WindowTable {
        WindowTable::new(2, Granule::new(GRANULE).unwrap(), 8 * GRANULE, GRANULE)
    }

    #[test]
    fn addresses_are_free_after_all_ranks_have_dropped_the_window() {
        let mut table = table();
        let (first, at) = table.insert_mapped(1).unwrap();
        assert_eq!(at, 0);
        assert_eq!(table.insert_mapped(7 * GRANULE).unwrap().1, GRANULE);
        let full = Error::NoWindowSpace { len: GRANULE, free: 0 };
        assert_eq!(table.insert_mapped(1), Err(full.clone()));
        assert!(!table.record_drop(first));
        assert_eq!(table.insert_mapped(1), Err(full));
        assert!(table.record_drop(first));
        assert_eq!(table.insert_mapped(GRANULE).unwrap().1, 0);
    }

    #[test]
    fn unused_addresses_are_used_before_freed_ones() {
        let mut table = table();
        let (first, _) = table.insert_mapped(1).unwrap();
        assert_eq!([(); 2].map(|()| table.record_drop(first)), [false, true]);
        assert_eq!(table.insert_mapped(1).unwrap().1, GRANULE);
        let (struck, at) = table.insert_mapped(6 * GRANULE).unwrap();
        assert_eq!(at, 2 * GRANULE);
        table.remove(struck);
        assert_eq!(table.insert_mapped(6 * GRANULE).unwrap().1, 2 * GRANULE);
    }

    #[test]
    fn a_window_of_memory_elsewhere_needs_no_addresses() {
        let mut table = table();
        let id = table.insert_unmapped();
        assert_eq!(table.insert_mapped(8 * GRANULE).unwrap(), (id + 1, 0));
        assert_eq!([(); 3].map(|()| table.record_drop(id)), [false, true, false]);
        assert!(!table.record_drop(id + 1));
    }

    #[test]
    fn small_windows_share_the_heap_until_it_is_full() {
        let mut table = table();
        assert!(table.is_small(GRANULE / 2) && !table.is_small(GRANULE / 2 + 1));
        let (first, at) = table.insert_in_heap(100).unwrap();
        assert_eq!((at, table.insert_in_heap(GRANULE / 2).unwrap().1), (0, SLOT));
        assert!(!table.is_small(GRANULE / 2));
        assert_eq!([(); 2].map(|()| table.record_drop(first)), [false, true]);
        assert_eq!(table.insert_in_heap(100).unwrap().1, 0);
    }
}
