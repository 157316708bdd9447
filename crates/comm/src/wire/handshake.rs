//! The messages of the handshake between two ranks: challenge and response, in which both prove that they know the
//! secret without sending it.
//!
//! ```text
//!   child                                               parent
//!     | --- claim: rank, size, nonce ------------------->  |
//!     | <-- challenge: rank, size, nonce, parent's proof - |   the parent proves itself first; to an attacker the
//!     | --- response: child's proof -------------------->  |   proof is a keyed hash, which is useless without the key
//!     | <-- admission (with the parent's liveness page) -- |
//!     | --- greeting (with the child's liveness page) -->  |   a frame
//!
//!   proof = BLAKE3 keyed by the secret, of the role, both ranks, both sizes, both nonces
//! ```
//!
//! Replaying a recorded handshake fails, because both nonces are random. Reflecting a proof to its sender fails,
//! because the proof contains the role.

use super::{FieldReader, Malformed};
use crate::Rank;
use crate::id::GroupKey;

const MAGIC: [u8; 4] = *b"wmh1";
const CLAIM: u8 = 1;
const CHALLENGE: u8 = 2;
const RESPONSE: u8 = 3;
const ADMISSION: u8 = 4;

/// The maximum length of a handshake message in bytes.
pub(crate) const MAX_LEN: usize = 128;

pub(crate) type Nonce = [u8; 16];
pub(crate) type Proof = [u8; 32];

/// The values from which both sides of a handshake compute their proofs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Transcript {
    pub(crate) claim: Claim,
    pub(crate) parent: Rank,
    pub(crate) parent_size: u32,
    pub(crate) parent_nonce: Nonce,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Child,
    Parent,
}

impl Transcript {
    pub(crate) fn proof(&self, key: &GroupKey, role: Role) -> Proof {
        let mut hasher = key.hasher();
        hasher.update(match role {
            Role::Child => b"child ",
            Role::Parent => b"parent",
        });
        for number in [self.claim.rank.0, self.claim.size, self.parent.0, self.parent_size] {
            hasher.update(&number.to_le_bytes());
        }
        hasher.update(&self.claim.nonce).update(&self.parent_nonce);
        *hasher.finalize().as_bytes()
    }

    pub(crate) fn verify(&self, key: &GroupKey, role: Role, proof: Proof) -> bool {
        // Comparing two values of type `blake3::Hash` takes constant time.
        blake3::Hash::from_bytes(self.proof(key, role)) == blake3::Hash::from_bytes(proof)
    }
}

/// The first handshake message of a child: its rank, the group size and a nonce.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
}

/// The first handshake message of a parent: its rank, the group size, a nonce and its proof.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Challenge {
    pub(crate) parent: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
    pub(crate) proof: Proof,
}

/// The parent's reply to an authenticated child: the child is admitted, or its rank is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AdmissionReply {
    Admitted,
    RankTaken,
}

/// A message of the handshake between a child and its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandshakeMessage {
    Claim(Claim),
    Challenge(Challenge),
    Response(Proof),
    Admission(AdmissionReply),
}

impl HandshakeMessage {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        match self {
            Self::Claim(claim) => {
                bytes.push(CLAIM);
                bytes.extend(claim.rank.0.to_le_bytes());
                bytes.extend(claim.size.to_le_bytes());
                bytes.extend(claim.nonce);
            }
            Self::Challenge(challenge) => {
                bytes.push(CHALLENGE);
                bytes.extend(challenge.parent.0.to_le_bytes());
                bytes.extend(challenge.size.to_le_bytes());
                bytes.extend(challenge.nonce);
                bytes.extend(challenge.proof);
            }
            Self::Response(proof) => {
                bytes.push(RESPONSE);
                bytes.extend(proof);
            }
            Self::Admission(admission) => {
                bytes.push(ADMISSION);
                bytes.push(match admission {
                    AdmissionReply::Admitted => 0,
                    AdmissionReply::RankTaken => 1,
                });
            }
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = FieldReader(bytes);
        if reader.array()? != MAGIC {
            return Err(Malformed("the message is not a handshake of this version"));
        }
        let hello = match reader.u8()? {
            CLAIM => {
                Self::Claim(Claim { rank: Rank(reader.u32()?), size: reader.u32()?, nonce: reader.array()? })
            }
            CHALLENGE => Self::Challenge(Challenge {
                parent: Rank(reader.u32()?),
                size: reader.u32()?,
                nonce: reader.array()?,
                proof: reader.array()?,
            }),
            RESPONSE => Self::Response(reader.array()?),
            ADMISSION => Self::Admission(match reader.u8()? {
                0 => AdmissionReply::Admitted,
                1 => AdmissionReply::RankTaken,
                _ => return Err(Malformed("the admission has an unknown code")),
            }),
            _ => return Err(Malformed("the handshake message has an unknown kind")),
        };
        reader.end()?;
        Ok(hello)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::UniqueId;

    fn transcript() -> Transcript {
        let claim = Claim { rank: Rank(5), size: 9, nonce: [1; 16] };
        Transcript { claim, parent: Rank(1), parent_size: 9, parent_nonce: [2; 16] }
    }

    #[test]
    fn a_proof_is_valid_for_its_transcript_role_and_secret_only() {
        let key = UniqueId::create_private().unwrap().key();
        let proof = transcript().proof(&key, Role::Child);
        assert!(transcript().verify(&key, Role::Child, proof));
        assert!(!transcript().verify(&key, Role::Parent, proof), "a reflected proof");
        let other = UniqueId::create_private().unwrap().key();
        assert!(!transcript().verify(&other, Role::Child, proof), "another secret");
        let changes: [fn(&mut Transcript); 6] = [
            |t| t.claim.rank.0 += 1,
            |t| t.claim.size += 1,
            |t| t.claim.nonce[0] += 1,
            |t| t.parent.0 += 1,
            |t| t.parent_size += 1,
            |t| t.parent_nonce[15] += 1,
        ];
        for change in changes {
            let mut changed = transcript();
            change(&mut changed);
            assert!(!changed.verify(&key, Role::Child, proof), "{changed:?}");
        }
    }

    #[test]
    fn messages_are_decoded_as_encoded_and_are_short() {
        let challenge = Challenge { parent: Rank(1), size: 9, nonce: [3; 16], proof: [4; 32] };
        for hello in [
            HandshakeMessage::Claim(transcript().claim),
            HandshakeMessage::Challenge(challenge),
            HandshakeMessage::Response([7; 32]),
            HandshakeMessage::Admission(AdmissionReply::Admitted),
            HandshakeMessage::Admission(AdmissionReply::RankTaken),
        ] {
            let bytes = hello.encode();
            assert!(bytes.len() <= MAX_LEN);
            assert_eq!(HandshakeMessage::decode(&bytes), Ok(hello));
            assert!(HandshakeMessage::decode(&bytes[..bytes.len() - 1]).is_err());
            assert!(HandshakeMessage::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
    }

    proptest! {
        #[test]
        fn a_decoded_message_encodes_to_the_same_bytes(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            for prefix in [&b""[..], b"wmh1", b"wmh1\x01", b"wmh1\x02", b"wmh1\x03", b"wmh1\x04"] {
                let bytes = [prefix, &bytes].concat();
                if let Ok(hello) = HandshakeMessage::decode(&bytes) {
                    prop_assert_eq!(hello.encode(), bytes);
                }
            }
        }
    }
}
