//! Requests as docs/PROTOCOL.md describes them, written byte by byte, for clients that do not keep to it.

use std::path::Path;

use wholemem_os::packet::Address;
use wholemem_os::{Deadline, PacketSocket};

/// The version of the protocol that these requests are of.
pub(crate) const PROTOCOL: u64 = 5;

/// What the first byte of a packet says: a message begins here, and more packets of it follow.
pub(crate) const BEGINS_AND_GOES_ON: u8 = 3;

/// What the first byte of a packet says: it is in the middle of a message.
pub(crate) const GOES_ON: u8 = 1;

/// The questions, by their numbers.
pub(crate) mod question {
    pub(crate) const HELLO: u8 = 0;
    pub(crate) const DELETE: u8 = 5;
    pub(crate) const FIND: u8 = 6;
    pub(crate) const FETCH: u8 = 7;
    pub(crate) const KICK: u8 = 8;
    pub(crate) const WATCH: u8 = 9;
    pub(crate) const STATUS: u8 = 10;
}

pub(crate) fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push((number & 0x7f).to_le_bytes()[0] | 0x80);
        number >>= 7;
    }
    bytes.push(number.to_le_bytes()[0]);
    bytes
}

/// A string as an operand.
pub(crate) fn text(text: &str) -> Vec<u8> {
    [varint(text.len() as u64), text.as_bytes().to_vec()].concat()
}

/// A request in one packet, with its operands encoded.
pub(crate) fn request_of(id: u64, question: u8, operands: &[u8]) -> Vec<u8> {
    let head = [2].into_iter().chain(varint(id)).chain([0, question]);
    head.chain(operands.iter().copied()).collect()
}

/// A request in one packet, whose operands are numbers.
pub(crate) fn request(id: u64, question: u8, operands: &[u64]) -> Vec<u8> {
    let operands: Vec<u8> = operands.iter().copied().flat_map(varint).collect();
    request_of(id, question, &operands)
}

/// The first request of a connection.
pub(crate) fn hello() -> Vec<u8> {
    request(1, question::HELLO, &[PROTOCOL])
}

pub(crate) fn connect(socket: &Path) -> Result<PacketSocket, wholemem_os::Error> {
    PacketSocket::connect(&Address::Path(socket.to_owned()))
}

/// Sends a packet if the socket takes it now.
pub(crate) fn send_now(wire: &PacketSocket, packet: &[u8]) -> Result<(), wholemem_os::Error> {
    wire.send(packet, &[], Deadline::NOW)
}
