//! A client's page of pins: which are in use, and the objects they hold.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::cells::Cells;
use crate::id::{ObjectId, State, Word};
use crate::index::Index;

use super::{Hold, used};

/// The length of a page of pins, in bytes: a cell that says how many are in use, the pins, and a cell for the secret by which
/// a forked child claims the page.
pub(crate) const PINS_LEN: usize = 64 << 10;

/// How many pins a client has.
pub(crate) const MAX_PINS: usize = PINS_LEN / size_of::<u64>() - 2;

/// Writes the secret of a page.
pub(crate) fn set_secret(page: &impl Cells, secret: u64) {
    page.store_release(page.count() - 1, secret);
}

/// The secret of a page, if its owner has written one.
pub(crate) fn secret(page: &impl Cells) -> Option<u64> {
    Some(page.load_acquire(page.count() - 1)).filter(|secret| *secret != 0)
}

/// The pins of this process. The lowest that is free is taken first, so that the server has little to look at.
#[derive(Debug)]
pub(crate) struct PinPage<P> {
    cells: P,
    free: Mutex<Free>,
    /// Notified when pins can be taken again.
    resumed: Condvar,
}

#[derive(Debug)]
struct Free {
    /// Whether the process is being forked: until that is done no pin is taken.
    is_paused: bool,
    /// Pins below `fresh` that are free, the one let go last at the end.
    again: Vec<usize>,
    /// The first pin that was never used.
    fresh: usize,
}

/// What came of an attempt to pin.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pinned {
    /// The pin at this place holds the object now.
    Held(usize),
    /// It is not there, or not sealed. The server is to be kicked if it may have seen the pin.
    Missed { kick: bool },
    /// All pins are in use.
    NoneLeft,
}

impl<P: Cells> PinPage<P> {
    pub(crate) fn new(cells: P) -> Self {
        let free = Free { is_paused: false, again: Vec::new(), fresh: 1 };
        Self { cells, free: Mutex::new(free), resumed: Condvar::new() }
    }

    /// How many pins are in use.
    pub(crate) fn in_use(&self) -> usize {
        let free = self.free();
        free.fresh - 1 - free.again.len()
    }

    /// Lets no pin be taken until [`PinPage::resume`]. Pins can still be released.
    pub(crate) fn pause(&self) {
        self.free().is_paused = true;
    }

    pub(crate) fn resume(&self) {
        self.free().is_paused = false;
        self.resumed.notify_all();
    }

    /// The cells.
    pub(crate) fn cells(&self) -> &P {
        &self.cells
    }

    fn free(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins an object that is sealed.
    pub(crate) fn pin<C: Cells>(&self, index: &Index<C>, id: ObjectId) -> Pinned {
        if id.slot() >= index.geometry().slots {
            return Pinned::Missed { kick: false };
        }
        let word = sealed(id);
        if index.cells().load_acquire(index.word_cell(id.slot())) != word {
            return Pinned::Missed { kick: false };
        }
        let mut free = self.free();
        while free.is_paused {
            free = self.resumed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        let Some(pin_at) = self.take(&mut free) else { return Pinned::NoneLeft };
        // Under the lock, so that what has a pin when the process is forked has it on the page.
        if self.hold(index, id, pin_at).take(id.as_u64()) {
            Pinned::Held(pin_at)
        } else {
            free.again.push(pin_at);
            Pinned::Missed { kick: true }
        }
    }

    /// Lets go what a pin holds, and says whether the server is to be kicked.
    pub(crate) fn unpin<C: Cells>(&self, index: &Index<C>, id: ObjectId, pin_at: usize) -> bool {
        let kick = self.hold(index, id, pin_at).release();
        self.free().again.push(pin_at);
        kick
    }

    fn hold<'a, C>(&'a self, index: &'a Index<C>, id: ObjectId, pin_at: usize) -> Hold<'a, C, P>
    where
        C: Cells,
    {
        let (words, word_at) = (index.cells(), index.word_cell(id.slot()));
        Hold { words, word_at, word: sealed(id), page: &self.cells, pin_at }
    }

    fn take(&self, free: &mut Free) -> Option<usize> {
        if let Some(again) = free.again.pop() {
            return Some(again);
        }
        let fresh = free.fresh;
        // The last cell is no pin.
        (fresh < self.cells.count() - 1).then(|| {
            free.fresh += 1;
            // Under the lock, so that it never goes down; before the pin is written, so that the server looks there.
            self.cells.store(0, free.fresh as u64);
            fresh
        })
    }
}

/// Copies the pins of a page that takes none meanwhile to another, whose client has a higher id.
pub(crate) fn copy_pins(from: &impl Cells, to: &impl Cells) {
    let end = used(from).min(to.count() - 1);
    for at in 1..end {
        to.store(at, from.load_acquire(at));
    }
    // After the pins. Whatever is released on the other page afterwards is released after this.
    to.store_release(0, end as u64);
}

fn sealed(id: ObjectId) -> u64 {
    Word { generation: id.generation(), state: State::Sealed }.encode()
}

#[cfg(test)]
mod tests {
    use super::super::pinned;
    use super::*;
    use crate::cells::recorded::RecordedCells;
    use crate::index::Geometry;

    fn is_pinned(cells: &RecordedCells, id: u64) -> bool {
        pinned(cells).any(|pin| pin == id)
    }

    fn index() -> Index<RecordedCells> {
        let geometry = Geometry { slots: 4, allocations: 1 };
        Index::format(RecordedCells::new(geometry.cells()), geometry)
    }

    #[test]
    fn only_what_is_sealed_is_pinned_and_only_until_it_is_let_go() {
        let (index, cells) = (index(), RecordedCells::new(4));
        let page = PinPage::new(cells.clone());
        let id = ObjectId::new(2, 5);
        let missed = Pinned::Missed { kick: false };
        assert_eq!(page.pin(&index, id), missed);
        index.commit(id, State::Created);
        assert_eq!(page.pin(&index, id), missed);
        index.commit(id, State::Sealed);
        assert_eq!(page.pin(&index, ObjectId::new(2, 4)), missed);
        assert_eq!(page.pin(&index, ObjectId::new(900, 5)), missed);
        assert_eq!(page.pin(&index, id), Pinned::Held(1));
        assert!(is_pinned(&cells, id.as_u64()));
        assert!(!page.unpin(&index, id, 1));
        assert!(!is_pinned(&cells, id.as_u64()));
    }

    #[test]
    fn letting_go_what_was_deleted_meanwhile_asks_for_a_kick() {
        let (index, page) = (index(), PinPage::new(RecordedCells::new(4)));
        let id = ObjectId::new(0, 0);
        index.commit(id, State::Sealed);
        assert_eq!(page.pin(&index, id), Pinned::Held(1));
        index.commit(id, State::Deleted);
        assert!(page.unpin(&index, id, 1));
    }

    #[test]
    fn pins_are_used_again_the_last_first_and_end_somewhere() {
        let (index, cells) = (index(), RecordedCells::new(5));
        let page = PinPage::new(cells.clone());
        let id = ObjectId::new(0, 0);
        index.commit(id, State::Sealed);
        let taken: Vec<_> = (0..4).map(|_| page.pin(&index, id)).collect();
        assert_eq!(taken, [Pinned::Held(1), Pinned::Held(2), Pinned::Held(3), Pinned::NoneLeft]);
        page.unpin(&index, id, 1);
        page.unpin(&index, id, 3);
        assert!(is_pinned(&cells, id.as_u64()), "2 holds it still");
        assert_eq!(page.pin(&index, id), Pinned::Held(3));
        assert_eq!(page.pin(&index, id), Pinned::Held(1));
        assert_eq!(cells.load(0), 4);
    }

    #[test]
    fn a_copy_has_the_pins_of_its_page_and_another_secret() {
        let (index, cells, copy) = (index(), RecordedCells::new(6), RecordedCells::new(6));
        let page = PinPage::new(cells.clone());
        let ids = [ObjectId::new(0, 0), ObjectId::new(1, 0), ObjectId::new(2, 0)];
        for (at, id) in ids.into_iter().enumerate() {
            index.commit(id, State::Sealed);
            assert_eq!(page.pin(&index, id), Pinned::Held(at + 1));
        }
        page.unpin(&index, ids[1], 2);
        set_secret(&cells, 7);
        page.pause();
        assert_eq!(page.in_use(), 2);
        copy_pins(&cells, &copy);
        set_secret(&copy, 8);
        page.resume();
        assert_eq!(pinned(&copy).collect::<Vec<_>>(), [ids[0].as_u64(), 0, ids[2].as_u64()]);
        assert_eq!((secret(&cells), secret(&copy), secret(&RecordedCells::new(6))), (Some(7), Some(8), None));
        assert_eq!(page.pin(&index, ids[0]), Pinned::Held(2));
        // A page that claims to be in use up to its secret is copied up to there.
        cells.store(0, u64::MAX);
        copy_pins(&cells, &copy);
        assert_eq!((copy.load(0), secret(&copy)), (5, Some(8)));
    }

    #[test]
    fn a_page_that_lies_about_its_use_is_looked_at_to_its_end_and_no_further() {
        let cells = RecordedCells::new(4);
        cells.store(0, u64::MAX);
        cells.store(3, 9);
        assert!(is_pinned(&cells, 9));
        cells.store(0, 0);
        assert!(!is_pinned(&cells, 9));
    }
}
