//! The word in which kernels note the first index that names no row.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use wholemem_hal::{Device, PinnedBuffer, Span};

use crate::{Error, Result};

/// No bad index so far.
const NONE: u64 = u64::MAX;

/// A word of host memory that kernels lower to the smallest position of a bad index, and the processor reads.
#[derive(Debug)]
pub(crate) struct Note {
    word: PinnedBuffer,
    span: Span,
}

impl Note {
    /// A clean word.
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let word = PinnedBuffer::create(device, size_of::<u64>())?;
        let note = Self { span: word.all(), word };
        note.word()?.store(NONE, Ordering::Release);
        Ok(note)
    }

    /// What kernels are given.
    pub(crate) fn span(&self) -> &Span {
        &self.span
    }

    /// The error that was noted, which is forgotten.
    pub(crate) fn take(&self) -> Result<()> {
        let word = self.word()?;
        // A look first: it is nearly always clean, and every call asks.
        if word.load(Ordering::Acquire) == NONE {
            return Ok(());
        }
        match word.swap(NONE, Ordering::AcqRel) {
            NONE => Ok(()),
            position => Err(Error::BadIndex { position }),
        }
    }

    fn word(&self) -> Result<&AtomicU64> {
        // The first word of memory that begins on a page.
        let word = self.word.bytes()?.atomic_u64(0).map_err(|cause| wholemem_hal::Error::Failed {
            attempt: wholemem_hal::Attempt::Access { len: size_of::<u64>() },
            cause: cause.into(),
        })?;
        Ok(word)
    }
}

/// Words for calls that wait for their own outcome: one for each of those that wait at the same time.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Clean, and nobody's.
    spare: Mutex<Vec<Note>>,
}

impl Notes {
    /// Calls `work`, which waits for what it has enqueued, with a word of its own, and answers what was noted there.
    pub(super) fn with(&self, device: &Device, work: impl FnOnce(&Note) -> Result<()>) -> Result<()> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let note = spare.map_or_else(|| Note::create(device), Ok)?;
        // After a failure nobody knows whether a kernel still writes it: it is not used again.
        work(&note)?;
        let noted = note.take();
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(note);
        noted
    }
}
