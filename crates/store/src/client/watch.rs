//! Being told of what happens to names.

use std::path::Path;

use wholemem_os::Deadline;

use super::Client;
use super::wire::Wire;
use crate::Result;
use crate::protocol::{Ask, Event};

/// A connection on which the server tells of what happens to names that begin in one way.
#[derive(Debug)]
pub struct Watch {
    wire: Wire,
    prefix: String,
}

impl Watch {
    pub(super) fn open(path: &Path, prefix: &str) -> Result<Self> {
        let (wire, _) = Wire::connect(path, Deadline::after(Client::PATIENCE))?;
        let mut watch = Self { wire, prefix: prefix.to_owned() };
        watch.ask()?;
        Ok(watch)
    }

    /// The next thing that happens. What happens while a server is replaced is not told.
    ///
    /// # Errors
    /// [`Error::TimedOut`](crate::Error::TimedOut) when nothing happens before the deadline;
    /// [`Error::Disconnected`](crate::Error::Disconnected) also for one who does not read for long.
    pub fn next(&mut self, deadline: Deadline) -> Result<Event> {
        loop {
            match self.wire.event(deadline)? {
                Some(event) => return Ok(event),
                None => self.ask()?,
            }
        }
    }

    fn ask(&mut self) -> Result<()> {
        let ask = Ask::Watch { prefix: self.prefix.clone() };
        self.wire.request(ask, &[], Deadline::after(Client::PATIENCE)).map(drop)
    }
}
