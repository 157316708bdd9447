//! Steps that all ranks take together: they succeed on all of them, or fail on all of them with the same error.

use std::error::Error as _;
use std::fmt::Write as _;

use wholemem_comm::{Bootstrap, Rank, Verdict};

use crate::error::{Error, Result};

/// What this rank's step came to, if every rank's succeeded; otherwise the error of the lowest rank whose did not.
/// Collective.
pub(crate) fn agree<T>(comm: &Bootstrap, outcome: Result<T>) -> Result<T> {
    let vote = outcome.as_ref().map(drop).map_err(to_text);
    match comm.agree(vote.as_ref().map(drop).map_err(String::as_str))? {
        Verdict::Agreed => outcome,
        Verdict::Refused { rank, why } => Err(from_text(rank, &why)),
    }
}

/// What a rank brings to a call that all ranks make together.
#[derive(Debug, Clone)]
pub(crate) struct Hello {
    /// What is its own: as many words on all ranks.
    pub(crate) own: Vec<u64>,
    /// What is the same on all ranks, or they do not mean the same call.
    pub(crate) same: Vec<u8>,
}

/// What is each rank's own, if all ranks have something to bring to the same call, and mean the same; otherwise the error of the
/// lowest rank that has none, or [`Error::Differs`]. Collective.
pub(crate) fn meet(comm: &Bootstrap, call: &str, hello: Result<Hello>) -> Result<Vec<Vec<u64>>> {
    const FINE: u8 = 0;
    const FAILED: u8 = 1;
    let said = match &hello {
        Ok(Hello { own, same }) => [&[FINE][..], &bytes_of(own), call.as_bytes(), same].concat(),
        Err(error) => [&[FAILED], to_text(error).as_bytes()].concat(),
    };
    let all = comm.all_gather(&said)?;
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    let mut owns = Vec::new();
    let (mut common, mut differs) = (None, None);
    for (rank, said) in (0..).map(Rank).zip(&all) {
        match said.split_first() {
            Some((&FINE, words)) => {
                let own_len = hello.as_ref().map_or(0, |hello| hello.own.len() * 8);
                let (own, same) = words.split_at_checked(own_len).unwrap_or((&[], words));
                owns.push(own.chunks_exact(8).map(word).collect());
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

/// Words as they travel.
pub(crate) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// An error as it travels: its number, its hint, if there is one, and its words with all that is behind them.
pub(crate) fn to_text(error: &Error) -> String {
    let mut text = format!("{} {}\n{error}", error.code(), error.hint().unwrap_or_default());
    // Those that are transparent have said their own words already.
    let mut source = error.source();
    while let Some(error) = source {
        let _ = write!(text, ": {error}");
        source = error.source();
    }
    text
}

/// The error that a rank has told of.
pub(crate) fn from_text(rank: Rank, text: &str) -> Error {
    let (about, why) = text.split_once('\n').unwrap_or(("", text));
    let (code, hint) = about.split_once(' ').unwrap_or_default();
    let hint = (!hint.is_empty()).then(|| hint.to_owned());
    Error::OnRank { rank, code: code.parse().unwrap_or_default(), why: why.to_owned(), hint }
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Attempt, Cause};

    use super::*;

    #[test]
    fn an_error_keeps_its_number_and_its_reason_on_its_way() {
        let cause = Cause::OutOfMemory { available: 1 << 20 };
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
