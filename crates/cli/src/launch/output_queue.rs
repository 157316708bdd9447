//! Queues of the launcher's stdout and stderr, which are written without blocking.
//!
//! A reader that stops reading, such as a pager, must not keep the launcher from detecting that a rank has failed. Unread
//! output is queued. If a queue is full, the ranks' pipes are not read, and the ranks block on write.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// If a queue has at least this number of bytes, the launcher does not read the ranks' pipes.
const MAX_QUEUED: usize = 1 << 20;

/// The number of bytes that a pipe accepts without blocking whenever it is writable (PIPE_BUF).
const MAX_WRITE: usize = 4096;

#[derive(Debug)]
pub(super) struct OutputQueue {
    is_error: bool,
    waiting: VecDeque<u8>,
    /// True if the reader has closed the launcher's stdout or stderr.
    closed: bool,
}

impl OutputQueue {
    /// Creates the queues of the launcher's stdout and stderr.
    pub(super) fn both() -> [Self; 2] {
        [false, true].map(|is_error| Self { is_error, waiting: VecDeque::new(), closed: false })
    }

    fn fd(&self) -> BorrowedFd<'static> {
        // The descriptors are `'static`, because this program never closes stdout and stderr.
        if self.is_error { rustix::stdio::stderr() } else { rustix::stdio::stdout() }
    }

    /// Returns true if the queue is full, so that no more output should be added.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= MAX_QUEUED
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        // If the reader has closed the pipe, the output of ranks is discarded, and the ranks continue.
        if !self.closed {
            self.waiting.extend(bytes);
        }
    }

    /// Returns the descriptor to poll for writing, if output is queued.
    pub(super) fn poll(&self) -> Option<PollFd<'_>> {
        (!self.is_empty()).then(|| PollFd::from_borrowed_fd(self.fd(), PollFlags::OUT))
    }

    /// Writes queued output until the descriptor is not writable.
    pub(super) fn flush(&mut self) -> Result<()> {
        while !self.is_empty() && is_ready(self.fd(), PollFlags::OUT) {
            let (front, _) = self.waiting.as_slices();
            match rustix::io::write(self.fd(), &front[..front.len().min(MAX_WRITE)]) {
                Ok(len) => drop(self.waiting.drain(..len)),
                Err(rustix::io::Errno::INTR) => {}
                // The descriptor is non-blocking, because another process has set O_NONBLOCK on the shared file description,
                // and it is full. The launcher polls until it is writable.
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

/// Returns true if a descriptor is readable or writable now, as `events` selects.
pub(super) fn is_ready(fd: impl AsFd, events: PollFlags) -> bool {
    let mut polls = [PollFd::new(&fd, events)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polls, Some(&now)).is_ok_and(|ready| ready > 0)
}
