//! The encoding of the two messages of a descriptor transfer: a batch of keys, and the reply to a batch.
//!
//! All numbers are little-endian. Both messages begin with a header of 24 bytes. A reader copies the message, checks
//! every field, and only then uses it.
//!
//! ```text
//!            0       4         5      6       8               16                24
//!   batch    | magic | version | 1    | count | total         | first           | count keys of 8 bytes
//!   reply    | magic | version | 2    | code  | received in   | must be zero    |
//!            |       |         |      |       | total, limit  |                 |
//! ```

use super::MAX_FDS;
use crate::width::to_u64;
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"wmfd";
const VERSION: u8 = 1;
const BATCH: u8 = 1;
const REPLY: u8 = 2;
pub(super) const HEADER: usize = 24;
pub(super) const KEY: usize = size_of::<u64>();

/// One packet of a descriptor transfer: the keys of the file descriptors that it carries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FdBatch {
    /// The number of file descriptors in the whole transfer.
    pub(super) total: u64,
    /// The number of file descriptors in the earlier batches of the transfer.
    pub(super) first: u64,
    pub(super) keys: Vec<u64>,
}

/// The receiver's reply to a batch of file descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BatchReply {
    /// The receiver now has this many file descriptors of the transfer.
    Received(u64),
    /// The receiver accepts at most this many file descriptors in a transfer, and has closed those that it received.
    TooMany(u64),
    /// The receiver could not open all file descriptors of a batch of this many, and has closed all that it received.
    Lost(u64),
}

fn encode_header(kind: u8, short: u16, first: u64, second: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[5] = kind;
    bytes[6..8].copy_from_slice(&short.to_le_bytes());
    bytes[8..16].copy_from_slice(&first.to_le_bytes());
    bytes[16..24].copy_from_slice(&second.to_le_bytes());
    bytes
}

/// Checks the header of a transfer message, and returns the three numbers after its kind and the bytes after the
/// header.
fn decode_header(bytes: &[u8], kind: u8) -> Result<(u16, u64, u64, &[u8])> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
        return violation("a packet of a transfer is shorter than its header");
    };
    if header[0..4] != MAGIC {
        return violation("a packet is not part of a transfer");
    }
    if header[4] != VERSION {
        return violation("a transfer has another version");
    }
    if header[5] != kind {
        return violation("received a batch instead of a reply, or a reply instead of a batch");
    }
    let number = |at| u64::from_le_bytes(std::array::from_fn(|n| header[at + n]));
    Ok((u16::from_le_bytes([header[6], header[7]]), number(8), number(16), rest))
}

pub(super) fn encode_batch(batch: &FdBatch) -> Vec<u8> {
    let count = u16::try_from(batch.keys.len()).expect("a batch has at most `MAX_FDS` keys");
    let mut bytes = encode_header(BATCH, count, batch.total, batch.first).to_vec();
    bytes.extend(batch.keys.iter().flat_map(|key| key.to_le_bytes()));
    bytes
}

pub(super) fn decode_batch(bytes: &[u8]) -> Result<FdBatch> {
    let (count, total, first, rest) = decode_header(bytes, BATCH)?;
    let count = usize::from(count);
    if count > MAX_FDS {
        return violation("a batch has more descriptors than a packet can carry");
    }
    let (keys, []) = rest.as_chunks::<KEY>() else {
        return violation("a batch ends with an incomplete key");
    };
    if keys.len() != count {
        return violation("the number of keys of a batch differs from its count");
    }
    if first.checked_add(to_u64(count)).is_none_or(|end| end > total) {
        return violation("a batch exceeds the total of its transfer");
    }
    // Only a transfer without descriptors may have an empty batch: otherwise a peer could keep the receiver in its
    // loop without end.
    if count == 0 && total != 0 {
        return violation("a batch is empty");
    }
    Ok(FdBatch { total, first, keys: keys.iter().map(|key| u64::from_le_bytes(*key)).collect() })
}

pub(super) fn encode_reply(reply: BatchReply) -> [u8; HEADER] {
    let (code, number) = match reply {
        BatchReply::Received(count) => (0, count),
        BatchReply::TooMany(limit) => (1, limit),
        BatchReply::Lost(count) => (2, count),
    };
    encode_header(REPLY, code, number, 0)
}

pub(super) fn decode_reply(bytes: &[u8]) -> Result<BatchReply> {
    let (code, number, zero, rest) = decode_header(bytes, REPLY)?;
    match code {
        _ if zero != 0 || !rest.is_empty() => violation("a reply has trailing or nonzero reserved bytes"),
        0 => Ok(BatchReply::Received(number)),
        1 => Ok(BatchReply::TooMany(number)),
        2 => Ok(BatchReply::Lost(number)),
        _ => violation("a reply has an unknown code"),
    }
}

pub(super) fn violation<T>(violation: &'static str) -> Result<T> {
    Err(Error::Protocol { violation })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_field_of_a_message_is_checked() {
        let batch = encode_batch(&FdBatch { total: 1, first: 0, keys: vec![7] });
        let reply = encode_reply(BatchReply::Received(1)).to_vec();
        let with = |bytes: &[u8], at: usize, value: u8| {
            let mut bytes = bytes.to_vec();
            bytes[at] = value;
            bytes
        };
        for (bytes, violation) in [
            (with(&batch, 3, 0), "a packet is not part of a transfer"),
            (with(&batch, 4, 9), "a transfer has another version"),
            (with(&batch, 5, REPLY), "received a batch instead of a reply, or a reply instead of a batch"),
            (with(&batch, 6, 2), "the number of keys of a batch differs from its count"),
            (with(&batch, 6, 65), "a batch has more descriptors than a packet can carry"),
            (with(&batch, 16, 1), "a batch exceeds the total of its transfer"),
            (batch[..31].to_vec(), "a batch ends with an incomplete key"),
        ] {
            assert_eq!(decode_batch(&bytes), Err(Error::Protocol { violation }));
        }
        for (bytes, violation) in [
            (with(&reply, 6, 3), "a reply has an unknown code"),
            (with(&reply, 16, 1), "a reply has trailing or nonzero reserved bytes"),
            ([reply.clone(), vec![0]].concat(), "a reply has trailing or nonzero reserved bytes"),
        ] {
            assert_eq!(decode_reply(&bytes), Err(Error::Protocol { violation }));
        }
    }

    #[test]
    fn the_encoding_has_the_documented_bytes() {
        let batch = encode_batch(&FdBatch { total: 0x0102, first: 3, keys: vec![0xA1B2] });
        let expected = [b"wmfd\x01\x01\x01\0\x02\x01", &[0; 6][..], b"\x03", &[0; 7], b"\xB2\xA1", &[0; 6]];
        assert_eq!(batch, expected.concat());
        let expected = [b"wmfd\x01\x02\x01\0\x05", &[0; 15][..]].concat();
        assert_eq!(encode_reply(BatchReply::TooMany(5)).to_vec(), expected);
    }

    proptest! {
        #[test]
        fn a_batch_is_decoded_as_encoded(keys in vec(any::<u64>(), 1..=MAX_FDS), first in 0..1_u64 << 60, more: u32) {
            let batch = FdBatch { total: first + to_u64(keys.len()) + u64::from(more), first, keys };
            prop_assert_eq!(decode_batch(&encode_batch(&batch)), Ok(batch));
        }

        #[test]
        fn a_reply_is_decoded_as_encoded(number: u64) {
            for reply in [BatchReply::Received(number), BatchReply::TooMany(number), BatchReply::Lost(number)] {
                prop_assert_eq!(decode_reply(&encode_reply(reply)), Ok(reply));
            }
        }

        #[test]
        fn a_decoded_message_encodes_to_the_same_bytes(
            mut bytes in vec(any::<u8>(), 0..200),
            has_valid_header: bool,
        ) {
            if has_valid_header && bytes.len() >= HEADER {
                let count = (bytes.len() - HEADER) / KEY;
                bytes.truncate(HEADER + count * KEY);
                let header = encode_header(1 + bytes[5] % 2, u16::try_from(count)?, 0, 0);
                bytes[..8].copy_from_slice(&header[..8]);
            }
            if let Ok(batch) = decode_batch(&bytes) {
                prop_assert_eq!(&encode_batch(&batch), &bytes);
            }
            if let Ok(reply) = decode_reply(&bytes) {
                prop_assert_eq!(&encode_reply(reply).to_vec(), &bytes);
            }
        }
    }
}
