//! Messages as packets: cut into pieces that a packet holds, and put together again.
//!
//! A packet is one byte and a piece of the message. In the byte, bit 0 says that more follow, and bit 1 that a message
//! begins here: a server that takes over from one that died in the middle of a message waits for the next beginning.

use std::borrow::Cow;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;

use serde::Serialize;
use serde::de::DeserializeOwned;
use wholemem_os::packet::MAX_PACKET;
use wholemem_os::{Deadline, PacketSocket};

/// The longest message.
pub(crate) const MAX_MESSAGE: usize = 8 << 20;

/// The most descriptors of one message.
pub(crate) const MAX_FDS: usize = 2;

const PIECE: usize = MAX_PACKET - 1;

/// By how many bytes the memory of a message grows at most.
const GROWTH: usize = 1 << 20;

const MORE: u8 = 1;
const BEGIN: u8 = 2;

/// What was received is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Malformed(pub(crate) &'static str);

const UNENCODABLE: Malformed = Malformed("a message that cannot be encoded");

/// A message as its packets.
pub(crate) fn encode(message: &impl Serialize, payload: &[u8]) -> Result<Vec<Vec<u8>>, Malformed> {
    let head = postcard::to_allocvec(message).map_err(|_| UNENCODABLE)?;
    let len = head.len() + payload.len();
    if len > MAX_MESSAGE {
        return Err(Malformed("a message is longer than a message may be"));
    }
    let packet = |start: usize| {
        let end = len.min(start + PIECE);
        let mut packet = Vec::with_capacity(end - start + 1);
        let more = if end < len { MORE } else { 0 };
        packet.push(if start == 0 { BEGIN | more } else { more });
        // Of both parts, what lies between start and end: payloads are long, and copied once.
        packet.extend_from_slice(&head[start.min(head.len())..end.min(head.len())]);
        let within = |at: usize| at.saturating_sub(head.len());
        packet.extend_from_slice(&payload[within(start)..within(end)]);
        packet
    };
    Ok((0..len.max(1)).step_by(PIECE).map(packet).collect())
}

/// The bytes behind a request, still in the message they came in, or in the packet.
#[derive(Debug, Default)]
pub(crate) struct Payload<'a> {
    message: Cow<'a, [u8]>,
    start: usize,
}

impl<'a> Payload<'a> {
    /// Takes a message apart.
    pub(crate) fn split<T: DeserializeOwned>(message: Cow<'a, [u8]>) -> Result<(T, Self), Malformed> {
        let (decoded, rest) = decode(&message)?;
        let start = message.len() - rest.len();
        Ok((decoded, Self { message, start }))
    }

    /// The same bytes, for later.
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

/// A message, and the bytes behind it.
pub(crate) fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), Malformed> {
    postcard::take_from_bytes(bytes).map_err(|_| Malformed("a message that cannot be decoded"))
}

/// The id that a message of one packet begins with. Allocates nothing.
pub(crate) fn short_id(packet: &[u8]) -> Option<u64> {
    let message = packet.split_first().filter(|(kind, _)| **kind == BEGIN)?.1;
    postcard::take_from_bytes(message).ok().map(|(id, _)| id)
}

/// Whether no packet of the same message follows.
pub(crate) fn is_last(packet: &[u8]) -> bool {
    packet.first().is_none_or(|kind| kind & MORE == 0)
}

/// Packets on their way to a message.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Assembly {
    bytes: Vec<u8>,
    phase: Phase,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Phase {
    /// Between two messages.
    #[default]
    Between,
    Within,
    /// Perhaps within a message whose beginning another process has read.
    Lost,
}

impl Assembly {
    /// For a connection that another process has read before.
    pub(crate) fn inherited() -> Self {
        Self { bytes: Vec::new(), phase: Phase::Lost }
    }

    /// How many bytes of a message are here.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Takes in a packet; the message, if that was its last. One of a single packet stays where it is.
    pub(crate) fn push<'a>(&mut self, packet: &'a [u8]) -> Result<Option<Cow<'a, [u8]>>, Malformed> {
        let Some((&kind, piece)) = packet.split_first() else { return Err(Malformed("an empty packet")) };
        match (kind & !MORE, &self.phase) {
            // Where another was not finished, its sender has given it up.
            (BEGIN, _) => self.bytes.clear(),
            (0, Phase::Within) => {}
            (0, Phase::Lost) => return Ok(None),
            _ => return Err(Malformed("a packet that does not follow the one before it")),
        }
        if self.bytes.len() + piece.len() > MAX_MESSAGE {
            return Err(Malformed("a message is longer than a message may be"));
        }
        if kind == BEGIN {
            self.phase = Phase::Between;
            return Ok(Some(Cow::Borrowed(piece)));
        }
        // Not twice as much as is needed, as a vector grows by itself: what a message takes is counted.
        let spare = self.bytes.capacity() - self.bytes.len();
        if spare < piece.len() {
            self.bytes.reserve_exact(piece.len().max(self.bytes.len().min(GROWTH)));
        }
        self.bytes.extend_from_slice(piece);
        let is_last = kind & MORE == 0;
        self.phase = if is_last { Phase::Between } else { Phase::Within };
        Ok(is_last.then(|| Cow::Owned(std::mem::take(&mut self.bytes))))
    }
}

/// Sends a message, with descriptors: as one packet of its parts where it fits, so that the payload is not copied first.
pub(crate) fn send_message(
    socket: &PacketSocket,
    message: &impl Serialize,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Deadline,
) -> Result<wholemem_os::Result<()>, Malformed> {
    let head = postcard::to_allocvec(message).map_err(|_| UNENCODABLE)?;
    if head.len() + payload.len() > PIECE {
        return encode(message, payload).map(|packets| send(socket, &packets, fds, deadline));
    }
    let parts = [&[BEGIN][..], &head, payload].map(IoSlice::new);
    // A part without bytes is none.
    let count = if payload.is_empty() { 2 } else { 3 };
    Ok(socket.send_parts(&parts[..count], fds, deadline))
}

/// Sends the packets of a message, waiting where the socket is full, with descriptors on the last.
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

    use super::super::{Ask, Label, Request};
    use super::*;

    fn request() -> Request {
        let label = Label { name: "weights".to_owned(), meta: vec![1, 2, 3] };
        Request { id: 7, again: 0, ask: Ask::Create { label, len: 9, members: Vec::new(), place: 0 } }
    }

    proptest! {
        #[test]
        fn a_message_arrives_with_its_payload_however_long(len in 0_usize..200_000) {
            let payload = vec![5; len];
            // Behind the byte that says what a packet is.
            let head = encode(&request(), &[]).unwrap()[0].len() - 1;
            let packets = encode(&request(), &payload).unwrap();
            prop_assert_eq!(packets.len(), (head + len).div_ceil(PIECE));
            let mut assembly = Assembly::default();
            let mut arrived = None;
            for packet in &packets {
                prop_assert!(arrived.is_none() && packet.len() <= MAX_PACKET);
                arrived = assembly.push(packet).unwrap();
            }
            let arrived = arrived.unwrap();
            let (message, rest) = decode::<Request>(&arrived).unwrap();
            prop_assert_eq!((message, rest), (request(), &payload[..]));
        }
    }

    #[test]
    fn what_is_too_long_or_out_of_order_is_refused() {
        assert!(encode(&request(), &vec![0; MAX_MESSAGE]).is_err());
        assert_eq!(Assembly::default().push(&[]), Err(Malformed("an empty packet")));
        let out_of_order = Err(Malformed("a packet that does not follow the one before it"));
        for kind in [0, MORE, 4, 255] {
            assert_eq!(Assembly::default().push(&[kind]), out_of_order);
        }
        let mut assembly = Assembly::default();
        let refused = (0..=MAX_MESSAGE / PIECE).find_map(|index| {
            let kind = if index == 0 { BEGIN | MORE } else { MORE };
            assembly.push(&[&[kind][..], &[0; PIECE]].concat()).err()
        });
        assert_eq!(refused, Some(Malformed("a message is longer than a message may be")));
    }

    #[test]
    fn a_message_that_was_given_up_is_followed_by_another() {
        // Its sender has waited too long for the rest to be taken.
        let long = encode(&request(), &[5; 150_000]).unwrap();
        let mut assembly = Assembly::default();
        assert_eq!(assembly.push(&long[0]), Ok(None));
        let short = encode(&request(), &[]).unwrap();
        let message = assembly.push(&short[0]).unwrap().unwrap();
        assert_eq!(decode::<Request>(&message).unwrap(), (request(), &[][..]));
        assert_eq!(assembly.push(&long[0]), Ok(None));
        let whole = long.iter().find_map(|packet| assembly.push(packet).unwrap()).unwrap();
        assert_eq!(decode::<Request>(&whole).unwrap(), (request(), &[5; 150_000][..]));
    }

    #[test]
    fn an_inherited_connection_begins_with_the_next_message() {
        let packets = encode(&request(), &[5; 150_000]).unwrap();
        let mut assembly = Assembly::inherited();
        assert_eq!(assembly.push(&packets[1]), Ok(None));
        assert_eq!(assembly.push(&packets[2]), Ok(None));
        let whole = packets.iter().find_map(|packet| assembly.push(packet).unwrap()).unwrap();
        assert_eq!(decode::<Request>(&whole).unwrap(), (request(), &[5; 150_000][..]));
    }
}
