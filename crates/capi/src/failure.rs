//! The error of a call: a status, a message, a hint, and the values that programs need.

use std::borrow::Cow;

use wholemem_comm::{Error as CommError, Rank};
use wholemem_hal::Error as HalError;
use wholemem_os::Error as OsError;
use wholemem_store::Error as StoreError;

use crate::handle::HandleError;
use crate::status::{
    WM_ERROR_INVALID_HANDLE, WM_ERROR_OS, WM_ERROR_PANIC, WM_ERROR_TOO_MANY_HANDLES, wm_status_t,
};

/// The hint for a program whose group of ranks failed.
const NEW_GROUP: &str = "create a new communicator of the remaining ranks";

/// The result of the code of an exported function.
pub(crate) type Result<T = (), E = Failure> = std::result::Result<T, E>;

/// The error of a call. It is boxed, because most calls succeed.
#[derive(Debug)]
pub(crate) struct Failure(pub(crate) Box<FailureDetails>);

/// The content of a [`Failure`].
#[derive(Debug)]
pub(crate) struct FailureDetails {
    pub(crate) status: wm_status_t,
    pub(crate) message: String,
    pub(crate) hint: Option<Cow<'static, str>>,
    /// The rank that caused the error.
    pub(crate) rank: Option<Rank>,
    /// The ranks that did not take part in a call before its timeout.
    pub(crate) missing: Vec<Rank>,
    /// The smallest position of an index that names no row.
    pub(crate) position: Option<u64>,
}

impl Failure {
    /// Creates the error of a call from a status and a message.
    #[cold]
    pub(crate) fn new(status: wm_status_t, message: impl Into<String>) -> Self {
        let message = message.into();
        let details =
            FailureDetails { status, message, hint: None, rank: None, missing: Vec::new(), position: None };
        Self(Box::new(details))
    }

    /// Creates the error of a call whose code panicked.
    #[cold]
    pub(crate) fn of_panic(payload: Box<dyn std::any::Any + Send>) -> Self {
        let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
        let message = text.map_or_else(
            || "the library panicked".to_owned(),
            |text| format!("the library panicked: {text}"),
        );
        // A payload whose destructor panics must not unwind into C.
        std::mem::forget(payload);
        Self::new(WM_ERROR_PANIC, message).hint("this is a defect of the library: please report it")
    }

    /// Sets the hint: what the caller can do about the error.
    pub(crate) fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.0.hint = Some(hint.into());
        self
    }

    fn maybe_hint(self, hint: Option<&str>) -> Self {
        match hint {
            Some(hint) => self.hint(hint.to_owned()),
            None => self,
        }
    }

    fn rank(mut self, rank: Rank) -> Self {
        self.0.rank = Some(rank);
        self
    }

    fn missing(mut self, missing: &[Rank]) -> Self {
        self.0.missing = missing.to_vec();
        self
    }
}

impl From<HandleError> for Failure {
    fn from(error: HandleError) -> Self {
        let status = match error {
            HandleError::Full { .. } | HandleError::TooManyCalls { .. } => WM_ERROR_TOO_MANY_HANDLES,
            _ => WM_ERROR_INVALID_HANDLE,
        };
        Self::new(status, error.to_string())
    }
}

impl From<wholemem::Error> for Failure {
    fn from(error: wholemem::Error) -> Self {
        use wholemem::Error;
        match error {
            Error::Hal(error) => error.into(),
            Error::Comm(error) => error.into(),
            Error::Os(error) => error.into(),
            Error::File(ref file) => Self::new(error.code(), with_source(file)).maybe_hint(error.hint()),
            Error::OnRank { rank, .. } | Error::RanksDisagree { rank } | Error::SavesDiffer { rank } => {
                Self::new(error.code(), error.to_string()).maybe_hint(error.hint()).rank(rank)
            }
            Error::BadIndex { position, .. } => {
                let mut failure = Self::new(error.code(), error.to_string());
                failure.0.position = Some(position);
                failure
            }
            _ => Self::new(error.code(), error.to_string()).maybe_hint(error.hint()),
        }
    }
}

impl From<CommError> for Failure {
    fn from(error: CommError) -> Self {
        let failure = Self::new(error.number(), error.to_string());
        match &error {
            CommError::PeerLost { rank } => failure.rank(*rank).hint(NEW_GROUP),
            CommError::PeerLeft { rank } => failure.rank(*rank),
            CommError::Aborted { by } => failure.rank(*by).hint(NEW_GROUP),
            CommError::Timeout { missing, joining: true, .. } => {
                failure.missing(missing).hint("start all ranks, and pass the same id and number of ranks to each")
            }
            CommError::Timeout { missing, joining: false, .. } => failure.missing(missing).hint(
                "a rank is stopped, slow, or at another place of its program; the timeout of the communicator or `WHOLEMEM_TIMEOUT` \
                 sets the time",
            ),
            CommError::NodeTimeout { ranks, .. } => failure.missing(ranks).hint(NEW_GROUP),
            CommError::Poisoned { missing } => failure.missing(missing).hint(NEW_GROUP),
            CommError::RanksDisagree { rank, .. } => failure
                .rank(*rank)
                .hint("make the same calls in the same order and with equal arguments on all ranks"),
            CommError::Protocol { rank, .. } => failure.rank(*rank).hint(NEW_GROUP),
            CommError::Descriptors { rank, .. } => failure.rank(*rank),
            CommError::Busy => failure.hint("threads that call at the same time need one communicator each"),
            _ => failure,
        }
    }
}

impl From<HalError> for Failure {
    fn from(error: HalError) -> Self {
        Self::new(error.code(), with_source(&error)).maybe_hint(error.hint())
    }
}

impl From<OsError> for Failure {
    fn from(error: OsError) -> Self {
        Self::new(WM_ERROR_OS, error.to_string())
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Memory(error) => error.into(),
            error => Self::new(error.number(), with_source(&error)),
        }
    }
}

/// Returns the message of an error, and of its source if it has one.
fn with_source(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
