//! Displays untrusted text, such as the name of an object, with invisible characters escaped.
//!
//! Escaped as `\u{202e}`: control characters, which act on a terminal; bidirectional controls, with which one name
//! can look like another; zero-width and invisible characters; line and paragraph separators; spaces other than
//! U+0020; and code points that Unicode has not assigned. Letters, marks and symbols of all scripts are unchanged.

use std::fmt::{self, Write};

/// Displays text with invisible characters escaped.
///
/// ```
/// use wholemem_os::Visible;
///
/// assert_eq!(Visible("café 日本").to_string(), "café 日本");
/// assert_eq!(Visible("gpj.\u{202e}exe\n").to_string(), r"gpj.\u{202e}exe\n");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visible<'a>(pub &'a str);

impl fmt::Display for Visible<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            // `escape_debug` would escape quotes and backslashes, but they are visible.
            '\'' | '"' | '\\' => f.write_char(letter),
            _ if is_invisible(letter) => letter.escape_unicode().fmt(f),
            _ => {
                // The character is escaped after the letter `a`, since `escape_debug` escapes a combining mark only
                // at the start of a text.
                let mut pair = [b'a', 0, 0, 0, 0];
                let len = 1 + letter.encode_utf8(&mut pair[1..]).len();
                str::from_utf8(&pair[..len])
                    .map_err(|_| fmt::Error)?
                    .escape_debug()
                    .skip(1)
                    .try_for_each(|part| f.write_char(part))
            }
        })
    }
}

/// Returns whether a character is rendered as nothing: a default-ignorable character of Unicode that is not a format
/// character.
fn is_invisible(letter: char) -> bool {
    matches!(
        letter,
        '\u{34f}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{ffa0}'
            | '\u{e0100}'..='\u{e01ef}'
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_all_scripts_is_unchanged() {
        let text = r#"a-Z 0 'quoted' "twice" back\slash café cafe\u{301} 日本語 עברית عربى हिन्दी 🦀 ½ €"#
            .replace(r"\u{301}", "\u{301}");
        assert_eq!(Visible(&text).to_string(), text);
    }

    #[test]
    fn control_and_invisible_characters_are_escaped() {
        let ranges = [
            ('\0', '\u{1f}'),
            ('\u{7f}', '\u{a0}'),
            ('\u{ad}', '\u{ad}'),
            ('\u{61c}', '\u{61c}'),
            ('\u{200b}', '\u{200f}'),
            ('\u{2028}', '\u{202e}'),
            ('\u{2060}', '\u{2064}'),
            ('\u{2066}', '\u{206f}'),
            ('\u{fe00}', '\u{fe0f}'),
            ('\u{feff}', '\u{feff}'),
            ('\u{fff9}', '\u{fffb}'),
            ('\u{e0020}', '\u{e007f}'),
            ('\u{e0100}', '\u{e01ef}'),
        ];
        for letter in ranges.into_iter().flat_map(|(first, last)| first..=last) {
            let shown = Visible(&format!("x{letter}y")).to_string();
            let escaped = shown.strip_prefix("x\\").and_then(|rest| rest.strip_suffix('y'));
            let escaped = escaped.unwrap_or_else(|| panic!("U+{:X} is {shown:?}", u32::from(letter)));
            assert!(escaped.chars().all(|part| part.is_ascii_graphic()), "{shown}");
        }
        assert_eq!(Visible("a\u{1b}[2J\r\n\tb \u{9b}é日").to_string(), r"a\u{1b}[2J\r\n\tb \u{9b}é日");
    }
}
