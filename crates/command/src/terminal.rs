//! Terminal output: data on stdout, everything else on stderr, and colours only on terminals.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use anyhow::{Result, anyhow};
use serde::Serialize;

use crate::wrap::wrap;

/// The smallest width for which tables are laid out.
const MIN_WIDTH: usize = 40;

/// The error if the reader of stdout closed the pipe, as `head` does. The program then stops without an error message.
#[derive(Debug)]
pub struct StdoutClosed;

impl std::error::Error for StdoutClosed {}

impl fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout closed the pipe")
    }
}

/// The style of a text, which selects its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextStyle {
    /// Ordinary text, without a colour.
    Plain,
    /// The text of a heading (bold).
    Heading,
    /// Text of little importance (dim).
    Dim,
    /// Text that reports a success (green).
    Success,
    /// Text that reports a failure (red).
    Error,
}

/// Determines whether text is written with colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// Text is written without colours.
    Off,
    /// Text is written with colours.
    On,
}

impl Colour {
    /// Returns whether text on stdout is written with colours.
    pub fn of_stdout() -> Self {
        static COLOUR: LazyLock<Colour> = LazyLock::new(|| Colour::for_output(io::stdout().is_terminal()));
        *COLOUR
    }

    /// Returns whether text on stderr is written with colours.
    pub fn of_stderr() -> Self {
        static COLOUR: LazyLock<Colour> = LazyLock::new(|| Colour::for_output(io::stderr().is_terminal()));
        *COLOUR
    }

    fn for_output(is_terminal: bool) -> Self {
        // An empty `NO_COLOR` counts as unset: https://no-color.org
        let disabled = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
        if is_terminal && !disabled && !dumb { Self::On } else { Self::Off }
    }

    /// Returns the text with the escape sequences of a style, or unchanged if colours are off.
    pub fn paint(self, style: TextStyle, text: &str) -> String {
        let code = match style {
            _ if self == Self::Off => return text.to_owned(),
            TextStyle::Plain => return text.to_owned(),
            TextStyle::Heading => 1,
            TextStyle::Dim => 2,
            TextStyle::Success => 32,
            TextStyle::Error => 31,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Returns the number of columns to which text on stdout is limited: `COLUMNS`, or the width of the terminal. `None` if stdout is
/// not a terminal and the variable is not set.
pub fn width() -> Option<usize> {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    let of_terminal =
        || rustix::termios::tcgetwinsize(io::stdout()).ok().map(|size| usize::from(size.ws_col));
    set.or_else(of_terminal).filter(|width| *width > 0).map(|width| width.max(MIN_WIDTH))
}

/// Returns text whose lines are at most as wide as the terminal. Indented lines, such as those of tables, are unchanged.
pub fn fitted(text: &str) -> String {
    fitted_within(text, width())
}

fn fitted_within(text: &str, width: Option<usize>) -> String {
    let Some(width) = width else { return text.to_owned() };
    let line = |line: &str| match line.starts_with(' ') {
        true => line.to_owned(),
        false => wrap(line, width).join("\n"),
    };
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// Writes text to stdout.
///
/// # Errors
/// [`StdoutClosed`] if the reader closed the pipe, or the error of `write`.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        // Only the text of the error is kept, because ENOSPC (a full disk) would otherwise be classified as a lack of memory.
        Err(error) => Err(anyhow!("cannot write to stdout: {error}")),
    }
}

/// Escapes control characters in text that other users chose, so that the text cannot control the terminal.
pub fn escaped(text: &str) -> String {
    wholemem_os::Visible(text).to_string()
}

/// Writes one JSON object in one line to stdout.
///
/// # Errors
/// As [`print()`].
pub fn print_json(object: &impl Serialize) -> Result<()> {
    print(&(serde_json::to_string(object)? + "\n"))
}

/// Writes a line with the prefix `note:` to stderr.
pub fn note(text: &str) {
    print_stderr(&format!("{} {text}\n", Colour::of_stderr().paint(TextStyle::Heading, "note:")));
}

/// Writes text to stderr. An error is ignored, because it cannot be reported anywhere else.
pub fn print_stderr(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_added_only_if_they_are_on() {
        assert_eq!(Colour::Off.paint(TextStyle::Error, "no"), "no");
        assert_eq!(Colour::On.paint(TextStyle::Error, "no"), "\x1b[31mno\x1b[0m");
        assert_eq!(Colour::On.paint(TextStyle::Plain, "no"), "no");
    }

    #[test]
    fn lines_that_are_not_indented_are_wrapped() {
        let text = "cuda: not available: no driver\n\n  a table that is wide\nend\n";
        assert_eq!(fitted_within(text, None), text);
        let expected = "cuda: not\navailable: no\ndriver\n\n  a table that is wide\nend\n";
        assert_eq!(fitted_within(text, Some(13)), expected);
    }

    #[test]
    fn text_of_other_users_cannot_control_the_terminal() {
        assert_eq!(escaped("a\u{1b}[2J\r\n\tb \u{9b}é日"), r"a\u{1b}[2J\r\n\tb \u{9b}é日");
        assert_eq!(escaped("gpj.\u{202e}exe"), r"gpj.\u{202e}exe");
    }

    #[test]
    fn output_that_is_not_a_terminal_has_no_colours() {
        assert_eq!(Colour::for_output(false), Colour::Off);
    }
}
