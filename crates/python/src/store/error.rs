//! Converts errors of the store into exceptions of `wholemem.errors`, with hints.

use wholemem_os::{Errno, Error as OsError};
use wholemem_store::{Error, Refusal};

use super::client::closed;
use crate::error::Exception;

impl From<Error> for Exception {
    fn from(error: Error) -> Self {
        let code = error.code();
        let raised = |class| Self::new(class, error.to_string()).code(code);
        match error {
            Error::Memory(error) => error.into(),
            Error::Os(error) => error.into(),
            Error::Refused(ref refusal) => {
                let (class, hint) = refused(refusal);
                let raised = raised(class);
                if hint.is_empty() { raised } else { raised.hint(hint) }
            }
            Error::NotServed { .. } => raised("ServerLost")
                .hint("start a store with `wholemem serve`, or set `WHOLEMEM_SOCKET` to its socket"),
            Error::NoSocket { .. } => {
                raised("BadEnvironment").hint("or pass it to the client: `Client(socket)`")
            }
            Error::Socket { ref source, .. } => {
                let message = format!("{error}: {source}");
                let (class, hint) = unusable(source);
                let raised = Self::new(class, message).code(code);
                if hint.is_empty() { raised } else { raised.hint(hint) }
            }
            Error::Disconnected => {
                raised("ServerLost").hint("create a new client; arrays of the old one stay valid")
            }
            // Another thread closed the client. If a signal interrupted the call, the exception of the signal handler is raised
            // instead.
            Error::Interrupted => closed(),
            Error::TimedOut => raised("Timeout").hint("the server is stopped or overloaded"),
            Error::TooManyPins { .. } => {
                raised("OutOfMemory").hint("drop arrays, or store arrays that belong together as a pack")
            }
            Error::Forked => raised("Forked").hint("create a client in the child process"),
            Error::DeviceHidden | Error::OnDevice { .. } => raised("WrongDevice"),
            Error::OutOfRange { .. } => raised("WrongValue"),
            Error::EmptyName => raised("WrongValue").hint("pass a name by which clients can get the object"),
            _ => raised("Error"),
        }
    }
}

/// Returns the exception class and the hint for an error of connecting to a socket.
fn unusable(source: &OsError) -> (&'static str, &'static str) {
    match source {
        OsError::Call { errno: Errno::NAMETOOLONG, .. } => {
            ("WrongValue", "the path of a socket can have at most 107 bytes")
        }
        OsError::Call { errno: Errno::INVAL, .. } => ("WrongValue", "pass a path without a zero byte"),
        OsError::Call { errno: Errno::ACCESS | Errno::PERM, .. } => (
            "NotAllowed",
            "a store is private to the user who serves it, unless that user opens its socket to others",
        ),
        _ => ("Error", ""),
    }
}

/// Returns the exception class and the hint for a request that the store's server refused.
fn refused(refusal: &Refusal) -> (&'static str, &'static str) {
    match refusal {
        Refusal::NoSuchName { .. } => {
            ("NotFound", "`client.list()` lists the objects; `get(name, timeout=10)` waits for the name")
        }
        Refusal::NoSuchObject { .. } => ("NotFound", "it was just deleted or replaced"),
        Refusal::OverQuota { wanted, quota, .. } if wanted > quota => {
            let hint = "it is larger than the whole store, so waiting does not help: serve with a larger `--size`, or \
            `--device-size` for memory of a GPU";
            ("OverQuota", hint)
        }
        Refusal::OverQuota { .. } => ("OverQuota", "`timeout=10` waits until other objects are deleted"),
        Refusal::IndexFull { .. } => {
            ("OutOfMemory", "delete objects, put packs, or serve with more `--objects`")
        }
        Refusal::NoMemory { .. } => ("OutOfMemory", ""),
        Refusal::NotYours { .. } => {
            ("NotAllowed", "only the user who created it, or who serves the store, may delete it")
        }
        Refusal::StillMapped => (
            "InUse",
            "drop every array of the draft, and end child processes that were forked meanwhile; then seal again",
        ),
        Refusal::NameTooLong { .. } | Refusal::MetaTooLong { .. } | Refusal::TooManyMembers { .. } => {
            ("WrongValue", "")
        }
        Refusal::NoSuchDevice { .. } => ("WrongDevice", ""),
        Refusal::NotTrusted { .. } => ("NotAllowed", ""),
        Refusal::CannotAdopt { .. } => ("Unsupported", "`put` copies it"),
        Refusal::OutOfRange { .. } => ("WrongValue", ""),
        Refusal::OtherProtocol { .. } => ("Unsupported", "use the same version of wholemem on both sides"),
        _ => ("Error", ""),
    }
}
