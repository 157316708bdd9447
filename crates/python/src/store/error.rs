//! Errors of the store as exceptions of `wholemem.errors`, with what can be done about each.

use wholemem_os::{Errno, Error as OsError};
use wholemem_store::{Error, Refusal};

use super::client::closed;
use crate::error::Raised;

impl From<Error> for Raised {
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
                .hint("start one with `wholemem serve`, or name its socket in `WHOLEMEM_SOCKET`"),
            Error::NoSocket { .. } => {
                raised("BadEnvironment").hint("or give it to the client: `Client(socket)`")
            }
            Error::Socket { ref source, .. } => {
                let message = format!("{error}: {source}");
                let (class, hint) = unusable(source);
                let raised = Self::new(class, message).code(code);
                if hint.is_empty() { raised } else { raised.hint(hint) }
            }
            Error::Disconnected => {
                raised("ServerLost").hint("make a new client; arrays of the old one stay as they are")
            }
            // By a signal, whose handler has raised something else; or by who closed the client.
            Error::Interrupted => closed(),
            Error::TimedOut => raised("Timeout").hint("the server is stopped, or very busy"),
            Error::TooManyPins { .. } => {
                raised("OutOfMemory").hint("drop arrays, or get what belongs together as a pack")
            }
            Error::Forked => raised("Forked").hint("make a client in the child itself"),
            Error::DeviceHidden | Error::OnDevice { .. } => raised("WrongDevice"),
            Error::OutOfRange { .. } => raised("WrongValue"),
            Error::EmptyName => raised("WrongValue").hint("give a name by which it can be got"),
            _ => raised("Error"),
        }
    }
}

/// The class of what the kernel says of a socket, and what can be done about it.
fn unusable(source: &OsError) -> (&'static str, &'static str) {
    match source {
        OsError::Call { errno: Errno::NAMETOOLONG, .. } => {
            ("WrongValue", "the path of a socket has at most 107 bytes")
        }
        OsError::Call { errno: Errno::INVAL, .. } => ("WrongValue", "give a path without a zero byte"),
        OsError::Call { errno: Errno::ACCESS | Errno::PERM, .. } => (
            "NotAllowed",
            "a store is for the user who serves it, unless that one opens its socket to others",
        ),
        _ => ("Error", ""),
    }
}

/// The class of a refusal, and what can be done about it.
fn refused(refusal: &Refusal) -> (&'static str, &'static str) {
    match refusal {
        Refusal::NoSuchName { .. } => {
            ("NotFound", "`client.list()` names what there is; `get(name, timeout=10)` waits for it to come")
        }
        Refusal::NoSuchObject { .. } => ("NotFound", "it was deleted, or replaced, a moment ago"),
        Refusal::OverQuota { wanted, quota, .. } if wanted > quota => {
            let hint = "it is larger than the whole store, and no waiting helps: serve with a larger `--size`, or \
                        `--device-size` for what is on a GPU";
            ("OverQuota", hint)
        }
        Refusal::OverQuota { .. } => ("OverQuota", "`timeout=10` waits for others to delete something"),
        Refusal::IndexFull { .. } => {
            ("OutOfMemory", "delete something, put packs, or serve with more `--objects`")
        }
        Refusal::NoMemory { .. } => ("OutOfMemory", ""),
        Refusal::NotYours { .. } => {
            ("NotAllowed", "only who made it, or who serves the store, may delete it")
        }
        Refusal::StillMapped => (
            "InUse",
            "drop every array that was made of the draft, and end children that were forked meanwhile; then seal again",
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
