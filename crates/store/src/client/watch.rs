//! Watches: streams of events of objects whose names begin with a prefix.

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

    fn register(&mut self) -> Result<()> {
        let kind = RequestKind::Watch { prefix: self.prefix.clone() };
        self.connection.request(kind, &[], Deadline::after(Client::TIMEOUT))?;
        self.is_unregistered = false;
        Ok(())
    }
}
