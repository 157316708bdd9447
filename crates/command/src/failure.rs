//! How a failure is told: what went wrong, down to its cause, and what to do about it.

use std::fmt;
use std::process::ExitCode;

use wholemem_hal::{BackendKind, Error};

use crate::memory;
use crate::terminal::{self, Colour, StdoutClosed, Tone};

/// The other process could not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerFailed {
    /// What it said.
    pub what: String,
    /// What a person could do about it.
    pub hint: Option<String>,
}

impl std::error::Error for PeerFailed {}

impl fmt::Display for PeerFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the other process failed: {}", self.what)
    }
}

/// Tells a person of the failure, and gives the exit code for it.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<StdoutClosed>() {
        return ExitCode::SUCCESS;
    }
    terminal::say(&render(error, Colour::of_stderr()));
    ExitCode::FAILURE
}

fn render(error: &anyhow::Error, colour: Colour) -> String {
    let title = colour.paint(Tone::Bad, "error:");
    let hint = hint(error).map(|hint| format!("\n{} {hint}\n", colour.paint(Tone::Good, "hint:")));
    // Names in it are anybody's.
    let text = format!("{error:#}").split('\n').map(terminal::plain).collect::<Vec<_>>().join("\n");
    format!("{title} {text}\n{}", hint.unwrap_or_default())
}

/// What a person could do about it.
pub fn hint(error: &anyhow::Error) -> Option<String> {
    let store = error.chain().find_map(|cause| cause.downcast_ref::<wholemem_store::Error>());
    if let Some(hint) = store.and_then(store_hint) {
        return Some(hint.to_owned());
    }
    if let Some(wholemem_store::Error::NoSocket { .. }) = store {
        return Some("`--socket` names it too".to_owned());
    }
    let cause = error.chain().find_map(|cause| cause.downcast_ref::<Error>());
    if let Some(Error::Unavailable { backend: BackendKind::Cuda, .. }) = cause {
        let hint = "`wholemem doctor` says what was tried; `--backend host` needs no GPU";
        return Some(hint.to_owned());
    }
    if memory::is_shortage(error) {
        let hint = "ask for less, with a smaller `--size`, `--sizes`, `--max-size` or `--table`, or free some memory";
        return Some(hint.to_owned());
    }
    if let Some(error) = error.chain().find_map(|cause| cause.downcast_ref::<wholemem::Error>()) {
        return error.hint().map(str::to_owned);
    }
    let peers = error.chain().find_map(|cause| cause.downcast_ref::<PeerFailed>()?.hint.clone());
    peers.or_else(|| cause.and_then(Error::hint).map(str::to_owned))
}

/// The same, of what went wrong with a store.
fn store_hint(error: &wholemem_store::Error) -> Option<&'static str> {
    use wholemem_os::{Errno, Error as Os};
    use wholemem_store::Error as Store;
    match error {
        Store::NotServed { .. } => {
            Some("`wholemem serve` serves one; `--socket` or `WHOLEMEM_SOCKET` names another")
        }
        Store::Socket { source: Os::Call { errno: Errno::NAMETOOLONG, .. }, .. } => {
            Some("the path of a socket has at most 107 bytes")
        }
        Store::Socket { source: Os::Call { errno: Errno::ACCESS, .. }, .. } => {
            Some("a store is for the user who serves it, unless that one opens its socket to others")
        }
        Store::TimedOut => {
            Some("the server is stopped or busy; its process is the child of `wholemem serve`")
        }
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
    fn a_failure_is_told_down_to_its_cause_with_a_hint_where_there_is_one() {
        let cause = BackendError::OutOfMemory { available: 1 << 20 };
        let failed = Error::Failed { attempt: Attempt::Reserve { len: 4096 }, cause };
        let error = Err::<(), _>(failed).context("step 1").unwrap_err();
        let expected = "error: step 1: cannot reserve 4 KiB of addresses: only 1 MiB of memory are available\n\
            \nhint: ask for less, with a smaller `--size`, `--sizes`, `--max-size` or `--table`, or free some memory\n";
        assert_eq!(render(&error, Colour::Off), expected);
    }

    #[test]
    fn an_absent_backend_comes_with_a_way_out() {
        let reason = "none".to_owned();
        let error = Error::Unavailable { backend: BackendKind::Cuda, reason };
        let expected = "error: the cuda backend is not available: none\n\
            \nhint: `wholemem doctor` says what was tried; `--backend host` needs no GPU\n";
        assert_eq!(render(&error.into(), Colour::Off), expected);
    }

    #[test]
    fn a_failure_of_the_other_process_keeps_its_hint() {
        let failed = PeerFailed { what: "no room".to_owned(), hint: Some("go".to_owned()) };
        let expected = "error: the other process failed: no room\n\nhint: go\n";
        assert_eq!(render(&failed.into(), Colour::Off), expected);
    }

    #[test]
    fn other_failures_have_no_hint() {
        let device = Backend::host(wholemem_hal::HostConfig::default()).unwrap().device(0).unwrap();
        let error = device.allocate(0).unwrap_err();
        assert_eq!(
            render(&error.into(), Colour::Off),
            "error: cannot create 0 B on host:0: the length is zero\n"
        );
    }
}
