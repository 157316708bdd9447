//! The messages between keeper and server, and the keys of parked descriptors.

use serde::{Deserialize, Serialize};

use crate::id::{AllocationId, ClientId, ID_BITS};

/// The key of a parked descriptor: the resource that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DescriptorKey {
    /// The memory of the index.
    Index,
    /// The socket that clients connect to.
    Listener,
    /// The process of the server, for a keeper that is not its parent.
    Server,
    /// Memory of objects.
    Allocation(AllocationId),
    /// The connection of a client.
    Socket(ClientId),
    /// The pin page of a client.
    Pins(ClientId),
    /// The process of a client.
    Process(ClientId),
    /// The file of the listening socket, opened with `O_PATH`.
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

/// A message of a server to its keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToKeeper {
    /// Hold the attached descriptors under these keys.
    Park(Vec<u64>),
    /// Close the descriptors with these keys.
    Unpark(Vec<u64>),
    /// The server accepts clients.
    Ready,
}

/// A message of a keeper to its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToServer {
    /// The descriptors with these keys are held.
    Parked(Vec<u64>),
    /// The server has to stop.
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
