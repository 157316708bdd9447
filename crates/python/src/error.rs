//! Converts errors of the other wholemem crates into exceptions of `wholemem.errors`, with attributes and hints.
//!
//! The exception classes are written in Python; each also derives from a matching builtin exception. This module maps
//! errors to classes. Values that programs need are attributes: `rank`, `missing`, `position`.

use std::error::Error as _;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use wholemem::files::FileError;
use wholemem_comm::{Error as CommError, Rank};
use wholemem_hal::{BackendError, Error as HalError};
use wholemem_os::{Errno, Error as OsError};

/// The hint for a user who used an object of a parent process in a forked child.
const IN_A_CHILD: &str = "gather in the main process; a worker, preferably started with `spawn`, creates its own communicator, \
                          or gets objects of a store by name through its own `store.Client`";

/// The hint for a user whose ranks are on several nodes: how to start all ranks on one node.
const ON_ONE_NODE: &str =
    "`torchrun --nnodes 1`, `srun --nodes 1` and `wholemem launch` start all ranks on one node";

/// An exception of `wholemem.errors` before it is created in the interpreter.
#[derive(Debug)]
pub(crate) struct Exception(Box<ExceptionArgs>);

#[derive(Debug)]
struct ExceptionArgs {
    class: &'static str,
    message: String,
    hint: Option<String>,
    code: Option<String>,
    detail: ExceptionDetail,
}

/// The attributes of an exception besides message, hint and code.
#[derive(Debug)]
enum ExceptionDetail {
    None,
    Rank(Rank),
    Missing(Vec<Rank>),
    Index { position: u64, index: Option<i64>, rows: Option<u64> },
}

impl Exception {
    /// Creates an exception of the named class of `wholemem.errors`.
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self(Box::new(ExceptionArgs {
            class,
            message,
            hint: None,
            code: None,
            detail: ExceptionDetail::None,
        }))
    }

    /// Sets the hint of the exception: what the user can do about the error.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    /// Sets the hint if the exception has the given class and no hint yet.
    pub(crate) fn hint_for(self, class: &str, hint: &str) -> Self {
        if self.0.class == class && self.0.hint.is_none() { self.hint(hint) } else { self }
    }

    /// Sets the code of the exception, by which programs identify the error.
    pub(crate) fn code(mut self, code: impl ToString) -> Self {
        self.0.code = Some(code.to_string());
        self
    }

    fn with(mut self, detail: ExceptionDetail) -> Self {
        self.0.detail = detail;
        self
    }

    fn rank(self, rank: Rank) -> Self {
        self.with(ExceptionDetail::Rank(rank))
    }

    fn missing(self, missing: &[Rank]) -> Self {
        self.with(ExceptionDetail::Missing(missing.to_vec()))
    }

    /// Sets the hint of the exception to `hint`, the hint of the error from which the exception was converted. If the error
    /// has no hint, nothing changes.
    fn with_hint_of(self, hint: Option<&str>) -> Self {
        match hint {
            Some(hint) => self.hint(hint),
            None => self,
        }
    }

    fn exception(self, py: Python<'_>) -> PyResult<PyErr> {
        let ExceptionArgs { class, message, hint, code, detail } = *self.0;
        let kwargs = PyDict::new(py);
        kwargs.set_item("hint", hint)?;
        kwargs.set_item("code", code)?;
        match detail {
            ExceptionDetail::None => {}
            ExceptionDetail::Rank(rank) => kwargs.set_item("rank", rank.0)?,
            ExceptionDetail::Missing(ranks) => {
                kwargs.set_item("missing", ranks.iter().map(|rank| rank.0).collect::<Vec<_>>())?
            }
            ExceptionDetail::Index { position, index, rows } => {
                kwargs.set_item("position", position)?;
                kwargs.set_item("index", index)?;
                kwargs.set_item("rows", rows)?;
            }
        }
        let class = py.import("wholemem.errors")?.getattr(class)?;
        Ok(PyErr::from_value(class.call((message,), Some(&kwargs))?))
    }
}

impl From<Exception> for PyErr {
    fn from(raised: Exception) -> Self {
        let exception = Python::try_attach(|py| raised.exception(py).unwrap_or_else(|error| error));
        // While the interpreter is finalizing, no code can catch the exception, so a builtin class is used.
        exception.unwrap_or_else(|| PyRuntimeError::new_err("the interpreter is ending"))
    }
}

/// Returns true if an exception is `wholemem.errors.BadIndex`.
pub(crate) fn is_bad_index(py: Python<'_>, error: &PyErr) -> bool {
    is_instance(py, error, "BadIndex")
}

/// Returns true if an exception is an instance of the named class of `wholemem.errors`.
fn is_instance(py: Python<'_>, error: &PyErr, class: &str) -> bool {
    let class = py.import("wholemem.errors").and_then(|errors| errors.getattr(class));
    class.is_ok_and(|class| error.is_instance(py, &class))
}

/// Adds the name of an argument to the exception that its value caused.
pub(crate) fn name_argument(py: Python<'_>, argument: &str, error: PyErr) -> PyErr {
    let value = error.value(py);
    let message = value.getattr("args").and_then(|args| args.get_item(0));
    let _ = match message {
        Ok(message) if is_instance(py, &error, "Error") => {
            value.setattr("args", (format!("{argument}: {message}"),))
        }
        // An exception of another package may have any arguments, so the name is added as a note (`add_note` requires Python
        // 3.11).
        _ => value.call_method1("add_note", (format!("this concerns {argument}"),)).map(drop),
    };
    error
}

/// Converts a result of the other wholemem crates into a `PyResult`.
pub(crate) trait IntoPyResult<T> {
    /// Converts the error of a result into a Python exception.
    fn into_py(self) -> PyResult<T>;
}

impl<T, E: Into<Exception>> IntoPyResult<T> for Result<T, E> {
    fn into_py(self) -> PyResult<T> {
        self.map_err(|error| error.into().into())
    }
}

impl From<wholemem::Error> for Exception {
    fn from(error: wholemem::Error) -> Self {
        use wholemem::Error;
        let class = match error {
            Error::Hal(error) => return error.into(),
            Error::Comm(error) => return error.into(),
            Error::Os(error) => return error.into(),
            Error::File(error) => return error.into(),
            Error::OnRank { rank, code, .. } => {
                let (class, detail) = on_rank(rank, code);
                let raised = Self::new(class, error.to_string()).code(code).with(detail);
                return raised.with_hint_of(error.hint());
            }
            Error::BadIndex { position, index, rows } => {
                let raised = Self::new("BadIndex", error.to_string()).code(error.code());
                return raised.with(ExceptionDetail::Index { position, index, rows });
            }
            Error::RanksDisagree { .. } | Error::SavesDiffer { .. } => "RanksDisagree",
            Error::TypesDiffer { .. } | Error::NotConvertible { .. } | Error::OpNotForType { .. } => {
                "WrongType"
            }
            Error::NoCommonAddress { .. } | Error::NoWindowSpace { .. } => "OutOfMemory",
            Error::NotResident { .. } => "Unsupported",
            Error::Environment { .. } => "BadEnvironment",
            _ => "WrongValue",
        };
        Self::new(class, error.to_string()).code(error.code()).with_hint_of(error.hint())
    }
}

/// Returns the exception class for an error that one rank had in a collective call, by the error's [code](wholemem::Error::code).
/// The same error in a call without other ranks has the same class.
fn on_rank(rank: Rank, code: u32) -> (&'static str, ExceptionDetail) {
    match code {
        7 | 8 | 25 => ("WrongDevice", ExceptionDetail::None),
        14 | 20 | 21 => ("Unsupported", ExceptionDetail::None),
        105 => ("OutOfMemory", ExceptionDetail::None),
        1002..=1008 | 1013..=1016 | 1031..=1032 => ("WrongValue", ExceptionDetail::None),
        1017 => ("BadFile", ExceptionDetail::None),
        1018 => ("Aborted", ExceptionDetail::Rank(rank)),
        _ => ("RankFailed", ExceptionDetail::Rank(rank)),
    }
}

impl From<CommError> for Exception {
    fn from(error: CommError) -> Self {
        let raised = |class| Self::new(class, error.to_string()).code(error.code());
        let hint = "create a new communicator of the remaining ranks";
        match &error {
            CommError::PeerLost { rank } => raised("PeerLost").rank(*rank).hint(hint),
            CommError::PeerLeft { rank } => raised("PeerLost").rank(*rank),
            CommError::Closed => raised("Closed").hint("create another communicator"),
            CommError::Aborted { by } => raised("Aborted").rank(*by).hint(hint),
            CommError::Timeout { missing, joining, .. } => {
                let hint = if *joining {
                    "start all ranks, and pass the same id and number of ranks to each"
                } else {
                    "a rank is stopped, slow, or at another place of its program; `timeout=` or `WHOLEMEM_TIMEOUT` sets the seconds"
                };
                raised("Timeout").missing(missing).hint(hint)
            }
            CommError::NodeTimeout { ranks, .. } => raised("Timeout").missing(ranks).hint(hint),
            CommError::AcrossNodes { .. } => raised("Unsupported").hint(ON_ONE_NODE),
            CommError::Poisoned { missing } => raised("Timeout").missing(missing).hint(hint),
            CommError::RanksDisagree { .. } => raised("RanksDisagree")
                .hint("make the same calls in the same order and with equal arguments on all ranks"),
            CommError::Protocol { .. } => raised("RanksDisagree").hint(hint),
            CommError::SizeDiffers { .. } | CommError::RankTaken { .. } => raised("RanksDisagree"),
            CommError::Environment { .. }
            | CommError::Discovery(_)
            | CommError::NoSecret
            | CommError::SocketDir { .. }
            | CommError::OtherNamespace { .. } => raised("BadEnvironment"),
            CommError::Busy => {
                raised("Busy").hint("threads that call at the same time need one communicator each")
            }
            CommError::Forked => raised("Forked").hint(IN_A_CHILD),
            CommError::Os(error) => os(error, error.to_string()).code("os"),
            CommError::Descriptors { .. } => raised("Error"),
            _ => raised("WrongValue"),
        }
    }
}

impl From<HalError> for Exception {
    fn from(error: HalError) -> Self {
        let mut message = error.to_string();
        if let Some(source) = error.source() {
            message = format!("{message}: {source}");
        }
        let raised = match &error {
            HalError::Failed { cause: BackendError::Os(cause), .. } => os(cause, message),
            HalError::Failed { cause: BackendError::OutOfMemory { .. }, .. } => {
                Self::new("OutOfMemory", message)
            }
            HalError::Failed { cause: BackendError::Driver { code, .. }, .. } if code.0 == 2 => {
                Self::new("OutOfMemory", message)
            }
            HalError::Failed { .. } | HalError::InUse { .. } => Self::new("Error", message),
            HalError::Forked { .. } => {
                return Self::new("Forked", message).code(error.code()).hint(IN_A_CHILD);
            }
            HalError::TimedOut { .. } => Self::new("Timeout", message).missing(&[]),
            HalError::Unsupported { .. } | HalError::Unavailable { .. } | HalError::NotHostVisible { .. } => {
                Self::new("Unsupported", message)
            }
            HalError::NoSuchDevice { .. } | HalError::WrongBackend { .. } | HalError::WrongDevice { .. } => {
                Self::new("WrongDevice", message)
            }
            HalError::Denied { .. } | HalError::ReadOnlyHandle { .. } => Self::new("ReadOnly", message),
            _ => Self::new("WrongValue", message),
        };
        raised.code(error.code()).with_hint_of(error.hint())
    }
}

impl From<OsError> for Exception {
    fn from(error: OsError) -> Self {
        os(&error, error.to_string()).code("os")
    }
}

impl From<FileError> for Exception {
    fn from(error: FileError) -> Self {
        let mut message = error.to_string();
        if let Some(source) = error.source() {
            message = format!("{message}: {source}");
        }
        Self::new("BadFile", message).code("file").with_hint_of(error.hint())
    }
}

fn os(error: &OsError, message: String) -> Exception {
    let full = [Errno::NOMEM, Errno::NOSPC];
    match error {
        OsError::Call { errno, .. } if full.contains(errno) => Exception::new("OutOfMemory", message),
        OsError::TimedOut => Exception::new("Timeout", message).missing(&[]),
        _ => Exception::new("Error", message),
    }
}
