//! The arenas (memory that small objects share) of one place, which is the host or a device, indexed by their longest free range.
//!
//! ```text
//!   tree              [ 9 ]            a tree of maxima over the slots of the table of allocations
//!                [ 7 ]     [ 9 ]       0 if a slot has no arena of this place that is ready
//!              [ 3 ][ 7 ][ 0 ][ 9 ]
//!   slot         0    1    2    3      first_with(5) is 1: left if the left half has enough, else right
//! ```
//!
//! The space of an arena is the length of its longest free range. Regions are multiples of their alignment, so a request fits an
//! arena if and only if it is not longer than that: a lookup never returns an arena in which the request then fails. Lookups and
//! updates cost O(log n) in the length of the table, which is fixed when the store is created, independent of the number of
//! arenas and other allocations.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::AllocationId;

/// The longest free range of each arena of a place (the host or a device), and the set of empty arenas.
#[derive(Debug)]
pub(super) struct Arenas {
    /// A binary tree of the longest free ranges: node `n` has the maximum of its children `2 n` and `2 n + 1`, and the leaves are
    /// the second half of the vector.
    tree: Vec<usize>,
    /// The arena of each slot of the allocation table whose allocation is an arena.
    ids: BTreeMap<usize, AllocationId>,
    /// The arenas that contain no object.
    empty: BTreeSet<AllocationId>,
    /// The number of tree levels that lookups and updates have visited.
    #[cfg(test)]
    pub(super) visited: std::cell::Cell<usize>,
}

impl Arenas {
    /// Creates an empty set of arenas, for an allocation table with `slots` slots.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            tree: vec![0; 2 * slots.next_power_of_two()],
            ids: BTreeMap::new(),
            empty: BTreeSet::new(),
            #[cfg(test)]
            visited: std::cell::Cell::default(),
        }
    }

    /// Records the length of an arena's longest free range, and whether the arena has no objects.
    ///
    /// # Panics
    /// If the slot of the arena is beyond the table.
    pub(super) fn set(&mut self, id: AllocationId, free_len: usize, is_empty: bool) {
        self.ids.insert(id.slot(), id);
        match is_empty {
            true => self.empty.insert(id),
            false => self.empty.remove(&id),
        };
        self.set_free_len(id.slot(), free_len);
    }

    /// Removes an arena from the set.
    pub(super) fn remove(&mut self, id: AllocationId) {
        self.ids.remove(&id.slot());
        self.empty.remove(&id);
        self.set_free_len(id.slot(), 0);
    }

    fn set_free_len(&mut self, slot: usize, free_len: usize) {
        let mut node = self.tree.len() / 2 + slot;
        self.tree[node] = free_len;
        while node > 1 {
            #[cfg(test)]
            self.visited.set(self.visited.get() + 1);
            node /= 2;
            let tree = self.tree[2 * node].max(self.tree[2 * node + 1]);
            if self.tree[node] == tree {
                break;
            }
            self.tree[node] = tree;
        }
    }

    /// Returns the arena with the lowest slot that has `len` contiguous free bytes.
    pub(super) fn first_with(&self, len: usize) -> Option<AllocationId> {
        // At least one byte is needed: a slot without an arena has no space, not even for zero bytes.
        let len = len.max(1);
        let leaves = self.tree.len() / 2;
        if self.tree[1] < len {
            return None;
        }
        let mut node = 1;
        while node < leaves {
            #[cfg(test)]
            self.visited.set(self.visited.get() + 1);
            node *= 2;
            node += usize::from(self.tree[node] < len);
        }
        self.ids.get(&(node - leaves)).copied()
    }

    /// Returns the number of arenas that contain no object.
    pub(super) fn empty_count(&self) -> usize {
        self.empty.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn id(slot: usize) -> AllocationId {
        AllocationId::new(slot, 7)
    }

    #[test]
    fn a_table_of_one_slot_works() {
        let mut arenas = Arenas::new(1);
        assert_eq!((arenas.first_with(0), arenas.first_with(1)), (None, None));
        arenas.set(id(0), 5, true);
        assert_eq!([0, 5, 6].map(|len| arenas.first_with(len)), [Some(id(0)), Some(id(0)), None]);
        arenas.remove(id(0));
        assert_eq!((arenas.first_with(1), arenas.empty_count()), (None, 0));
    }

    type ArenaOp = (prop::sample::Index, Option<(usize, bool)>, usize);

    fn step() -> impl Strategy<Value = ArenaOp> {
        (any::<prop::sample::Index>(), prop::option::weighted(0.8, (0_usize..10, any::<bool>())), 0_usize..12)
    }

    proptest! {
        #[test]
        fn lookups_agree_with_a_scan_of_all_slots(
            slots in 1_usize..20,
            steps in prop::collection::vec(step(), 0..60),
        ) {
            let (mut arenas, mut model) = (Arenas::new(slots), vec![None; slots]);
            for (slot, arena, wanted) in steps {
                let slot = slot.index(slots);
                match arena {
                    Some((free_len, is_empty)) => arenas.set(id(slot), free_len, is_empty),
                    None => arenas.remove(id(slot)),
                }
                model[slot] = arena;
                let fits = |arena: &Option<(usize, bool)>| arena.is_some_and(|(free_len, _)| free_len >= wanted.max(1));
                prop_assert_eq!(arenas.first_with(wanted), model.iter().position(fits).map(id));
                let empty = model.iter().filter(|arena| arena.is_some_and(|(_, is_empty)| is_empty));
                prop_assert_eq!(arenas.empty_count(), empty.count());
            }
        }
    }
}
