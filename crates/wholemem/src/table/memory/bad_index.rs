//! Records of bad indices (indices that name no row) in host memory, which kernels write and the host reads.
//!
//! Calls that do not wait share one record of the memory. A call that waits uses a separate record, and reads the index at the
//! recorded position from its indices. So only the index of a GPU call that did not wait is unknown.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use wholemem_hal::{Device, PinnedBuffer, Span};

use crate::abi::{BadIndex, BadIndexRecord, NO_BAD_INDEX, RECORD_WORDS};
use crate::{Error, Result};

/// A record of the first bad index (an index that names no row), in pinned host memory.
#[derive(Debug)]
pub(crate) struct BadIndexFlag {
    words: PinnedBuffer,
    span: Span,
    rows: RowsOfCalls,
}

impl BadIndexFlag {
    /// Creates an empty record of bad indices.
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let words = PinnedBuffer::create(device, RECORD_WORDS * size_of::<u64>())?;
        let flag = Self { span: words.all(), words, rows: RowsOfCalls::default() };
        let record = flag.record()?;
        record.recorded_for.store(NO_BAD_INDEX, Ordering::Release);
        record.position.store(NO_BAD_INDEX, Ordering::Release);
        Ok(flag)
    }

    /// Returns the memory of the bad-index record, for a call on a table with `rows` rows.
    pub(crate) fn span_for(&self, rows: u64) -> &Span {
        self.rows.add(rows);
        &self.span
    }

    /// Returns the error for the recorded bad index, if there is one, and clears the record.
    pub(crate) fn take(&self) -> Result<()> {
        match self.record()?.take() {
            None => Ok(()),
            Some(BadIndex { position, index, rows }) => {
                Err(Error::BadIndex { position, index, rows: rows.or_else(|| self.rows.only()) })
            }
        }
    }

    fn record(&self) -> Result<BadIndexRecord<'_>> {
        let bytes = self.words.bytes()?;
        // The record's memory begins at a page boundary, so its words are aligned.
        let record = BadIndexRecord::of(|word| bytes.atomic_u64(word as usize * size_of::<u64>()));
        record.map_err(|cause| {
            let attempt = wholemem_hal::Attempt::Access { len: size_of::<u64>() };
            wholemem_hal::Error::Failed { attempt, cause: cause.into() }.into()
        })
    }
}

/// The number of rows of the tables whose calls used a bad-index record. Views of one memory share the record and can have
/// different numbers of rows.
#[derive(Debug)]
struct RowsOfCalls(AtomicU64);

impl RowsOfCalls {
    const NO_CALL: u64 = u64::MAX;
    /// Means that calls used tables with different numbers of rows. No table has this number of rows, because the maximum is 2^63
    /// - 1.
    const SEVERAL: u64 = u64::MAX - 1;

    fn add(&self, rows: u64) {
        if self.0.load(Ordering::Relaxed) == rows {
            return;
        }
        let exchange = self.0.compare_exchange(Self::NO_CALL, rows, Ordering::Relaxed, Ordering::Relaxed);
        if exchange.is_err_and(|others| others != rows) {
            self.0.store(Self::SEVERAL, Ordering::Relaxed);
        }
    }

    /// Returns the number of rows, if it was the same for all calls that used the record.
    fn only(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|rows| *rows < Self::SEVERAL)
    }
}

impl Default for RowsOfCalls {
    fn default() -> Self {
        Self(AtomicU64::new(Self::NO_CALL))
    }
}

/// The bad-index records of calls that wait: one for each concurrent call.
#[derive(Debug, Default)]
pub(super) struct BadIndexFlags {
    /// Empty records of bad indices that no call uses.
    spare: Mutex<Vec<BadIndexFlag>>,
}

impl BadIndexFlags {
    /// Calls `work` with a bad-index record of its own, and returns the recorded error. `work` waits for the calls that it
    /// enqueues.
    pub(super) fn with(&self, device: &Device, work: impl FnOnce(&BadIndexFlag) -> Result<()>) -> Result<()> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let flag = spare.map_or_else(|| BadIndexFlag::create(device), Ok)?;
        // If `work` fails, a kernel may still write the record, so the record is not reused.
        work(&flag)?;
        let outcome = flag.take();
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(flag);
        outcome
    }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    fn flag() -> BadIndexFlag {
        BadIndexFlag::create(&Backend::host(HostConfig::default()).unwrap().device(0).unwrap()).unwrap()
    }

    #[test]
    fn the_index_belongs_to_the_smallest_position() {
        let flag = flag();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let flag = &flag;
                scope.spawn(move || {
                    for position in (0..500).rev() {
                        let position = 4 * position + thread;
                        flag.record().unwrap().store(position, -1 - i64::try_from(position).unwrap(), 7);
                    }
                });
            }
        });
        assert_eq!(flag.take(), Err(Error::BadIndex { position: 0, index: Some(-1), rows: Some(7) }));
        assert_eq!(flag.take(), Ok(()));
    }

    /// A GPU kernel stores only the position of a bad index, not the index.
    #[test]
    fn an_index_that_was_not_recorded_is_unknown() {
        let flag = flag();
        flag.record().unwrap().store(9, -5, 7);
        flag.record().unwrap().position.fetch_min(3, Ordering::AcqRel);
        assert_eq!(flag.take(), Err(Error::BadIndex { position: 3, index: None, rows: None }));
        flag.record().unwrap().position.fetch_min(9, Ordering::AcqRel);
        assert_eq!(flag.take(), Err(Error::BadIndex { position: 9, index: None, rows: None }));
        flag.record().unwrap().store(2, 6, 7);
        assert_eq!(flag.take(), Err(Error::BadIndex { position: 2, index: None, rows: None }), "row 6 of 7");
    }

    #[test]
    fn the_number_of_rows_is_known_if_all_calls_have_the_same() {
        let flag = flag();
        let bad = |rows| Err(Error::BadIndex { position: 3, index: None, rows });
        let take = || {
            flag.record().unwrap().position.fetch_min(3, Ordering::AcqRel);
            flag.take()
        };
        flag.span_for(10);
        flag.span_for(10);
        assert_eq!(take(), bad(Some(10)));
        flag.span_for(4);
        flag.span_for(10);
        assert_eq!(take(), bad(None));
    }
}
