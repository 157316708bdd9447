//! Arguments of a client's calls: timeouts, default values, and names of objects; and the errors of names that do not exist.

use std::convert::Infallible;
use std::time::Duration;

use pyo3::Borrowed;
use pyo3::prelude::*;
use wholemem_os::Deadline;
use wholemem_store::{Error, Refusal};

use super::entry::Entry;
use crate::error::Exception;

/// Converts a timeout in seconds to a duration. Infinity is allowed.
pub(super) fn seconds_of(seconds: f64) -> Result<Duration, Exception> {
    if seconds == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| Exception::new("WrongValue", format!("a timeout of {seconds} seconds is not valid")))
}

/// Returns the deadline after a number of seconds from now. Infinity is allowed.
pub(super) fn deadline_of(seconds: f64) -> Result<Deadline, Exception> {
    seconds_of(seconds).map(Deadline::after)
}

/// Converts the error of a `get` that waited for a name.
pub(super) fn wait_error(error: Error, seconds: f64) -> Exception {
    match error {
        Error::Refused(Refusal::NoSuchName { name }) => {
            let message = format!("the name `{name}` did not appear within {seconds} seconds");
            Exception::new("Timeout", message).code("no-such-name").hint("`client.list()` lists the objects")
        }
        error => error.into(),
    }
}

/// The argument of `delete`: a name, whose current object is deleted, or an entry, whose object is deleted.
#[derive(FromPyObject)]
pub(super) enum DeleteArg<'py> {
    Name(String),
    Entry(Bound<'py, Entry>),
}

pub(super) fn with_list_hint(error: Error) -> Exception {
    match error {
        Error::Refused(Refusal::NoSuchName { .. }) => {
            Exception::from(error).hint("`client.list()` lists the objects")
        }
        error => error.into(),
    }
}

/// The optional argument `default` of a call, for which `None` is a value.
pub(super) struct DefaultArg<'py>(pub(super) Option<Bound<'py, PyAny>>);

impl DefaultArg<'_> {
    /// The argument was not passed.
    pub(super) const MISSING: Self = Self(None);
}

impl<'py> FromPyObject<'_, 'py> for DefaultArg<'py> {
    type Error = Infallible;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> Result<Self, Infallible> {
        Ok(Self(Some(object.to_owned())))
    }
}

/// Returns the error of a name that does not exist as a value, and every other error as an error.
pub(super) fn or_missing<T>(outcome: Result<T, Error>) -> Result<Result<T, Error>, Error> {
    match outcome {
        Err(error @ Error::Refused(Refusal::NoSuchName { .. })) => Ok(Err(error)),
        outcome => outcome.map(Ok),
    }
}

/// Returns whether a name exists, from the result of looking it up. A name that no object can have does not exist.
pub(super) fn exists<T>(outcome: Result<T, Error>) -> Result<bool, Error> {
    match outcome {
        Ok(_) => Ok(true),
        Err(Error::Refused(Refusal::NoSuchName { .. } | Refusal::NameTooLong { .. })) => Ok(false),
        Err(error) => Err(error),
    }
}
