//! The record in which kernels store the first index that names no row.
//!
//! GPU kernels only lower `position` (atomic minimum). CPU kernels also store the index and the number of rows, for the position
//! in `recorded for`; if that differs from `position`, the index is unknown.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The position if there was no bad index.
pub(crate) const NO_BAD_INDEX: u64 = u64::MAX;

/// A word of a record: a `u64`, eight times its number behind the record's address.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadIndexWord {
    /// The smallest position of a bad index; all bits set if there was none.
    Position = 0,
    /// The index. CPU kernels only.
    Index = 1,
    /// The number of rows of the table. CPU kernels only.
    Rows = 2,
    /// The position for which the index and the number of rows were stored. CPU kernels only.
    RecordedFor = 3,
}

/// The number of words of a record.
pub(crate) const RECORD_WORDS: usize = BadIndexWord::RecordedFor as usize + 1;

/// Held while the words of a record are changed together. Bad indices are rare, so one lock serves all records.
static RECORDING: Mutex<()> = Mutex::new(());

/// The words of a record.
pub(crate) struct BadIndexRecord<'a> {
    /// The first word: its address is in the request.
    pub(crate) position: &'a AtomicU64,
    pub(crate) index: &'a AtomicU64,
    pub(crate) rows: &'a AtomicU64,
    pub(crate) recorded_for: &'a AtomicU64,
}

impl<'a> BadIndexRecord<'a> {
    /// The record whose words `word` gives.
    pub(crate) fn of<E>(word: impl Fn(BadIndexWord) -> Result<&'a AtomicU64, E>) -> Result<Self, E> {
        Ok(Self {
            position: word(BadIndexWord::Position)?,
            index: word(BadIndexWord::Index)?,
            rows: word(BadIndexWord::Rows)?,
            recorded_for: word(BadIndexWord::RecordedFor)?,
        })
    }

    /// Stores an index that names none of `rows` rows, unless one at a smaller position is stored.
    pub(crate) fn store(&self, position: u64, index: i64, rows: u64) {
        if position >= self.position.load(Ordering::Acquire) {
            return;
        }
        let _recording = recording();
        if position < self.position.load(Ordering::Acquire) {
            self.index.store(index.cast_unsigned(), Ordering::Release);
            self.rows.store(rows, Ordering::Release);
            // If the index names a row now, another writer replaced it after it was checked: it is unknown.
            let recorded_for = if names_a_row(index, rows) { NO_BAD_INDEX } else { position };
            self.recorded_for.store(recorded_for, Ordering::Release);
            self.position.store(position, Ordering::Release);
        }
    }

    /// Takes the stored position and clears the record.
    pub(crate) fn take(&self) -> Option<BadIndex> {
        // Almost always clean, and every call reads it: check without the lock first.
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

/// An index that names no row; `None` for what is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadIndex {
    pub(crate) position: u64,
    pub(crate) index: Option<i64>,
    pub(crate) rows: Option<u64>,
}

/// Whether an index names one of `rows` rows.
pub(crate) fn names_a_row(index: i64, rows: u64) -> bool {
    u64::try_from(index).is_ok_and(|index| index < rows)
}

fn recording() -> MutexGuard<'static, ()> {
    // The lock protects no data of its own, so a panic of a holder leaves nothing inconsistent.
    RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
}
