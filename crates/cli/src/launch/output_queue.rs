//! Where the lines of the ranks go: written as fast as they are read there, without ever waiting for the reader.
//!
//! A reader that stands still, as a pager does, must not keep the launcher from seeing that a rank has failed. What it
//! has not read yet waits here; when that is much, the ranks are not read either, and wait themselves.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// How much waits before ranks are no longer read.
const MAX_QUEUED: usize = 1 << 20;

/// What a pipe takes at once whenever it says that it takes something.
const MAX_WRITE: usize = 4096;

#[derive(Debug)]
pub(super) struct OutputQueue {
    is_error: bool,
    waiting: VecDeque<u8>,
    /// The reader went away.
    closed: bool,
}

impl OutputQueue {
    /// The queues of ranks' standard output and error.
    pub(super) fn both() -> [Self; 2] {
        [false, true].map(|is_error| Self { is_error, waiting: VecDeque::new(), closed: false })
    }

    fn fd(&self) -> BorrowedFd<'static> {
        // Neither is ever closed by this program.
        if self.is_error { rustix::stdio::stderr() } else { rustix::stdio::stdout() }
    }

    /// Whether so much waits that no more is to be brought.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_QUEUED
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        // A reader who has seen enough does not end the ranks.
        if !self.closed {
            self.waiting.extend(bytes);
        }
    }

    /// What to wait for, if anything waits.
    pub(super) fn poll(&self) -> Option<PollFd<'_>> {
        (!self.is_empty()).then(|| PollFd::from_borrowed_fd(self.fd(), PollFlags::OUT))
    }

    /// Writes what is taken at once.
    pub(super) fn flush(&mut self) -> Result<()> {
        while !self.is_empty() && is_ready(self.fd(), PollFlags::OUT) {
            let (front, _) = self.waiting.as_slices();
            match rustix::io::write(self.fd(), &front[..front.len().min(MAX_WRITE)]) {
                Ok(len) => drop(self.waiting.drain(..len)),
                Err(rustix::io::Errno::INTR) => {}
                // Somebody who shares it has asked for this; it said that it is ready, and will again.
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::PIPE) => {
                    self.closed = true;
                    self.waiting.clear();
                }
                Err(errno) => return Err(io::Error::from(errno)).context("cannot write what ranks wrote"),
            }
        }
        Ok(())
    }
}

/// Whether something can be done with a descriptor now.
pub(super) fn is_ready(fd: impl AsFd, what: PollFlags) -> bool {
    let mut polls = [PollFd::new(&fd, what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polls, Some(&now)).is_ok_and(|ready| ready > 0)
}
