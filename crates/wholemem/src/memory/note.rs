//! The word in which kernels note the first index that names no row.

use std::sync::atomic::Ordering;

use wholemem_hal::{Device, PinnedBuffer, Span};

use crate::{Error, Result};

/// No bad index so far.
const NONE: u64 = u64::MAX;

/// A word of host memory that kernels lower to the smallest position of a bad index, and the processor reads.
#[derive(Debug)]
pub(crate) struct Note {
    word: PinnedBuffer,
}

impl Note {
    /// A clean word.
    pub(crate) fn create(device: &Device) -> Result<Self> {
        let note = Self { word: PinnedBuffer::create(device, size_of::<u64>())? };
        note.swap(NONE)?;
        Ok(note)
    }

    /// What kernels are given.
    pub(crate) fn span(&self) -> Span {
        self.word.all()
    }

    /// The error that was noted, which is forgotten.
    pub(crate) fn take(&self) -> Result<()> {
        match self.swap(NONE)? {
            NONE => Ok(()),
            position => Err(Error::BadIndex { position }),
        }
    }

    fn swap(&self, value: u64) -> Result<u64> {
        // The first word of memory that begins on a page.
        let bytes = self.word.bytes()?;
        let word = bytes.atomic_u64(0).map_err(|cause| wholemem_hal::Error::Failed {
            attempt: wholemem_hal::Attempt::Access { len: size_of::<u64>() },
            cause: cause.into(),
        })?;
        Ok(word.swap(value, Ordering::AcqRel))
    }
}
