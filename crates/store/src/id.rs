//! What objects, allocations and clients are called: numbers that are never given twice.

use std::fmt;
use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::convert::to_usize;

/// Slots of a table, and so the bits of an id that say which one it is.
const SLOT_BITS: u32 = 24;

/// The most slots a table can have: an id of zero means nothing, so slots count from one in it.
pub(crate) const MOST_SLOTS: usize = (1 << SLOT_BITS) - 2;

/// All bits of an id. Those above say what kind of thing it is, where things of several kinds are kept together.
pub(crate) const ID_BITS: u32 = 60;

/// The last generation of a slot. A slot that reaches it is used no more, so that no id comes twice.
pub(crate) const LAST_GENERATION: u64 = (1 << (ID_BITS - SLOT_BITS)) - 1;

macro_rules! slot_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub struct $name(#[serde(deserialize_with = "deserialize_number")] u64);

        impl $name {
            /// The id of what a slot holds in one generation.
            pub(crate) fn new(slot: usize, generation: u64) -> Self {
                debug_assert!(slot < MOST_SLOTS && generation <= LAST_GENERATION);
                Self(generation << SLOT_BITS | (slot as u64 + 1))
            }

            /// The id that a number stands for, if it stands for one.
            #[must_use]
            pub fn from_u64(number: u64) -> Option<Self> {
                is_id(number).then_some(Self(number))
            }

            /// The number itself; never zero.
            #[must_use]
            pub fn as_u64(self) -> u64 {
                self.0
            }

            pub(crate) fn slot(self) -> usize {
                // Slots count from one in a number.
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

        /// From either form in which an id is written: the number, or slot and generation as it is displayed.
        impl FromStr for $name {
            type Err = ParseIdError;

            fn from_str(text: &str) -> Result<Self, ParseIdError> {
                let number = match text.split_once('.') {
                    None => text.parse().ok(),
                    Some((slot, generation)) => number_of(slot.parse().ok(), generation.parse().ok()),
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

/// Whether a number stands for an id.
fn is_id(number: u64) -> bool {
    let slot = number & ((1 << SLOT_BITS) - 1);
    number >> ID_BITS == 0 && (1..=MOST_SLOTS as u64).contains(&slot)
}

/// Decodes the number of an id. Another number is an error.
fn deserialize_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let number = u64::deserialize(deserializer)?;
    if is_id(number) { Ok(number) } else { Err(D::Error::custom(ParseIdError)) }
}

/// The number of an id, if there can be one of this slot and generation.
fn number_of(slot: Option<u64>, generation: Option<u64>) -> Option<u64> {
    let (slot, generation) = (slot?, generation?);
    let fits = slot < MOST_SLOTS as u64 && generation <= LAST_GENERATION;
    fits.then_some(generation << SLOT_BITS | (slot + 1))
}

/// A text that is not the id of anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an id: expected a number, or slot and generation such as `12.3`")]
pub struct ParseIdError;

slot_id! {
    /// An object: 64 bits that mean it, and no other, for as long as the store lives.
    #[doc(alias = "ObjectID")]
    ObjectId
}

slot_id! {
    /// A piece of memory that objects lie in.
    AllocationId
}

/// A connection of a client, told from all others also across restarts of the server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct ClientId(pub(crate) u64);

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What a slot holds: nothing, or something at one point of its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    Free,
    /// Made, and being written by its maker alone.
    Created,
    /// Never changed again, and there for everybody.
    Sealed,
    /// No longer found, and kept while somebody has it pinned.
    Deleted,
}

/// The word of a slot: its generation and its state, changed by one store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) generation: u64,
    pub(crate) state: State,
}

impl Word {
    pub(crate) fn encode(self) -> u64 {
        self.generation << 8 | self.state as u64
    }

    /// What a number stands for. A state that nobody stores is a slot to keep away from.
    pub(crate) fn decode(number: u64) -> Self {
        let state = match number & 0xff {
            0 => State::Free,
            1 => State::Created,
            2 => State::Sealed,
            _ => State::Deleted,
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
        fn an_id_tells_its_slot_and_generation(slot in 0..MOST_SLOTS, generation in 0..=LAST_GENERATION) {
            let id = ObjectId::new(slot, generation);
            prop_assert_eq!((id.slot(), id.generation()), (slot, generation));
            prop_assert_eq!(ObjectId::from_u64(id.as_u64()), Some(id));
            prop_assert_eq!((id.to_string().parse(), id.as_u64().to_string().parse()), (Ok(id), Ok(id)));
        }

        #[test]
        fn a_word_tells_its_generation_and_state(generation in 0..=LAST_GENERATION, state in 0_u64..4) {
            let word = Word::decode(generation << 8 | state);
            prop_assert_eq!(word.encode(), generation << 8 | state);
            prop_assert_eq!(word.generation, generation);
        }
    }

    #[test]
    fn a_number_that_is_no_id_is_not_decoded() {
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
    fn zero_is_no_id() {
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
