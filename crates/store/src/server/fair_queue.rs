//! A fair queue: keys are served round-robin, and the items of one key are first in, first out.
//!
//! ```text
//!   push a1 a2 a3 a4, then b1, then c1 c2      order of keys: a b c
//!   pop  a1 b1 c1 a2 c2 a3 a4
//! ```
//!
//! Between two pops of the same key, every other key that had items during all of that time is popped exactly once. So an item
//! waits for at most one item of each other key and for the earlier items of its own key, however many items the other keys have.
//! A key that becomes empty loses its position: its next item is queued behind all other keys. Every operation costs O(log n) in
//! the number of keys that have items.
//!
//! The queue does not limit the number of items, and it does not weigh them: every item counts as one.

use std::collections::{BTreeMap, VecDeque};

/// The items of one key in a fair queue (at least one item), and the key's position in the round-robin order.
#[derive(Debug)]
struct KeyQueue<T> {
    position: i64,
    items: VecDeque<T>,
}

/// A queue that serves its keys round-robin, and the items of each key first in, first out.
#[derive(Debug)]
pub(super) struct FairQueue<K, T> {
    queues: BTreeMap<K, KeyQueue<T>>,
    /// The key at each position of the round-robin order; the key at the lowest position is served next. Every key with items has
    /// exactly one position.
    order: BTreeMap<i64, K>,
    len: usize,
}

impl<K, T> Default for FairQueue<K, T> {
    fn default() -> Self {
        Self { queues: BTreeMap::new(), order: BTreeMap::new(), len: 0 }
    }
}

impl<K: Ord + Clone, T> FairQueue<K, T> {
    /// Appends an item to the queue of its key.
    pub(super) fn push(&mut self, key: K, item: T) {
        self.len += 1;
        if let Some(queue) = self.queues.get_mut(&key) {
            queue.items.push_back(item);
            return;
        }
        let position = add_position(&mut self.order, key.clone());
        self.queues.insert(key, KeyQueue { position, items: VecDeque::from([item]) });
    }

    /// Undoes a [`Self::pop`]: returns an item to the front of its key's queue, and moves the key to the front of the round-robin
    /// order.
    pub(super) fn push_front(&mut self, key: K, item: T) {
        self.len += 1;
        let position = self.order.first_key_value().map_or(0, |(first, _)| first - 1);
        self.order.insert(position, key.clone());
        let queue = self.queues.entry(key).or_insert_with(|| KeyQueue { position, items: VecDeque::new() });
        if queue.position != position {
            self.order.remove(&queue.position);
            queue.position = position;
        }
        queue.items.push_front(item);
    }

    /// Removes the first item of the key that is served next, and moves this key behind all other keys.
    pub(super) fn pop(&mut self) -> Option<(K, T)> {
        let (_, key) = self.order.pop_first()?;
        let queue = self.queues.get_mut(&key).expect("a key with a position has items");
        let item = queue.items.pop_front().expect("the queue of a key is removed with its last item");
        self.len -= 1;
        if queue.items.is_empty() {
            self.queues.remove(&key);
        } else {
            queue.position = add_position(&mut self.order, key.clone());
        }
        Some((key, item))
    }

    /// Removes all items of a key from the queue, and returns them in order.
    #[cfg_attr(
        not(test),
        allow(dead_code, reason = "part of the interface of a queue, currently used by tests only")
    )]
    pub(super) fn remove_key(&mut self, key: &K) -> impl ExactSizeIterator<Item = T> + use<K, T> {
        let queue = self.queues.remove(key);
        if let Some(queue) = &queue {
            self.order.remove(&queue.position);
            self.len -= queue.items.len();
        }
        queue.map(|queue| queue.items).unwrap_or_default().into_iter()
    }

    /// Returns the number of queued items of all keys together.
    #[cfg_attr(
        not(test),
        allow(dead_code, reason = "part of the interface of a queue, currently used by tests only")
    )]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Assigns a key the last position in the order in which keys are served.
fn add_position<K>(order: &mut BTreeMap<i64, K>, key: K) -> i64 {
    let position = order.last_key_value().map_or(0, |(last, _)| last + 1);
    order.insert(position, key);
    position
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all<T>(queue: &mut FairQueue<char, T>) -> Vec<(char, T)> {
        std::iter::from_fn(|| queue.pop()).collect()
    }

    #[test]
    fn keys_are_served_round_robin_however_many_items_one_has() {
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
    fn a_key_that_became_empty_is_queued_behind_all_others() {
        let mut queue = FairQueue::default();
        queue.push('a', 0);
        queue.push('b', 0);
        queue.push('b', 1);
        assert_eq!(queue.pop(), Some(('a', 0)));
        queue.push('a', 1);
        assert_eq!(all(&mut queue), [('b', 0), ('a', 1), ('b', 1)]);
    }

    #[test]
    fn removing_a_key_removes_its_items_and_its_position() {
        let mut queue = FairQueue::default();
        ['a', 'b', 'a', 'c'].into_iter().zip(0..).for_each(|(key, item)| queue.push(key, item));
        assert_eq!(queue.remove_key(&'a').collect::<Vec<_>>(), [0, 2]);
        assert_eq!(queue.remove_key(&'a').len(), 0);
        assert_eq!(queue.len(), 2);
        queue.push('a', 4);
        assert_eq!(all(&mut queue), [('b', 1), ('c', 3), ('a', 4)]);
        assert!(queue.is_empty() && queue.order.is_empty() && queue.queues.is_empty());
    }

    #[derive(Debug, Clone)]
    enum QueueOp {
        Push(u8),
        Pop,
        PopAndPutBack,
        Remove(u8),
    }

    fn step() -> impl Strategy<Value = QueueOp> {
        prop_oneof![4 => (0_u8..5).prop_map(QueueOp::Push), 3 => Just(QueueOp::Pop), 1 => Just(QueueOp::PopAndPutBack), 1 => (0_u8..5).prop_map(QueueOp::Remove)]
    }

    proptest! {
        #[test]
        fn items_of_a_key_keep_their_order_and_no_key_is_popped_twice_while_another_waits(
            steps in prop::collection::vec(step(), 0..200)
        ) {
            let mut queue = FairQueue::default();
            let mut model: BTreeMap<u8, VecDeque<usize>> = BTreeMap::new();
            // For each key that has items in the queue: the keys that were popped since this key got its first item or was last
            // popped.
            let mut popped: BTreeMap<u8, Vec<u8>> = BTreeMap::new();
            for (item, step) in steps.into_iter().enumerate() {
                match step {
                    QueueOp::Push(key) => {
                        queue.push(key, item);
                        model.entry(key).or_default().push_back(item);
                        popped.entry(key).or_default();
                    }
                    QueueOp::Pop => {
                        let first = queue.pop();
                        prop_assert_eq!(first.is_some(), !model.is_empty());
                        let Some((key, item)) = first else { continue };
                        let items = model.get_mut(&key).expect("the key has items");
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
                    QueueOp::PopAndPutBack => {
                        let Some((key, item)) = queue.pop() else { continue };
                        queue.push_front(key, item);
                    }
                    QueueOp::Remove(key) => {
                        let items = model.remove(&key).unwrap_or_default();
                        prop_assert_eq!(queue.remove_key(&key).collect::<VecDeque<_>>(), items);
                        popped.remove(&key);
                    }
                }
                let len = model.values().map(VecDeque::len).sum::<usize>();
                prop_assert_eq!((queue.len(), queue.is_empty()), (len, len == 0));
                prop_assert_eq!(queue.order.len(), model.len());
            }
        }
    }
}
