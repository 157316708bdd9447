//! Memory that the server of a store shares with its clients, accessed as atomic cells of eight bytes.
//!
//! [`Cells`] is a trait so that tests can record all stores, replay any prefix of them, and run every interleaving under loom.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use wholemem_os::SharedMap;

/// The points of the pin and index protocols at which a process executes a sequentially consistent fence. Tests remove each of
/// these fences by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FencePoint {
    /// A reader has written its pin (a mark that it uses an object) and next checks that the object is still sealed.
    Pin,
    /// A reader has cleared its pin of an object and next checks whether the object was deleted, so that it must notify the
    /// server.
    Unpin,
    /// The server has marked an object as deleted and next scans the pins of all clients.
    Retire,
    /// The server is about to overwrite an object's record, or a reader has read a record and next checks that the record is
    /// still valid (seqlock).
    Record,
}

/// A sequence of eight-byte cells in memory that is shared with other processes.
///
/// # Panics
/// Every access panics if the index is out of bounds, as a slice does; a store panics if the memory is mapped read-only.
pub(crate) trait Cells {
    /// Returns the number of eight-byte cells.
    fn count(&self) -> usize;
    /// Loads an eight-byte cell of shared memory with relaxed ordering.
    fn load(&self, at: usize) -> u64;
    /// Loads an eight-byte cell of shared memory with acquire ordering.
    fn load_acquire(&self, at: usize) -> u64;
    /// Stores to an eight-byte cell of shared memory with relaxed ordering.
    fn store(&self, at: usize, value: u64);
    /// Stores to an eight-byte cell of shared memory with release ordering.
    fn store_release(&self, at: usize, value: u64);
    /// Executes a sequentially consistent fence; `place` is the name of the fence for tests.
    fn fence(&self, place: FencePoint);
}

/// The eight-byte cells of a mapped memory file.
#[derive(Debug, Clone)]
pub(crate) struct MappedCells(Arc<SharedMap>);

const WITHIN: &str = "the index of the cell is below `count`";

impl MappedCells {
    pub(crate) fn new(map: SharedMap) -> Self {
        Self(Arc::new(map))
    }
}

impl Cells for MappedCells {
    fn count(&self) -> usize {
        self.0.bytes().len() / size_of::<u64>()
    }

    fn load(&self, at: usize) -> u64 {
        self.0.bytes().read_u64(at * size_of::<u64>()).expect(WITHIN).load_relaxed()
    }

    fn load_acquire(&self, at: usize) -> u64 {
        self.0.bytes().read_u64(at * size_of::<u64>()).expect(WITHIN).load_acquire()
    }

    fn store(&self, at: usize, value: u64) {
        self.0.bytes().atomic_u64(at * size_of::<u64>()).expect(WITHIN).store(value, Ordering::Relaxed);
    }

    fn store_release(&self, at: usize, value: u64) {
        self.0.bytes().atomic_u64(at * size_of::<u64>()).expect(WITHIN).store(value, Ordering::Release);
    }

    fn fence(&self, _: FencePoint) {
        fence(Ordering::SeqCst);
    }
}

/// Cells in private memory that record every store, for tests.
#[cfg(test)]
pub(crate) mod recorded {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::{Cells, FencePoint};

    /// A handle of cells that record every store; clones share the same cells.
    #[derive(Debug, Clone)]
    pub(crate) struct RecordedCells(Rc<RefCell<CellRecording>>);

    #[derive(Debug)]
    struct CellRecording {
        cells: Vec<u64>,
        stores: Vec<(usize, u64)>,
    }

    impl RecordedCells {
        pub(crate) fn new(count: usize) -> Self {
            Self::from_cells(vec![0; count])
        }

        pub(crate) fn from_cells(cells: Vec<u64>) -> Self {
            Self(Rc::new(RefCell::new(CellRecording { cells, stores: Vec::new() })))
        }

        /// Returns the stores that were recorded since the last call of this function. The field `before` of the result is empty.
        pub(crate) fn take(&self) -> Prefixes {
            let mut recording = self.0.borrow_mut();
            let stores = std::mem::take(&mut recording.stores);
            Prefixes { before: Vec::new(), stores }
        }

        pub(crate) fn snapshot(&self) -> Vec<u64> {
            self.0.borrow().cells.clone()
        }
    }

    /// A recorded sequence of stores to cells, any prefix of which can be replayed.
    #[derive(Debug)]
    pub(crate) struct Prefixes {
        pub(crate) before: Vec<u64>,
        pub(crate) stores: Vec<(usize, u64)>,
    }

    impl Prefixes {
        pub(crate) fn replay(&self, count: usize) -> RecordedCells {
            let mut cells = self.before.clone();
            for (at, value) in &self.stores[..count] {
                cells[*at] = *value;
            }
            RecordedCells::from_cells(cells)
        }
    }

    impl Cells for RecordedCells {
        fn count(&self) -> usize {
            self.0.borrow().cells.len()
        }

        fn load(&self, at: usize) -> u64 {
            self.0.borrow().cells[at]
        }

        fn load_acquire(&self, at: usize) -> u64 {
            self.load(at)
        }

        fn store(&self, at: usize, value: u64) {
            let mut recording = self.0.borrow_mut();
            recording.cells[at] = value;
            recording.stores.push((at, value));
        }

        fn store_release(&self, at: usize, value: u64) {
            self.store(at, value);
        }

        fn fence(&self, _: FencePoint) {}
    }
}

#[cfg(test)]
mod tests {
    use wholemem_os::Memfd;
    use wholemem_os::vm::Protection;

    use super::*;

    #[test]
    fn all_maps_of_a_file_share_its_cells() {
        let memory = Memfd::create("test", 4096).unwrap();
        let writer = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite).unwrap());
        let reader = MappedCells::new(SharedMap::create(&memory, Protection::Read).unwrap());
        assert_eq!((writer.count(), reader.count()), (512, 512));
        writer.store(511, 7);
        writer.store_release(0, 9);
        writer.fence(FencePoint::Record);
        assert_eq!((reader.load_acquire(0), reader.load(511)), (9, 7));
    }
}
