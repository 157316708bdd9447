//! Reads the output of a rank: its lines are printed with the rank as prefix, and written to log files with `--log-dir`.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;

use anyhow::{Context, Result};
use rustix::event::PollFlags;

use super::output_queue::{OutputQueue, is_ready};

/// The maximum length of a line in the output of a rank. A longer line is split.
const MAX_LINE: usize = 64 << 10;

/// The maximum number of reads from one output pipe of a rank before other pipes, signals and exits are handled. A full pipe
/// needs fewer reads, so all output that a rank wrote before its exit is forwarded.
const MAX_READS: usize = 64;

/// The pipes from the stdout and stderr of a rank, with their log files.
#[derive(Debug)]
pub(super) struct RankOutput {
    prefix: String,
    streams: Vec<OutputStream>,
}

#[derive(Debug)]
struct OutputStream {
    from: OwnedFd,
    is_error: bool,
    log: Option<File>,
    partial: Vec<u8>,
    ended: bool,
}

impl RankOutput {
    pub(super) fn of(rank: u32, ranks: u32, child: &mut Child, folder: Option<&Path>) -> Result<Self> {
        let width = (ranks - 1).to_string().len();
        let log = |name: &str| {
            let path = folder.map(|folder| folder.join(format!("rank-{rank:0width$}.{name}")));
            path.map(|path| File::create(&path).with_context(|| format!("cannot write {}", path.display())))
                .transpose()
        };
        let streams =
            [(child.stdout.take().map(OwnedFd::from), false), (child.stderr.take().map(OwnedFd::from), true)];
        let stream = |(from, is_error): (Option<OwnedFd>, bool)| {
            let log = log(if is_error { "err" } else { "out" });
            from.map(|from| Ok(OutputStream { from, is_error, log: log?, partial: Vec::new(), ended: false }))
        };
        let streams: Result<Vec<_>> = streams.into_iter().filter_map(stream).collect();
        Ok(Self { prefix: format!("[{rank:width$}] "), streams: streams? })
    }

    /// Returns the open pipes of a rank to poll: those whose output queue is not full.
    pub(super) fn fds(&self, queues: &[OutputQueue; 2]) -> impl Iterator<Item = BorrowedFd<'_>> {
        let is_read =
            |stream: &&OutputStream| !stream.ended && !queues[usize::from(stream.is_error)].is_full();
        self.streams.iter().filter(is_read).map(|stream| stream.from.as_fd())
    }

    /// Reads available output of a rank and appends it to the launcher's queues until they are full. Returns true if anything
    /// was read.
    pub(super) fn forward(&mut self, queues: &mut [OutputQueue; 2]) -> Result<bool> {
        let mut any = false;
        for stream in &mut self.streams {
            let queue = &mut queues[usize::from(stream.is_error)];
            for _ in 0..MAX_READS {
                if stream.ended || queue.is_full() || !is_ready(&stream.from, PollFlags::IN) {
                    break;
                }
                stream.read(&self.prefix, queue)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Forwards the last lines of a rank's output that have no line break.
    pub(super) fn finish(&mut self, queues: &mut [OutputQueue; 2]) {
        for stream in self.streams.iter_mut().filter(|stream| !stream.partial.is_empty()) {
            stream.partial.push(b'\n');
            stream.push_lines(&self.prefix, &mut queues[usize::from(stream.is_error)]);
        }
    }
}

impl OutputStream {
    fn read(&mut self, prefix: &str, queue: &mut OutputQueue) -> Result<()> {
        let mut buffer = [0; 16 << 10];
        match rustix::io::read(&self.from, &mut buffer) {
            Ok(0) => self.ended = true,
            Ok(len) => {
                if let Some(log) = &mut self.log {
                    log.write_all(&buffer[..len]).context("cannot write the output of a rank")?;
                }
                self.partial.extend_from_slice(&buffer[..len]);
                if self.partial.len() > MAX_LINE && !self.partial.contains(&b'\n') {
                    self.partial.push(b'\n');
                }
                self.push_lines(prefix, queue);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => self.ended = true,
        }
        Ok(())
    }

    fn push_lines(&mut self, prefix: &str, queue: &mut OutputQueue) {
        let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') else { return };
        let rest = self.partial.split_off(end + 1);
        let lines = std::mem::replace(&mut self.partial, rest);
        queue.push(&prefixed(&lines, prefix));
    }
}

fn prefixed(lines: &[u8], prefix: &str) -> Vec<u8> {
    lines.split_inclusive(|byte| *byte == b'\n').flat_map(|line| [prefix.as_bytes(), line].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_gets_the_prefix() {
        assert_eq!(prefixed(b"a\n\nb\n", "[1] "), b"[1] a\n[1] \n[1] b\n");
    }
}
