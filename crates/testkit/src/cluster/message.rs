//! Requests that a test sends to the first process of a node, and its answers, as bytes.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A request to the first process of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Request {
    /// Prepares the namespaces of the process.
    SetUp(NodeSetUp),
    /// Starts a process. The packet has its stdin, stdout and stderr, and a pipe for its exit status.
    Spawn(Spawn),
    /// Sends a signal to all other processes of the node, and waits until it has taken effect.
    SignalAll(i32),
}

/// The set-up of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodeSetUp {
    pub(super) hostname: OsString,
    /// The contents of `/etc/hosts`.
    pub(super) hosts: OsString,
    /// Folders of the machine that stay visible, even if they are in `/tmp`.
    pub(super) visible: Vec<OsString>,
    /// True for a node; false for the switch, which has no ranks.
    pub(super) is_node: bool,
}

/// A process to start in a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Spawn {
    /// The program and its arguments.
    pub(super) command: Vec<OsString>,
    pub(super) variables: Vec<(OsString, OsString)>,
}

const SET_UP: &[u8] = b"set up";
const SPAWN: &[u8] = b"spawn";
const SIGNAL_ALL: &[u8] = b"signal all";

impl Request {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut fields = Fields(Vec::new());
        match self {
            Self::SetUp(set_up) => {
                fields.push(SET_UP);
                fields.push(set_up.hostname.as_bytes());
                fields.push(set_up.hosts.as_bytes());
                fields.push(&[u8::from(set_up.is_node)]);
                set_up.visible.iter().for_each(|folder| fields.push(folder.as_bytes()));
            }
            Self::Spawn(spawn) => {
                fields.push(SPAWN);
                fields.push(spawn.command.len().to_string().as_bytes());
                spawn.command.iter().for_each(|argument| fields.push(argument.as_bytes()));
                for (name, value) in &spawn.variables {
                    fields.push(name.as_bytes());
                    fields.push(value.as_bytes());
                }
            }
            Self::SignalAll(signal) => {
                fields.push(SIGNAL_ALL);
                fields.push(signal.to_string().as_bytes());
            }
        }
        fields.0
    }

    /// Decodes a request, which only the test itself sends.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let fields = fields(bytes)?;
        let (kind, fields) = fields.split_first()?;
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).ok();
        let owned = |bytes: &&[u8]| OsString::from_vec(bytes.to_vec());
        match (*kind, fields) {
            (SET_UP, [hostname, hosts, [is_node], visible @ ..]) => Some(Self::SetUp(NodeSetUp {
                hostname: owned(hostname),
                hosts: owned(hosts),
                visible: visible.iter().map(owned).collect(),
                is_node: *is_node == 1,
            })),
            (SPAWN, [count, rest @ ..]) => {
                let (command, variables) = rest.split_at_checked(text(count)?.parse().ok()?)?;
                let variables = variables.chunks_exact(2).map(|pair| (owned(&pair[0]), owned(&pair[1])));
                let command = command.iter().map(owned).collect();
                Some(Self::Spawn(Spawn { command, variables: variables.collect() }))
            }
            (SIGNAL_ALL, [signal]) => Some(Self::SignalAll(text(signal)?.parse().ok()?)),
            _ => None,
        }
    }
}

impl Spawn {
    pub(super) fn of(program: impl AsRef<OsStr>) -> Self {
        Self { command: vec![program.as_ref().to_owned()], variables: Vec::new() }
    }
}

/// A list of byte strings, each after its length.
struct Fields(Vec<u8>);

impl Fields {
    fn push(&mut self, field: &[u8]) {
        let len = u32::try_from(field.len()).expect("a short field");
        self.0.extend_from_slice(&len.to_le_bytes());
        self.0.extend_from_slice(field);
    }
}

fn fields(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut fields = Vec::new();
    while let Some((len, rest)) = bytes.split_first_chunk() {
        let (field, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
        fields.push(field);
        bytes = rest;
    }
    bytes.is_empty().then_some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_decoded_from_their_bytes() {
        let spawn = Spawn {
            command: vec!["a".into(), OsString::from_vec(vec![0xff, b' ']), OsString::new()],
            variables: vec![("NAME".into(), "value".into()), ("EMPTY".into(), OsString::new())],
        };
        let set_up = NodeSetUp {
            hostname: "n1".into(),
            hosts: "10.0.0.1 n1\n".into(),
            visible: vec!["/tmp/a".into()],
            is_node: true,
        };
        for request in [Request::Spawn(spawn), Request::SetUp(set_up), Request::SignalAll(19)] {
            let bytes = request.encode();
            assert_eq!(Request::decode(&bytes), Some(request));
            assert_eq!(Request::decode(&bytes[..bytes.len() - 1]), None);
        }
    }
}
