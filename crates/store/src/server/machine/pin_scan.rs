//! Scans the pin pages, in which clients mark objects in use, for pins of deleted objects, a bounded number of pins at a time.
//!
//! Clients write pins without notifying the server, so a deleted object may be freed only after every pin page was read and none
//! contained its id. Reading all pages once is a *pass*. A pass is divided into slices, since the pages may hold millions of
//! pins: each step of the server reads one slice. If few pins are in use, the whole pass fits the step that deletes the object.
//!
//! An object is freed only by a pass that began after the object was marked as deleted. Pages are read in the order of their
//! clients' ids, because a process that forks copies its pins to a page with a higher id: a pin that is copied during a pass, and
//! then released on the lower page, is still found on the higher one.

use std::collections::BTreeSet;
use std::time::Duration;

use super::interface::ServerMemory;
use crate::id::{ClientId, ObjectId};

/// The units of work that one step of the state machine may spend on scanning pins. Reading one pin is one unit.
pub(super) const STEP_WORK: usize = 1024;

/// The units of work that count for starting to read a client's pin page, whose first cell is rarely in a CPU cache.
pub(crate) const PAGE_WORK: usize = 16;

/// The units of work that count for each pin of a deleted object that the scan finds.
const HIT_WORK: usize = 16;

/// The units of work that count for freeing a deleted object.
pub(super) const FREE_WORK: usize = 64;

/// The approximate number of deleted objects that one scan pass over all pin pages checks. Other objects wait for the next pass.
const MAX_PASS_OBJECTS: usize = 1024;

/// The interval at which pins are scanned without a notification, since a client may be stopped after it has released a pin and
/// before it notifies the server.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The position at which a scan of pins continues: a cell of a client's pin page.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PinPosition {
    pub(crate) client: ClientId,
    /// The index of the cell in the client's pin page; the first pin has index 1.
    pub(crate) cell: usize,
}

/// One pass of a scan over all pin pages.
#[derive(Debug)]
struct ScanPass {
    /// The deleted objects that the scan pass checks: packs, each by its first object, and single objects.
    packs: Vec<ObjectId>,
    /// The position at which the scan pass continues; `None` when all pin pages were read.
    at: Option<PinPosition>,
    /// Deleted objects for which the scan pass has found a pin of a client.
    pinned: BTreeSet<ObjectId>,
}

/// The deleted objects that are not freed yet, and the progress of the scan for their pins.
#[derive(Debug)]
pub(super) struct PinScan {
    retired: BTreeSet<ObjectId>,
    /// One bit for each index slot, set if the slot's object is in `retired`: most pins are of objects that are not deleted, and
    /// are skipped by testing this bit alone.
    slots: Vec<u64>,
    /// The deleted objects that the next scan pass over all pin pages checks.
    next: BTreeSet<ObjectId>,
    pass: Option<ScanPass>,
    /// The number of completed scan passes over all pin pages.
    passes: u64,
    rechecked: Duration,
    /// The deleted object behind which the next periodic recheck of pins begins.
    recheck_from: Option<ObjectId>,
}

impl PinScan {
    /// Creates a scan of pins for an index with `slots` slots, without deleted objects.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            retired: BTreeSet::new(),
            slots: vec![0; slots.div_ceil(64)],
            next: BTreeSet::new(),
            pass: None,
            passes: 0,
            rechecked: Duration::ZERO,
            recheck_from: None,
        }
    }

    /// Returns the number of objects that are deleted but not freed yet.
    pub(super) fn count(&self) -> usize {
        self.retired.len()
    }

    pub(super) fn contains(&self, id: ObjectId) -> bool {
        self.has_bit(id) && self.retired.contains(&id)
    }

    fn has_bit(&self, id: ObjectId) -> bool {
        self.slots.get(id.slot() / 64).is_some_and(|bits| bits >> (id.slot() % 64) & 1 == 1)
    }

    /// Adds an object that is marked as deleted to the set of deleted objects.
    pub(super) fn add(&mut self, id: ObjectId) {
        self.retired.insert(id);
        if let Some(bits) = self.slots.get_mut(id.slot() / 64) {
            *bits |= 1 << (id.slot() % 64);
        }
    }

    /// Removes an object that is freed from the set of deleted objects.
    pub(super) fn remove(&mut self, id: ObjectId) {
        if self.retired.remove(&id)
            && let Some(bits) = self.slots.get_mut(id.slot() / 64)
        {
            *bits &= !(1 << (id.slot() % 64));
        }
    }

    /// Adds a deleted object, or a pack by its first object, to the next scan pass over all pin pages.
    pub(super) fn search(&mut self, first: ObjectId) {
        self.next.insert(first);
    }

    /// Returns true if a scan pass over all pin pages is in progress or about to begin.
    pub(super) fn is_active(&self) -> bool {
        self.pass.is_some() || !self.next.is_empty()
    }

    /// Returns the number of completed scan passes over all pin pages.
    pub(super) fn passes(&self) -> u64 {
        self.passes
    }

    /// Returns the number of completed scan passes after which every deleted object that is waiting for a scan now has been
    /// checked.
    pub(super) fn passes_to_come(&self) -> u64 {
        let next = self.next.len().div_ceil(MAX_PASS_OBJECTS) as u64;
        self.passes + u64::from(self.pass.is_some()) + next
    }

    /// Returns the time of the next step of the state machine that the scan of pins needs; `None` if no object is deleted.
    pub(super) fn wake_at(&self) -> Option<Duration> {
        match () {
            () if self.is_active() => Some(Duration::ZERO),
            () if self.retired.is_empty() => None,
            () => Some(self.rechecked + RECHECK_INTERVAL),
        }
    }

    /// Returns deleted objects whose pins are scanned again because an interval has passed: some objects now, others the next
    /// time.
    pub(super) fn due(&mut self, now: Duration) -> Vec<ObjectId> {
        if self.retired.is_empty() || now.saturating_sub(self.rechecked) < RECHECK_INTERVAL {
            return Vec::new();
        }
        self.rechecked = now;
        let behind = |id: &&ObjectId| self.recheck_from.is_none_or(|from| **id > from);
        let range = match self.recheck_from {
            Some(from) => self.retired.range(from..),
            None => self.retired.range(..),
        };
        let due: Vec<_> = range.filter(behind).take(MAX_PASS_OBJECTS).copied().collect();
        self.recheck_from = due.last().copied().filter(|_| due.len() == MAX_PASS_OBJECTS);
        due
    }

    /// Reads pins as far as `work` allows. `size` returns the number of objects of a pack. Returns true when a scan pass has read
    /// all pin pages; [`PinScan::take_checked`] then returns the objects that the pass has checked.
    pub(super) fn read(
        &mut self,
        server_memory: &impl ServerMemory,
        size: impl Fn(ObjectId) -> usize,
        work: &mut usize,
    ) -> bool {
        let mut pass = match self.pass.take() {
            Some(pass) => pass,
            None if self.next.is_empty() => return false,
            None => {
                let mut objects = 0;
                let mut packs = Vec::new();
                while objects < MAX_PASS_OBJECTS
                    && let Some(first) = self.next.pop_first()
                {
                    objects += size(first);
                    packs.push(first);
                }
                ScanPass { packs, at: Some(PinPosition::default()), pinned: BTreeSet::new() }
            }
        };
        while *work > 0
            && let Some(at) = pass.at
        {
            let pinned = &mut pass.pinned;
            let mut visit =
                |_: ClientId, pin: u64| match ObjectId::from_u64(pin).filter(|id| self.contains(*id)) {
                    Some(id) => {
                        pinned.insert(id);
                        HIT_WORK
                    }
                    None => 1,
                };
            pass.at = server_memory.read_pins(at, work, &mut visit);
        }
        let is_read = pass.at.is_none();
        self.pass = Some(pass);
        is_read
    }

    /// Removes and returns the next pack or single object that a complete scan pass has checked. The pass ends when none is left.
    pub(super) fn take_checked(&mut self) -> Option<ObjectId> {
        let pass = self.pass.as_mut().filter(|pass| pass.at.is_none())?;
        let first = pass.packs.pop();
        if first.is_none() {
            self.pass = None;
            self.passes += 1;
        }
        first
    }

    /// Returns true if the complete scan pass has found a pin of a deleted object.
    pub(super) fn is_pinned(&self, id: ObjectId) -> bool {
        self.pass.as_ref().is_some_and(|pass| pass.pinned.contains(&id))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::id::AllocationId;

    /// The pin pages of a test, with a counter of the cells that were read.
    #[derive(Default)]
    struct TestPages {
        pages: Vec<Vec<u64>>,
        read: Cell<usize>,
    }

    impl ServerMemory for TestPages {
        fn write(&mut self, _: AllocationId, _: u64, _: &[u8]) -> bool {
            false
        }

        fn read_pins(
            &self,
            from: PinPosition,
            work: &mut usize,
            visit: &mut dyn FnMut(ClientId, u64) -> usize,
        ) -> Option<PinPosition> {
            let page = self.pages.get(usize::try_from(from.client.0).unwrap())?;
            for cell in from.cell.max(1)..=page.len() {
                if *work == 0 {
                    return Some(PinPosition { client: from.client, cell });
                }
                self.read.set(self.read.get() + 1);
                *work = work.saturating_sub(visit(from.client, page[cell - 1]));
            }
            Some(PinPosition { client: ClientId(from.client.0 + 1), cell: 0 })
        }

        fn take_pins(&mut self, _: ClientId) -> Vec<u64> {
            Vec::new()
        }
    }

    fn id(slot: usize) -> ObjectId {
        ObjectId::new(slot, 3)
    }

    /// Runs one scan pass to its end. Returns the number of slices of the pass, and the pinned objects.
    fn run(scan: &mut PinScan, pages: &TestPages) -> (usize, BTreeSet<ObjectId>) {
        let mut slices = 1;
        while !scan.read(pages, |_| 1, &mut STEP_WORK.clone()) {
            slices += 1;
        }
        let mut pinned = BTreeSet::new();
        while let Some(first) = scan.take_checked() {
            pinned.extend(scan.is_pinned(first).then_some(first));
        }
        (slices, pinned)
    }

    #[test]
    fn a_slice_reads_a_bounded_number_of_pins() {
        for clients in [1, 10, 100] {
            // One pin page of this length fits a slice of the scan, but two pages do not.
            let page = vec![77; STEP_WORK - PAGE_WORK - 1];
            let pages = TestPages { pages: vec![page; clients], ..TestPages::default() };
            let mut scan = PinScan::new(64);
            scan.add(id(5));
            scan.search(id(5));
            let mut work = STEP_WORK;
            let is_read = scan.read(&pages, |_| 1, &mut work);
            assert_eq!((is_read, pages.read.get().min(STEP_WORK)), (clients == 1, pages.read.get()));
        }
    }

    #[test]
    fn a_pass_finds_pins_on_all_pages() {
        let mut pages = TestPages { pages: vec![vec![77; 8000]; 5], ..TestPages::default() };
        let mut scan = PinScan::new(64);
        for slot in [5, 6] {
            scan.add(id(slot));
            scan.search(id(slot));
        }
        pages.pages[4][7999] = id(6).as_u64();
        pages.pages[3][0] = ObjectId::new(5, 2).as_u64();
        let (slices, pinned) = run(&mut scan, &pages);
        let work = pages.pages.len() * (8000 + PAGE_WORK) + HIT_WORK;
        let expected = (work.div_ceil(STEP_WORK), BTreeSet::from([id(6)]));
        assert_eq!((slices, pinned), expected, "another generation is another object");
        assert_eq!(scan.passes(), 1);
    }

    #[test]
    fn objects_that_are_deleted_during_a_pass_are_left_to_the_next() {
        let pages = TestPages { pages: vec![vec![77; 8191]; 2], ..TestPages::default() };
        let mut scan = PinScan::new(64);
        scan.add(id(5));
        scan.search(id(5));
        assert!(!scan.read(&pages, |_| 1, &mut 100));
        scan.add(id(6));
        scan.search(id(6));
        assert_eq!(scan.passes_to_come(), 2);
        let mut checked = Vec::new();
        while !scan.read(&pages, |_| 1, &mut STEP_WORK.clone()) {}
        while let Some(first) = scan.take_checked() {
            checked.push(first);
        }
        assert_eq!((checked, scan.passes(), scan.is_active()), (vec![id(5)], 1, true));
    }

    #[test]
    fn all_deleted_objects_are_rechecked_some_at_a_time() {
        let mut scan = PinScan::new(4096);
        (0..3000).for_each(|slot| scan.add(id(slot)));
        let at = |seconds| Duration::from_secs(seconds);
        (0..3000).for_each(|slot| scan.search(id(slot)));
        assert_eq!(scan.passes_to_come(), 3);
        let due: Vec<_> = (1..=4).map(|second| scan.due(at(second)).len()).collect();
        assert_eq!(due, [1024, 1024, 952, 1024]);
        assert_eq!(scan.due(at(4)), []);
    }

    #[test]
    fn a_pack_counts_as_many_objects_as_it_has() {
        let mut scan = PinScan::new(64);
        for slot in 0..3 {
            scan.add(id(slot));
            scan.search(id(slot));
        }
        while !scan.read(&TestPages::default(), |_| 600, &mut STEP_WORK.clone()) {}
        let mut checked = 0;
        while scan.take_checked().is_some() {
            checked += 1;
        }
        assert_eq!((checked, scan.is_active()), (2, true));
    }
}
