//! Prints errors to stderr, with their causes and a `hint:` line, and selects the exit code.

use std::fmt;
use std::process::ExitCode;

use serde::Serialize;
use wholemem_hal::{BackendKind, Error};

use crate::memory;
use crate::terminal::{self, Colour, StdoutClosed, TextStyle};

/// The error of a process that this command started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFailed {
    /// The message of the other process's error, with its causes.
    pub message: String,
    /// The hint of the other process's error, if it has one.
    pub hint: Option<String>,
}

impl std::error::Error for PeerFailed {}

impl fmt::Display for PeerFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the other process failed: {}", self.message)
    }
}

/// The error of a command that has already reported why it failed.
#[derive(Debug)]
pub struct Reported;

impl std::error::Error for Reported {}

impl fmt::Display for Reported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the command failed")
    }
}

/// An error as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ErrorReport {
    /// The message of the error, with its causes.
    pub message: String,
    /// A stable identifier of an error of a store, such as `no-such-name`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<&'static str>,
    /// Advice on what the user can do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl ErrorReport {
    /// Creates the report of an error.
    #[must_use]
    pub fn new(error: &anyhow::Error) -> Self {
        let code = store_error(error).map(wholemem_store::Error::code);
        Self { message: format!("{error:#}"), code, hint: hint(error) }
    }
}

fn store_error(error: &anyhow::Error) -> Option<&wholemem_store::Error> {
    error.chain().find_map(|cause| cause.downcast_ref::<wholemem_store::Error>())
}

/// Prints an error to stderr, as text or as one JSON object, and returns the exit code. A closed stdout ([`StdoutClosed`]) is not
/// an error, and an error that was already reported ([`Reported`]) is not printed.
pub fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    match () {
        () if error.is::<StdoutClosed>() => return ExitCode::SUCCESS,
        () if error.is::<Reported>() => {}
        () if json => print_json(&ErrorReport::new(error)),
        () => print(error),
    }
    ExitCode::FAILURE
}

/// Prints an error to stderr, with its causes and a hint.
pub fn print(error: &anyhow::Error) {
    terminal::print_stderr(&render(error, Colour::of_stderr()));
}

/// Prints an error to stderr as one JSON object with the key `error`.
pub fn print_json(error: &ErrorReport) {
    let object = serde_json::json!({ "error": error });
    terminal::print_stderr(&format!("{object}\n"));
}

fn render(error: &anyhow::Error, colour: Colour) -> String {
    let title = colour.paint(TextStyle::Error, "error:");
    let hint = hint(error).map(|hint| format!("\n{} {hint}\n", colour.paint(TextStyle::Success, "hint:")));
    // Control characters are escaped, because the message may contain names that other users chose.
    let text = format!("{error:#}").split('\n').map(terminal::escaped).collect::<Vec<_>>().join("\n");
    format!("{title} {text}\n{}", hint.unwrap_or_default())
}

/// Returns advice on what the user can do about an error.
pub fn hint(error: &anyhow::Error) -> Option<String> {
    let store = store_error(error);
    if let Some(hint) = store.and_then(store_hint) {
        return Some(hint.to_owned());
    }
    if let Some(wholemem_store::Error::NoSocket { .. }) = store {
        return Some("`--socket` sets the path as well".to_owned());
    }
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
    if let Some(Error::Unavailable { backend: BackendKind::Cuda, .. }) = cause {
        let hint = "`wholemem doctor` shows what was tried; `--backend host` needs no GPU";
        return Some(hint.to_owned());
    }
    if memory::is_out_of_memory(error) {
        let hint = "use a smaller `--size`, `--sizes`, `--max-size` or `--table`, or free some memory";
        return Some(hint.to_owned());
    }
    if let Some(error) = error.chain().find_map(|cause| cause.downcast_ref::<wholemem::Error>()) {
        return error.hint().map(str::to_owned);
    }
    let peers = error.chain().find_map(|cause| cause.downcast_ref::<PeerFailed>()?.hint.clone());
    peers.or_else(|| cause.and_then(Error::hint).map(str::to_owned))
}

/// Returns advice on what the user can do about an error of a store.
fn store_hint(error: &wholemem_store::Error) -> Option<&'static str> {
    use wholemem_os::{Errno, Error as Os};
    use wholemem_store::Error as Store;
    match error {
        Store::NotServed { .. } => {
            Some("`wholemem serve` starts a store; `--socket` or `WHOLEMEM_SOCKET` selects another socket")
        }
        Store::Socket { source: Os::Call { errno: Errno::NAMETOOLONG, .. }, .. } => {
            Some("the path of a socket is limited to 107 bytes")
        }
        Store::Socket { source: Os::Call { errno: Errno::ACCESS, .. }, .. } => Some(
            "only the user who runs the server may connect, unless that user changes the mode of the socket",
        ),
        Store::TimedOut => Some("the server is stopped or busy; its process is a child of `wholemem serve`"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;
    use wholemem_hal::Backend;
    use wholemem_hal::{Attempt, BackendError};

    use super::*;

    #[test]
    fn an_error_is_printed_with_its_causes_and_its_hint() {
        let cause = BackendError::OutOfMemory { available: 1 << 20 };
        let failed = Error::Failed { attempt: Attempt::Reserve { len: 4096 }, cause };
        let error = Err::<(), _>(failed).context("step 1").unwrap_err();
        let expected = "error: step 1: cannot reserve 4 KiB of addresses: only 1 MiB of memory are available\n\
            \nhint: use a smaller `--size`, `--sizes`, `--max-size` or `--table`, or free some memory\n";
        assert_eq!(render(&error, Colour::Off), expected);
    }

    #[test]
    fn the_error_for_an_unavailable_backend_has_a_hint() {
        let reason = "none".to_owned();
        let error = Error::Unavailable { backend: BackendKind::Cuda, reason };
        let expected = "error: the cuda backend is not available: none\n\
            \nhint: `wholemem doctor` shows what was tried; `--backend host` needs no GPU\n";
        assert_eq!(render(&error.into(), Colour::Off), expected);
    }

    #[test]
    fn an_error_of_the_other_process_is_printed_with_its_hint() {
        let failed = PeerFailed { message: "out of memory".to_owned(), hint: Some("use less".to_owned()) };
        let expected = "error: the other process failed: out of memory\n\nhint: use less\n";
        assert_eq!(render(&failed.into(), Colour::Off), expected);
    }

    #[test]
    fn an_error_as_json_has_its_message_code_and_hint() {
        let name = "weights".to_owned();
        let refused = wholemem_store::Error::Refused(wholemem_store::Refusal::NoSuchName { name });
        let error = Err::<(), _>(refused).context("step 1").unwrap_err();
        let message = "step 1: there is no object named `weights`".to_owned();
        let expected = ErrorReport { message, code: Some("no-such-name"), hint: None };
        assert_eq!(ErrorReport::new(&error), expected);
        let text = serde_json::to_string(&expected).unwrap();
        assert_eq!(text, r#"{"message":"step 1: there is no object named `weights`","code":"no-such-name"}"#);
    }

    #[test]
    fn an_error_without_advice_has_no_hint_line() {
        let device = Backend::host(wholemem_hal::HostConfig::default()).unwrap().device(0).unwrap();
        let error = device.allocate(0).unwrap_err();
        assert_eq!(
            render(&error.into(), Colour::Off),
            "error: cannot create 0 B on host:0: the length is zero\n"
        );
    }
}
