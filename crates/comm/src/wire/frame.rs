//! Frames: the packets between authenticated ranks.
//!
//! ```text
//!   0       4      5           6      8     12    16      24      32       40         48
//!   | magic | kind | operation | fds  | src | dst | op    | total | offset | argument | at most 69,584 bytes
//! ```
//!
//! `src` and `dst` are the first sender and the last receiver of a message; ranks between them forward its frames
//! unread. A long message is divided into consecutive frames, and `offset` is the position of a frame in it.
//! `operation` and `argument` are the collective operation that the sender has called, so that ranks that made different
//! calls get an error; `op` is its number.

use wholemem_os::packet::{MAX_FDS, MAX_PACKET};

use super::{FieldReader, Malformed};
use crate::Rank;
use crate::fault::{Disagreement, GroupFault};
use crate::operation::Operation;

const MAGIC: [u8; 4] = *b"wmf2";
pub(crate) const HEADER: usize = 48;

/// The maximum payload of one frame in bytes.
pub(crate) const MAX_PAYLOAD: usize = MAX_PACKET - HEADER;

/// The maximum length of a message. It limits the memory that a faulty rank can make another rank allocate.
pub(crate) const MAX_MESSAGE: usize = 1 << 40;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        /// The kind of a frame (a packet between ranks).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum FrameKind { $($(#[$doc])* $name = $code,)* }

        impl FrameKind {
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
    /// The greeting: carries the sender's liveness page and pidfd as two file descriptors.
    Greeting = 1,
    /// Reports to the sender's parent in the tree of ranks which ranks of the sender's subtree have joined or died.
    JoinUpdate = 2,
    /// Tells a child rank in the tree of ranks whether the group is complete, or why joining failed.
    JoinDecision = 3,
    /// A vote in a collective operation, sent to the parent in the tree of ranks.
    Vote = 4,
    /// The decision of a collective operation, sent to a child in the tree of ranks.
    Decision = 5,
    /// Reports to the sender's parent in the tree of ranks which ranks of the sender's subtree are missing in an
    /// operation.
    MissingReport = 6,
    /// A message from one rank to any other rank.
    Direct = 7,
    /// A batch of file descriptors.
    Fds = 8,
    /// Acknowledges the last batch of file descriptors.
    FdsAck = 9,
    /// File descriptors of this operation were lost: the sender sends no more of them.
    FdsLost = 10,
    /// Reports that the group has failed.
    GroupFailed = 11,
    /// Reports that a rank has left the group.
    RankLeft = 12,
    /// Offers a direct link to a rank that is not a neighbour in the tree of ranks: one end of a socket pair, as a file
    /// descriptor. If the frame has no descriptor, the descriptor was lost on the way.
    LinkOffer = 13,
    /// Accepts an offered direct link.
    LinkAccepted = 14,
    /// Declines an offered direct link.
    LinkDeclined = 15,
    /// Reports to the root which ranks of a node have joined or died.
    NodeReport = 16,
    /// Tells the ranks of a node whether the group of several nodes is complete, or why joining failed.
    NodeDecision = 17,
    /// Shows a rank of another node that this rank runs.
    Heartbeat = 18,
}

impl FrameKind {
    /// Returns true if frames of this kind are forwarded to ranks that are not neighbours of the sender in the tree.
    pub(crate) fn is_forwarded(self) -> bool {
        matches!(self, Self::Direct | Self::LinkOffer | Self::LinkAccepted | Self::LinkDeclined)
    }
}

/// The header of a frame (a packet between ranks).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) kind: FrameKind,
    pub(crate) operation: Operation,
    pub(crate) fds: u16,
    pub(crate) src: Rank,
    pub(crate) dst: Rank,
    pub(crate) op: u64,
    pub(crate) total: u64,
    pub(crate) offset: u64,
}

impl FrameHeader {
    /// Creates the header of a message without file descriptors.
    pub(crate) fn new(kind: FrameKind, operation: Operation, src: Rank, dst: Rank, op: u64) -> Self {
        Self { kind, operation, fds: 0, src, dst, op, total: 0, offset: 0 }
    }

    pub(crate) fn encode(&self, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.extend(MAGIC);
        let (operation, argument) = self.operation.encode();
        bytes.extend([self.kind as u8, operation]);
        bytes.extend(self.fds.to_le_bytes());
        bytes.extend(self.src.0.to_le_bytes());
        bytes.extend(self.dst.0.to_le_bytes());
        for number in [self.op, self.total, self.offset, argument] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    /// Divides a message into frames (packets), each with its header.
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

/// Decodes a frame into its header and payload.
pub(crate) fn decode(bytes: &[u8]) -> Result<(FrameHeader, &[u8]), Malformed> {
    let mut reader = FieldReader(bytes);
    if reader.array()? != MAGIC {
        return Err(Malformed("the message is not a frame of this version"));
    }
    let kind = FrameKind::decode(reader.u8()?)?;
    let operation = reader.u8()?;
    let header = FrameHeader {
        kind,
        fds: reader.u16()?,
        src: Rank(reader.u32()?),
        dst: Rank(reader.u32()?),
        op: reader.u64()?,
        total: reader.u64()?,
        offset: reader.u64()?,
        operation: Operation::decode(operation, reader.u64()?).map_err(Malformed)?,
    };
    let payload = reader.0;
    if usize::from(header.fds) > MAX_FDS {
        return Err(Malformed("a frame has more descriptors than a packet can carry"));
    }
    if header.total > MAX_MESSAGE as u64 {
        return Err(Malformed("a message exceeds the maximum length"));
    }
    match header.offset.checked_add(payload.len() as u64) {
        Some(end) if end <= header.total => {}
        _ => return Err(Malformed("a frame exceeds the length of its message")),
    }
    if payload.is_empty() && header.total != 0 {
        return Err(Malformed("a frame has no payload, but its message has"));
    }
    Ok((header, payload))
}

/// Encodes a list of ranks without its length: the list is the last field of a payload.
pub(crate) fn encode_ranks(ranks: &[Rank]) -> Vec<u8> {
    ranks.iter().flat_map(|rank| rank.0.to_le_bytes()).collect()
}

pub(crate) fn decode_ranks(bytes: &[u8]) -> Result<Vec<Rank>, Malformed> {
    let (ranks, []) = bytes.as_chunks::<4>() else {
        return Err(Malformed("a list of ranks ends with an incomplete rank"));
    };
    Ok(ranks.iter().map(|rank| Rank(u32::from_le_bytes(*rank))).collect())
}

/// The ranks that have joined, and the ranks that have died after they joined.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct JoinUpdate {
    pub(crate) joined: Vec<Rank>,
    pub(crate) died: Vec<Rank>,
}

pub(crate) fn encode_join_update(update: &JoinUpdate) -> Vec<u8> {
    let joined = u32::try_from(update.joined.len()).expect("each rank joins once, and ranks are u32");
    let joined = joined.to_le_bytes();
    [joined.to_vec(), encode_ranks(&update.joined), encode_ranks(&update.died)].concat()
}

pub(crate) fn decode_join_update(bytes: &[u8]) -> Result<JoinUpdate, Malformed> {
    let mut reader = FieldReader(bytes);
    let joined = usize::try_from(reader.u32()?).ok().and_then(|joined| joined.checked_mul(4));
    let joined = joined.ok_or(Malformed("a join update has too many ranks"))?;
    let joined = reader.bytes(joined).and_then(decode_ranks)?;
    Ok(JoinUpdate { joined, died: decode_ranks(reader.0)? })
}

pub(crate) fn encode_fault(fault: Option<&GroupFault>) -> Vec<u8> {
    let (code, ranks) = match fault {
        None => (0u8, &[][..]),
        Some(GroupFault::Lost(rank)) => (1, std::slice::from_ref(rank)),
        Some(GroupFault::Aborted(rank)) => (2, std::slice::from_ref(rank)),
        Some(GroupFault::Missing(ranks)) => (3, &ranks[..]),
        Some(GroupFault::ProtocolViolation(rank)) => (4, std::slice::from_ref(rank)),
        Some(GroupFault::RanksDisagree(disagreement)) => return encode_disagreement(disagreement),
        Some(GroupFault::NodeSilent { node, ranks, milliseconds }) => {
            let numbers = [node.to_le_bytes(), milliseconds.to_le_bytes()].concat();
            return [vec![NODE_SILENT], numbers, encode_ranks(ranks)].concat();
        }
    };
    [vec![code], encode_ranks(ranks)].concat()
}

pub(crate) fn decode_fault(bytes: &[u8]) -> Result<Option<GroupFault>, Malformed> {
    let mut reader = FieldReader(bytes);
    let code = reader.u8()?;
    if code == DISAGREEMENT {
        return decode_disagreement(reader).map(GroupFault::RanksDisagree).map(Some);
    }
    if code == NODE_SILENT {
        let (node, milliseconds) = (reader.u32()?, reader.u32()?);
        let ranks = decode_ranks(reader.0)?;
        return Ok(Some(GroupFault::NodeSilent { node, ranks, milliseconds }));
    }
    let ranks = decode_ranks(reader.0)?;
    match (code, &ranks[..]) {
        (0, []) => Ok(None),
        (1, [rank]) => Ok(Some(GroupFault::Lost(*rank))),
        (2, [rank]) => Ok(Some(GroupFault::Aborted(*rank))),
        (3, _) => Ok(Some(GroupFault::Missing(ranks))),
        (4, [rank]) => Ok(Some(GroupFault::ProtocolViolation(*rank))),
        _ => Err(Malformed("a fault has an unknown kind")),
    }
}

/// The code of the fault that two ranks made different calls.
const DISAGREEMENT: u8 = 5;

/// The code of the fault that a node does not answer.
const NODE_SILENT: u8 = 6;

/// Encodes the operation number and the two calls, each as its rank, operation and argument.
fn encode_disagreement(disagreement: &Disagreement) -> Vec<u8> {
    let mut bytes = vec![DISAGREEMENT];
    bytes.extend(disagreement.op().to_le_bytes());
    for (rank, operation) in disagreement.calls() {
        let (operation, argument) = operation.encode();
        bytes.extend(rank.0.to_le_bytes());
        bytes.push(operation);
        bytes.extend(argument.to_le_bytes());
    }
    bytes
}

fn decode_disagreement(mut reader: FieldReader<'_>) -> Result<Disagreement, Malformed> {
    let op = reader.u64()?;
    let mut call = || {
        let rank = Rank(reader.u32()?);
        let operation = Operation::decode(reader.u8()?, reader.u64()?).map_err(Malformed)?;
        Ok((rank, operation))
    };
    let (lower, higher) = (call()?, call()?);
    reader.end()?;
    Disagreement::new(op, lower, higher)
        .filter(|disagreement| disagreement.calls() == [lower, higher])
        .ok_or(Malformed("a disagreement has equal calls, or its ranks are not in order"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header() -> FrameHeader {
        FrameHeader::new(FrameKind::Vote, Operation::AllGather, Rank(3), Rank(0), 17)
    }

    fn disagreement() -> Disagreement {
        let broadcast = (Rank(1), Operation::Broadcast { root: Rank(2) });
        Disagreement::new(9, (Rank(3), Operation::AllToAll { part_len: 5 }), broadcast).unwrap()
    }

    #[test]
    fn a_malformed_disagreement_is_refused() {
        let valid = encode_fault(Some(&GroupFault::RanksDisagree(disagreement())));
        let (front, calls) = valid.split_at(9);
        let (lower, higher) = calls.split_at(13);
        let unordered = Err(Malformed("a disagreement has equal calls, or its ranks are not in order"));
        for (second, first) in [(lower, higher), (lower, lower), (higher, higher)] {
            assert_eq!(decode_fault(&[front, first, second].concat()), unordered);
        }
        assert_eq!(decode_fault(&[&valid[..], &[0]].concat()), Err(Malformed("the message is too long")));
        assert_eq!(decode_fault(&valid[..valid.len() - 1]), Err(Malformed("the message is too short")));
    }

    #[test]
    fn a_long_message_is_divided_into_frames_that_fit_a_packet() {
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
    fn faults_updates_and_ranks_are_decoded_as_encoded() {
        for fault in [
            None,
            Some(GroupFault::Lost(Rank(1))),
            Some(GroupFault::Aborted(Rank(2))),
            Some(GroupFault::Missing(vec![Rank(3), Rank(4)])),
            Some(GroupFault::ProtocolViolation(Rank(5))),
            Some(GroupFault::RanksDisagree(disagreement())),
            Some(GroupFault::NodeSilent { node: 2, ranks: vec![Rank(4), Rank(5)], milliseconds: 1500 }),
        ] {
            assert_eq!(decode_fault(&encode_fault(fault.as_ref())), Ok(fault));
        }
        let update = JoinUpdate { joined: vec![Rank(1), Rank(2)], died: vec![Rank(9)] };
        assert_eq!(decode_join_update(&encode_join_update(&update)), Ok(update));
        assert!(decode_join_update(&[255, 255, 255, 255]).is_err());
        assert!(decode_ranks(&[1, 2, 3]).is_err());
    }

    proptest! {
        #[test]
        fn a_decoded_frame_is_within_its_bounds(
            bytes in prop::collection::vec(any::<u8>(), 0..100),
            kind in 0u8..17,
            operation in 0u8..11,
        ) {
            for bytes in [bytes.clone(), [&MAGIC[..], &[kind, operation], &bytes].concat()] {
                if let Ok((header, payload)) = decode(&bytes) {
                    prop_assert!(header.offset + payload.len() as u64 <= header.total);
                    prop_assert_eq!(header.encode(payload), bytes);
                }
            }
        }
    }
}
