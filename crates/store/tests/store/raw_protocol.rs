//! Encodes requests byte by byte as docs/PROTOCOL.md describes them, for test clients that violate the protocol.

use std::path::Path;

use wholemem_os::packet::Address;
use wholemem_os::{Deadline, PacketSocket};

/// The protocol version of the requests that these tests encode.
pub(crate) const PROTOCOL: u64 = 6;

/// The packet flags of the first of several packets of a message.
pub(crate) const FIRST_AND_MORE: u8 = 3;

/// The packet flags of a packet in the middle of a message.
pub(crate) const MORE: u8 = 1;

/// The numbers of the kinds of requests in the protocol.
pub(crate) mod request_kind {
    pub(crate) const HELLO: u8 = 0;
    pub(crate) const DELETE: u8 = 5;
    pub(crate) const FIND: u8 = 6;
    pub(crate) const FETCH: u8 = 7;
    pub(crate) const PIN_RELEASED: u8 = 8;
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

/// Encodes a string as an operand of a request.
pub(crate) fn text(text: &str) -> Vec<u8> {
    [varint(text.len() as u64), text.as_bytes().to_vec()].concat()
}

/// Encodes a request as one packet, with operands that are already encoded.
pub(crate) fn request_of(id: u64, request_kind: u8, operands: &[u8]) -> Vec<u8> {
    let head = [2].into_iter().chain(varint(id)).chain([0, request_kind]);
    head.chain(operands.iter().copied()).collect()
}

/// Encodes a request as one packet, with operands that are numbers.
pub(crate) fn request(id: u64, request_kind: u8, operands: &[u64]) -> Vec<u8> {
    let operands: Vec<u8> = operands.iter().copied().flat_map(varint).collect();
    request_of(id, request_kind, &operands)
}

/// Encodes the first request of a connection, the hello.
pub(crate) fn hello() -> Vec<u8> {
    request(1, request_kind::HELLO, &[PROTOCOL])
}

pub(crate) fn connect(socket: &Path) -> Result<PacketSocket, wholemem_os::Error> {
    PacketSocket::connect(&Address::Path(socket.to_owned()))
}

/// Sends a packet if the socket accepts it without blocking.
pub(crate) fn send_now(socket: &PacketSocket, packet: &[u8]) -> Result<(), wholemem_os::Error> {
    socket.send(packet, &[], Deadline::NOW)
}
