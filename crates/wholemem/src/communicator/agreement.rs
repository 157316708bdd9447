//! Agreement among ranks: a step of a collective call succeeds on every rank, or fails on every rank with the same error.

use std::error::Error as _;
use std::fmt::Write as _;

use wholemem_comm::{Bootstrap, Rank, VoteResult};

use crate::error::{Error, Result};

/// Returns this rank's outcome if the step succeeded on every rank, and otherwise the error of the lowest rank on which it failed.
/// Collective.
pub(crate) fn agree<T>(comm: &Bootstrap, outcome: Result<T>) -> Result<T> {
    let vote = outcome.as_ref().map(drop).map_err(to_text);
    match comm.agree(vote.as_ref().map(drop).map_err(String::as_str))? {
        VoteResult::Agreed => outcome,
        VoteResult::Refused { rank, reason } => Err(from_text(rank, &reason)),
    }
}

/// The arguments with which a rank enters a collective call.
#[derive(Debug, Clone)]
pub(crate) struct CallTerms {
    /// Values of this rank alone: the same number of words on all ranks.
    pub(crate) own: Vec<u64>,
    /// Arguments that must be equal on all ranks.
    pub(crate) same: Vec<u8>,
}

/// Exchanges the terms of a collective call and returns every rank's own values. If a rank enters with an error, all ranks
/// return the error of the lowest such rank; if a rank makes another call or its `same` differs, [`Error::Differs`].
/// Collective.
pub(crate) fn exchange_terms(
    comm: &Bootstrap,
    call: &str,
    terms: Result<CallTerms>,
) -> Result<Vec<Vec<u64>>> {
    const FINE: u8 = 0;
    const FAILED: u8 = 1;
    let message = match &terms {
        Ok(CallTerms { own, same }) => [&[FINE][..], &bytes_of(own), call.as_bytes(), same].concat(),
        Err(error) => [&[FAILED], to_text(error).as_bytes()].concat(),
    };
    let all = comm.all_gather(&message)?;
    let mut owns = Vec::new();
    let (mut common, mut differs) = (None, None);
    for (rank, message) in (0..).map(Rank).zip(&all) {
        match message.split_first() {
            Some((&FINE, words)) => {
                let own_len = terms.as_ref().map_or(0, |terms| terms.own.len() * 8);
                let Some((own, same)) = words.split_at_checked(own_len) else {
                    differs.get_or_insert(Error::Differs { rank });
                    continue;
                };
                owns.push(own.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect());
                if *common.get_or_insert(same) != same {
                    differs.get_or_insert(Error::Differs { rank });
                }
            }
            Some((_, text)) => return Err(from_text(rank, &String::from_utf8_lossy(text))),
            None => {
                differs.get_or_insert(Error::Differs { rank });
            }
        }
    }
    differs.map_or(Ok(owns), Err)
}

/// Encodes words for the wire.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Encodes an error for the wire: its code, its hint if it has one, its message and the messages of its sources.
pub(crate) fn to_text(error: &Error) -> String {
    let mut text = format!("{} {}\n{error}", error.code(), error.hint().unwrap_or_default());
    // The source of a transparent error comes after the message that the error took from it.
    let mut source = error.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

/// Decodes words that a rank has sent.
pub(crate) fn words_of<const COUNT: usize>(rank: Rank, bytes: &[u8]) -> Result<[u64; COUNT]> {
    let words = match bytes.as_chunks() {
        (words, []) => <[[u8; 8]; COUNT]>::try_from(words).ok(),
        _ => None,
    };
    let what = "it sends another number of words";
    let words = words.ok_or(wholemem_comm::Error::Protocol { rank, what })?;
    Ok(words.map(u64::from_le_bytes))
}

/// Decodes the error of a rank.
pub(crate) fn from_text(rank: Rank, text: &str) -> Error {
    let decode = || {
        let (about, why) = text.split_once('\n')?;
        let (code, hint) = about.split_once(' ')?;
        let hint = (!hint.is_empty()).then(|| hint.to_owned());
        Some(Error::OnRank { rank, code: code.parse().ok()?, why: why.to_owned(), hint })
    };
    let what = "the error that it sends has another form";
    decode().unwrap_or(Error::Comm(wholemem_comm::Error::Protocol { rank, what }))
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Attempt, BackendError};

    use super::*;

    #[test]
    fn an_error_keeps_its_number_and_its_reason_on_its_way() {
        let cause = BackendError::OutOfMemory { available: 1 << 20 };
        let error = Error::Hal(wholemem_hal::Error::Failed { attempt: Attempt::Pin { len: 2 << 20 }, cause });
        let told = from_text(Rank(3), &to_text(&error));
        let why = "cannot pin 2 MiB of host memory: only 1 MiB of memory are available".to_owned();
        assert_eq!(told, Error::OnRank { rank: Rank(3), code: error.code(), why, hint: None });
    }

    #[test]
    fn a_hint_is_told_too() {
        let (input, output, len) = (0, 8, 16);
        let error = Error::Overlap { input, output, len };
        let told = from_text(Rank(1), &to_text(&error));
        assert!(told.hint().is_some() && told.hint() == error.hint(), "{told:?}");
        assert_eq!(told.to_string(), format!("rank 1 failed: {error}"));
    }

    #[test]
    fn what_a_rank_sends_in_another_form_is_an_error_of_that_rank() {
        let protocol = |what| Error::Comm(wholemem_comm::Error::Protocol { rank: Rank(2), what });
        for text in ["", "1005", "1005 \u{0}", "five \nwhy"] {
            assert_eq!(
                from_text(Rank(2), text),
                protocol("the error that it sends has another form"),
                "{text}"
            );
        }
        assert_eq!(words_of(Rank(2), &bytes_of(&[7, 9])), Ok([7, 9]));
        for len in [0, 8, 15, 24] {
            let words = words_of::<2>(Rank(2), &vec![0; len]);
            assert_eq!(words, Err(protocol("it sends another number of words")), "{len}");
        }
    }

    #[test]
    fn all_ranks_hear_of_the_lowest_that_failed() {
        let ranks = Bootstrap::local(3).unwrap();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let outcome =
                |comm: &Bootstrap| if comm.rank() == Rank(0) { Ok(7) } else { Err(Error::EmptyRow) };
            let threads: Vec<_> =
                ranks.iter().map(|comm| scope.spawn(move || agree(comm, outcome(comm)))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let told =
            Error::OnRank { rank: Rank(1), code: 1005, why: "a row has no bytes".to_owned(), hint: None };
        assert_eq!(outcomes, vec![Err(told); 3]);
    }
}
