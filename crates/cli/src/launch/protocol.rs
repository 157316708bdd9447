//! The messages between the launcher and the agents on other hosts, over the stdin and stdout of ssh.
//!
//! The launcher sends one JSON text in each line of the agent's stdin. The agent's stdout has the output of its ranks; a line
//! that begins with a record separator is a message for the launcher. A rank cannot send such a line, because its lines
//! begin with its prefix.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::PollFlags;
use serde::{Deserialize, Serialize};

use super::output_queue::is_ready;
use super::plan::{ByteText, NodePlan};

/// The first byte of a message in the output of an agent.
pub(super) const MARK: u8 = 0x1e;

/// The version of the program, which must be equal on all hosts.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The maximum length of a message of the launcher.
const MAX_MESSAGE: usize = 16 << 20;

/// A message of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum AgentMessage {
    /// The first message: the version of the agent, and unused ports of its host.
    Hello { version: String, ports: [u16; 2] },
    /// The agent cannot start its ranks.
    Error(String),
    /// A rank failed, with its exit status in the kernel's form.
    Failed { rank: u32, status: i32 },
    /// Sent from time to time, so that the host notices if the connection is broken.
    Alive,
    /// The last message: all ranks of the agent have ended.
    End,
}

/// A message of the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum LauncherMessage {
    /// Starts the ranks.
    Start(Box<Start>),
    /// Sends a signal to all ranks.
    Signal(i32),
}

/// What an agent needs to start its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Start {
    /// The folder in which the ranks run.
    pub(super) folder: ByteText,
    /// The secret of the group.
    pub(super) secret: SecretText,
    /// The ranks.
    pub(super) plan: NodePlan,
}

/// The secret of a group, which `Debug` hides.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SecretText(pub(super) String);

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(..)")
    }
}

impl AgentMessage {
    /// Returns the line with the message.
    pub(super) fn to_line(&self) -> Vec<u8> {
        [&[MARK], &encode(self)[..], b"\n"].concat()
    }

    /// Parses a line of an agent's output. Returns `None` if it is output of a rank, or of another program.
    pub(super) fn from_line(line: &[u8]) -> Option<Self> {
        serde_json::from_slice(line.strip_prefix(&[MARK])?).ok()
    }
}

impl LauncherMessage {
    /// Returns the line with the message.
    pub(super) fn to_line(&self) -> Vec<u8> {
        [&encode(self)[..], b"\n"].concat()
    }
}

fn encode(message: &impl Serialize) -> Vec<u8> {
    // The messages have string keys only, and no number that JSON cannot represent.
    serde_json::to_vec(message).expect("a message that JSON can represent")
}

/// The messages of the launcher that an agent receives on its stdin.
#[derive(Debug)]
pub(super) struct ControlInput {
    partial: Vec<u8>,
    ended: bool,
}

impl ControlInput {
    pub(super) fn new() -> Self {
        Self { partial: Vec::new(), ended: false }
    }

    /// Returns the descriptor to poll for reading, until the launcher has closed it.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'static>> {
        (!self.ended).then(rustix::stdio::stdin)
    }

    /// Returns true if the launcher has closed the connection, or has sent a malformed message.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Waits for the first message. Returns `None` if the connection ends.
    pub(super) fn wait(&mut self) -> Option<LauncherMessage> {
        while !self.ended {
            self.read();
            if let Some(message) = self.next() {
                return Some(message);
            }
        }
        None
    }

    /// Reads what is available, without waiting.
    pub(super) fn read_available(&mut self) {
        while self.fd().is_some_and(|fd| is_ready(fd, PollFlags::IN)) {
            self.read();
        }
    }

    /// Returns the next message that has been read.
    pub(super) fn next(&mut self) -> Option<LauncherMessage> {
        let end = self.partial.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<_> = self.partial.drain(..=end).collect();
        let message = serde_json::from_slice(&line).ok();
        self.ended |= message.is_none();
        message
    }

    fn read(&mut self) {
        let mut buffer = [0; 16 << 10];
        match rustix::io::read(rustix::stdio::stdin().as_fd(), &mut buffer) {
            Ok(0) => self.ended = true,
            Ok(len) => self.partial.extend_from_slice(&buffer[..len]),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => self.ended = true,
        }
        self.ended |= self.partial.len() > MAX_MESSAGE;
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn messages_are_parsed_from_their_lines() {
        for message in [
            AgentMessage::Hello { version: "1".to_owned(), ports: [1, 2] },
            AgentMessage::Error("no\nfolder".to_owned()),
            AgentMessage::Failed { rank: 3, status: 9 },
            AgentMessage::Alive,
            AgentMessage::End,
        ] {
            let line = message.to_line();
            assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
            assert_eq!(AgentMessage::from_line(line.strip_suffix(b"\n").unwrap()), Some(message));
        }
        for line in [&b"[1 n0] text"[..], b"\x1etext", b"", b"{\"End\":null}"] {
            assert_eq!(AgentMessage::from_line(line), None);
        }
    }

    #[test]
    fn the_secret_is_in_the_message_but_not_in_its_debug_output() {
        let command = vec![ByteText::new(std::ffi::OsString::from_vec(vec![b'a', 0xff]))];
        let plan = NodePlan {
            first_rank: 0,
            ranks: 1,
            size: 1,
            node: 0,
            nodes: 1,
            host: None,
            variables: Vec::new(),
            command,
            log_dir: None,
        };
        let secret = SecretText("correct horse".to_owned());
        let start = Start { folder: ByteText::new("/"), secret, plan };
        let message = LauncherMessage::Start(Box::new(start));
        let mut input = ControlInput { partial: message.to_line(), ended: false };
        assert_eq!(input.next().as_ref(), Some(&message));
        assert!(!format!("{message:?}").contains("horse"), "{message:?}");
    }

    #[test]
    fn a_malformed_message_ends_the_connection() {
        let mut input = ControlInput { partial: b"{\"Signal\":2}\nx\n".to_vec(), ended: false };
        assert_eq!((input.next(), input.has_ended()), (Some(LauncherMessage::Signal(2)), false));
        assert_eq!((input.next(), input.has_ended()), (None, true));
    }
}
