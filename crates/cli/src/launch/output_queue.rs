//! Queues of the launcher's stdout and stderr, which are written without blocking.
//!
//! A reader that stops reading, such as a pager, must not keep the launcher from detecting that a rank has failed. Unread
//! output is queued. If a queue is full, the ranks' pipes are not read, and the ranks block on write.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Queued bytes from which on the ranks' pipes are not read.
const MAX_QUEUED: usize = 1 << 20;

/// Bytes that a pipe accepts without blocking whenever it is writable (PIPE_BUF).
const MAX_WRITE: usize = 4096;

#[derive(Debug)]
pub(super) struct OutputQueue {
    is_error: bool,
    waiting: VecDeque<u8>,
    /// The reader closed the pipe.
    closed: bool,
}

impl OutputQueue {
    /// Creates the queues of stdout and stderr.
    pub(super) fn both() -> [Self; 2] {
        [false, true].map(|is_error| Self { is_error, waiting: VecDeque::new(), closed: false })
    }

    fn fd(&self) -> BorrowedFd<'static> {
        // This program never closes them.
        if self.is_error { rustix::stdio::stderr() } else { rustix::stdio::stdout() }
    }

    /// Whether no more output should be added.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_QUEUED
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        // A closed pipe discards output and does not end the ranks.
        if !self.closed {
            self.waiting.extend(bytes);
        }
    }

    /// The descriptor to poll, if output is queued.
    pub(super) fn poll(&self) -> Option<PollFd<'_>> {
        (!self.is_empty()).then(|| PollFd::from_borrowed_fd(self.fd(), PollFlags::OUT))
    }

    /// Writes queued output until the descriptor would block.
    pub(super) fn flush(&mut self) -> Result<()> {
        while !self.is_empty() && is_ready(self.fd(), PollFlags::OUT) {
            let (front, _) = self.waiting.as_slices();
            match rustix::io::write(self.fd(), &front[..front.len().min(MAX_WRITE)]) {
                Ok(len) => drop(self.waiting.drain(..len)),
                Err(rustix::io::Errno::INTR) => {}
                // Another process has set O_NONBLOCK on the shared file description. `poll` reports the next chance.
                Err(rustix::io::Errno::AGAIN) => break,
                Err(rustix::io::Errno::PIPE) => {
                    self.closed = true;
                    self.waiting.clear();
                }
                Err(errno) => return Err(io::Error::from(errno)).context("cannot write the output of ranks"),
            }
        }
        Ok(())
    }
}

/// Whether a descriptor is readable or writable now, as `events` selects.
pub(super) fn is_ready(fd: impl AsFd, events: PollFlags) -> bool {
    let mut polls = [PollFd::new(&fd, events)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polls, Some(&now)).is_ok_and(|ready| ready > 0)
}
