//! Divides text into lines.

use unicode_width::UnicodeWidthStr;

/// Divides text into lines of at most `width` columns, between words or, in longer words, behind `/` and `.` or anywhere.
pub(crate) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let mut word = word;
        loop {
            let line = lines.last_mut().expect("there always is a line");
            let gap = usize::from(!line.is_empty());
            if line.width() + gap + word.width() <= width {
                line.push_str(&" "[..gap]);
                line.push_str(word);
                break;
            }
            if !line.is_empty() {
                lines.push(String::new());
                continue;
            }
            let (part, rest) = word.split_at(break_of(word, width));
            line.push_str(part);
            word = rest;
            if word.is_empty() {
                break;
            }
            lines.push(String::new());
        }
    }
    lines
}

/// Returns where a word that is too long is divided.
fn break_of(word: &str, width: usize) -> usize {
    let mut fits = 0;
    let mut preferred = None;
    for (at, letter) in word.char_indices() {
        let end = at + letter.len_utf8();
        if word[..end].width() > width {
            break;
        }
        fits = end;
        if matches!(letter, '/' | '.') {
            preferred = Some(end);
        }
    }
    // A column that is narrower than one letter still makes progress.
    let first = word.chars().next().map_or(0, char::len_utf8);
    preferred.filter(|at| 2 * at > fits).unwrap_or(fits).max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_divided_only_if_they_are_too_long() {
        assert_eq!(wrap("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrap("x layers.0.weight", 10), ["x", "layers.0.", "weight"]);
        assert_eq!(wrap("日本語", 1), ["日", "本", "語"]);
        assert_eq!(wrap("", 5), [""]);
    }
}
