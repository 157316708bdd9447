//! The one place that writes: data to stdout, everything else to stderr, colour only for eyes.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::LazyLock;

use anyhow::{Result, anyhow};
use serde::Serialize;

/// The reader of stdout went away, as `head` does when it has seen enough: a reason to stop, and none to complain.
#[derive(Debug)]
pub struct StdoutClosed;

impl std::error::Error for StdoutClosed {}

impl fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reader of stdout went away")
    }
}

/// How a piece of text is meant, besides what it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// As text usually is.
    Plain,
    /// A heading.
    Strong,
    /// Something of less importance.
    Faint,
    /// A success.
    Good,
    /// A failure.
    Bad,
}

/// Whether text may carry colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// Text is written without colour.
    Off,
    /// Text is written with colour.
    On,
}

impl Colour {
    /// Whether text on stdout may.
    pub fn of_stdout() -> Self {
        static COLOUR: LazyLock<Colour> = LazyLock::new(|| Colour::wanted(io::stdout().is_terminal()));
        *COLOUR
    }

    /// Whether text on stderr may.
    pub fn of_stderr() -> Self {
        static COLOUR: LazyLock<Colour> = LazyLock::new(|| Colour::wanted(io::stderr().is_terminal()));
        *COLOUR
    }

    fn wanted(is_terminal: bool) -> Self {
        // An empty variable counts as absent: https://no-color.org
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
        if is_terminal && !refused && !dumb { Self::On } else { Self::Off }
    }

    /// The text in the colour of a tone.
    pub fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            _ if self == Self::Off => return text.to_owned(),
            Tone::Plain => return text.to_owned(),
            Tone::Strong => 1,
            Tone::Faint => 2,
            Tone::Good => 32,
            Tone::Bad => 31,
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// Writes data.
///
/// # Errors
/// [`StdoutClosed`], or what the system said.
pub fn print(text: &str) -> Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
        // As text: the cause of a full disk is not to be taken for that of full memory.
        Err(error) => Err(anyhow!("cannot write to stdout: {error}")),
    }
}

/// Text that somebody else has chosen, with what would act on the terminal made visible.
pub fn plain(text: &str) -> String {
    wholemem_os::Visible(text).to_string()
}

/// Writes one object in one line.
///
/// # Errors
/// As [`print()`].
pub fn print_json(object: &impl Serialize) -> Result<()> {
    print(&(serde_json::to_string(object)? + "\n"))
}

/// Tells a person something besides the data.
pub fn note(text: &str) {
    say(&format!("{} {text}\n", Colour::of_stderr().paint(Tone::Strong, "note:")));
}

/// Writes to stderr. If nobody is there to read it, nobody misses it.
pub fn say(text: &str) {
    let _ = io::stderr().lock().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_is_added_only_where_it_is_wanted() {
        assert_eq!(Colour::Off.paint(Tone::Bad, "no"), "no");
        assert_eq!(Colour::On.paint(Tone::Bad, "no"), "\x1b[31mno\x1b[0m");
        assert_eq!(Colour::On.paint(Tone::Plain, "no"), "no");
    }

    #[test]
    fn text_of_others_does_nothing_to_the_terminal() {
        assert_eq!(plain("a\u{1b}[2J\r\n\tb \u{9b}é日"), r"a\u{1b}[2J\r\n\tb \u{9b}é日");
        assert_eq!(plain("gpj.\u{202e}exe"), r"gpj.\u{202e}exe");
    }

    #[test]
    fn what_is_no_terminal_has_no_colour() {
        assert_eq!(Colour::wanted(false), Colour::Off);
    }
}
