//! Pins: references to objects that a client takes without a system call, and that the server finds in shared memory (hazard
//! pointers).
//!
//! ```text
//!   reader                                        server
//!   1  w = word, must be `sealed`                 6  word = `deleted`
//!   2  pin = id                                      ---------------- fence
//!      ---------------- fence                     7  any pin == id ?  keep until notified
//!   3  word != w ?  pin = 0, notify, retry        8  else free the memory, word = `free`
//!   4  read the record, use the memory
//!   5  pin = 0
//!      ---------------- fence
//!      word != w ?  notify
//! ```
//!
//! Reader and server each write, fence, and then read the other's cell, so at least one of them sees the other (Dekker). Either
//! the server finds the pin, or the reader finds the deletion. A reader that releases a pin of an object whose deletion the
//! server has deferred finds the deletion too, and notifies the server.
//!
//! A process that forks first copies its pins to a page for the child. That page belongs to a client with a higher id, because
//! the server reads pages in the order of ids. The process takes no new pin until the fork is complete.
//!
//! Every process has a pin page that only it writes. The server only compares pins with ids, so a page with arbitrary content
//! delays the release of the objects that it names, and has no other effect.

mod page;

pub(crate) use page::{MAX_PINS, PINS_LEN, PinOutcome, PinPage, copy_pins, secret, set_secret};

use crate::cells::{Cells, FencePoint};
use crate::convert::to_usize;

/// The memory cells of one pin: the word of the object's slot, its expected value, and the pin.
#[derive(Debug)]
pub(crate) struct PinCells<'a, W, P> {
    pub(crate) words: &'a W,
    pub(crate) word_at: usize,
    pub(crate) word: u64,
    pub(crate) page: &'a P,
    pub(crate) pin_at: usize,
}

impl<W: Cells, P: Cells> PinCells<'_, W, P> {
    /// Pins an object if the word of its slot still has the expected value. Otherwise returns false, and the caller must notify
    /// the server, which may have seen the pin in between.
    pub(crate) fn try_pin(&self, id: u64) -> bool {
        self.page.store(self.pin_at, id);
        self.page.fence(FencePoint::Pin);
        if self.words.load_acquire(self.word_at) == self.word {
            return true;
        }
        self.page.store_release(self.pin_at, 0);
        false
    }

    /// Releases a pin. Returns true if the object was deleted meanwhile: the caller must then notify the server, which may have
    /// deferred the release of the object's memory because of this pin.
    pub(crate) fn release(&self) -> bool {
        self.page.store_release(self.pin_at, 0);
        self.page.fence(FencePoint::Unpin);
        self.words.load_acquire(self.word_at) != self.word
    }
}

/// Returns the number of used cells of a pin page according to its owner, limited to the length of the page. The first cell
/// contains this number and is not a pin.
pub(crate) fn used(page: &impl Cells) -> usize {
    to_usize(page.load_acquire(0)).min(page.count())
}

/// Returns the object ids that a pin page contains according to its owner. The ids are not validated.
pub(crate) fn pinned(page: &impl Cells) -> impl Iterator<Item = u64> {
    (1..used(page)).map(|at| page.load_acquire(at))
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    use loom::thread;

    use super::*;
    use crate::id::{SlotState, SlotWord};

    /// Cells for the model checker `loom`, which runs every interleaving; optionally without one of the fences.
    struct LoomCells {
        cells: Vec<AtomicU64>,
        missing: Option<FencePoint>,
    }

    impl LoomCells {
        fn new(count: usize, missing: Option<FencePoint>) -> Self {
            Self { cells: (0..count).map(|_| AtomicU64::new(0)).collect(), missing }
        }
    }

    impl Cells for LoomCells {
        fn count(&self) -> usize {
            self.cells.len()
        }
        fn load(&self, at: usize) -> u64 {
            self.cells[at].load(Ordering::Relaxed)
        }
        fn load_acquire(&self, at: usize) -> u64 {
            self.cells[at].load(Ordering::Acquire)
        }
        fn store(&self, at: usize, value: u64) {
            self.cells[at].store(value, Ordering::Relaxed);
        }
        fn store_release(&self, at: usize, value: u64) {
            self.cells[at].store(value, Ordering::Release);
        }
        fn fence(&self, place: FencePoint) {
            if self.missing != Some(place) {
                fence(Ordering::SeqCst);
            }
        }
    }

    const ID: u64 = 77;
    const WORD: usize = 0;
    const BYTES: usize = 1;
    const OLD: u64 = 1;
    const NEW: u64 = 2;

    fn word(generation: u64, state: SlotState) -> u64 {
        SlotWord { generation, state }.encode()
    }

    /// Runs all interleavings of a reader and the server: the reader pins an object, reads its bytes twice and releases it, while
    /// the server deletes the object and reuses its memory as soon as the pins permit.
    fn run_model(missing: Option<FencePoint>) {
        loom::model(move || {
            // `object` has the word and the bytes of one object; `page` is a pin page with one pin.
            let object = Arc::new(LoomCells::new(2, missing));
            let page = Arc::new(LoomCells::new(2, missing));
            object.store(BYTES, OLD);
            object.store_release(WORD, word(1, SlotState::Sealed));
            let notified = Arc::new(AtomicBool::new(false));

            let reader = {
                let (object, page, notified) = (object.clone(), page.clone(), notified.clone());
                thread::spawn(move || {
                    let found = object.load_acquire(WORD);
                    if found != word(1, SlotState::Sealed) {
                        return;
                    }
                    let pin =
                        PinCells { words: &*object, word_at: WORD, word: found, page: &*page, pin_at: 1 };
                    page.store(0, 2);
                    let must_notify = if pin.try_pin(ID) {
                        assert_eq!(object.load(BYTES), OLD, "the bytes of a pinned object are unchanged");
                        assert_eq!(object.load(BYTES), OLD, "the bytes of a pinned object stay unchanged");
                        pin.release()
                    } else {
                        true
                    };
                    if must_notify {
                        notified.store(true, Ordering::SeqCst);
                    }
                })
            };

            object.store_release(WORD, word(1, SlotState::Deleted));
            object.fence(FencePoint::Retire);
            let deferred = pinned(&*page).any(|pin| pin == ID);
            if !deferred {
                object.store(BYTES, NEW);
                object.store_release(WORD, word(2, SlotState::Free));
            }
            reader.join().expect("the reader finishes");
            // If the server saw the pin and deferred the release of the memory, the reader must have notified the server.
            assert!(!deferred || notified.load(Ordering::SeqCst), "an object is retained without a pin");
        });
    }

    fn fails(missing: FencePoint) -> bool {
        std::panic::catch_unwind(|| run_model(Some(missing))).is_err()
    }

    #[test]
    fn no_interleaving_frees_pinned_memory_or_retains_unpinned_memory() {
        run_model(None);
    }

    #[test]
    fn without_the_pin_fence_pinned_memory_is_freed() {
        assert!(fails(FencePoint::Pin));
    }

    #[test]
    fn without_the_unpin_fence_unpinned_memory_is_retained() {
        assert!(fails(FencePoint::Unpin));
    }

    #[test]
    fn without_the_retire_fence_pinned_memory_is_freed() {
        assert!(fails(FencePoint::Retire));
    }

    /// Runs all interleavings of a server that replaces the object of a name and deletes the old one, and a reader that looks the
    /// name up once.
    #[test]
    fn a_lookup_during_a_replacement_gets_the_old_or_the_new_version() {
        loom::model(|| {
            // The cells are the words of two objects, the contents of the objects, and the bucket of the name.
            let cells = Arc::new(LoomCells::new(5, None));
            let page = Arc::new(LoomCells::new(2, None));
            let (first, second, bucket) = (0, 1, 4);
            cells.store(2, OLD);
            cells.store_release(first, word(1, SlotState::Sealed));
            cells.store_release(bucket, 1);
            let server = {
                let (cells, page) = (cells.clone(), page.clone());
                thread::spawn(move || {
                    cells.store(3, NEW);
                    cells.store_release(second, word(1, SlotState::Sealed));
                    cells.store_release(bucket, 2);
                    cells.store_release(first, word(1, SlotState::Deleted));
                    cells.fence(FencePoint::Retire);
                    if pinned(&*page).all(|pin| pin != 1) {
                        cells.store(2, 0);
                    }
                })
            };
            page.store(0, 2);
            let id = cells.load_acquire(bucket);
            let slot = if id == 1 { first } else { second };
            let found = cells.load_acquire(slot);
            let pin = PinCells { words: &*cells, word_at: slot, word: found, page: &*page, pin_at: 1 };
            if found == word(1, SlotState::Sealed) && pin.try_pin(id) {
                let expected = if id == 1 { OLD } else { NEW };
                assert_eq!(cells.load(slot + 2), expected);
                pin.release();
            } else {
                assert_eq!(id, 1, "the newest version is always found");
            }
            server.join().expect("the server finishes");
        });
    }
}
