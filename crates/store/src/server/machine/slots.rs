//! Which slots of a table are free, and for which generation.

use std::collections::VecDeque;

use crate::id::LAST_GENERATION;

/// How many slots are free before one is reused: few, so that the table stays short, but enough that generations last.
const RESTING: usize = 64;

/// The free slots of a table. The one that was freed first is used first.
#[derive(Debug)]
pub(super) struct Slots {
    /// Slots that were used before, with the generation they are free for.
    freed: VecDeque<(usize, u64)>,
    /// The first slot that was never used.
    fresh: usize,
    count: usize,
}

impl Slots {
    /// A table of `count` slots. Those below `used` are in use, or are given back one by one.
    pub(super) fn used_up_to(count: usize, used: usize) -> Self {
        Self { freed: VecDeque::new(), fresh: used, count }
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// How many can be taken.
    pub(super) fn left(&self) -> usize {
        self.freed.len() + self.count - self.fresh
    }

    pub(super) fn take(&mut self) -> Option<(usize, u64)> {
        if self.freed.len() < RESTING && self.fresh < self.count {
            self.fresh += 1;
            return Some((self.fresh - 1, 0));
        }
        self.freed.pop_front()
    }

    /// A slot is free for a generation, unless that was its last.
    pub(super) fn give_back(&mut self, slot: usize, generation: u64) {
        if generation <= LAST_GENERATION {
            self.freed.push_back((slot, generation));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_in_turn_and_never_twice_in_one_generation() {
        let mut slots = Slots::used_up_to(2, 0);
        assert_eq!((slots.take(), slots.take(), slots.take()), (Some((0, 0)), Some((1, 0)), None));
        slots.give_back(1, 1);
        slots.give_back(0, 1);
        assert_eq!(slots.left(), 2);
        assert_eq!((slots.take(), slots.take()), (Some((1, 1)), Some((0, 1))));
        slots.give_back(0, LAST_GENERATION + 1);
        assert_eq!((slots.left(), slots.take()), (0, None));
    }

    #[test]
    fn a_table_grows_no_longer_than_is_used_and_rests() {
        let mut slots = Slots::used_up_to(1000, 0);
        for _ in 0..5000 {
            let (slot, generation) = slots.take().unwrap();
            slots.give_back(slot, generation + 1);
        }
        assert_eq!(slots.fresh, RESTING);
    }

    #[test]
    fn slots_of_an_index_that_was_used_begin_where_it_ended() {
        let mut slots = Slots::used_up_to(4, 3);
        slots.give_back(1, 9);
        assert_eq!((slots.take(), slots.take(), slots.take()), (Some((3, 0)), Some((1, 9)), None));
    }
}
