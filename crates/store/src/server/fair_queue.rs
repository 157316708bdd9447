//! A queue that is fair between keys: keys take turns, and the items of one key leave in the order in which they came.
//!
//! ```text
//!   push a1 a2 a3 a4, then b1, then c1 c2      turns: a b c
//!   pop  a1 b1 c1 a2 c2 a3 a4
//! ```
//!
//! Guarantees: between two pops of the same key, every other key that had items during all of that time is popped exactly
//! once. So an item waits for at most one item of each other key and for the items of its own key before it, however
//! many items the other keys have. A key that becomes empty loses its place: its next item takes a turn behind all
//! others. Every operation costs O(log n) in the number of keys that have items.
//!
//! It does not limit how many items there are, and it does not weigh them: an item that takes long counts as one.

use std::collections::{BTreeMap, VecDeque};

/// The items of one key, which are never none, and the turn of the key.
#[derive(Debug)]
struct Lane<T> {
    turn: i64,
    items: VecDeque<T>,
}

/// A queue of items with keys that take turns.
#[derive(Debug)]
pub(super) struct FairQueue<K, T> {
    lanes: BTreeMap<K, Lane<T>>,
    /// The key of each turn. The lowest is next. Every key with items has exactly one.
    turns: BTreeMap<i64, K>,
    len: usize,
}

impl<K, T> Default for FairQueue<K, T> {
    fn default() -> Self {
        Self { lanes: BTreeMap::new(), turns: BTreeMap::new(), len: 0 }
    }
}

impl<K: Ord + Clone, T> FairQueue<K, T> {
    /// Adds an item behind the others of its key.
    pub(super) fn push(&mut self, key: K, item: T) {
        self.len += 1;
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.items.push_back(item);
            return;
        }
        let turn = add_turn(&mut self.turns, key.clone());
        self.lanes.insert(key, Lane { turn, items: VecDeque::from([item]) });
    }

    /// Adds an item before the others of its key, and gives the key the next turn: undoes a [`Self::pop`].
    pub(super) fn push_front(&mut self, key: K, item: T) {
        self.len += 1;
        let turn = self.turns.first_key_value().map_or(0, |(first, _)| first - 1);
        self.turns.insert(turn, key.clone());
        let lane = self.lanes.entry(key).or_insert_with(|| Lane { turn, items: VecDeque::new() });
        if lane.turn != turn {
            self.turns.remove(&lane.turn);
            lane.turn = turn;
        }
        lane.items.push_front(item);
    }

    /// Removes the first item of the key whose turn it is. The key's next turn comes after all other keys.
    pub(super) fn pop(&mut self) -> Option<(K, T)> {
        let (_, key) = self.turns.pop_first()?;
        let lane = self.lanes.get_mut(&key).expect("a key that has a turn has items");
        let item = lane.items.pop_front().expect("a lane is removed with its last item");
        self.len -= 1;
        if lane.items.is_empty() {
            self.lanes.remove(&key);
        } else {
            lane.turn = add_turn(&mut self.turns, key.clone());
        }
        Some((key, item))
    }

    /// Removes all items of a key, in their order.
    #[cfg_attr(not(test), allow(dead_code, reason = "part of the type, and not needed by its first users"))]
    pub(super) fn remove_key(&mut self, key: &K) -> impl ExactSizeIterator<Item = T> + use<K, T> {
        let lane = self.lanes.remove(key);
        if let Some(lane) = &lane {
            self.turns.remove(&lane.turn);
            self.len -= lane.items.len();
        }
        lane.map(|lane| lane.items).unwrap_or_default().into_iter()
    }

    /// How many items there are, of all keys.
    #[cfg_attr(not(test), allow(dead_code, reason = "part of the type, and not needed by its first users"))]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Adds a turn behind all others.
fn add_turn<K>(turns: &mut BTreeMap<i64, K>, key: K) -> i64 {
    let turn = turns.last_key_value().map_or(0, |(last, _)| last + 1);
    turns.insert(turn, key);
    turn
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all<T>(queue: &mut FairQueue<char, T>) -> Vec<(char, T)> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn keys_take_turns_however_many_items_one_of_them_has() {
        let mut queue = FairQueue::default();
        (0..1000).for_each(|item| queue.push('a', item));
        queue.push('b', 0);
        queue.push('c', 0);
        queue.push('c', 1);
        let first: Vec<_> = std::iter::from_fn(|| queue.pop()).take(7).collect();
        assert_eq!(first, [('a', 0), ('b', 0), ('c', 0), ('a', 1), ('c', 1), ('a', 2), ('a', 3)]);
        assert_eq!(queue.len(), 996);
    }

    #[test]
    fn a_key_that_became_empty_comes_back_behind_all_others() {
        let mut queue = FairQueue::default();
        queue.push('a', 0);
        queue.push('b', 0);
        queue.push('b', 1);
        assert_eq!(queue.pop(), Some(('a', 0)));
        queue.push('a', 1);
        assert_eq!(all(&mut queue), [('b', 0), ('a', 1), ('b', 1)]);
    }

    #[test]
    fn removing_a_key_removes_its_items_and_its_turn() {
        let mut queue = FairQueue::default();
        ['a', 'b', 'a', 'c'].into_iter().zip(0..).for_each(|(key, item)| queue.push(key, item));
        assert_eq!(queue.remove_key(&'a').collect::<Vec<_>>(), [0, 2]);
        assert_eq!(queue.remove_key(&'a').len(), 0);
        assert_eq!(queue.len(), 2);
        queue.push('a', 4);
        assert_eq!(all(&mut queue), [('b', 1), ('c', 3), ('a', 4)]);
        assert!(queue.is_empty() && queue.turns.is_empty() && queue.lanes.is_empty());
    }

    #[derive(Debug, Clone)]
    enum Step {
        Push(u8),
        Pop,
        PopAndPutBack,
        Remove(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![4 => (0_u8..5).prop_map(Step::Push), 3 => Just(Step::Pop), 1 => Just(Step::PopAndPutBack), 1 => (0_u8..5).prop_map(Step::Remove)]
    }

    proptest! {
        #[test]
        fn items_of_a_key_keep_their_order_and_no_key_is_popped_twice_while_another_waits(
            steps in prop::collection::vec(step(), 0..200)
        ) {
            let mut queue = FairQueue::default();
            let mut model: BTreeMap<u8, VecDeque<usize>> = BTreeMap::new();
            // For each key that has items, the keys that were popped since it had its first item or its last pop.
            let mut popped: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
            for (item, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Push(key) => {
                        queue.push(key, item);
                        model.entry(key).or_default().push_back(item);
                        popped.entry(key).or_default();
                    }
                    Step::Pop => {
                        let first = queue.pop();
                        prop_assert_eq!(first.is_some(), !model.is_empty());
                        let Some((key, item)) = first else { continue };
                        let items = model.get_mut(&key).expect("a key that has items");
                        prop_assert_eq!(items.pop_front(), Some(item));
                        for (waiting, others) in &mut popped {
                            prop_assert!(*waiting == key || !others.contains(&key), "{} before {}", key, waiting);
                            others.push(key);
                        }
                        popped.remove(&key);
                        if items.is_empty() {
                            model.remove(&key);
                        } else {
                            popped.insert(key, Vec::new());
                        }
                    }
                    Step::PopAndPutBack => {
                        let Some((key, item)) = queue.pop() else { continue };
                        queue.push_front(key, item);
                    }
                    Step::Remove(key) => {
                        let items = model.remove(&key).unwrap_or_default();
                        prop_assert_eq!(queue.remove_key(&key).collect::<VecDeque<_>>(), items);
                        popped.remove(&key);
                    }
                }
                let len = model.values().map(VecDeque::len).sum::<usize>();
                prop_assert_eq!((queue.len(), queue.is_empty()), (len, len == 0));
                prop_assert_eq!(queue.turns.len(), model.len());
            }
        }
    }
}
