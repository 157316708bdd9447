//! The encoding of messages between ranks: [`handshake`] until both ranks are authenticated, [`frame`] after that.
//!
//! All numbers are little-endian. A received message is copied, and every field is checked before any is used.
//! Messages are not encrypted: the secret authenticates ranks, but does not protect the contents.

pub(crate) mod frame;
pub(crate) mod handshake;
pub(crate) mod nodes;
pub(crate) mod session;

/// The reason why a message is malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) &'static str);

/// Reads fields from the front of a byte slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FieldReader<'a>(pub(crate) &'a [u8]);

impl<'a> FieldReader<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (front, rest) = self.0.split_at_checked(len).ok_or(Malformed("the message is too short"))?;
        self.0 = rest;
        Ok(front)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let bytes = self.bytes(N)?;
        Ok(std::array::from_fn(|n| bytes[n]))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// Checks that all bytes of the message were read.
    pub(crate) fn end(self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("the message is too long")) }
    }
}
