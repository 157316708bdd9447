//! Reads the output of a rank: its lines are printed with the rank as prefix, and written to log files with `--log-dir`.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Child;

use anyhow::{Context, Result};
use rustix::event::PollFlags;

use super::lines::LineReader;
use super::output_queue::{OutputQueue, is_ready};
use super::plan::NodePlan;

/// The maximum length of a line in the output of a rank. A longer line is split.
pub(super) const MAX_LINE: usize = 64 << 10;

/// The maximum number of reads from one output pipe of a rank before other pipes, signals and exits are handled. A full pipe
/// needs fewer reads, so all output that a rank wrote before its exit is forwarded.
pub(super) const MAX_READS: usize = 64;

/// The pipes from the stdout and stderr of a rank, with their log files.
#[derive(Debug)]
pub(super) struct RankOutput {
    prefix: String,
    streams: Vec<OutputStream>,
}

#[derive(Debug)]
struct OutputStream {
    reader: LineReader,
    is_error: bool,
    log: Option<File>,
}

impl RankOutput {
    pub(super) fn of(rank: u32, plan: &NodePlan, child: &mut Child) -> Result<Self> {
        let log = |extension: &str| {
            let path =
                plan.log_dir.as_ref().map(|folder| folder.to_path().join(plan.log_name(rank, extension)));
            path.map(|path| File::create(&path).with_context(|| format!("cannot write {}", path.display())))
                .transpose()
        };
        let streams =
            [(child.stdout.take().map(OwnedFd::from), false), (child.stderr.take().map(OwnedFd::from), true)];
        let stream = |(from, is_error): (Option<OwnedFd>, bool)| {
            let log = log(if is_error { "err" } else { "out" });
            from.map(|from| Ok(OutputStream { reader: LineReader::new(from, MAX_LINE), is_error, log: log? }))
        };
        let streams: Result<Vec<_>> = streams.into_iter().filter_map(stream).collect();
        Ok(Self { prefix: plan.prefix(rank), streams: streams? })
    }

    /// Returns the open pipes of a rank to poll: those whose output queue is not full.
    pub(super) fn fds(&self, queues: &[OutputQueue; 2]) -> impl Iterator<Item = BorrowedFd<'_>> {
        let is_read = |stream: &&OutputStream| {
            !stream.reader.has_ended() && !queues[usize::from(stream.is_error)].is_full()
        };
        self.streams.iter().filter(is_read).map(|stream| stream.reader.as_fd())
    }

    /// Reads available output of a rank and appends it to the launcher's queues until they are full. Returns true if anything
    /// was read.
    pub(super) fn forward(&mut self, queues: &mut [OutputQueue; 2]) -> Result<bool> {
        let mut any = false;
        for stream in &mut self.streams {
            let queue = &mut queues[usize::from(stream.is_error)];
            for _ in 0..MAX_READS {
                if stream.reader.has_ended() || queue.is_full() || !is_ready(&stream.reader, PollFlags::IN) {
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
        for stream in &mut self.streams {
            let lines = stream.reader.finish();
            queues[usize::from(stream.is_error)].push(&prefixed(&lines, &self.prefix));
        }
    }
}

impl OutputStream {
    fn read(&mut self, prefix: &str, queue: &mut OutputQueue) -> Result<()> {
        let log = |bytes: &[u8]| self.log.as_mut().map_or(Ok(()), |log| log.write_all(bytes));
        let lines = self.reader.read(log).context("cannot write the output of a rank")?;
        queue.push(&prefixed(&lines, prefix));
        Ok(())
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
