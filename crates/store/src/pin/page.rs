//! The pin page of a client (memory in which the client lists the objects that it uses): allocates and writes pins.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::cells::Cells;
use crate::id::{ObjectId, SlotState, SlotWord};
use crate::index::ObjectIndex;

use super::{PinCells, used};

/// The length of a pin page in bytes: a cell with the number of used cells, the pins, and a cell for the secret by which a forked
/// child claims the page.
pub(crate) const PINS_LEN: usize = 64 << 10;

/// The maximum number of objects that a client can pin at a time.
pub(crate) const MAX_PINS: usize = PINS_LEN / size_of::<u64>() - 2;

/// Writes the secret of a pin page, by which a forked child claims the page.
pub(crate) fn set_secret(page: &impl Cells, secret: u64) {
    page.store_release(page.count() - 1, secret);
}

/// Returns the secret by which a forked child claims a pin page; `None` if the client that owns the page has not written one.
pub(crate) fn secret(page: &impl Cells) -> Option<u64> {
    Some(page.load_acquire(page.count() - 1)).filter(|secret| *secret != 0)
}

/// The pin page of a client in this process. Released pins are used again before new ones, so that the server scans few cells.
#[derive(Debug)]
pub(crate) struct PinPage<P> {
    cells: P,
    free: Mutex<FreePins>,
    /// Notified when a fork is complete, so that pins may be taken again.
    resumed: Condvar,
}

#[derive(Debug)]
struct FreePins {
    /// True while the process is being forked. No pin is taken until the fork is complete.
    is_paused: bool,
    /// The free pins with an index below `fresh`, the most recently released last.
    released: Vec<usize>,
    /// The index of the first pin of the page that was never used.
    fresh: usize,
}

/// The result of a client's attempt to pin an object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum PinOutcome {
    /// The object is pinned by the pin at this index of the pin page.
    Pinned(usize),
    /// The object does not exist or is not sealed. If `must_notify`, the client must notify the server, which may have seen the
    /// pin.
    NotSealed { must_notify: bool },
    /// All pins of the client's pin page are in use.
    NoFreePin,
}

impl<P: Cells> PinPage<P> {
    pub(crate) fn new(cells: P) -> Self {
        let free = FreePins { is_paused: false, released: Vec::new(), fresh: 1 };
        Self { cells, free: Mutex::new(free), resumed: Condvar::new() }
    }

    /// Returns the number of pins of the page that are in use.
    pub(crate) fn in_use(&self) -> usize {
        let free = self.free();
        free.fresh - 1 - free.released.len()
    }

    /// Makes [`PinPage::pin`] wait until [`PinPage::resume`] is called. Pins can still be released.
    pub(crate) fn pause(&self) {
        self.free().is_paused = true;
    }

    pub(crate) fn resume(&self) {
        self.free().is_paused = false;
        self.resumed.notify_all();
    }

    /// Returns the memory cells of the pin page.
    pub(crate) fn cells(&self) -> &P {
        &self.cells
    }

    fn free(&self) -> MutexGuard<'_, FreePins> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pins an object of the index if the object is sealed.
    pub(crate) fn pin<C: Cells>(&self, index: &ObjectIndex<C>, id: ObjectId) -> PinOutcome {
        if id.slot() >= index.geometry().slots {
            return PinOutcome::NotSealed { must_notify: false };
        }
        let word = sealed(id);
        if index.cells().load_acquire(index.word_cell(id.slot())) != word {
            return PinOutcome::NotSealed { must_notify: false };
        }
        let mut free = self.free();
        while free.is_paused {
            free = self.resumed.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        let Some(pin_at) = self.allocate_pin(&mut free) else { return PinOutcome::NoFreePin };
        // The pin is written while the lock is held, so that every taken pin is on the page when the process forks.
        if self.pin_cells(index, id, pin_at).try_pin(id.as_u64()) {
            PinOutcome::Pinned(pin_at)
        } else {
            free.released.push(pin_at);
            PinOutcome::NotSealed { must_notify: true }
        }
    }

    /// Releases a pin. Returns true if the client must notify the server, because the object was deleted meanwhile.
    pub(crate) fn unpin<C: Cells>(&self, index: &ObjectIndex<C>, id: ObjectId, pin_at: usize) -> bool {
        let must_notify = self.pin_cells(index, id, pin_at).release();
        self.free().released.push(pin_at);
        must_notify
    }

    fn pin_cells<'a, C>(
        &'a self,
        index: &'a ObjectIndex<C>,
        id: ObjectId,
        pin_at: usize,
    ) -> PinCells<'a, C, P>
    where
        C: Cells,
    {
        let (words, word_at) = (index.cells(), index.word_cell(id.slot()));
        PinCells { words, word_at, word: sealed(id), page: &self.cells, pin_at }
    }

    fn allocate_pin(&self, free: &mut FreePins) -> Option<usize> {
        if let Some(released) = free.released.pop() {
            return Some(released);
        }
        let fresh = free.fresh;
        // The last cell of a pin page holds its secret and is not a pin.
        (fresh < self.cells.count() - 1).then(|| {
            free.fresh += 1;
            // The number of used cells is stored while the lock is held, so that it never decreases, and before the pin is
            // written, so that the server scans the pin.
            self.cells.store(0, free.fresh as u64);
            fresh
        })
    }
}

/// Copies the pins of a paused pin page to the pin page of a client with a higher id.
pub(crate) fn copy_pins(from: &impl Cells, to: &impl Cells) {
    let end = used(from).min(to.count() - 1);
    for at in 1..end {
        to.store(at, from.load_acquire(at));
    }
    // The number of used cells is stored after the pins: a pin that is released on the first page from now on is still on the
    // second page.
    to.store_release(0, end as u64);
}

fn sealed(id: ObjectId) -> u64 {
    SlotWord { generation: id.generation(), state: SlotState::Sealed }.encode()
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

    fn index() -> ObjectIndex<RecordedCells> {
        let geometry = Geometry { slots: 4, allocations: 1 };
        ObjectIndex::format(RecordedCells::new(geometry.cells()), geometry)
    }

    #[test]
    fn only_sealed_objects_are_pinned_and_only_until_the_release() {
        let (index, cells) = (index(), RecordedCells::new(4));
        let page = PinPage::new(cells.clone());
        let id = ObjectId::new(2, 5);
        let missed = PinOutcome::NotSealed { must_notify: false };
        assert_eq!(page.pin(&index, id), missed);
        index.commit(id, SlotState::Created);
        assert_eq!(page.pin(&index, id), missed);
        index.commit(id, SlotState::Sealed);
        assert_eq!(page.pin(&index, ObjectId::new(2, 4)), missed);
        assert_eq!(page.pin(&index, ObjectId::new(900, 5)), missed);
        assert_eq!(page.pin(&index, id), PinOutcome::Pinned(1));
        assert!(is_pinned(&cells, id.as_u64()));
        assert!(!page.unpin(&index, id, 1));
        assert!(!is_pinned(&cells, id.as_u64()));
    }

    #[test]
    fn releasing_a_deleted_object_requires_a_notification() {
        let (index, page) = (index(), PinPage::new(RecordedCells::new(4)));
        let id = ObjectId::new(0, 0);
        index.commit(id, SlotState::Sealed);
        assert_eq!(page.pin(&index, id), PinOutcome::Pinned(1));
        index.commit(id, SlotState::Deleted);
        assert!(page.unpin(&index, id, 1));
    }

    #[test]
    fn pins_are_reused_last_in_first_out_and_are_limited() {
        let (index, cells) = (index(), RecordedCells::new(5));
        let page = PinPage::new(cells.clone());
        let id = ObjectId::new(0, 0);
        index.commit(id, SlotState::Sealed);
        let outcomes: Vec<_> = (0..4).map(|_| page.pin(&index, id)).collect();
        assert_eq!(
            outcomes,
            [PinOutcome::Pinned(1), PinOutcome::Pinned(2), PinOutcome::Pinned(3), PinOutcome::NoFreePin]
        );
        page.unpin(&index, id, 1);
        page.unpin(&index, id, 3);
        assert!(is_pinned(&cells, id.as_u64()), "pin 2 still holds the object");
        assert_eq!(page.pin(&index, id), PinOutcome::Pinned(3));
        assert_eq!(page.pin(&index, id), PinOutcome::Pinned(1));
        assert_eq!(cells.load(0), 4);
    }

    #[test]
    fn a_copied_page_has_the_same_pins_and_its_own_secret() {
        let (index, cells, copy) = (index(), RecordedCells::new(6), RecordedCells::new(6));
        let page = PinPage::new(cells.clone());
        let ids = [ObjectId::new(0, 0), ObjectId::new(1, 0), ObjectId::new(2, 0)];
        for (at, id) in ids.into_iter().enumerate() {
            index.commit(id, SlotState::Sealed);
            assert_eq!(page.pin(&index, id), PinOutcome::Pinned(at + 1));
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
        assert_eq!(page.pin(&index, ids[0]), PinOutcome::Pinned(2));
        // A number of used cells that includes the cell of the secret is limited to the cells before the secret.
        cells.store(0, u64::MAX);
        copy_pins(&cells, &copy);
        assert_eq!((copy.load(0), secret(&copy)), (5, Some(8)));
    }

    #[test]
    fn an_invalid_count_of_pins_is_limited_to_the_page() {
        let cells = RecordedCells::new(4);
        cells.store(0, u64::MAX);
        cells.store(3, 9);
        assert!(is_pinned(&cells, 9));
        cells.store(0, 0);
        assert!(!is_pinned(&cells, 9));
    }
}
