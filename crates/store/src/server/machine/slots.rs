//! The free slots of a table of the index, and their generations.

use std::collections::VecDeque;

use crate::id::LAST_GENERATION;

/// The minimum number of free slots before one of them is reused: small, so that the table stays short, but large enough that the
/// generations of a slot are not used up quickly.
const MIN_FREE_SLOTS: usize = 64;

/// The free slots of a table of the index, which are reused first in, first out.
#[derive(Debug)]
pub(super) struct Slots {
    /// Free slots that were used before, with the generation of their next use.
    freed: VecDeque<(usize, u64)>,
    /// The first slot of the table that was never used.
    fresh: usize,
    count: usize,
}

impl Slots {
    /// Creates the free slots of a table of `count` slots. The slots below `used` are in use, or are freed one by one.
    pub(super) fn used_up_to(count: usize, used: usize) -> Self {
        Self { freed: VecDeque::new(), fresh: used, count }
    }

    /// Returns the number of slots of the table, free or not.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Returns the number of slots that can be allocated.
    pub(super) fn free_count(&self) -> usize {
        self.freed.len() + self.count - self.fresh
    }

    pub(super) fn allocate(&mut self) -> Option<(usize, u64)> {
        if self.freed.len() < MIN_FREE_SLOTS && self.fresh < self.count {
            self.fresh += 1;
            return Some((self.fresh - 1, 0));
        }
        self.freed.pop_front()
    }

    /// Frees a slot for use with its next generation, unless the slot has used its last generation.
    pub(super) fn free(&mut self, slot: usize, generation: u64) {
        if generation <= LAST_GENERATION {
            self.freed.push_back((slot, generation));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_in_order_with_a_new_generation() {
        let mut slots = Slots::used_up_to(2, 0);
        assert_eq!(
            (slots.allocate(), slots.allocate(), slots.allocate()),
            (Some((0, 0)), Some((1, 0)), None)
        );
        slots.free(1, 1);
        slots.free(0, 1);
        assert_eq!(slots.free_count(), 2);
        assert_eq!((slots.allocate(), slots.allocate()), (Some((1, 1)), Some((0, 1))));
        slots.free(0, LAST_GENERATION + 1);
        assert_eq!((slots.free_count(), slots.allocate()), (0, None));
    }

    #[test]
    fn a_table_grows_by_used_and_reserved_slots_only() {
        let mut slots = Slots::used_up_to(1000, 0);
        for _ in 0..5000 {
            let (slot, generation) = slots.allocate().unwrap();
            slots.free(slot, generation + 1);
        }
        assert_eq!(slots.fresh, MIN_FREE_SLOTS);
    }

    #[test]
    fn fresh_slots_of_a_used_index_begin_after_the_used_ones() {
        let mut slots = Slots::used_up_to(4, 3);
        slots.free(1, 9);
        assert_eq!(
            (slots.allocate(), slots.allocate(), slots.allocate()),
            (Some((3, 0)), Some((1, 9)), None)
        );
    }
}
