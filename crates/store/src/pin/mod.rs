//! Pins: how a reader holds an object without a system call, and how the server learns of it.
//!
//! ```text
//!   reader                                        server
//!   1  w = word, which says `sealed`              6  word = `deleted`
//!   2  pin = id                                      ---------------- fence
//!      ---------------- fence                     7  any pin == id ?  keep it until somebody kicks
//!   3  word != w ?  pin = 0, kick, look again     8  else free the memory, word = `free`
//!   4  read the record, use the memory
//!   5  pin = 0
//!      ---------------- fence
//!      word != w ?  kick
//! ```
//!
//! Both write, then fence, then look at what the other writes: one of them at least sees the other. So either the server
//! finds the pin, or the reader finds the deletion. A reader that has let go while the server kept the object for its
//! sake finds the deletion too, and says so.
//!
//! A process that forks copies its pins to a page for the child before it does: a page of a client with a higher id, since the
//! server reads pages in the order of ids. Until the fork is done the process takes no further pin.
//!
//! Every process has a page of pins that it alone writes. The server only ever compares a pin with an id, so a page
//! full of lies holds back what it names, and does nothing else.

mod page;

pub(crate) use page::{MAX_PINS, PINS_LEN, PinPage, Pinned, copy_pins, secret, set_secret};

use crate::cells::{Cells, Fence};
use crate::convert::to_usize;

/// The memory of a pin: where the object's word is and what it was, and where the pin is.
#[derive(Debug)]
pub(crate) struct Hold<'a, W, P> {
    pub(crate) words: &'a W,
    pub(crate) word_at: usize,
    pub(crate) word: u64,
    pub(crate) page: &'a P,
    pub(crate) pin_at: usize,
}

impl<W: Cells, P: Cells> Hold<'_, W, P> {
    /// Pins the object, if its word is still what it was. If not, the server has to be kicked: it may have seen the
    /// pin while it was there.
    pub(crate) fn take(&self, id: u64) -> bool {
        self.page.store(self.pin_at, id);
        self.page.fence(Fence::Pin);
        if self.words.load_acquire(self.word_at) == self.word {
            return true;
        }
        self.page.store_release(self.pin_at, 0);
        false
    }

    /// Lets the object go, and says whether the server has to be kicked because it waits for that.
    pub(crate) fn release(&self) -> bool {
        self.page.store_release(self.pin_at, 0);
        self.page.fence(Fence::Unpin);
        self.words.load_acquire(self.word_at) != self.word
    }
}

/// How many cells of a page are in use, as its owner says: at most all of them. The first is not a pin.
pub(crate) fn used(page: &impl Cells) -> usize {
    to_usize(page.load_acquire(0)).min(page.count())
}

/// What a page pins, as its owner says: any numbers.
pub(crate) fn pinned(page: &impl Cells) -> impl Iterator<Item = u64> {
    (1..used(page)).map(|at| page.load_acquire(at))
}

#[cfg(test)]
mod tests {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
    use loom::thread;

    use super::*;
    use crate::id::{State, Word};

    /// Cells whose every interleaving is walked, with one of the fences taken away or none.
    struct Modelled {
        cells: Vec<AtomicU64>,
        missing: Option<Fence>,
    }

    impl Modelled {
        fn new(count: usize, missing: Option<Fence>) -> Self {
            Self { cells: (0..count).map(|_| AtomicU64::new(0)).collect(), missing }
        }
    }

    impl Cells for Modelled {
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
        fn fence(&self, place: Fence) {
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

    fn word(generation: u64, state: State) -> u64 {
        Word { generation, state }.encode()
    }

    /// One reader gets an object, reads its bytes twice and lets it go, while the server deletes it, and puts another
    /// one in its place as soon as it may.
    fn walk(missing: Option<Fence>) {
        loom::model(move || {
            // The word and the bytes of one object; a page with one pin.
            let object = Arc::new(Modelled::new(2, missing));
            let page = Arc::new(Modelled::new(2, missing));
            object.store(BYTES, OLD);
            object.store_release(WORD, word(1, State::Sealed));
            let kicked = Arc::new(AtomicBool::new(false));

            let reader = {
                let (object, page, kicked) = (object.clone(), page.clone(), kicked.clone());
                thread::spawn(move || {
                    let found = object.load_acquire(WORD);
                    if found != word(1, State::Sealed) {
                        return;
                    }
                    let hold = Hold { words: &*object, word_at: WORD, word: found, page: &*page, pin_at: 1 };
                    page.store(0, 2);
                    let must_kick = if hold.take(ID) {
                        assert_eq!(object.load(BYTES), OLD, "the bytes of a pinned object are its own");
                        assert_eq!(object.load(BYTES), OLD, "and stay so");
                        hold.release()
                    } else {
                        true
                    };
                    if must_kick {
                        kicked.store(true, Ordering::SeqCst);
                    }
                })
            };

            // The server.
            object.store_release(WORD, word(1, State::Deleted));
            object.fence(Fence::Retire);
            let deferred = pinned(&*page).any(|pin| pin == ID);
            if !deferred {
                object.store(BYTES, NEW);
                object.store_release(WORD, word(2, State::Free));
            }
            reader.join().expect("the reader ends");
            // Whoever let go without a word has been seen by nobody.
            assert!(!deferred || kicked.load(Ordering::SeqCst), "an object is kept that nobody holds");
        });
    }

    fn fails(missing: Fence) -> bool {
        std::panic::catch_unwind(|| walk(Some(missing))).is_err()
    }

    #[test]
    fn no_interleaving_takes_memory_from_a_reader_or_keeps_it_for_nobody() {
        walk(None);
    }

    #[test]
    fn without_the_fence_of_a_pin_memory_is_taken_from_a_reader() {
        assert!(fails(Fence::Pin));
    }

    #[test]
    fn without_the_fence_of_letting_go_memory_is_kept_for_nobody() {
        assert!(fails(Fence::Unpin));
    }

    #[test]
    fn without_the_fence_of_a_deletion_memory_is_taken_from_a_reader() {
        assert!(fails(Fence::Retire));
    }

    /// A name flips from one version to another, which is then deleted, while a reader looks it up once.
    #[test]
    fn a_reader_of_a_flipping_name_gets_one_version_or_the_other() {
        loom::model(|| {
            // Two words, two contents, and the bucket that names one of them.
            let cells = Arc::new(Modelled::new(5, None));
            let page = Arc::new(Modelled::new(2, None));
            let (first, second, bucket) = (0, 1, 4);
            cells.store(2, OLD);
            cells.store_release(first, word(1, State::Sealed));
            cells.store_release(bucket, 1);
            let server = {
                let (cells, page) = (cells.clone(), page.clone());
                thread::spawn(move || {
                    cells.store(3, NEW);
                    cells.store_release(second, word(1, State::Sealed));
                    cells.store_release(bucket, 2);
                    cells.store_release(first, word(1, State::Deleted));
                    cells.fence(Fence::Retire);
                    if pinned(&*page).all(|pin| pin != 1) {
                        cells.store(2, 0);
                    }
                })
            };
            page.store(0, 2);
            let id = cells.load_acquire(bucket);
            let slot = if id == 1 { first } else { second };
            let found = cells.load_acquire(slot);
            let hold = Hold { words: &*cells, word_at: slot, word: found, page: &*page, pin_at: 1 };
            if found == word(1, State::Sealed) && hold.take(id) {
                let expected = if id == 1 { OLD } else { NEW };
                assert_eq!(cells.load(slot + 2), expected);
                hold.release();
            } else {
                assert_eq!(id, 1, "the newest version is always there");
            }
            server.join().expect("the server ends");
        });
    }
}
