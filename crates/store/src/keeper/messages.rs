//! The messages between the keeper and the server of a store, and the keys of parked descriptors (file descriptors that the
//! keeper holds).

use serde::{Deserialize, Serialize};

use crate::id::{AllocationId, ClientId, ID_BITS};

/// The key of a parked descriptor (a file descriptor that the keeper holds): the resource that the descriptor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DescriptorKey {
    /// The descriptor of the index (the table of all objects).
    Index,
    /// The descriptor of the socket that clients connect to.
    Listener,
    /// The pidfd of the server process, for a keeper that is not its parent.
    Server,
    /// The descriptor of an allocation, whose memory holds objects.
    Allocation(AllocationId),
    /// The descriptor of a client's connection.
    Socket(ClientId),
    /// The descriptor of a client's pin page, in which the client lists the objects that it uses.
    Pins(ClientId),
    /// The pidfd of a client's process.
    Process(ClientId),
    /// The descriptor of the listening socket's file, opened with `O_PATH`.
    SocketFile,
}

impl DescriptorKey {
    pub(crate) fn encode(self) -> u64 {
        let (kind, number) = match self {
            Self::Index => (1, 0),
            Self::Listener => (2, 0),
            Self::Server => (3, 0),
            Self::Allocation(id) => (4, id.as_u64()),
            Self::Socket(client) => (5, client.0),
            Self::Pins(client) => (6, client.0),
            Self::Process(client) => (7, client.0),
            Self::SocketFile => (8, 0),
        };
        kind << ID_BITS | number
    }

    pub(crate) fn decode(key: u64) -> Option<Self> {
        let number = key & ((1 << ID_BITS) - 1);
        Some(match key >> ID_BITS {
            1 => Self::Index,
            2 => Self::Listener,
            3 => Self::Server,
            4 => Self::Allocation(AllocationId::from_u64(number)?),
            5 => Self::Socket(ClientId(number)),
            6 => Self::Pins(ClientId(number)),
            7 => Self::Process(ClientId(number)),
            8 => Self::SocketFile,
            _ => return None,
        })
    }
}

/// A message from the server of a store to its keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToKeeper {
    /// Asks the keeper to hold the attached descriptors under these keys.
    Park(Vec<u64>),
    /// Asks the keeper to close the descriptors with these keys.
    Unpark(Vec<u64>),
    /// Reports to the keeper that the server accepts clients.
    Ready,
}

/// A message from the keeper of a store to its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToServer {
    /// Confirms that the keeper holds the descriptors with these keys.
    Parked(Vec<u64>),
    /// Asks the server to stop.
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_decode_to_their_resource() {
        let client = ClientId(7 << 32 | 9);
        let keys = [
            DescriptorKey::Index,
            DescriptorKey::Listener,
            DescriptorKey::Server,
            DescriptorKey::Allocation(AllocationId::new(3, 1 << 35)),
            DescriptorKey::Socket(client),
            DescriptorKey::Pins(client),
            DescriptorKey::Process(client),
            DescriptorKey::SocketFile,
        ];
        for key in keys {
            assert_eq!(DescriptorKey::decode(key.encode()), Some(key));
        }
        assert_eq!(
            (DescriptorKey::decode(0), DescriptorKey::decode(4 << ID_BITS), DescriptorKey::decode(u64::MAX)),
            (None, None, None)
        );
    }
}
