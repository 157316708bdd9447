//! Watches: streams of events of objects whose names begin with a prefix.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use wholemem_os::Deadline;

use super::Client;
use super::connection::Connection;
use crate::protocol::{Event, RequestKind};
use crate::{Error, Result};

/// A connection on which the server sends the events of objects whose names begin with one prefix.
#[derive(Debug)]
pub struct Watch {
    connection: Connection,
    prefix: String,
    /// True if the watch is not registered with the current server.
    is_unregistered: bool,
}

impl Watch {
    pub(super) fn open(path: &Path, prefix: &str) -> Result<Self> {
        let (connection, _) = Connection::connect(path, Deadline::after(Client::TIMEOUT))?;
        let mut watch = Self { connection, prefix: prefix.to_owned(), is_unregistered: true };
        watch.register()?;
        Ok(watch)
    }

    /// Waits for the next event of the watched names.
    ///
    /// Events between the death of a server and the next call are lost; that call returns [`Error::EventsMissed`] once. No event
    /// after that is lost, so a caller that lists the objects then has the current state.
    ///
    /// # Errors
    /// [`Error::EventsMissed`] if the server was replaced; the watch continues.
    /// [`Error::TimedOut`] if there is no event before the deadline;
    /// [`Error::Disconnected`] if the store has ended, or if the caller has not read events for too long.
    pub fn next(&mut self, deadline: Deadline) -> Result<Event> {
        if !self.is_unregistered {
            match self.connection.event(deadline)? {
                Some(event) => return Ok(event),
                None => self.is_unregistered = true,
            }
        }
        self.register()?;
        Err(Error::EventsMissed { prefix: self.prefix.clone() })
    }

    /// Returns the next event if it has already arrived, and `None` otherwise. Never waits, so it is for event loops: they wait until the
    /// descriptor of the watch is readable, and then call this function until it returns `None`.
    ///
    /// It also returns `None` if the server was replaced: then [`Watch::is_registered`] returns false, and [`Watch::next`] registers the
    /// watch with the new server.
    ///
    /// # Errors
    /// [`Error::Disconnected`] as for [`Watch::next`].
    pub fn try_next(&mut self) -> Result<Option<Event>> {
        if self.is_unregistered {
            return Ok(None);
        }
        match self.connection.event(Deadline::NOW) {
            Ok(None) => {
                self.is_unregistered = true;
                Ok(None)
            }
            Err(Error::TimedOut) => Ok(None),
            outcome => outcome,
        }
    }

    /// Returns false if the server was replaced and the next call of [`Watch::next`] must register the watch with the new one.
    #[must_use]
    pub fn is_registered(&self) -> bool {
        !self.is_unregistered
    }

    fn register(&mut self) -> Result<()> {
        let kind = RequestKind::Watch { prefix: self.prefix.clone() };
        self.connection.request(kind, &[], Deadline::after(Client::TIMEOUT))?;
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
