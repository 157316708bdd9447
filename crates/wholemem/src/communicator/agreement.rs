//! Agreement among ranks: a step of a collective call succeeds on every rank, or fails on every rank with the same error.

use std::error::Error as _;
use std::fmt::Write as _;

use wholemem_comm::{Bootstrap, Rank, VoteResult};

use crate::error::{Error, Result};

/// Returns `outcome` if the step of a collective call succeeded on every rank, and otherwise the error of the lowest rank that
/// failed. Collective.
pub(crate) fn agree<T>(comm: &Bootstrap, outcome: Result<T>) -> Result<T> {
    let vote = outcome.as_ref().map(drop).map_err(to_text);
    match comm.agree(vote.as_ref().map(drop).map_err(String::as_str))? {
        VoteResult::Agreed => outcome,
        VoteResult::Refused { rank, reason } => Err(from_text(rank, &reason)),
    }
}

/// The arguments of a collective call that a rank sends to all ranks.
#[derive(Debug, Clone)]
pub(crate) struct CallTerms {
    /// Values of this rank, which may differ between ranks. All ranks send the same number of words.
    pub(crate) own: Vec<u64>,
    /// Encoded arguments of the collective call that must be equal on all ranks.
    pub(crate) same: Vec<u8>,
}

/// Exchanges the arguments of a collective call and returns the `own` values of every rank. If a rank passes an error, all ranks
/// return the error of the lowest such rank. If a rank makes another call or passes another `same`, all ranks return
/// [`Error::RanksDisagree`]. Collective.
pub(crate) fn exchange_terms(
    comm: &Bootstrap,
    call: &str,
    terms: Result<CallTerms>,
) -> Result<Vec<Vec<u64>>> {
    const SUCCEEDED: u8 = 0;
    const FAILED: u8 = 1;
    let message = match &terms {
        Ok(CallTerms { own, same }) => [&[SUCCEEDED][..], &bytes_of(own), call.as_bytes(), same].concat(),
        Err(error) => [&[FAILED], to_text(error).as_bytes()].concat(),
    };
    let all = comm.all_gather(&message)?;
    let mut owns = Vec::new();
    let (mut common, mut differs) = (None, None);
    for (rank, message) in (0..).map(Rank).zip(&all) {
        match message.split_first() {
            Some((&SUCCEEDED, words)) => {
                let own_len = terms.as_ref().map_or(0, |terms| terms.own.len() * 8);
                let Some((own, same)) = words.split_at_checked(own_len) else {
                    differs.get_or_insert(Error::RanksDisagree { rank });
                    continue;
                };
                owns.push(own.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect());
                if *common.get_or_insert(same) != same {
                    differs.get_or_insert(Error::RanksDisagree { rank });
                }
            }
            Some((_, text)) => return Err(from_text(rank, &String::from_utf8_lossy(text))),
            None => {
                differs.get_or_insert(Error::RanksDisagree { rank });
            }
        }
    }
    differs.map_or(Ok(owns), Err)
}

/// Encodes words as bytes for a message.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Encodes an error as text for a message to other ranks: its code, its hint if it has one, its text and the texts of its
/// sources.
pub(crate) fn to_text(error: &Error) -> String {
    let mut text = format!("{} {}\n{error}", error.code(), error.hint().unwrap_or_default());
    // The text of a transparent error is the text of its source, which must not be repeated, so the loop begins after that
    // source.
    let mut source = error.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

/// Decodes a message of `rank` that must have exactly `COUNT` words.
pub(crate) fn words_of<const COUNT: usize>(rank: Rank, bytes: &[u8]) -> Result<[u64; COUNT]> {
    let words = match bytes.as_chunks() {
        (words, []) => <[[u8; 8]; COUNT]>::try_from(words).ok(),
        _ => None,
    };
    let what = "its message has an invalid number of words";
    let words = words.ok_or(wholemem_comm::Error::Protocol { rank, what })?;
    Ok(words.map(u64::from_le_bytes))
}

/// Decodes the error in a message that `rank` sent.
pub(crate) fn from_text(rank: Rank, text: &str) -> Error {
    let decode = || {
        let (about, reason) = text.split_once('\n')?;
        let (code, hint) = about.split_once(' ')?;
        let hint = (!hint.is_empty()).then(|| hint.to_owned());
        Some(Error::OnRank { rank, code: code.parse().ok()?, reason: reason.to_owned(), hint })
    };
    let what = "the error in its message is malformed";
    decode().unwrap_or(Error::Comm(wholemem_comm::Error::Protocol { rank, what }))
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Attempt, BackendError};

    use super::*;

    #[test]
    fn the_code_and_message_of_an_error_are_transmitted() {
        let cause = BackendError::OutOfMemory { available: 1 << 20 };
        let error = Error::Hal(wholemem_hal::Error::Failed { attempt: Attempt::Pin { len: 2 << 20 }, cause });
        let received = from_text(Rank(3), &to_text(&error));
        let reason = "cannot pin 2 MiB of host memory: only 1 MiB of memory are available".to_owned();
        assert_eq!(received, Error::OnRank { rank: Rank(3), code: error.code(), reason, hint: None });
    }

    #[test]
    fn the_hint_of_an_error_is_transmitted() {
        let (input, output, len) = (0, 8, 16);
        let error = Error::Overlap { input, output, len };
        let received = from_text(Rank(1), &to_text(&error));
        assert!(received.hint().is_some() && received.hint() == error.hint(), "{received:?}");
        assert_eq!(received.to_string(), format!("rank 1 failed: {error}"));
    }

    #[test]
    fn a_malformed_message_is_an_error_that_names_the_sender() {
        let protocol = |what| Error::Comm(wholemem_comm::Error::Protocol { rank: Rank(2), what });
        for text in ["", "1005", "1005 \u{0}", "five \nwhy"] {
            assert_eq!(from_text(Rank(2), text), protocol("the error in its message is malformed"), "{text}");
        }
        assert_eq!(words_of(Rank(2), &bytes_of(&[7, 9])), Ok([7, 9]));
        for len in [0, 8, 15, 24] {
            let words = words_of::<2>(Rank(2), &vec![0; len]);
            assert_eq!(words, Err(protocol("its message has an invalid number of words")), "{len}");
        }
    }

    #[test]
    fn all_ranks_return_the_error_of_the_lowest_rank_that_failed() {
        let ranks = Bootstrap::local(3).unwrap();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let outcome =
                |comm: &Bootstrap| if comm.rank() == Rank(0) { Ok(7) } else { Err(Error::EmptyRow) };
            let threads: Vec<_> =
                ranks.iter().map(|comm| scope.spawn(move || agree(comm, outcome(comm)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let received = Error::OnRank {
            rank: Rank(1),
            code: 1005,
            reason: "the length of a row is 0 bytes".to_owned(),
            hint: None,
        };
        assert_eq!(outcomes, vec![Err(received); 3]);
    }
}
