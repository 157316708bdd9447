//! The report of a lane: how the host aborts its kernels, and why a kernel has aborted.
//!
//! The words are defined in `abi`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error as CommError, Rank};
use wholemem_hal::{Attempt, Device, PinnedBuffer, Span};

use crate::Result;
use crate::abi::{ABORT, ABORTED, ASLEEP, CAUSE, GIVEN_UP, LEFT, LOST, MISSED, MISSING, cause};

/// The words of one lane on one rank.
#[derive(Debug, Clone)]
pub(super) struct Report {
    words: PinnedBuffer,
    ranks: u32,
}

impl Report {
    pub(super) fn create(device: &Device, ranks: u32) -> Result<Self> {
        let len = (MISSING + (ranks as usize).div_ceil(64)) * 8;
        Ok(Self { words: PinnedBuffer::create(device, len)?, ranks })
    }

    /// The memory of the report.
    pub(super) fn span(&self) -> Span {
        self.words.all()
    }

    /// Requests that this rank's kernels abort.
    pub(super) fn abort(&self, own: Rank, error: &CommError) -> Result<()> {
        let cause = match error {
            CommError::PeerLeft { rank } => cause(LEFT, *rank),
            CommError::Closed => cause(LEFT, own),
            CommError::PeerLost { rank } => cause(LOST, *rank),
            CommError::Aborted { by } => cause(ABORTED, *by),
            CommError::Poisoned { missing } => cause(MISSED, missing.first().copied().unwrap_or(Rank(0))),
            _ => cause(ABORTED, Rank(0)),
        };
        // Only the first cause is kept.
        self.with(ABORT, |word| {
            let _ = word.compare_exchange(0, cause, Ordering::SeqCst, Ordering::SeqCst);
        })
    }

    /// Whether this rank's thread sleeps or is about to.
    pub(super) fn is_asleep(&self) -> bool {
        self.with(ASLEEP, |word| word.load(Ordering::SeqCst)).is_ok_and(|asleep| asleep != 0)
    }

    /// The error of an aborted kernel, if one has aborted.
    pub(super) fn check(&self, comm: &Bootstrap, timeout: Duration) -> Result<()> {
        if self.with(GIVEN_UP, |word| word.load(Ordering::Acquire))? == 0 {
            return Ok(());
        }
        let cause = self.with(CAUSE, |word| word.load(Ordering::Relaxed))?;
        let error = match blamed(cause) {
            Some((MISSED, rank)) => {
                CommError::Timeout { missing: self.missing(rank)?, timeout, joining: false }
            }
            Some((LOST, rank)) => CommError::PeerLost { rank },
            Some((LEFT, rank)) => CommError::PeerLeft { rank },
            Some((ABORTED, by)) => CommError::Aborted { by },
            _ => CommError::Protocol { rank: comm.rank(), what: "the cause in its report has another form" },
        };
        // An error of the bootstrap group takes precedence: it is the same on all remaining ranks.
        comm.check()?;
        Err(error.into())
    }

    fn missing(&self, blamed: Rank) -> Result<Vec<Rank>> {
        let mut missing = Vec::new();
        for rank in 0..self.ranks {
            let bits = self.with(MISSING + rank as usize / 64, |word| word.load(Ordering::Relaxed))?;
            if bits >> (rank % 64) & 1 == 1 {
                missing.push(Rank(rank));
            }
        }
        Ok(if missing.is_empty() { vec![blamed] } else { missing })
    }

    fn with<T>(&self, index: usize, use_it: impl FnOnce(&AtomicU64) -> T) -> Result<T> {
        let bytes = self.words.bytes()?;
        // The buffer begins on a page, so its words are aligned.
        let word = bytes.atomic_u64(index * 8).map_err(|cause| wholemem_hal::Error::Failed {
            attempt: Attempt::Access { len: size_of::<u64>() },
            cause: cause.into(),
        })?;
        Ok(use_it(word))
    }
}

/// Decodes a [cause](cause): what happened, and the rank that caused it.
fn blamed(cause: u64) -> Option<(u64, Rank)> {
    let rank = u32::try_from(cause & 0xffff_ffff).expect("masked to 32 bits").checked_sub(1)?;
    Some((cause >> 32, Rank(rank)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_decoded_as_it_was_encoded() {
        for rank in [Rank(0), Rank(7), Rank(u32::MAX - 1)] {
            assert_eq!(blamed(cause(LOST, rank)), Some((LOST, rank)));
        }
        assert_eq!(blamed(LOST << 32), None, "a cause without a rank");
    }
}
