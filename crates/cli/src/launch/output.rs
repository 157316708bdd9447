//! What a rank writes: each line behind its rank, and all of it in a file where one is asked for.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;

use anyhow::{Context, Result};
use rustix::event::PollFlags;

use super::sink::{Sink, is_ready};

/// A line that has not ended by then is passed on in pieces.
const LONGEST: usize = 64 << 10;

/// How often a stream is read before the others have their turn, and signals and deaths theirs. A full pipe is read in
/// fewer, so that what a rank wrote before it ended comes out.
const TURN: usize = 64;

/// The two streams of a rank.
#[derive(Debug)]
pub(super) struct Output {
    prefix: String,
    streams: Vec<Stream>,
}

#[derive(Debug)]
struct Stream {
    from: OwnedFd,
    is_error: bool,
    log: Option<File>,
    partial: Vec<u8>,
    ended: bool,
}

impl Output {
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
            from.map(|from| Ok(Stream { from, is_error, log: log?, partial: Vec::new(), ended: false }))
        };
        let streams: Result<Vec<_>> = streams.into_iter().filter_map(stream).collect();
        Ok(Self { prefix: format!("[{rank:width$}] "), streams: streams? })
    }

    /// What there is to read from, where there is room for it.
    pub(super) fn fds(&self, sinks: &[Sink; 2]) -> impl Iterator<Item = BorrowedFd<'_>> {
        let is_read = |stream: &&Stream| !stream.ended && !sinks[usize::from(stream.is_error)].is_full();
        self.streams.iter().filter(is_read).map(|stream| stream.from.as_fd())
    }

    /// Passes on what is there to be read, as far as there is room for it. Says whether there was anything.
    pub(super) fn pass_on(&mut self, sinks: &mut [Sink; 2]) -> Result<bool> {
        let mut any = false;
        for stream in &mut self.streams {
            let sink = &mut sinks[usize::from(stream.is_error)];
            for _ in 0..TURN {
                if stream.ended || sink.is_full() || !is_ready(&stream.from, PollFlags::IN) {
                    break;
                }
                stream.read(&self.prefix, sink)?;
                any = true;
            }
        }
        Ok(any)
    }

    /// Passes on the lines that were not ended.
    pub(super) fn finish(&mut self, sinks: &mut [Sink; 2]) {
        for stream in self.streams.iter_mut().filter(|stream| !stream.partial.is_empty()) {
            stream.partial.push(b'\n');
            stream.bring_lines(&self.prefix, &mut sinks[usize::from(stream.is_error)]);
        }
    }
}

impl Stream {
    fn read(&mut self, prefix: &str, sink: &mut Sink) -> Result<()> {
        let mut buffer = [0; 16 << 10];
        match rustix::io::read(&self.from, &mut buffer) {
            Ok(0) => self.ended = true,
            Ok(len) => {
                if let Some(log) = &mut self.log {
                    log.write_all(&buffer[..len]).context("cannot write the output of a rank")?;
                }
                self.partial.extend_from_slice(&buffer[..len]);
                if self.partial.len() > LONGEST && !self.partial.contains(&b'\n') {
                    self.partial.push(b'\n');
                }
                self.bring_lines(prefix, sink);
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => self.ended = true,
        }
        Ok(())
    }

    fn bring_lines(&mut self, prefix: &str, sink: &mut Sink) {
        let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') else { return };
        let rest = self.partial.split_off(end + 1);
        let lines = std::mem::replace(&mut self.partial, rest);
        sink.bring(&prefixed(&lines, prefix));
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
