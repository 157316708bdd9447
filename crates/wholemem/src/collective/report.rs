//! The report of a lane (a sequence of collective calls): words through which the host aborts kernels, and kernels report why
//! they were aborted.
//!
//! The words are defined in `abi`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use wholemem_comm::{Bootstrap, Error as CommError, Rank};
use wholemem_hal::{Attempt, Device, PinnedBuffer, Span};

use super::terms::Terms;
use crate::Result;
use crate::abi::{Cause, ReportWord, TERMS_WORDS, tag_of};

/// The report words of one lane (a sequence of collective calls) on one rank.
#[derive(Debug, Clone)]
pub(super) struct LaneReport {
    words: PinnedBuffer,
    ranks: u32,
}

impl LaneReport {
    pub(super) fn create(device: &Device, ranks: u32) -> Result<Self> {
        let len = (ReportWord::Missing as usize + (ranks as usize).div_ceil(64)) * 8;
        Ok(Self { words: PinnedBuffer::create(device, len)?, ranks })
    }

    /// The memory of the report words, as an operand of kernels.
    pub(super) fn span(&self) -> Span {
        self.words.all()
    }

    /// Requests that this rank's collective kernels abort because of `error`.
    pub(super) fn abort(&self, own: Rank, error: &CommError) -> Result<()> {
        let cause = match error {
            CommError::PeerLeft { rank } => Cause::Left.word(*rank),
            CommError::Closed => Cause::Left.word(own),
            CommError::PeerLost { rank } => Cause::Lost.word(*rank),
            CommError::Aborted { by } => Cause::Aborted.word(*by),
            CommError::Poisoned { missing } => {
                Cause::TimedOut.word(missing.first().copied().unwrap_or(Rank(0)))
            }
            _ => Cause::Aborted.word(Rank(0)),
        };
        // If the abort word already has a cause, it is not overwritten: only the first cause is reported.
        self.with(ReportWord::Abort, |word| {
            let _ = word.compare_exchange(0, cause, Ordering::SeqCst, Ordering::SeqCst);
        })
    }

    /// Returns true if the thread that runs a collective call of this CPU rank sleeps or is about to sleep.
    pub(super) fn is_asleep(&self) -> bool {
        self.with(ReportWord::Asleep, |word| word.load(Ordering::SeqCst)).is_ok_and(|asleep| asleep != 0)
    }

    /// Returns the error of an aborted collective kernel, if one has been aborted.
    pub(super) fn check(&self, comm: &Bootstrap, timeout: Duration) -> Result<()> {
        if self.with(ReportWord::Aborted, |word| word.load(Ordering::Acquire))? == 0 {
            return Ok(());
        }
        let cause = self.with(ReportWord::Cause, |word| word.load(Ordering::Relaxed))?;
        let error = match Cause::of_word(cause) {
            Some((Cause::TimedOut, rank)) => {
                CommError::Timeout { missing: self.missing(rank)?, timeout, joining: false }
            }
            Some((Cause::Lost, rank)) => CommError::PeerLost { rank },
            Some((Cause::Left, rank)) => CommError::PeerLeft { rank },
            Some((Cause::Aborted, rank)) => CommError::Aborted { by: rank },
            // A disagreement takes precedence over errors of the bootstrap group: a rank that has received the disagreement may
            // leave the group before the others have received it.
            Some((Cause::Disagreed, rank)) => return Err(self.disagreement(rank)?.into()),
            None => CommError::Protocol { rank: comm.rank(), what: "the cause in its report is malformed" },
        };
        // An error of the bootstrap group takes precedence over the kernel's error, because it is the same on all remaining
        // ranks.
        comm.check()?;
        Err(error.into())
    }

    /// Returns the error for a call in which `rank` made another call than this rank.
    fn disagreement(&self, rank: Rank) -> Result<CommError> {
        let number = self.with(ReportWord::Call, |word| word.load(Ordering::Relaxed))?;
        let terms = |first: ReportWord| {
            let mut words = [0; TERMS_WORDS as usize];
            let mut is_of_call = true;
            for (at, value) in words.iter_mut().enumerate() {
                let word = self.with_index(first as usize + at, |word| word.load(Ordering::Relaxed))?;
                is_of_call &= word >> 32 == tag_of(number);
                *value = u32::try_from(word & 0xffff_ffff).expect("masked to 32 bits");
            }
            Ok::<_, crate::Error>(describe(is_of_call.then_some(words)))
        };
        Ok(CommError::RanksDisagree {
            rank,
            here: terms(ReportWord::OwnTerms)?,
            there: terms(ReportWord::PeerTerms)?,
        })
    }

    fn missing(&self, rank_at_fault: Rank) -> Result<Vec<Rank>> {
        let mut missing = Vec::new();
        for rank in 0..self.ranks {
            let bits = self.with_index(ReportWord::Missing as usize + rank as usize / 64, |word| {
                word.load(Ordering::Relaxed)
            })?;
            if bits >> (rank % 64) & 1 == 1 {
                missing.push(Rank(rank));
            }
        }
        Ok(if missing.is_empty() { vec![rank_at_fault] } else { missing })
    }

    fn with<T>(&self, word: ReportWord, access: impl FnOnce(&AtomicU64) -> T) -> Result<T> {
        self.with_index(word as usize, access)
    }

    fn with_index<T>(&self, index: usize, access: impl FnOnce(&AtomicU64) -> T) -> Result<T> {
        let bytes = self.words.bytes()?;
        // The report's memory begins at a page boundary, so its words are aligned.
        let word = bytes.atomic_u64(index * 8).map_err(|cause| wholemem_hal::Error::Failed {
            attempt: Attempt::Access { len: size_of::<u64>() },
            cause: cause.into(),
        })?;
        Ok(access(word))
    }
}

/// Describes the call that has the given terms: a collective call, or a kernel of a user, whose terms are zero. The terms are `None`
/// if they were not published.
fn describe(words: Option<[u32; TERMS_WORDS as usize]>) -> String {
    let Some(words) = words else { return "another call".to_owned() };
    match Terms::decode(words) {
        Some(terms) => terms.to_string(),
        None if words.iter().all(|word| *word == 0) => "a kernel of the user".to_owned(),
        None => "an unknown call".to_owned(),
    }
}
