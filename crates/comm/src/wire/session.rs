//! The encoding of connections between nodes: mutual authentication, and frames with a message authentication code
//! (MAC) and a sequence number.
//!
//! ```text
//!   connecting rank                                     accepting rank
//!     | --- hello: purpose, rank, size, nonce ---------->  |
//!     | <-- challenge: rank, size, nonce, proof ---------  |   the accepting rank proves itself first
//!     | --- response: proof ---------------------------->  |
//!     | <== frames, each with MAC and sequence number ==>  |
//!
//!   packet before both are authenticated: | len | handshake message |
//!   packet after that:                    | len | seq | MAC | frame |        len counts the frame only
//!
//!   proof       = BLAKE3 keyed by the secret, of the role, the purpose, both ranks, both sizes, both nonces
//!   session key = the same, with the direction instead of the role; each direction has its own key
//!   MAC         = the first 16 bytes of BLAKE3 keyed by the session key, of len, seq and the frame
//! ```
//!
//! A recorded handshake cannot be replayed, because both nonces are random. A frame of another connection or of the
//! other direction has another key. A frame that is repeated, dropped or moved has another sequence number than the
//! receiver expects. Each of them ends the connection. Frames are not encrypted.

use super::{FieldReader, Malformed};
use crate::Rank;
use crate::id::GroupKey;

const MAGIC: [u8; 4] = *b"wmt1";
const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const RESPONSE: u8 = 3;

/// The maximum length of a handshake message in bytes.
pub(crate) const MAX_HANDSHAKE: usize = 128;

/// The bytes before the frame in a packet: length, sequence number and MAC.
pub(crate) const PACKET_HEADER: usize = 4 + 8 + MAC_LEN;

const MAC_LEN: usize = 16;

pub(crate) type Nonce = [u8; 32];
pub(crate) type Proof = [u8; 32];

/// What a rank connects to another node for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The leader of a node joins the group, or a rank reports that a rank of its node has died.
    Report,
    /// The rank checks whether the process of the accepting rank runs. The connection ends after the challenge.
    Probe,
}

impl Purpose {
    fn code(self) -> u8 {
        match self {
            Self::Report => 1,
            Self::Probe => 2,
        }
    }
}

/// A message of the handshake between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodeHandshake {
    Hello(Hello),
    Challenge(NodeChallenge),
    Response(Proof),
}

/// The first message of a connecting rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) purpose: Purpose,
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
}

/// The reply of an accepting rank, with its proof that it knows the secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeChallenge {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
    pub(crate) proof: Proof,
}

/// The side of a connection between nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Connecting,
    Accepting,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Connecting => Self::Accepting,
            Self::Accepting => Self::Connecting,
        }
    }
}

/// The values from which both sides of a connection compute their proofs and the keys of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionTranscript {
    pub(crate) hello: Hello,
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
}

impl SessionTranscript {
    fn hash(&self, key: &GroupKey, use_of: &[u8], side: Side) -> [u8; 32] {
        let mut hasher = key.hasher();
        hasher.update(use_of).update(match side {
            Side::Connecting => b"connecting",
            Side::Accepting => b"accepting ",
        });
        hasher.update(&[self.hello.purpose.code()]);
        for number in [self.hello.rank.0, self.hello.size, self.rank.0, self.size] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&self.hello.nonce).update(&self.nonce);
        *hasher.finalize().as_bytes()
    }

    pub(crate) fn proof(&self, key: &GroupKey, side: Side) -> Proof {
        self.hash(key, b"node proof ", side)
    }

    pub(crate) fn verify(&self, key: &GroupKey, side: Side, proof: Proof) -> bool {
        // Comparing two values of type `blake3::Hash` takes constant time.
        blake3::Hash::from_bytes(self.proof(key, side)) == blake3::Hash::from_bytes(proof)
    }

    /// Returns the ends of the authenticated connection for one side of it.
    pub(crate) fn session(&self, key: &GroupKey, side: Side) -> (Sealer, Opener) {
        let from = |side| self.hash(key, b"node frames", side);
        (Sealer { key: from(side), seq: 0 }, Opener { key: from(side.other()), seq: 0 })
    }
}

impl NodeHandshake {
    /// Encodes the message as a packet, with its length.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        match self {
            Self::Hello(hello) => {
                bytes.extend([HELLO, hello.purpose.code()]);
                bytes.extend(hello.rank.0.to_le_bytes());
                bytes.extend(hello.size.to_le_bytes());
                bytes.extend(hello.nonce);
            }
            Self::Challenge(challenge) => {
                bytes.push(CHALLENGE);
                bytes.extend(challenge.rank.0.to_le_bytes());
                bytes.extend(challenge.size.to_le_bytes());
                bytes.extend(challenge.nonce);
                bytes.extend(challenge.proof);
            }
            Self::Response(proof) => {
                bytes.push(RESPONSE);
                bytes.extend(proof);
            }
        }
        let len = u32::try_from(bytes.len()).expect("at most MAX_HANDSHAKE bytes");
        [&len.to_le_bytes()[..], &bytes].concat()
    }

    /// Decodes a message without its length.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = FieldReader(bytes);
        if reader.array()? != MAGIC {
            return Err(Malformed("the message is not a handshake of this version"));
        }
        let message = match reader.u8()? {
            HELLO => {
                let purpose = match reader.u8()? {
                    1 => Purpose::Report,
                    2 => Purpose::Probe,
                    _ => return Err(Malformed("a connection has an unknown purpose")),
                };
                let (rank, size) = (Rank(reader.u32()?), reader.u32()?);
                Self::Hello(Hello { purpose, rank, size, nonce: reader.array()? })
            }
            CHALLENGE => Self::Challenge(NodeChallenge {
                rank: Rank(reader.u32()?),
                size: reader.u32()?,
                nonce: reader.array()?,
                proof: reader.array()?,
            }),
            RESPONSE => Self::Response(reader.array()?),
            _ => return Err(Malformed("the handshake message has an unknown kind")),
        };
        reader.end()?;
        Ok(message)
    }
}

fn mac(key: &[u8; 32], len: [u8; 4], seq: [u8; 8], frame: &[u8]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(&len).update(&seq).update(frame);
    hasher.finalize()
}

/// Adds the MAC and the sequence number to the frames that one side of a connection sends.
pub(crate) struct Sealer {
    key: [u8; 32],
    seq: u64,
}

/// Checks the MAC and the sequence number of the frames that one side of a connection receives.
pub(crate) struct Opener {
    key: [u8; 32],
    seq: u64,
}

impl std::fmt::Debug for Sealer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sealer({})", self.seq)
    }
}

impl std::fmt::Debug for Opener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Opener({})", self.seq)
    }
}

impl Sealer {
    /// Appends a frame as a packet.
    pub(crate) fn seal(&mut self, frame: &[u8], packet: &mut Vec<u8>) {
        let len = u32::try_from(frame.len()).expect("a frame is at most 64 KiB and a header").to_le_bytes();
        let seq = self.seq.to_le_bytes();
        self.seq += 1;
        packet.extend(len);
        packet.extend(seq);
        packet.extend(&mac(&self.key, len, seq, frame).as_bytes()[..MAC_LEN]);
        packet.extend(frame);
    }
}

impl Opener {
    /// Checks a packet that has been received whole, and returns its frame.
    pub(crate) fn open<'p>(&mut self, packet: &'p [u8]) -> Result<&'p [u8], Malformed> {
        let mut reader = FieldReader(packet);
        let (len, seq, received) = (reader.array()?, reader.array()?, reader.array::<MAC_LEN>()?);
        let computed = mac(&self.key, len, seq, reader.0);
        let mut expected = [0; 32];
        let mut given = [0; 32];
        expected[..MAC_LEN].copy_from_slice(&computed.as_bytes()[..MAC_LEN]);
        given[..MAC_LEN].copy_from_slice(&received);
        if blake3::Hash::from_bytes(expected) != blake3::Hash::from_bytes(given) {
            return Err(Malformed("the MAC of a frame is wrong"));
        }
        if u64::from_le_bytes(seq) != self.seq {
            return Err(Malformed("the sequence number of a frame is wrong"));
        }
        self.seq += 1;
        Ok(reader.0)
    }
}

/// Divides the received bytes of a connection into packets.
#[derive(Debug, Default)]
pub(crate) struct PacketReader {
    bytes: Vec<u8>,
    /// The bytes at the front that were returned already.
    taken: usize,
}

impl PacketReader {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        if self.taken > 0 && self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        } else if self.taken > 1 << 16 {
            self.bytes.drain(..self.taken);
            self.taken = 0;
        }
        self.bytes.extend(bytes);
    }

    /// Returns true if a packet has arrived whole.
    pub(crate) fn has_next(&self, header: usize) -> bool {
        let rest = &self.bytes[self.taken..];
        let len = rest.first_chunk().map(|len| u32::from_le_bytes(*len) as usize);
        len.is_some_and(|len| rest.len() >= header.saturating_add(len))
    }

    /// Returns the next packet: `header` bytes, which begin with the length of the rest, and the rest. Returns `None` if
    /// it has not arrived whole.
    pub(crate) fn next(&mut self, header: usize, limit: usize) -> Result<Option<&[u8]>, Malformed> {
        let rest = &self.bytes[self.taken..];
        let Some(len) = rest.first_chunk().map(|len| u32::from_le_bytes(*len)) else { return Ok(None) };
        let len = usize::try_from(len).ok().filter(|len| *len <= limit);
        let Some(len) = len else { return Err(Malformed("a packet is longer than any message")) };
        let Some(packet) = rest.get(..header + len) else { return Ok(None) };
        self.taken += packet.len();
        Ok(Some(packet))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::UniqueId;

    fn key() -> GroupKey {
        UniqueId::create_private().unwrap().key()
    }

    fn transcript() -> SessionTranscript {
        let hello = Hello { purpose: Purpose::Report, rank: Rank(5), size: 9, nonce: [1; 32] };
        SessionTranscript { hello, rank: Rank(0), size: 9, nonce: [2; 32] }
    }

    #[test]
    fn a_proof_is_valid_for_its_transcript_side_and_secret_only() {
        let (key, other) = (key(), key());
        let proof = transcript().proof(&key, Side::Connecting);
        assert!(transcript().verify(&key, Side::Connecting, proof));
        assert!(!transcript().verify(&key, Side::Accepting, proof), "a reflected proof");
        assert!(!transcript().verify(&other, Side::Connecting, proof), "another secret");
        let changes: [fn(&mut SessionTranscript); 7] = [
            |t| t.hello.purpose = Purpose::Probe,
            |t| t.hello.rank.0 += 1,
            |t| t.hello.size += 1,
            |t| t.hello.nonce[0] += 1,
            |t| t.rank.0 += 1,
            |t| t.size += 1,
            |t| t.nonce[31] += 1,
        ];
        for change in changes {
            let mut changed = transcript();
            change(&mut changed);
            assert!(!changed.verify(&key, Side::Connecting, proof), "{changed:?}");
        }
    }

    fn sealed(sealer: &mut Sealer, frame: &[u8]) -> Vec<u8> {
        let mut packet = Vec::new();
        sealer.seal(frame, &mut packet);
        packet
    }

    #[test]
    fn changed_repeated_reordered_reflected_and_foreign_frames_are_refused() {
        let key = key();
        let ends = || {
            (transcript().session(&key, Side::Connecting).0, transcript().session(&key, Side::Accepting).1)
        };
        let (mut sealer, mut opener) = ends();
        let packets = [sealed(&mut sealer, b"one"), sealed(&mut sealer, b"two")];
        assert_eq!(opener.open(&packets[0]), Ok(&b"one"[..]));
        let (wrong_mac, wrong_seq) = (
            Err(Malformed("the MAC of a frame is wrong")),
            Err(Malformed("the sequence number of a frame is wrong")),
        );
        assert_eq!(opener.open(&packets[0]), wrong_seq, "repeated");
        assert_eq!(ends().1.open(&packets[1]), wrong_seq, "a frame before it was dropped");
        assert_eq!(opener.open(&packets[1]), Ok(&b"two"[..]));
        for at in 0..packets[0].len() {
            let mut changed = packets[0].clone();
            changed[at] ^= 1;
            assert_eq!(ends().1.open(&changed), wrong_mac, "byte {at}");
        }
        let mut own = transcript().session(&key, Side::Connecting).1;
        assert_eq!(own.open(&packets[0]), wrong_mac, "reflected to its sender");
        let later = SessionTranscript { nonce: [3; 32], ..transcript() };
        assert_eq!(
            later.session(&key, Side::Accepting).1.open(&packets[0]),
            wrong_mac,
            "of an earlier connection"
        );
    }

    #[test]
    fn messages_are_decoded_as_encoded_and_are_short() {
        let challenge = NodeChallenge { rank: Rank(1), size: 9, nonce: [3; 32], proof: [4; 32] };
        for message in [
            NodeHandshake::Hello(transcript().hello),
            NodeHandshake::Challenge(challenge),
            NodeHandshake::Response([7; 32]),
        ] {
            let packet = message.encode();
            let bytes = &packet[4..];
            assert!(bytes.len() <= MAX_HANDSHAKE);
            assert_eq!(NodeHandshake::decode(bytes), Ok(message));
            assert!(NodeHandshake::decode(&bytes[..bytes.len() - 1]).is_err());
            assert!(NodeHandshake::decode(&[bytes, &[0]].concat()).is_err());
        }
    }

    proptest! {
        #[test]
        fn packets_are_read_as_written_however_the_bytes_are_divided(
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..20),
            cuts in prop::collection::vec(1usize..200, 1..20),
        ) {
            let key = key();
            let mut sealer = transcript().session(&key, Side::Connecting).0;
            let mut opener = transcript().session(&key, Side::Accepting).1;
            let mut bytes = Vec::new();
            frames.iter().for_each(|frame| sealer.seal(frame, &mut bytes));
            let (mut reader, mut read, mut rest) = (PacketReader::default(), Vec::new(), &bytes[..]);
            for cut in cuts.iter().cycle() {
                let (front, back) = rest.split_at((*cut).min(rest.len()));
                reader.push(front);
                while let Some(packet) = reader.next(PACKET_HEADER, 300).unwrap() {
                    read.push(opener.open(packet).unwrap().to_vec());
                }
                rest = back;
                if rest.is_empty() {
                    break;
                }
            }
            prop_assert_eq!((read, reader.has_next(PACKET_HEADER)), (frames, false));
        }

        #[test]
        fn a_decoded_message_encodes_to_the_same_bytes(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            for prefix in [&b""[..], b"wmt1", b"wmt1\x01", b"wmt1\x02", b"wmt1\x03"] {
                let bytes = [prefix, &bytes].concat();
                if let Ok(message) = NodeHandshake::decode(&bytes) {
                    prop_assert_eq!(&message.encode()[4..], &bytes[..]);
                }
            }
        }
    }
}
