//! Being told of what happens to names.

use std::path::Path;

use wholemem_os::Deadline;

use super::Client;
use super::connection::Connection;
use crate::protocol::{Ask, Event};
use crate::{Error, Result};

/// A connection on which the server tells of what happens to names that begin in one way.
#[derive(Debug)]
pub struct Watch {
    connection: Connection,
    prefix: String,
    /// Whether there is another server, who does not know of it yet.
    is_unknown: bool,
}

impl Watch {
    pub(super) fn open(path: &Path, prefix: &str) -> Result<Self> {
        let (connection, _) = Connection::connect(path, Deadline::after(Client::PATIENCE))?;
        let mut watch = Self { connection, prefix: prefix.to_owned(), is_unknown: true };
        watch.ask()?;
        Ok(watch)
    }

    /// The next thing that happens.
    ///
    /// What happens between the death of a server and the next call of this is told by nobody. Whoever calls hears of
    /// that, once, and everything from then on: who looks at what there is after that has missed nothing.
    ///
    /// # Errors
    /// [`Error::EventsMissed`] when the server was replaced; the watch goes on.
    /// [`Error::TimedOut`] when nothing happens before the deadline;
    /// [`Error::Disconnected`] also for one who does not read for long.
    pub fn next(&mut self, deadline: Deadline) -> Result<Event> {
        if !self.is_unknown {
            match self.connection.event(deadline)? {
                Some(event) => return Ok(event),
                None => self.is_unknown = true,
            }
        }
        self.ask()?;
        Err(Error::EventsMissed { prefix: self.prefix.clone() })
    }

    fn ask(&mut self) -> Result<()> {
        let ask = Ask::Watch { prefix: self.prefix.clone() };
        self.connection.request(ask, &[], Deadline::after(Client::PATIENCE))?;
        self.is_unknown = false;
        Ok(())
    }
}
