//! Memory that the server and its clients share, as cells of eight bytes: every access is atomic.
//!
//! What goes through [`Cells`] can be recorded, cut off after any store, and walked through every interleaving: the
//! tests of the index and of the pins are implementations of it.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use wholemem_os::SharedMap;

/// The places where the protocols between processes need an order of all, each with the name it is taken away by in
/// a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// A reader has written its pin, and will look whether the object is still there.
    Pin,
    /// A reader has cleared its pin, and will look whether somebody waits for that.
    Unpin,
    /// The server has marked an object as deleted, and will look for pins.
    Retire,
    /// The server will write a record where another was, or a reader has read one and looks whether it still stands.
    Record,
}

/// Cells of eight bytes, shared with other processes.
///
/// # Panics
/// Every access panics for a cell that is not there, as a slice does, and a store for memory received read-only.
pub(crate) trait Cells {
    /// How many there are.
    fn count(&self) -> usize;
    /// The value, with no promise about other cells.
    fn load(&self, at: usize) -> u64;
    /// The value; what its writer stored before releasing it is visible afterwards.
    fn load_acquire(&self, at: usize) -> u64;
    /// Stores, with no promise about other cells.
    fn store(&self, at: usize, value: u64);
    /// Stores after everything before it.
    fn store_release(&self, at: usize, value: u64);
    /// An order that all agree on.
    fn fence(&self, place: Fence);
}

/// The cells of a mapped memory file.
#[derive(Debug, Clone)]
pub(crate) struct MappedCells(Arc<SharedMap>);

const WITHIN: &str = "a cell that was counted before";

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

    fn fence(&self, _: Fence) {
        fence(Ordering::SeqCst);
    }
}

/// Cells of this process alone, which remember every store: for tests.
#[cfg(test)]
pub(crate) mod recorded {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::{Cells, Fence};

    /// Clones are the same cells.
    #[derive(Debug, Clone)]
    pub(crate) struct RecordedCells(Rc<RefCell<Recording>>);

    #[derive(Debug)]
    struct Recording {
        cells: Vec<u64>,
        stores: Vec<(usize, u64)>,
    }

    impl RecordedCells {
        pub(crate) fn new(count: usize) -> Self {
            Self::from_cells(vec![0; count])
        }

        pub(crate) fn from_cells(cells: Vec<u64>) -> Self {
            Self(Rc::new(RefCell::new(Recording { cells, stores: Vec::new() })))
        }

        /// The stores since the last call, and the cells as they were before them.
        pub(crate) fn take(&self) -> Prefixes {
            let mut recording = self.0.borrow_mut();
            let stores = std::mem::take(&mut recording.stores);
            Prefixes { before: Vec::new(), stores }
        }

        pub(crate) fn snapshot(&self) -> Vec<u64> {
            self.0.borrow().cells.clone()
        }
    }

    /// A sequence of stores, to be replayed up to any of them.
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

        fn fence(&self, _: Fence) {}
    }
}

#[cfg(test)]
mod tests {
    use wholemem_os::Memfd;
    use wholemem_os::vm::Protection;

    use super::*;

    #[test]
    fn cells_of_a_file_are_the_same_through_every_map() {
        let memory = Memfd::create("test", 4096).unwrap();
        let writer = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite).unwrap());
        let reader = MappedCells::new(SharedMap::create(&memory, Protection::Read).unwrap());
        assert_eq!((writer.count(), reader.count()), (512, 512));
        writer.store(511, 7);
        writer.store_release(0, 9);
        writer.fence(Fence::Record);
        assert_eq!((reader.load_acquire(0), reader.load(511)), (9, 7));
    }
}
