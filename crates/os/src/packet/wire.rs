//! The two messages of a transfer as bytes: a batch of keys, and the answer to it.
//!
//! All numbers are little-endian. Both messages begin with the same 24 bytes; what a reader does with them is
//! copy, check every field, and only then use any.
//!
//! ```text
//!            0       4         5      6       8               16                24
//!   batch    | magic | version | 1    | count | total         | first           | count keys of 8 bytes
//!   answer   | magic | version | 2    | code  | taken in all, | must be zero    |
//!            |       |         |      |       | or the limit  |                 |
//! ```

use super::MAX_FDS;
use crate::width::to_u64;
use crate::{Error, Result};

const MAGIC: [u8; 4] = *b"wmfd";
const VERSION: u8 = 1;
const BATCH: u8 = 1;
const ANSWER: u8 = 2;
pub(super) const HEADER: usize = 24;
pub(super) const KEY: usize = size_of::<u64>();

/// A part of a transfer: the keys of the descriptors that travel with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Batch {
    /// How many descriptors the whole transfer has.
    pub(super) total: u64,
    /// How many came before this batch.
    pub(super) first: u64,
    pub(super) keys: Vec<u64>,
}

/// What the receiver says to a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// It has this many of the transfer now.
    Taken(u64),
    /// It takes no more than this many, and has closed what came.
    TooMany(u64),
    /// It could not open all of this batch, of which it expected this many, and has closed what came.
    Lost(u64),
}

fn encode_header(kind: u8, short: u16, one: u64, two: u64) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[4] = VERSION;
    bytes[5] = kind;
    bytes[6..8].copy_from_slice(&short.to_le_bytes());
    bytes[8..16].copy_from_slice(&one.to_le_bytes());
    bytes[16..24].copy_from_slice(&two.to_le_bytes());
    bytes
}

/// The three numbers after the kind, and what follows the header.
fn decode_header(bytes: &[u8], kind: u8) -> Result<(u16, u64, u64, &[u8])> {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
        return broken("a packet of a transfer is shorter than its header");
    };
    if header[0..4] != MAGIC {
        return broken("a packet is not part of a transfer");
    }
    if header[4] != VERSION {
        return broken("a transfer has another version");
    }
    if header[5] != kind {
        return broken("a batch came where an answer was due, or an answer where a batch was");
    }
    let number = |at| u64::from_le_bytes(std::array::from_fn(|n| header[at + n]));
    Ok((u16::from_le_bytes([header[6], header[7]]), number(8), number(16), rest))
}

pub(super) fn encode_batch(batch: &Batch) -> Vec<u8> {
    let count = u16::try_from(batch.keys.len()).expect("a batch has at most `MAX_FDS` keys");
    let mut bytes = encode_header(BATCH, count, batch.total, batch.first).to_vec();
    bytes.extend(batch.keys.iter().flat_map(|key| key.to_le_bytes()));
    bytes
}

pub(super) fn decode_batch(bytes: &[u8]) -> Result<Batch> {
    let (count, total, first, rest) = decode_header(bytes, BATCH)?;
    let count = usize::from(count);
    if count > MAX_FDS {
        return broken("a batch counts more descriptors than a packet carries");
    }
    let (keys, []) = rest.as_chunks::<KEY>() else {
        return broken("a batch does not end with a key");
    };
    if keys.len() != count {
        return broken("a batch has another number of keys than it says");
    }
    if first.checked_add(to_u64(count)).is_none_or(|end| end > total) {
        return broken("a batch goes beyond its transfer");
    }
    // Otherwise a peer could keep us receiving for ever.
    if count == 0 && total != 0 {
        return broken("a batch brings nothing");
    }
    Ok(Batch { total, first, keys: keys.iter().map(|key| u64::from_le_bytes(*key)).collect() })
}

pub(super) fn encode_answer(answer: Answer) -> [u8; HEADER] {
    let (code, number) = match answer {
        Answer::Taken(count) => (0, count),
        Answer::TooMany(limit) => (1, limit),
        Answer::Lost(room) => (2, room),
    };
    encode_header(ANSWER, code, number, 0)
}

pub(super) fn decode_answer(bytes: &[u8]) -> Result<Answer> {
    let (code, number, zero, rest) = decode_header(bytes, ANSWER)?;
    match code {
        _ if zero != 0 || !rest.is_empty() => broken("an answer has more in it than an answer"),
        0 => Ok(Answer::Taken(number)),
        1 => Ok(Answer::TooMany(number)),
        2 => Ok(Answer::Lost(number)),
        _ => broken("an answer has an unknown code"),
    }
}

pub(super) fn broken<T>(what: &'static str) -> Result<T> {
    Err(Error::Protocol { what })
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_field_of_a_message_is_checked() {
        let batch = encode_batch(&Batch { total: 1, first: 0, keys: vec![7] });
        let answer = encode_answer(Answer::Taken(1)).to_vec();
        let with = |bytes: &[u8], at: usize, value: u8| {
            let mut bytes = bytes.to_vec();
            bytes[at] = value;
            bytes
        };
        for (bytes, what) in [
            (with(&batch, 3, 0), "a packet is not part of a transfer"),
            (with(&batch, 4, 9), "a transfer has another version"),
            (with(&batch, 5, ANSWER), "a batch came where an answer was due, or an answer where a batch was"),
            (with(&batch, 6, 2), "a batch has another number of keys than it says"),
            (with(&batch, 6, 65), "a batch counts more descriptors than a packet carries"),
            (with(&batch, 16, 1), "a batch goes beyond its transfer"),
            (batch[..31].to_vec(), "a batch does not end with a key"),
        ] {
            assert_eq!(decode_batch(&bytes), Err(Error::Protocol { what }));
        }
        for (bytes, what) in [
            (with(&answer, 6, 3), "an answer has an unknown code"),
            (with(&answer, 16, 1), "an answer has more in it than an answer"),
            ([answer.clone(), vec![0]].concat(), "an answer has more in it than an answer"),
        ] {
            assert_eq!(decode_answer(&bytes), Err(Error::Protocol { what }));
        }
    }

    #[test]
    fn the_bytes_on_the_wire_are_these() {
        let batch = encode_batch(&Batch { total: 0x0102, first: 3, keys: vec![0xA1B2] });
        let expected = [b"wmfd\x01\x01\x01\0\x02\x01", &[0; 6][..], b"\x03", &[0; 7], b"\xB2\xA1", &[0; 6]];
        assert_eq!(batch, expected.concat());
        let expected = [b"wmfd\x01\x02\x01\0\x05", &[0; 15][..]].concat();
        assert_eq!(encode_answer(Answer::TooMany(5)).to_vec(), expected);
    }

    proptest! {
        #[test]
        fn a_batch_survives_the_wire(keys in vec(any::<u64>(), 1..=MAX_FDS), first in 0..1_u64 << 60, more: u32) {
            let batch = Batch { total: first + to_u64(keys.len()) + u64::from(more), first, keys };
            prop_assert_eq!(decode_batch(&encode_batch(&batch)), Ok(batch));
        }

        #[test]
        fn an_answer_survives_the_wire(number: u64) {
            for answer in [Answer::Taken(number), Answer::TooMany(number), Answer::Lost(number)] {
                prop_assert_eq!(decode_answer(&encode_answer(answer)), Ok(answer));
            }
        }

        #[test]
        fn whatever_is_decoded_is_what_would_have_been_sent(
            mut bytes in vec(any::<u8>(), 0..200),
            begins_well: bool,
        ) {
            if begins_well && bytes.len() >= HEADER {
                let count = (bytes.len() - HEADER) / KEY;
                bytes.truncate(HEADER + count * KEY);
                let header = encode_header(1 + bytes[5] % 2, u16::try_from(count)?, 0, 0);
                bytes[..8].copy_from_slice(&header[..8]);
            }
            if let Ok(batch) = decode_batch(&bytes) {
                prop_assert_eq!(&encode_batch(&batch), &bytes);
            }
            if let Ok(answer) = decode_answer(&bytes) {
                prop_assert_eq!(&encode_answer(answer).to_vec(), &bytes);
            }
        }
    }
}
