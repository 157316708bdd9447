//! The record in which kernels of gather and scatter store the first index that names no row of the table.
//!
//! GPU kernels only lower `position` (atomic minimum). CPU kernels also store the index and the number of rows, for the position
//! in `recorded for`; if that differs from `position`, the index is unknown.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The value of the position word if no index was out of range.
pub(crate) const NO_BAD_INDEX: u64 = u64::MAX;

/// A word of the record of bad indices (indices that name no row). Word `n` is the `u64` at 8 * `n` bytes after the address of
/// the record.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadIndexWord {
    /// The smallest position of a bad index (one that names no row) among the indices; all bits set if there was none.
    Position = 0,
    /// The bad index, which names no row. Only CPU kernels store it.
    Index = 1,
    /// The number of rows of the table that the bad index was meant for. Only CPU kernels store it.
    Rows = 2,
    /// The position for which the bad index and the number of rows were stored. Only CPU kernels store it.
    RecordedFor = 3,
}

/// The number of words in a record of a bad index.
pub(crate) const RECORD_WORDS: usize = BadIndexWord::RecordedFor as usize + 1;

/// A lock that is held while several words of a bad-index record are changed. Bad indices are rare, so one lock serves all
/// records.
static RECORDING: Mutex<()> = Mutex::new(());

/// The words of a record of a bad index (an index that names no row).
pub(crate) struct BadIndexRecord<'a> {
    /// The first word of the record. Kernels receive its address in their request.
    pub(crate) position: &'a AtomicU64,
    pub(crate) index: &'a AtomicU64,
    pub(crate) rows: &'a AtomicU64,
    pub(crate) recorded_for: &'a AtomicU64,
}

impl<'a> BadIndexRecord<'a> {
    /// Creates a record from the words that the function `word` returns.
    pub(crate) fn of<E>(word: impl Fn(BadIndexWord) -> Result<&'a AtomicU64, E>) -> Result<Self, E> {
        Ok(Self {
            position: word(BadIndexWord::Position)?,
            index: word(BadIndexWord::Index)?,
            rows: word(BadIndexWord::Rows)?,
            recorded_for: word(BadIndexWord::RecordedFor)?,
        })
    }

    /// Stores a bad index, which names none of `rows` rows, unless a bad index at a smaller position is stored.
    pub(crate) fn store(&self, position: u64, index: i64, rows: u64) {
        if position >= self.position.load(Ordering::Acquire) {
            return;
        }
        let _recording = recording();
        if position < self.position.load(Ordering::Acquire) {
            self.index.store(index.cast_unsigned(), Ordering::Release);
            self.rows.store(rows, Ordering::Release);
            // If the index names a row now, another thread replaced it after the check, so the bad index is unknown.
            let recorded_for = if names_a_row(index, rows) { NO_BAD_INDEX } else { position };
            self.recorded_for.store(recorded_for, Ordering::Release);
            self.position.store(position, Ordering::Release);
        }
    }

    /// Returns the stored bad index, if there is one, and clears the record.
    pub(crate) fn take(&self) -> Option<BadIndex> {
        // Every call reads the record, and it is almost always empty, so check it without the lock first.
        if self.position.load(Ordering::Acquire) == NO_BAD_INDEX {
            return None;
        }
        let _recording = recording();
        let position = self.position.swap(NO_BAD_INDEX, Ordering::AcqRel);
        if position == NO_BAD_INDEX {
            return None;
        }
        let recorded = self.recorded_for.swap(NO_BAD_INDEX, Ordering::AcqRel) == position;
        let known = |word: &AtomicU64| recorded.then(|| word.load(Ordering::Acquire));
        let index = known(self.index).map(u64::cast_signed);
        Some(BadIndex { position, index, rows: known(self.rows) })
    }
}

/// A bad index, which names no row of a table. The index and the number of rows are `None` if they are unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadIndex {
    pub(crate) position: u64,
    pub(crate) index: Option<i64>,
    pub(crate) rows: Option<u64>,
}

/// Returns true if an index names one of `rows` rows.
pub(crate) fn names_a_row(index: i64, rows: u64) -> bool {
    u64::try_from(index).is_ok_and(|index| index < rows)
}

fn recording() -> MutexGuard<'static, ()> {
    // The lock protects no data of its own, so a panic of its holder leaves nothing inconsistent.
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}
