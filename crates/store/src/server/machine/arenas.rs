//! The arenas of one place, indexed by how much room each of them has.
//!
//! ```text
//!   most              [ 9 ]            a tree of maxima over the slots of the table of allocations
//!                [ 7 ]     [ 9 ]       0 where a slot has no arena of this place that is ready
//!              [ 3 ][ 7 ][ 0 ][ 9 ]
//!   slot         0    1    2    3      first_with(5) is 1: left where the left half has enough, else right
//! ```
//!
//! The room of an arena is the length of its longest free range. Regions are whole multiples of their alignment, so that a
//! request fits an arena if and only if it is not longer than that: a lookup never returns an arena in which the request
//! then fails. Lookups and updates cost O(log n) in the length of the table, which is fixed when the store is created, and
//! do not depend on how many arenas or other allocations there are.

use std::collections::{BTreeMap, BTreeSet};

use crate::id::AllocationId;

/// How much room each arena of a place has, and which of them are empty.
#[derive(Debug)]
pub(super) struct Arenas {
    /// The tree: node `n` has the children `2 n` and `2 n + 1`, and the leaves are the second half.
    most: Vec<usize>,
    /// The arena of each slot that has one.
    ids: BTreeMap<usize, AllocationId>,
    /// The arenas in which no object lies.
    empty: BTreeSet<AllocationId>,
    /// How many levels of the tree were walked.
    #[cfg(test)]
    pub(super) visited: std::cell::Cell<usize>,
}

impl Arenas {
    /// No arenas, in a table of `slots` allocations.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            most: vec![0; 2 * slots.next_power_of_two()],
            ids: BTreeMap::new(),
            empty: BTreeSet::new(),
            #[cfg(test)]
            visited: std::cell::Cell::default(),
        }
    }

    /// Records the longest free range that an arena has, and whether no object lies in it.
    ///
    /// # Panics
    /// If the slot of the arena is beyond the table.
    pub(super) fn set(&mut self, id: AllocationId, room: usize, is_empty: bool) {
        self.ids.insert(id.slot(), id);
        match is_empty {
            true => self.empty.insert(id),
            false => self.empty.remove(&id),
        };
        self.set_room(id.slot(), room);
    }

    /// Removes an arena.
    pub(super) fn remove(&mut self, id: AllocationId) {
        self.ids.remove(&id.slot());
        self.empty.remove(&id);
        self.set_room(id.slot(), 0);
    }

    fn set_room(&mut self, slot: usize, room: usize) {
        let mut node = self.most.len() / 2 + slot;
        self.most[node] = room;
        while node > 1 {
            #[cfg(test)]
            self.visited.set(self.visited.get() + 1);
            node /= 2;
            let most = self.most[2 * node].max(self.most[2 * node + 1]);
            if self.most[node] == most {
                break;
            }
            self.most[node] = most;
        }
    }

    /// The first arena, by its slot, that has room for `len` bytes in one piece.
    pub(super) fn first_with(&self, len: usize) -> Option<AllocationId> {
        // A slot without an arena has no room, not even for zero bytes.
        let len = len.max(1);
        let leaves = self.most.len() / 2;
        if self.most[1] < len {
            return None;
        }
        let mut node = 1;
        while node < leaves {
            #[cfg(test)]
            self.visited.set(self.visited.get() + 1);
            node *= 2;
            node += usize::from(self.most[node] < len);
        }
        self.ids.get(&(node - leaves)).copied()
    }

    /// How many arenas are empty.
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
    fn a_table_of_one_slot_is_a_tree_too() {
        let mut arenas = Arenas::new(1);
        assert_eq!((arenas.first_with(0), arenas.first_with(1)), (None, None));
        arenas.set(id(0), 5, true);
        assert_eq!([0, 5, 6].map(|len| arenas.first_with(len)), [Some(id(0)), Some(id(0)), None]);
        arenas.remove(id(0));
        assert_eq!((arenas.first_with(1), arenas.empty_count()), (None, 0));
    }

    type Step = (prop::sample::Index, Option<(usize, bool)>, usize);

    fn step() -> impl Strategy<Value = Step> {
        (any::<prop::sample::Index>(), prop::option::weighted(0.8, (0_usize..10, any::<bool>())), 0_usize..12)
    }

    proptest! {
        #[test]
        fn lookups_agree_with_a_walk_over_all_slots(
            slots in 1_usize..20,
            steps in prop::collection::vec(step(), 0..60),
        ) {
            let (mut arenas, mut model) = (Arenas::new(slots), vec![None; slots]);
            for (slot, arena, wanted) in steps {
                let slot = slot.index(slots);
                match arena {
                    Some((room, is_empty)) => arenas.set(id(slot), room, is_empty),
                    None => arenas.remove(id(slot)),
                }
                model[slot] = arena;
                let fits = |arena: &Option<(usize, bool)>| arena.is_some_and(|(room, _)| room >= wanted.max(1));
                prop_assert_eq!(arenas.first_with(wanted), model.iter().position(fits).map(id));
                let empty = model.iter().filter(|arena| arena.is_some_and(|(_, is_empty)| is_empty));
                prop_assert_eq!(arenas.empty_count(), empty.count());
            }
        }
    }
}
