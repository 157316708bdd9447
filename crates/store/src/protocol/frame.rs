//! Splits messages between a client and the server into packets, and assembles packets into messages.
//!
//! A packet is one byte of flags and a fragment of the message. Bit 0 is set if more packets of the message follow, bit 1 if the
//! packet is the first of a message. A server that takes over a connection in the middle of a message waits for the next first
//! packet.

use std::borrow::Cow;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use serde::Serialize;
use serde::de::DeserializeOwned;
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, PacketSocket};

/// The maximum length of a message between a client and the server, in bytes.
pub(crate) const MAX_MESSAGE: usize = 8 << 20;

/// The maximum number of file descriptors that are sent with a message.
pub(crate) const MAX_FDS: usize = 2;

const MAX_FRAGMENT: usize = MAX_PACKET - 1;

/// The maximum number of bytes by which the buffer of an incomplete message grows at a time.
const MAX_GROWTH: usize = 1 << 20;

const MORE: u8 = 1;
const FIRST: u8 = 2;

/// The error of received bytes that are not a valid message, or of a message that cannot be encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct MalformedMessage(pub(crate) &'static str);

const UNENCODABLE: MalformedMessage = MalformedMessage("the message cannot be encoded");

/// Encodes a message and its payload as packets.
pub(crate) fn encode(message: &impl Serialize, payload: &[u8]) -> Result<Vec<Vec<u8>>, MalformedMessage> {
    let head = postcard::to_allocvec(message).map_err(|_| UNENCODABLE)?;
    let len = head.len() + payload.len();
    if len > MAX_MESSAGE {
        return Err(MalformedMessage("the message is too long"));
    }
    let packet = |start: usize| {
        let end = len.min(start + MAX_FRAGMENT);
        let mut packet = Vec::with_capacity(end - start + 1);
        let more = if end < len { MORE } else { 0 };
        packet.push(if start == 0 { FIRST | more } else { more });
        // Copies the bytes from `start` to `end` of the message head and the payload, so that a long payload is copied only once.
        packet.extend_from_slice(&head[start.min(head.len())..end.min(head.len())]);
        let within = |at: usize| at.saturating_sub(head.len());
        packet.extend_from_slice(&payload[within(start)..within(end)]);
        packet
    };
    Ok((0..len.max(1)).step_by(MAX_FRAGMENT).map(packet).collect())
}

/// The bytes that follow a request in its message, borrowed from the packet if the message consists of one packet.
#[derive(Debug, Default)]
pub(crate) struct Payload<'a> {
    message: Cow<'a, [u8]>,
    start: usize,
}

impl<'a> Payload<'a> {
    /// Decodes a request or a response, and returns it with the payload of its message.
    pub(crate) fn split<T: DeserializeOwned>(message: Cow<'a, [u8]>) -> Result<(T, Self), MalformedMessage> {
        let (decoded, rest) = decode(&message)?;
        let start = message.len() - rest.len();
        Ok((decoded, Self { message, start }))
    }

    /// Makes the payload of a message independent of the packet buffer, by a copy if necessary.
    pub(crate) fn into_owned(self) -> Payload<'static> {
        Payload { message: Cow::Owned(self.message.into_owned()), start: self.start }
    }
}

impl std::ops::Deref for Payload<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.message[self.start..]
    }
}

impl From<Vec<u8>> for Payload<'_> {
    fn from(message: Vec<u8>) -> Self {
        Self { message: Cow::Owned(message), start: 0 }
    }
}

/// Decodes a request or a response, and returns it with the bytes that follow it.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), MalformedMessage> {
    postcard::take_from_bytes(bytes).map_err(|_| MalformedMessage("the message cannot be decoded"))
}

/// Returns the id at the beginning of a message that consists of one packet. Allocates no memory.
pub(crate) fn peek_id(packet: &[u8]) -> Option<u64> {
    let message = packet.split_first().filter(|(kind, _)| **kind == FIRST)?.1;
    postcard::take_from_bytes(message).ok().map(|(id, _)| id)
}

/// Returns true if a packet is the last packet of its message.
pub(crate) fn is_last(packet: &[u8]) -> bool {
    packet.first().is_none_or(|kind| kind & MORE == 0)
}

/// Assembles the packets of a connection into messages.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageAssembler {
    bytes: Vec<u8>,
    phase: AssemblyPhase,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum AssemblyPhase {
    /// No message is incomplete: the next packet begins a message.
    #[default]
    Between,
    Within,
    /// The next packet may continue a message whose first packet was read by another process.
    Unsynchronized,
}

impl MessageAssembler {
    /// Creates the assembler of a connection from which another process (the previous server) has read before.
    pub(crate) fn inherited() -> Self {
        Self { bytes: Vec::new(), phase: AssemblyPhase::Unsynchronized }
    }

    /// Returns the number of received bytes of the incomplete message.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Adds a packet, and returns the message if the packet completes it. A message of one packet is borrowed from the packet.
    pub(crate) fn push<'a>(&mut self, packet: &'a [u8]) -> Result<Option<Cow<'a, [u8]>>, MalformedMessage> {
        let Some((&kind, fragment)) = packet.split_first() else {
            return Err(MalformedMessage("the packet is empty"));
        };
        match (kind & !MORE, &self.phase) {
            // If the previous message is incomplete, its sender has given up sending it, so its bytes are dropped.
            (FIRST, _) => self.bytes.clear(),
            (0, AssemblyPhase::Within) => {}
            (0, AssemblyPhase::Unsynchronized) => return Ok(None),
            _ => return Err(MalformedMessage("the packet does not continue a message")),
        }
        if self.bytes.len() + fragment.len() > MAX_MESSAGE {
            return Err(MalformedMessage("the message is too long"));
        }
        if kind == FIRST {
            self.phase = AssemblyPhase::Between;
            return Ok(Some(Cow::Borrowed(fragment)));
        }
        // The buffer grows by a limited length (`Vec` would double its capacity), because the memory of a message is charged to
        // its client.
        let spare = self.bytes.capacity() - self.bytes.len();
        if spare < fragment.len() {
            self.bytes.reserve_exact(fragment.len().max(self.bytes.len().min(MAX_GROWTH)));
        }
        self.bytes.extend_from_slice(fragment);
        let is_last = kind & MORE == 0;
        self.phase = if is_last { AssemblyPhase::Between } else { AssemblyPhase::Within };
        Ok(is_last.then(|| Cow::Owned(std::mem::take(&mut self.bytes))))
    }
}

/// Sends a message with file descriptors. A message that fits one packet is sent by scatter-gather, without a copy of the
/// payload.
pub(crate) fn send_message(
    socket: &PacketSocket,
    message: &impl Serialize,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<wholemem_os::Result<()>, MalformedMessage> {
    let head = postcard::to_allocvec(message).map_err(|_| UNENCODABLE)?;
    if head.len() + payload.len() > MAX_FRAGMENT {
        return encode(message, payload).map(|packets| send(socket, &packets, fds, deadline));
    }
    let parts = [&[FIRST][..], &head, payload].map(IoSlice::new);
    // An empty part of a packet is not allowed, so an empty payload is omitted.
    let count = if payload.is_empty() { 2 } else { 3 };
    Ok(socket.send_parts(&parts[..count], fds, deadline))
}

/// Sends the packets of a message, and the file descriptors with the last packet. Waits while the socket is full.
pub(crate) fn send(
    socket: &PacketSocket,
    packets: &[Vec<u8>],
    fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> wholemem_os::Result<()> {
    for (index, packet) in packets.iter().enumerate() {
        let fds = if index + 1 == packets.len() { fds } else { &[] };
        socket.send(packet, fds, deadline)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Label, Request, RequestKind};
    use super::*;

    fn request() -> Request {
        let label = Label { name: "weights".to_owned(), meta: vec![1, 2, 3] };
        Request {
            id: 7,
            resends: 0,
            kind: RequestKind::Create { label, len: 9, members: Vec::new(), place: 0 },
        }
    }

    proptest! {
        #[test]
        fn a_message_of_any_length_arrives_with_its_payload(len in 0_usize..200_000) {
            let payload = vec![5; len];
            // The length of the encoded request, without the byte of packet flags.
            let head = encode(&request(), &[]).unwrap()[0].len() - 1;
            let packets = encode(&request(), &payload).unwrap();
            prop_assert_eq!(packets.len(), (head + len).div_ceil(MAX_FRAGMENT));
            let mut assembler = MessageAssembler::default();
            let mut arrived = None;
            for packet in &packets {
                prop_assert!(arrived.is_none() && packet.len() <= MAX_PACKET);
                arrived = assembler.push(packet).unwrap();
            }
            let arrived = arrived.unwrap();
            let (message, rest) = decode::<Request>(&arrived).unwrap();
            prop_assert_eq!((message, rest), (request(), &payload[..]));
        }
    }

    #[test]
    fn long_messages_and_packets_out_of_order_are_refused() {
        assert!(encode(&request(), &vec![0; MAX_MESSAGE]).is_err());
        assert_eq!(MessageAssembler::default().push(&[]), Err(MalformedMessage("the packet is empty")));
        let out_of_order = Err(MalformedMessage("the packet does not continue a message"));
        for kind in [0, MORE, 4, 255] {
            assert_eq!(MessageAssembler::default().push(&[kind]), out_of_order);
        }
        let mut assembler = MessageAssembler::default();
        let refused = (0..=MAX_MESSAGE / MAX_FRAGMENT).find_map(|index| {
            let kind = if index == 0 { FIRST | MORE } else { MORE };
            assembler.push(&[&[kind][..], &[0; MAX_FRAGMENT]].concat()).err()
        });
        assert_eq!(refused, Some(MalformedMessage("the message is too long")));
    }

    #[test]
    fn an_incomplete_message_is_replaced_by_the_next_one() {
        // The sender of the long message gives up when its timeout expires in the middle of the message.
        let long = encode(&request(), &[5; 150_000]).unwrap();
        let mut assembler = MessageAssembler::default();
        assert_eq!(assembler.push(&long[0]), Ok(None));
        let short = encode(&request(), &[]).unwrap();
        let message = assembler.push(&short[0]).unwrap().unwrap();
        assert_eq!(decode::<Request>(&message).unwrap(), (request(), &[][..]));
        assert_eq!(assembler.push(&long[0]), Ok(None));
        let whole = long.iter().find_map(|packet| assembler.push(packet).unwrap()).unwrap();
        assert_eq!(decode::<Request>(&whole).unwrap(), (request(), &[5; 150_000][..]));
    }

    #[test]
    fn an_inherited_connection_skips_to_the_next_message() {
        let packets = encode(&request(), &[5; 150_000]).unwrap();
        let mut assembler = MessageAssembler::inherited();
        assert_eq!(assembler.push(&packets[1]), Ok(None));
        assert_eq!(assembler.push(&packets[2]), Ok(None));
        let whole = packets.iter().find_map(|packet| assembler.push(packet).unwrap()).unwrap();
        assert_eq!(decode::<Request>(&whole).unwrap(), (request(), &[5; 150_000][..]));
    }
}
