//! Just enough reading of Rust to tell code from comments and text.
//!
//! It finds identifiers and keywords outside comments, strings and characters, and the sentence a file opens with.
//! It will not parse: what it reads has passed the compiler, or will be refused there.

/// The identifiers and keywords of a source text, each with its line, counted from 1. Raw identifiers are left
/// out: `r#unsafe` is a name, not the keyword.
pub(crate) fn words(source: &str) -> Vec<(usize, &str)> {
    let bytes = source.as_bytes();
    let mut words = Vec::new();
    let mut line = 1;
    let mut at = 0;
    while at < bytes.len() {
        let rest = &source[at..];
        let end = at
            + match bytes[at] {
                b'/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
                b'/' if rest.starts_with("/*") => block_comment(rest),
                b'"' => string(rest),
                b'\'' => character_or_tick(rest),
                b'0'..=b'9' => word(rest),
                b'r' | b'b' | b'c' if raw_string(rest).is_some() => raw_string(rest).unwrap_or(1),
                b'r' if rest.starts_with("r#") => 2 + word(&rest[2..]),
                byte if is_word(byte) => {
                    let len = word(rest);
                    words.push((line, &rest[..len]));
                    len
                }
                _ => 1,
            };
        line += bytes[at..end].iter().filter(|byte| **byte == b'\n').count();
        at = end;
    }
    words
}

/// The first paragraph of the `//!` comment that the file opens with, where only inner attributes stand before it.
pub(crate) fn opening(source: &str) -> Option<String> {
    let mut rest = source.trim_start();
    if rest.starts_with("#!") && !rest.starts_with("#![") {
        rest = rest.split_once('\n')?.1.trim_start();
    }
    while rest.starts_with("#![") {
        rest = rest[attribute(rest)..].trim_start();
    }
    let paragraph: Vec<_> = rest
        .lines()
        .map_while(|line| line.trim_start().strip_prefix("//!"))
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    if paragraph.is_empty() { None } else { Some(paragraph.join(" ")) }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

fn word(rest: &str) -> usize {
    rest.bytes().position(|byte| !is_word(byte)).unwrap_or(rest.len())
}

/// The length of an attribute, up to the bracket that closes it.
fn attribute(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        match rest.as_bytes()[at] {
            b'"' => {
                at += string(&rest[at..]);
                continue;
            }
            b'[' => depth += 1,
            b']' if depth == 1 => return at + 1,
            b']' => depth -= 1,
            _ => {}
        }
        at += 1;
    }
    rest.len()
}

/// The length of a block comment, which may hold others.
fn block_comment(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut depth = 0;
    let mut at = 0;
    while at + 1 < bytes.len() {
        match &bytes[at..at + 2] {
            b"/*" => depth += 1,
            b"*/" => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    rest.len()
}

/// The length of a string from its opening quote to its closing one.
fn string(rest: &str) -> usize {
    let bytes = rest.as_bytes();
    let mut at = 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// The length of a raw string, if one starts here.
fn raw_string(rest: &str) -> Option<usize> {
    let after =
        rest.strip_prefix("br").or_else(|| rest.strip_prefix("cr")).or_else(|| rest.strip_prefix('r'))?;
    let hashes = after.bytes().take_while(|byte| *byte == b'#').count();
    let text = after[hashes..].strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(hashes));
    let len = text.find(&close).map_or(text.len(), |found| found + close.len());
    Some(rest.len() - text.len() + len)
}

/// The length of a character literal, or 1 for the tick of a lifetime or label.
fn character_or_tick(rest: &str) -> usize {
    let mut characters = rest.char_indices().skip(1);
    match (characters.next(), characters.next()) {
        // The second character is the escaped one, so a closing tick comes no sooner than after it.
        (Some((_, '\\')), Some((at, escaped))) => {
            let body = at + escaped.len_utf8();
            rest[body..].find('\'').map_or(rest.len(), |found| body + found + 1)
        }
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_words(source: &str, expected: &[&str]) {
        let found: Vec<_> = words(source).into_iter().map(|(_, word)| word).collect();
        assert_eq!(found, expected, "{source}");
    }

    #[test]
    fn words_in_comments_and_text_are_no_code() {
        assert_words("a // unsafe\nb", &["a", "b"]);
        assert_words("a /* unsafe /* unsafe */ unsafe */ b", &["a", "b"]);
        assert_words(r#"a "unsafe \" unsafe" b"#, &["a", "b"]);
        assert_words(r###"a r#"unsafe " unsafe"# b br"unsafe" c"###, &["a", "b", "c"]);
        assert_words(
            "a 'u' b '\\'' c '\u{e9}' d '\\u{1F600}' e b'\"' f",
            &["a", "b", "c", "d", "e", "b", "f"],
        );
    }

    #[test]
    fn words_beside_comments_and_text_are_code() {
        assert_words("unsafe/**/{\"\"}unsafe", &["unsafe", "unsafe"]);
        assert_words("fn f<'a>(x: &'a u8) { unsafe {} }", &["fn", "f", "a", "x", "a", "u8", "unsafe"]);
        assert_words("#[unsafe(no_mangle)]", &["unsafe", "no_mangle"]);
        assert_words("'\"' unsafe '\"'", &["unsafe"]);
        assert_words("r\"\\\" unsafe", &["unsafe"]);
    }

    #[test]
    fn names_and_numbers_that_look_like_keywords_are_none() {
        assert_words("unsafe_code r#unsafe 1_unsafe", &["unsafe_code"]);
    }

    #[test]
    fn lines_are_counted_through_comments_and_text() {
        assert_eq!(words("/*\n\n*/ a \"\n\" b // c\nd"), [(3, "a"), (4, "b"), (5, "d")]);
    }

    #[test]
    fn unfinished_sources_end_with_the_file() {
        assert_words("a /* b", &["a"]);
        assert_words("a \"b \\", &["a"]);
        assert_words("a r#\"b", &["a"]);
        assert_words("a '", &["a"]);
        assert_words("a '\\", &["a"]);
    }

    #[test]
    fn an_opening_may_follow_inner_attributes() {
        let expected = Some("What this is, over two lines.".to_owned());
        assert_eq!(opening("//! What this is,\n//! over two lines.\n//!\n//! More.\n"), expected);
        assert_eq!(opening("#![cfg(test)]\n\n//! What this is,\n//! over two lines.\nuse std;"), expected);
        let two_lines =
            "#![expect(\n    lint,\n    reason = \"]\"\n)]\n//! What this is,\n//! over two lines.";
        assert_eq!(opening(two_lines), expected);
    }

    #[test]
    fn a_file_may_lack_an_opening() {
        for source in
            ["", "fn main() {}\n//! Late.", "// Not a doc comment.", "//!\n//! After a gap.", "#![cfg(test)]"]
        {
            assert_eq!(opening(source), None, "{source}");
        }
    }
}
