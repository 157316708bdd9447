//! A client's page of pins: which are in use, and the objects they hold.

use std::sync::{Mutex, PoisonError};

use crate::cells::Cells;
use crate::id::{ObjectId, State, Word};
use crate::index::Index;

use super::Hold;

/// The length of a page of pins, in bytes: a cell that says how many are in use, and the pins.
pub(crate) const PINS_LEN: usize = 64 << 10;

/// The pins of this process. The lowest that is free is taken first, so that the server has little to look at.
#[derive(Debug)]
pub(crate) struct PinPage<P> {
    cells: P,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
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
        Self { cells, free: Mutex::new(Free { again: Vec::new(), fresh: 1 }) }
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
        let Some(pin_at) = self.take() else { return Pinned::NoneLeft };
        if self.hold(index, id, pin_at).take(id.as_u64()) {
            Pinned::Held(pin_at)
        } else {
            self.give_back(pin_at);
            Pinned::Missed { kick: true }
        }
    }

    /// Lets go what a pin holds, and says whether the server is to be kicked.
    pub(crate) fn unpin<C: Cells>(&self, index: &Index<C>, id: ObjectId, pin_at: usize) -> bool {
        let kick = self.hold(index, id, pin_at).release();
        self.give_back(pin_at);
        kick
    }

    fn hold<'a, C>(&'a self, index: &'a Index<C>, id: ObjectId, pin_at: usize) -> Hold<'a, C, P>
    where
        C: Cells,
    {
        let (words, word_at) = (index.cells(), index.word_cell(id.slot()));
        Hold { words, word_at, word: sealed(id), page: &self.cells, pin_at }
    }

    fn take(&self) -> Option<usize> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(again) = free.again.pop() {
            return Some(again);
        }
        let fresh = free.fresh;
        (fresh < self.cells.count()).then(|| {
            free.fresh += 1;
            // Under the lock, so that it never goes down; before the pin is written, so that the server looks there.
            self.cells.store(0, free.fresh as u64);
            fresh
        })
    }

    fn give_back(&self, pin_at: usize) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).again.push(pin_at);
    }
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
        let (index, cells) = (index(), RecordedCells::new(4));
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
    fn a_page_that_lies_about_its_use_is_looked_at_to_its_end_and_no_further() {
        let cells = RecordedCells::new(4);
        cells.store(0, u64::MAX);
        cells.store(3, 9);
        assert!(is_pinned(&cells, 9));
        cells.store(0, 0);
        assert!(!is_pinned(&cells, 9));
    }
}
