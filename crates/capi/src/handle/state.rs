//! The state of a slot in one atomic word: which handle the slot belongs to, whether the handle is valid, and how many calls use its
//! object.
//!
//! ```text
//!   63           32 31      24 23     22             0
//!   |  generation  |   kind   | live |  calls        |
//!    \_______ key _______/      1 until the handle is freed
//! ```
//!
//! A call enters a slot by one compare-and-swap that adds 1 to `calls`, if the key is that of the handle and the slot is live. So a
//! call that has entered keeps the object alive. Freeing clears `live`, after which no call can enter. The object belongs to the one
//! caller that observes both `live == 0` and `calls == 0` first: the caller that freed the handle, or the last call that leaves.

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of bits of a state word below the key.
pub(crate) const KEY_SHIFT: u32 = 24;

const LIVE: u64 = 1 << (KEY_SHIFT - 1);
const CALLS: u64 = LIVE - 1;

/// An atomic 64-bit word. It is a trait so that tests can use the words of the model checker loom.
pub(crate) trait Word {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64;
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64>;
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_sub(value, order)
    }

    #[inline]
    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.compare_exchange(current, new, success, failure)
    }
}

/// Why a call did not enter a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// The slot belongs to another handle, or the handle was freed.
    Stale,
    /// As many calls as a slot can count use the object.
    TooManyCalls,
}

/// The state word of a slot.
#[derive(Debug, Default)]
pub(crate) struct SlotState<W>(pub(crate) W);

impl<W: Word> SlotState<W> {
    /// Makes a slot live, after its object was written. The caller owns the slot.
    pub(crate) fn publish(&self, key: u64) {
        self.0.store(key << KEY_SHIFT | LIVE, Ordering::Release);
    }

    /// Enters a slot for a call. The object stays alive until the call [leaves](Self::leave).
    #[inline]
    pub(crate) fn enter(&self, key: u64) -> Result<(), Refused> {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            if seen & !CALLS != (key << KEY_SHIFT | LIVE) {
                return Err(Refused::Stale);
            }
            if seen & CALLS == CALLS {
                return Err(Refused::TooManyCalls);
            }
            // Acquire: the object, which was written before the slot became live, is visible to this call.
            match self.0.compare_exchange(seen, seen + 1, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = now,
            }
        }
    }

    /// Leaves a slot that this call has entered. Returns true if the caller must take the object: the handle was freed, and this was
    /// the last call.
    #[inline]
    #[must_use]
    pub(crate) fn leave(&self) -> bool {
        // Release and acquire: all uses of the object by other calls happen before the last call takes it.
        self.0.fetch_sub(1, Ordering::AcqRel) & (LIVE | CALLS) == 1
    }

    /// Frees the handle with a key, so that no call can enter any more. Returns true if the caller must take the object, and false if
    /// the last call that uses it will.
    pub(crate) fn free(&self, key: u64) -> Result<bool, Refused> {
        let mut seen = self.0.load(Ordering::Relaxed);
        loop {
            if seen & !CALLS != (key << KEY_SHIFT | LIVE) {
                return Err(Refused::Stale);
            }
            // Acquire and release as in `enter` and `leave`: the caller may take the object.
            match self.0.compare_exchange(seen, seen & !LIVE, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(seen & CALLS == 0),
                Err(now) => seen = now,
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

    impl Word for AtomicU64 {
        fn load(&self, order: Ordering) -> u64 {
            self.load(order)
        }

        fn store(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }

        fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            self.fetch_sub(value, order)
        }

        fn compare_exchange(
            &self,
            current: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            self.compare_exchange(current, new, success, failure)
        }
    }

    /// A slot whose object is a number, with accesses that loom checks.
    struct ModelSlot {
        state: SlotState<AtomicU64>,
        object: UnsafeCell<Option<u64>>,
        taken: AtomicU64,
    }

    impl ModelSlot {
        fn live(key: u64, object: u64) -> Self {
            let slot = Self {
                state: SlotState(AtomicU64::new(0)),
                object: UnsafeCell::new(None),
                taken: AtomicU64::new(0),
            };
            slot.put(key, object);
            slot
        }

        fn put(&self, key: u64, object: u64) {
            // SAFETY: no call can enter the slot before `publish`; loom checks that no access is concurrent.
            self.object.with_mut(|to| unsafe { *to = Some(object) });
            self.state.publish(key);
        }

        /// Calls a function with the object, as an exported function does. Returns whether the handle was valid.
        fn use_object(&self, key: u64, object: u64) -> bool {
            if self.state.enter(key).is_err() {
                return false;
            }
            // SAFETY: this call has entered the slot, so the object is not taken; loom checks that no write is concurrent.
            self.object.with(|of| assert_eq!(unsafe { *of }, Some(object)));
            if self.state.leave() {
                self.take(object);
            }
            true
        }

        fn free(&self, key: u64, object: u64) -> bool {
            let Ok(is_last) = self.state.free(key) else { return false };
            if is_last {
                self.take(object);
            }
            true
        }

        fn take(&self, object: u64) {
            // SAFETY: the state has made this caller the owner of the object; loom checks that no access is concurrent.
            self.object.with_mut(|of| assert_eq!(unsafe { (*of).take() }, Some(object)));
            self.taken.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn an_object_is_taken_once_and_not_while_a_call_uses_it() {
        loom::model(|| {
            let slot = Arc::new(ModelSlot::live(7, 70));
            let user = Arc::clone(&slot);
            let user = thread::spawn(move || user.use_object(7, 70));
            let other = Arc::clone(&slot);
            let other = thread::spawn(move || other.free(7, 70));
            let freed = slot.free(7, 70);
            let _ = user.join().unwrap();
            assert!(freed != other.join().unwrap(), "exactly one of two frees succeeds");
            assert_eq!(slot.taken.load(Ordering::Relaxed), 1);
        });
    }

    #[test]
    fn a_slot_in_use_again_refuses_the_old_handle() {
        loom::model(|| {
            let slot = Arc::new(ModelSlot::live(7, 70));
            let user = Arc::clone(&slot);
            // If the slot has the object of key 8, the call must not see it: `use_object` compares the object.
            let user = thread::spawn(move || {
                let _ = user.use_object(7, 70);
                let _ = user.use_object(8, 80);
            });
            if slot.state.free(7).unwrap() {
                slot.take(70);
                slot.put(8, 80);
                assert!(slot.use_object(8, 80));
            }
            user.join().unwrap();
            assert!(!slot.use_object(7, 70));
        });
    }

    #[test]
    fn a_full_counter_of_calls_is_refused_and_does_not_overflow() {
        let state = SlotState(std::sync::atomic::AtomicU64::new(0));
        state.publish(7);
        state.0.fetch_add(CALLS - 1, Ordering::Relaxed);
        assert_eq!(state.enter(7), Ok(()));
        assert_eq!(state.enter(7), Err(Refused::TooManyCalls));
        assert_eq!(state.free(7), Ok(false));
        assert_eq!(state.free(7), Err(Refused::Stale));
        for _ in 1..CALLS.min(1000) {
            assert!(!state.leave());
        }
    }
}
