//! The list of slots that are free for reuse: a lock-free stack of slot numbers.
//!
//! It has no lock, because a child that is forked while another thread holds a lock could never create a handle again. The head has a
//! tag that changes with every operation, so that a slot that was removed and added again meanwhile is not taken for unchanged. The
//! tag has 32 bits: an operation would have to be suspended for exactly 2^32 operations to mistake it.

use std::sync::atomic::Ordering;

use super::state::Word;

/// A stack of slot numbers. The links are in the slots: `link` returns the link of a slot, which belongs to the list while the slot is
/// in the list.
#[derive(Debug, Default)]
pub(crate) struct FreeList<W> {
    /// The tag in the upper half; in the lower half the number of the first slot plus 1, or 0 if the list is empty.
    head: W,
}

/// Returns the lower half of a head or of a link.
fn entry(word: u64) -> u64 {
    word & u64::from(u32::MAX)
}

fn next_tag(head: u64) -> u64 {
    (head >> 32).wrapping_add(1) << 32
}

impl<W: Word> FreeList<W> {
    pub(crate) const fn new(head: W) -> Self {
        Self { head }
    }

    /// Adds a slot that the caller owns.
    pub(crate) fn push<'a>(&self, slot: u32, link: impl Fn(u32) -> &'a W)
    where
        W: 'a,
    {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            link(slot).store(entry(head), Ordering::Relaxed);
            let new = next_tag(head) | (u64::from(slot) + 1);
            // Release: the link, and what the caller wrote to the slot, are visible to the caller that removes it.
            match self.head.compare_exchange(head, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    /// Removes a slot, which belongs to the caller then.
    pub(crate) fn pop<'a>(&self, link: impl Fn(u32) -> &'a W) -> Option<u32>
    where
        W: 'a,
    {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let slot = u32::try_from(entry(head)).ok()?.checked_sub(1)?;
            // The slot may be removed by another thread meanwhile. Then the link is not that of the list, but the exchange fails.
            let new = next_tag(head) | entry(link(slot).load(Ordering::Relaxed));
            match self.head.compare_exchange(head, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => head = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    /// A list of two slots, each with a number that its owner increments; loom checks that no other access is concurrent.
    struct Model {
        list: FreeList<AtomicU64>,
        links: [AtomicU64; 2],
        slots: [UnsafeCell<u64>; 2],
    }

    impl Model {
        fn create() -> Arc<Self> {
            let link = || AtomicU64::new(0);
            let slots = [(); 2].map(|()| UnsafeCell::new(0));
            let model = Self { list: FreeList::new(link()), links: [link(), link()], slots };
            (0..2).for_each(|slot| model.push(slot));
            Arc::new(model)
        }

        fn push(&self, slot: u32) {
            self.list.push(slot, |slot| &self.links[slot as usize]);
        }

        /// Removes a slot and uses it.
        fn pop(&self) -> Option<u32> {
            let slot = self.list.pop(|slot| &self.links[slot as usize])?;
            // SAFETY: the caller owns the slot that it has removed; loom checks that no access is concurrent.
            self.slots[slot as usize].with_mut(|uses| unsafe { *uses += 1 });
            Some(slot)
        }
    }

    /// One thread removes both slots and adds the first one again, while another thread removes one: without a tag in the head, the
    /// other thread would put the second slot, which is in use, back into the list.
    #[test]
    fn no_slot_is_removed_twice_or_lost() {
        loom::model(|| {
            let model = Model::create();
            let other = Arc::clone(&model);
            let other = thread::spawn(move || {
                let (first, second) = (other.pop(), other.pop());
                if let Some(first) = first {
                    other.push(first);
                }
                second
            });
            let own = model.pop();
            let held = [own, other.join().unwrap()];
            let left = [(); 3].map(|()| model.pop());
            let mut all: Vec<_> = held.into_iter().chain(left).flatten().collect();
            all.sort_unstable();
            assert_eq!(all, [0, 1]);
        });
    }
}
