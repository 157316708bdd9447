//! A frame: one packet between ranks that have proved themselves to each other.
//!
//! ```text
//!   0       4      5      6      8     12    16      24      32       40
//!   | magic | kind | what | fds  | src | dst | op    | total | offset | at most 65,496 bytes
//! ```
//!
//! `src` and `dst` are where a message begins and ends; ranks between them pass its frames on unread. A message longer
//! than a frame is cut into frames that follow each other, each saying where its part belongs. `what` names the
//! operation, so that ranks which are at different ones find out.

use wholemem_os::packet::{MAX_FDS, MAX_PACKET};

use super::{Malformed, Reader};
use crate::Rank;
use crate::fault::Fault;

const MAGIC: [u8; 4] = *b"wmf1";
pub(crate) const HEADER: usize = 40;

/// The most payload one frame carries.
pub(crate) const MAX_PAYLOAD: usize = MAX_PACKET - HEADER;

/// The longest message: what many ranks gather. Ranks trust each other, but not each other's arithmetic.
pub(crate) const MAX_MESSAGE: usize = 1 << 40;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// What a frame is for.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Kind { $($(#[$doc])* $name = $code,)* }

        impl Kind {
            fn decode(code: u8) -> Result<Self, Malformed> {
                match code {
                    $($code => Ok(Self::$name),)*
                    _ => Err(Malformed("a frame has an unknown kind")),
                }
            }
        }
    };
}

kinds! {
    /// The sender's pulse and process, as two descriptors.
    Greeting = 1,
    /// Who has joined and died below the sender.
    News = 2,
    /// The group stands, or why not.
    Decision = 3,
    /// A vote, on its way up.
    Up = 4,
    /// A decision, on its way down.
    Down = 5,
    /// Who is missing below the sender.
    Report = 6,
    /// A message from one rank to another.
    Direct = 7,
    /// A batch of descriptors.
    Fds = 8,
    /// The last batch has been taken.
    FdsTaken = 9,
    /// Descriptors of this operation were lost: no more of them come.
    FdsLost = 10,
    /// The group has fallen.
    Fall = 11,
    /// A rank has left.
    Left = 12,
    /// One end of a link between two ranks that are no neighbours, as a descriptor. Without it: it was lost on the way.
    Offer = 13,
    /// The offer is taken.
    Accepted = 14,
    /// The offer is not taken.
    Declined = 15,
}

impl Kind {
    /// Whether it is passed on to a rank that is no neighbour of its sender.
    pub(crate) fn travels(self) -> bool {
        matches!(self, Self::Direct | Self::Offer | Self::Accepted | Self::Declined)
    }
}

macro_rules! operations {
    ($($name:ident = $code:literal $text:literal,)*) => {
        /// What a rank is at.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum What { $($name = $code,)* }

        impl What {
            fn decode(code: u8) -> Result<Self, Malformed> {
                match code {
                    $($code => Ok(Self::$name),)*
                    _ => Err(Malformed("a frame is of an unknown operation")),
                }
            }

            pub(crate) fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

operations! {
    Nothing = 0 "nothing",
    Barrier = 1 "barrier",
    Broadcast = 2 "broadcast",
    AllGather = 3 "all_gather",
    AllToAll = 4 "all_to_all",
    AllGatherFds = 5 "all_gather_fds",
    Agree = 6 "agree",
    Split = 7 "split",
}

/// The front of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) what: What,
    pub(crate) fds: u16,
    pub(crate) src: Rank,
    pub(crate) dst: Rank,
    pub(crate) op: u64,
    pub(crate) total: u64,
    pub(crate) offset: u64,
}

impl Header {
    /// A frame that is a whole message without descriptors.
    pub(crate) fn new(kind: Kind, what: What, src: Rank, dst: Rank, op: u64) -> Self {
        Self { kind, what, fds: 0, src, dst, op, total: 0, offset: 0 }
    }

    pub(crate) fn encode(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.extend(MAGIC);
        bytes.extend([self.kind as u8, self.what as u8]);
        bytes.extend(self.fds.to_le_bytes());
        bytes.extend(self.src.0.to_le_bytes());
        bytes.extend(self.dst.0.to_le_bytes());
        for number in [self.op, self.total, self.offset] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    /// The frames of a message.
    pub(crate) fn frames(self, payload: &[u8]) -> Vec<Vec<u8>> {
        let header = Self { total: payload.len() as u64, ..self };
        if payload.is_empty() {
            return vec![header.encode(payload)];
        }
        let part =
            |(n, part): (usize, &[u8])| Self { offset: (n * MAX_PAYLOAD) as u64, ..header }.encode(part);
        payload.chunks(MAX_PAYLOAD).enumerate().map(part).collect()
    }
}

/// Reads a frame.
pub(crate) fn decode(bytes: &[u8]) -> Result<(Header, &[u8]), Malformed> {
    let mut reader = Reader(bytes);
    if reader.array()? != MAGIC {
        return Err(Malformed("it is no frame of this version"));
    }
    let header = Header {
        kind: Kind::decode(reader.u8()?)?,
        what: What::decode(reader.u8()?)?,
        fds: reader.u16()?,
        src: Rank(reader.u32()?),
        dst: Rank(reader.u32()?),
        op: reader.u64()?,
        total: reader.u64()?,
        offset: reader.u64()?,
    };
    let payload = reader.0;
    if usize::from(header.fds) > MAX_FDS {
        return Err(Malformed("a frame counts more descriptors than it can carry"));
    }
    if header.total > MAX_MESSAGE as u64 {
        return Err(Malformed("a message is longer than any may be"));
    }
    match header.offset.checked_add(payload.len() as u64) {
        Some(end) if end <= header.total => {}
        _ => return Err(Malformed("a frame goes beyond its message")),
    }
    if payload.is_empty() && header.total != 0 {
        return Err(Malformed("a frame brings nothing of its message"));
    }
    Ok((header, payload))
}

/// A list of ranks, as the rest of a payload.
pub(crate) fn encode_ranks(ranks: &[Rank]) -> Vec<u8> {
    ranks.iter().flat_map(|rank| rank.0.to_le_bytes()).collect()
}

pub(crate) fn decode_ranks(bytes: &[u8]) -> Result<Vec<Rank>, Malformed> {
    let (ranks, []) = bytes.as_chunks::<4>() else {
        return Err(Malformed("a list of ranks ends in the middle of one"));
    };
    Ok(ranks.iter().map(|rank| Rank(u32::from_le_bytes(*rank))).collect())
}

/// Ranks that have joined, and ranks that have died since.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) joined: Vec<Rank>,
    pub(crate) died: Vec<Rank>,
}

pub(crate) fn encode_news(news: &News) -> Vec<u8> {
    let joined = u32::try_from(news.joined.len()).expect("each rank joins once, and ranks are u32");
    let joined = joined.to_le_bytes();
    [joined.to_vec(), encode_ranks(&news.joined), encode_ranks(&news.died)].concat()
}

pub(crate) fn decode_news(bytes: &[u8]) -> Result<News, Malformed> {
    let mut reader = Reader(bytes);
    let joined = usize::try_from(reader.u32()?).ok().and_then(|joined| joined.checked_mul(4));
    let joined = joined.ok_or(Malformed("news of more ranks than there can be"))?;
    let joined = reader.bytes(joined).and_then(decode_ranks)?;
    Ok(News { joined, died: decode_ranks(reader.0)? })
}

pub(crate) fn encode_fault(fault: Option<&Fault>) -> Vec<u8> {
    let (code, ranks) = match fault {
        None => (0u8, &[][..]),
        Some(Fault::Lost(rank)) => (1, std::slice::from_ref(rank)),
        Some(Fault::Aborted(rank)) => (2, std::slice::from_ref(rank)),
        Some(Fault::Missing(ranks)) => (3, &ranks[..]),
        Some(Fault::Broke(rank)) => (4, std::slice::from_ref(rank)),
    };
    [vec![code], encode_ranks(ranks)].concat()
}

pub(crate) fn decode_fault(bytes: &[u8]) -> Result<Option<Fault>, Malformed> {
    let mut reader = Reader(bytes);
    let code = reader.u8()?;
    let ranks = decode_ranks(reader.0)?;
    match (code, &ranks[..]) {
        (0, []) => Ok(None),
        (1, [rank]) => Ok(Some(Fault::Lost(*rank))),
        (2, [rank]) => Ok(Some(Fault::Aborted(*rank))),
        (3, _) => Ok(Some(Fault::Missing(ranks))),
        (4, [rank]) => Ok(Some(Fault::Broke(*rank))),
        _ => Err(Malformed("a fault is of no known kind")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> Header {
        Header::new(Kind::Up, What::AllGather, Rank(3), Rank(0), 17)
    }

    #[test]
    fn a_long_message_is_cut_into_frames_that_fit() {
        let payload: Vec<u8> = (0..200_000u32).map(|n| n.to_le_bytes()[0]).collect();
        let frames = header().frames(&payload);
        assert_eq!(frames.len(), payload.len().div_ceil(MAX_PAYLOAD));
        assert!(frames.len() > 1);
        let mut whole: Vec<u8> = Vec::new();
        for frame in &frames {
            assert!(frame.len() <= MAX_PACKET);
            let (header, part) = decode(frame).unwrap();
            assert_eq!((header.offset, header.total), (whole.len() as u64, 200_000));
            whole.extend(part);
        }
        assert_eq!(whole, payload);
        assert_eq!(header().frames(&[]).len(), 1, "an empty message is one frame");
    }

    #[test]
    fn faults_news_and_ranks_survive_the_wire() {
        for fault in [
            None,
            Some(Fault::Lost(Rank(1))),
            Some(Fault::Aborted(Rank(2))),
            Some(Fault::Missing(vec![Rank(3), Rank(4)])),
            Some(Fault::Broke(Rank(5))),
        ] {
            assert_eq!(decode_fault(&encode_fault(fault.as_ref())), Ok(fault));
        }
        let news = News { joined: vec![Rank(1), Rank(2)], died: vec![Rank(9)] };
        assert_eq!(decode_news(&encode_news(&news)), Ok(news));
        assert!(decode_news(&[255, 255, 255, 255]).is_err());
        assert!(decode_ranks(&[1, 2, 3]).is_err());
    }

    proptest! {
        #[test]
        fn whatever_is_decoded_keeps_within_its_bounds(
            bytes in prop::collection::vec(any::<u8>(), 0..100),
            kind in 0u8..17,
            what in 0u8..9,
        ) {
            for bytes in [bytes.clone(), [&MAGIC[..], &[kind, what], &bytes].concat()] {
                if let Ok((header, payload)) = decode(&bytes) {
                    prop_assert!(header.offset + payload.len() as u64 <= header.total);
                    prop_assert_eq!(header.encode(payload), bytes);
                }
            }
        }
    }
}
