//! [`LineReader`]: reads complete lines from a pipe.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Reads a pipe and returns its complete lines. A line that is longer than the limit is split.
#[derive(Debug)]
pub(super) struct LineReader {
    from: OwnedFd,
    max_line: usize,
    partial: Vec<u8>,
    ended: bool,
}

impl LineReader {
    pub(super) fn new(from: OwnedFd, max_line: usize) -> Self {
        Self { from, max_line, partial: Vec::new(), ended: false }
    }

    /// Returns true if the pipe was closed by its writers.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Reads once, passes the bytes to `raw`, and returns the lines that are complete.
    ///
    /// # Errors
    /// The error of `raw`.
    pub(super) fn read(&mut self, raw: impl FnOnce(&[u8]) -> io::Result<()>) -> io::Result<Vec<u8>> {
        let mut buffer = [0; 16 << 10];
        match rustix::io::read(&self.from, &mut buffer) {
            Ok(0) => self.ended = true,
            Ok(len) => {
                raw(&buffer[..len])?;
                self.partial.extend_from_slice(&buffer[..len]);
                if self.partial.len() > self.max_line && !self.partial.contains(&b'\n') {
                    self.partial.push(b'\n');
                }
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => self.ended = true,
        }
        let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') else { return Ok(Vec::new()) };
        let rest = self.partial.split_off(end + 1);
        Ok(std::mem::replace(&mut self.partial, rest))
    }

    /// Returns the last line, which has no line break, with a line break.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        if !self.partial.is_empty() {
            self.partial.push(b'\n');
        }
        std::mem::take(&mut self.partial)
    }
}

impl AsFd for LineReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.from.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn complete_lines_are_returned_and_long_ones_are_split() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut lines = LineReader::new(reader.into(), 4);
        let mut read = |text: &[u8]| {
            writer.write_all(text).unwrap();
            let mut raw = Vec::new();
            let keep = |bytes: &[u8]| {
                raw.extend_from_slice(bytes);
                Ok(())
            };
            let lines = lines.read(keep).unwrap();
            assert_eq!(raw, text);
            lines
        };
        assert_eq!(read(b"a"), b"");
        assert_eq!(read(b"b\nc\nd"), b"ab\nc\n");
        assert_eq!(read(b"1234"), b"d1234\n");
        assert_eq!(read(b"end"), b"");
        drop(writer);
        assert_eq!(
            (lines.has_ended(), lines.read(|_| Ok(())).unwrap(), lines.has_ended()),
            (false, vec![], true)
        );
        assert_eq!((lines.finish(), lines.finish()), (b"end\n".to_vec(), vec![]));
    }
}
