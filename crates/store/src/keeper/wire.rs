//! What keeper and server say to each other, and the keys under which descriptors are kept.

use serde::{Deserialize, Serialize};

use crate::id::{AllocationId, ClientId, ID_BITS};

/// What a kept descriptor is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    /// The index.
    Index,
    /// The socket at which clients come.
    Listener,
    /// The process of the server, for a keeper that is not its parent.
    Server,
    /// Memory of objects.
    Allocation(AllocationId),
    /// The connection of a client.
    Socket(ClientId),
    /// A client's page of pins.
    Pins(ClientId),
    /// The process of a client.
    Process(ClientId),
    /// The file of the socket at which clients come, as a descriptor that only names it.
    SocketFile,
}

impl Key {
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

/// What a server says to its keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToKeeper {
    /// Keep the descriptors that come along, under these keys.
    Park(Vec<u64>),
    /// Keep these no longer.
    Unpark(Vec<u64>),
    /// Clients are served.
    Ready,
}

/// What a keeper says to its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ToServer {
    /// What came under these keys is kept.
    Parked(Vec<u64>),
    /// Everything is to end.
    Stop,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_tell_what_they_are_of() {
        let client = ClientId(7 << 32 | 9);
        let keys = [
            Key::Index,
            Key::Listener,
            Key::Server,
            Key::Allocation(AllocationId::new(3, 1 << 35)),
            Key::Socket(client),
            Key::Pins(client),
            Key::Process(client),
            Key::SocketFile,
        ];
        for key in keys {
            assert_eq!(Key::decode(key.encode()), Some(key));
        }
        assert_eq!((Key::decode(0), Key::decode(4 << ID_BITS), Key::decode(u64::MAX)), (None, None, None));
    }
}
