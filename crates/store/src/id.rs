//! Identifiers of objects, allocations and clients; no identifier is used twice.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::convert::to_usize;

/// The number of low bits of an id that encode a slot of a table.
const SLOT_BITS: u32 = 24;

/// The maximum number of slots of a table. An id encodes slot `n` as `n + 1`, because zero is not a valid id.
pub(crate) const MAX_SLOTS: usize = (1 << SLOT_BITS) - 2;

/// The number of bits of an id. The upper bits of the 64-bit number are free, to encode the kind of an id where several kinds
/// share one number space.
pub(crate) const ID_BITS: u32 = 60;

/// The last generation of a table slot. The slot is not used again after this generation, so that no id repeats.
pub(crate) const LAST_GENERATION: u64 = (1 << (ID_BITS - SLOT_BITS)) - 1;

macro_rules! slot_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(#[serde(deserialize_with = "deserialize_number")] u64);

        impl $name {
            /// Returns the id of the object or allocation in a table slot, for one generation of the slot.
            pub(crate) fn new(slot: usize, generation: u64) -> Self {
                debug_assert!(slot < MAX_SLOTS && generation <= LAST_GENERATION);
                Self(generation << SLOT_BITS | (slot as u64 + 1))
            }

            /// Decodes an id from a number; returns `None` if the number is not a valid id.
            #[must_use]
            pub fn from_u64(number: u64) -> Option<Self> {
                is_id(number).then_some(Self(number))
            }

            /// Returns the id as a number, which is never zero.
            #[must_use]
            pub fn as_u64(self) -> u64 {
                self.0
            }

            pub(crate) fn slot(self) -> usize {
                // The low bits of the number are the slot plus one.
                to_usize((self.0 & ((1 << SLOT_BITS) - 1)) - 1)
            }

            pub(crate) fn generation(self) -> u64 {
                self.0 >> SLOT_BITS
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}.{}", self.slot(), self.generation())
            }
        }

        /// Parses an id from either of its textual forms: a number, or `slot.generation` as displayed.
        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let number = match text.split_once('.') {
                    None => text.parse().ok(),
                    Some((slot, generation)) => encode_id(slot.parse().ok(), generation.parse().ok()),
                };
                number.and_then(Self::from_u64).ok_or(ParseIdError)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

/// Returns true if a number is a valid id of an object or an allocation.
fn is_id(number: u64) -> bool {
    let slot = number & ((1 << SLOT_BITS) - 1);
    number >> ID_BITS == 0 && (1..=MAX_SLOTS as u64).contains(&slot)
}

/// Deserializes the number of an id; fails if the number is not a valid id.
fn deserialize_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let number = u64::deserialize(deserializer)?;
    if is_id(number) { Ok(number) } else { Err(D::Error::custom(ParseIdError)) }
}

/// Encodes an id from a slot and its generation; returns `None` if either is out of range.
fn encode_id(slot: Option<u64>, generation: Option<u64>) -> Option<u64> {
    let (slot, generation) = (slot?, generation?);
    let fits = slot < MAX_SLOTS as u64 && generation <= LAST_GENERATION;
    fits.then_some(generation << SLOT_BITS | (slot + 1))
}

/// The error of parsing a text that is not the id of an object or an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an id of an object or allocation: expected a number, or slot and generation such as `12.3`")]
pub struct ParseIdError;

slot_id! {
    /// The id of an object: 64 bits that are never used for another object of the same store.
    #[doc(alias = "ObjectID")]
    ObjectId
}

slot_id! {
    /// The id of an allocation: memory that holds one or more objects.
    AllocationId
}

/// The id of a client's connection to a store. No id is used twice, even if the server is restarted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct ClientId(pub(crate) u64);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The state of a slot of the index (the table of all objects).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SlotState {
    Free,
    /// The object is created and not sealed yet; only its creator may write it.
    Created,
    /// The object is sealed: immutable, and visible to all clients.
    Sealed,
    /// The object is deleted: no longer found by name, and retained while a client has it pinned.
    Deleted,
}

/// The word of an index slot: its generation and state, changed together by one atomic store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlotWord {
    pub(crate) generation: u64,
    pub(crate) state: SlotState,
}

impl SlotWord {
    pub(crate) fn encode(self) -> u64 {
        self.generation << 8 | self.state as u64
    }

    /// Decodes the word of an index slot. An unknown state is decoded as `Deleted`, so that the slot is not used.
    pub(crate) fn decode(number: u64) -> Self {
        let state = match number & 0xff {
            0 => SlotState::Free,
            1 => SlotState::Created,
            2 => SlotState::Sealed,
            _ => SlotState::Deleted,
        };
        Self { generation: number >> 8, state }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_id_encodes_its_slot_and_generation(slot in 0..MAX_SLOTS, generation in 0..=LAST_GENERATION) {
            let id = ObjectId::new(slot, generation);
            prop_assert_eq!((id.slot(), id.generation()), (slot, generation));
            prop_assert_eq!(ObjectId::from_u64(id.as_u64()), Some(id));
            prop_assert_eq!((id.to_string().parse(), id.as_u64().to_string().parse()), (Ok(id), Ok(id)));
        }

        #[test]
        fn a_word_encodes_its_generation_and_state(generation in 0..=LAST_GENERATION, state in 0_u64..4) {
            let word = SlotWord::decode(generation << 8 | state);
            prop_assert_eq!(word.encode(), generation << 8 | state);
            prop_assert_eq!(word.generation, generation);
        }
    }

    #[test]
    fn an_invalid_id_is_not_decoded() {
        let id = ObjectId::new(5, 9);
        let bytes = postcard::to_allocvec(&id).unwrap();
        assert_eq!(bytes, postcard::to_allocvec(&id.as_u64()).unwrap());
        assert_eq!(postcard::from_bytes(&bytes), Ok(id));
        for number in [0, 7 << SLOT_BITS, 1 << ID_BITS | 1, u64::MAX] {
            let bytes = postcard::to_allocvec(&number).unwrap();
            assert_eq!(
                postcard::from_bytes::<AllocationId>(&bytes),
                Err(postcard::Error::SerdeDeCustom),
                "{number}"
            );
        }
    }

    #[test]
    fn zero_is_not_an_id() {
        assert_eq!(ObjectId::from_u64(0), None);
        assert_eq!(ObjectId::from_u64(7 << SLOT_BITS), None);
        assert_eq!(ObjectId::from_u64(u64::MAX), None);
        assert_eq!(ObjectId::from_u64(1 << ID_BITS | 1), None);
        assert_eq!(ObjectId::new(0, 0).to_string(), "0.0");
        for text in ["0", "", ".", "1.", ".1", "-1.0", "16777216.0", "0.68719476736", "x", "1.2.3"] {
            assert_eq!(text.parse::<ObjectId>(), Err(ParseIdError), "{text:?}");
        }
    }
}
