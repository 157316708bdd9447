//! Licence expressions as package manifests write them, and whether we may choose a licence that fits.
//!
//! `OR` lets us choose, `AND` binds us to both, `WITH` belongs to the licence before it. The old `/` means `OR`.
//! What it will not do: judge `+` or unknown licences. A name that is not on the list is simply not on the list.

use std::iter::Peekable;

/// The expression is not one.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Something other than what the grammar asks for stands here.
    Unexpected { found: String, wanted: &'static str },
    /// The expression stops where the grammar asks for more.
    Ended { wanted: &'static str },
}

impl std::fmt::Display for Malformed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unexpected { found, wanted } => write!(f, "found `{found}` instead of {wanted}"),
            Self::Ended { wanted } => write!(f, "ends where {wanted} should stand"),
        }
    }
}

impl std::error::Error for Malformed {}

/// Whether a choice among the licences of the expression needs only licences on the list.
pub(crate) fn satisfiable(expression: &str, allowed: &[&str]) -> Result<bool, Malformed> {
    let words = words(expression);
    let mut parser = Parser { words: words.iter().copied().peekable(), allowed };
    let answer = parser.any()?;
    match parser.words.next() {
        None => Ok(answer),
        Some(found) => Err(Malformed::Unexpected { found: found.to_owned(), wanted: "the end" }),
    }
}

/// One method a level of the grammar, each answering whether what it read can be satisfied.
struct Parser<'a, I: Iterator<Item = &'a str>> {
    words: Peekable<I>,
    allowed: &'a [&'a str],
}

impl<'a, I: Iterator<Item = &'a str>> Parser<'a, I> {
    fn any(&mut self) -> Result<bool, Malformed> {
        let mut answer = self.all()?;
        while self.words.next_if(|word| *word == "OR" || *word == "/").is_some() {
            // Read on even when satisfied: the rest must be well formed too.
            answer |= self.all()?;
        }
        Ok(answer)
    }

    fn all(&mut self) -> Result<bool, Malformed> {
        let mut answer = self.one()?;
        while self.words.next_if_eq(&"AND").is_some() {
            answer &= self.one()?;
        }
        Ok(answer)
    }

    fn one(&mut self) -> Result<bool, Malformed> {
        if self.words.next_if_eq(&"(").is_some() {
            let answer = self.any()?;
            return match self.words.next() {
                Some(")") => Ok(answer),
                Some(found) => Err(Malformed::Unexpected { found: found.to_owned(), wanted: "`)`" }),
                None => Err(Malformed::Ended { wanted: "`)`" }),
            };
        }
        let licence = self.name("a licence")?;
        if self.words.next_if_eq(&"WITH").is_none() {
            return Ok(self.allowed.contains(&licence));
        }
        let exception = self.name("an exception")?;
        Ok(self.allowed.contains(&format!("{licence} WITH {exception}").as_str()))
    }

    fn name(&mut self, wanted: &'static str) -> Result<&'a str, Malformed> {
        match self.words.next() {
            None => Err(Malformed::Ended { wanted }),
            Some(found @ ("(" | ")" | "/" | "AND" | "OR" | "WITH")) => {
                Err(Malformed::Unexpected { found: found.to_owned(), wanted })
            }
            Some(name) => Ok(name),
        }
    }
}

/// The expression in words: names and operators, with `(`, `)` and `/` as words of their own.
fn words(expression: &str) -> Vec<&str> {
    expression
        .split_whitespace()
        .flat_map(|word| word.split_inclusive(['(', ')', '/']))
        .flat_map(|piece| match piece.strip_suffix(['(', ')', '/']) {
            Some(name) => [name, &piece[name.len()..]],
            None => [piece, ""],
        })
        .filter(|word| !word.is_empty())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: &[&str] = &["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0"];

    #[track_caller]
    fn assert_satisfiable(expression: &str, expected: bool) {
        assert_eq!(satisfiable(expression, ALLOWED), Ok(expected), "{expression}");
    }

    #[test]
    fn a_single_licence_is_on_the_list_or_not() {
        assert_satisfiable("MIT", true);
        assert_satisfiable("GPL-3.0-only", false);
        assert_satisfiable("Apache-2.0+", false);
    }

    #[test]
    fn one_of_a_choice_is_enough() {
        assert_satisfiable("GPL-3.0-only OR MIT", true);
        assert_satisfiable("MIT OR GPL-3.0-only", true);
        assert_satisfiable("GPL-3.0-only OR MPL-2.0", false);
    }

    #[test]
    fn every_part_of_a_sum_is_needed() {
        assert_satisfiable("MIT AND Unicode-3.0", true);
        assert_satisfiable("MIT AND GPL-3.0-only", false);
    }

    #[test]
    fn and_binds_tighter_than_or_and_parentheses_tighter_still() {
        assert_satisfiable("MIT OR Apache-2.0 AND GPL-3.0-only", true);
        assert_satisfiable("(MIT OR Apache-2.0) AND GPL-3.0-only", false);
        assert_satisfiable("(MIT OR Apache-2.0) AND Unicode-3.0", true);
        assert_satisfiable("((MIT))AND(Unicode-3.0)", true);
    }

    #[test]
    fn the_old_slash_is_a_choice() {
        assert_satisfiable("MIT/Apache-2.0", true);
        assert_satisfiable("GPL-3.0-only / MIT", true);
        assert_satisfiable("GPL-3.0-only/MPL-2.0", false);
    }

    #[test]
    fn an_exception_belongs_to_its_licence() {
        assert_satisfiable("Apache-2.0 WITH LLVM-exception", true);
        assert_satisfiable("GPL-2.0-only WITH Classpath-exception-2.0", false);
        assert_satisfiable("MIT WITH LLVM-exception", false);
        assert_satisfiable("GPL-2.0-only OR Apache-2.0 WITH LLVM-exception", true);
    }

    #[test]
    fn malformed_expressions_say_what_was_wanted() {
        let unexpected = |found: &str, wanted| Malformed::Unexpected { found: found.to_owned(), wanted };
        for (expression, expected) in [
            ("", Malformed::Ended { wanted: "a licence" }),
            ("MIT OR", Malformed::Ended { wanted: "a licence" }),
            ("MIT OR OR MIT", unexpected("OR", "a licence")),
            ("MIT Apache-2.0", unexpected("Apache-2.0", "the end")),
            ("(MIT", Malformed::Ended { wanted: "`)`" }),
            ("(MIT Apache-2.0)", unexpected("Apache-2.0", "`)`")),
            ("MIT)", unexpected(")", "the end")),
            ("MIT WITH", Malformed::Ended { wanted: "an exception" }),
            ("MIT OR (", Malformed::Ended { wanted: "a licence" }),
        ] {
            assert_eq!(satisfiable(expression, ALLOWED), Err(expected), "{expression}");
        }
    }
}
