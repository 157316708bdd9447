//! Watches: streams of events of objects whose names begin with a prefix.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use wholemem_os::Deadline;

use super::connection::Connection;
use super::{Client, unexpected};
use crate::protocol::{Answer, Event, RequestKind};
use crate::{Error, Result};

/// A connection on which the server sends the events of objects whose names begin with one prefix.
///
/// A program that ends and starts again resumes a watch with [`Client::watch_after`] and the last [`Event::revision`].
#[derive(Debug)]
pub struct Watch {
    connection: Connection,
    prefix: String,
    /// The revision of the last event that this watch has returned, or behind which it starts.
    revision: Option<u64>,
    /// True if the watch is not registered with the current server.
    is_unregistered: bool,
    /// True if events are lost that were not reported by [`Error::EventsMissed`] yet.
    has_missed: bool,
}

impl Watch {
    pub(super) fn open(path: &Path, prefix: &str, after: Option<u64>) -> Result<Self> {
        let (connection, _) = Connection::connect(path, Deadline::after(Client::TIMEOUT))?;
        let prefix = prefix.to_owned();
        let mut watch =
            Self { connection, prefix, revision: after, is_unregistered: true, has_missed: false };
        watch.register()?;
        Ok(watch)
    }

    /// Returns the revision behind which the next event is: that of the last event, or of the beginning of the watch.
    #[must_use]
    pub fn revision(&self) -> u64 {
        self.revision.unwrap_or_default()
    }

    /// Waits for the next event of the watched names.
    ///
    /// Events between the death of a server and the next call are lost; that call returns [`Error::EventsMissed`] once. No event
    /// after that is lost, so a caller that lists the objects then has the current state.
    ///
    /// # Errors
    /// [`Error::EventsMissed`] if the server was replaced, or if it has not retained the events behind the revision at which the
    /// watch was resumed; the watch continues.
    /// [`Error::TimedOut`] if there is no event before the deadline;
    /// [`Error::Disconnected`] if the store has ended, or if the caller has not read events for too long.
    pub fn next(&mut self, deadline: Deadline) -> Result<Event> {
        loop {
            if self.is_unregistered {
                self.register()?;
            }
            if std::mem::take(&mut self.has_missed) {
                return Err(Error::EventsMissed { prefix: self.prefix.clone() });
            }
            match self.connection.event(deadline)? {
                Some(event) => {
                    self.revision = Some(event.revision);
                    return Ok(event);
                }
                None => self.is_unregistered = true,
            }
        }
    }

    /// Returns the next event if it has already arrived, and `None` otherwise. Never waits, so it is for event loops: they wait until the
    /// descriptor of the watch is readable, and then call this function until it returns `None`.
    ///
    /// It also returns `None` if the server was replaced: then [`Watch::is_registered`] returns false, and [`Watch::next`] registers the
    /// watch with the new server.
    ///
    /// # Errors
    /// [`Error::EventsMissed`] if events behind the revision at which the watch was resumed are lost. The descriptor is not readable
    /// for this error, so the first call must not wait for it.
    /// [`Error::Disconnected`] as for [`Watch::next`].
    pub fn try_next(&mut self) -> Result<Option<Event>> {
        if self.is_unregistered {
            return Ok(None);
        }
        if std::mem::take(&mut self.has_missed) {
            return Err(Error::EventsMissed { prefix: self.prefix.clone() });
        }
        match self.connection.event(Deadline::NOW) {
            Ok(Some(event)) => {
                self.revision = Some(event.revision);
                Ok(Some(event))
            }
            Ok(None) => {
                self.is_unregistered = true;
                Ok(None)
            }
            Err(Error::TimedOut) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns false if the server was replaced and the next call of [`Watch::next`] must register the watch with the new one.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        !self.is_unregistered
    }

    fn register(&mut self) -> Result<()> {
        let kind = RequestKind::WatchFrom { prefix: self.prefix.clone(), after: self.revision };
        let (answer, _) = self.connection.request(kind, &[], Deadline::after(Client::TIMEOUT))?;
        let Answer::Watching { revision, is_complete } = answer else { return Err(unexpected()) };
        self.revision = Some(revision);
        self.has_missed |= !is_complete;
        self.is_unregistered = false;
        Ok(())
    }
}

/// The descriptor is readable if an event has arrived, if the server was replaced, or if the store has ended.
impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
