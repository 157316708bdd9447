//! The handshake: both sides prove that they know the secret, and neither says it.
//!
//! ```text
//!   child                                               parent
//!     | --- claim: rank, size, nonce ------------------->  |
//!     | <-- challenge: rank, size, nonce, parent's proof - |   the parent proves itself first: to a stranger who
//!     | --- answer: child's proof ---------------------->  |   asks, that is a hash of numbers he chose, and no use
//!     | <-- welcome (with the parent's pulse) ------------ |
//!     | --- greeting (with the child's pulse): a frame ->  |
//!
//!   proof = BLAKE3 keyed by the secret, of the role, both ranks, both sizes, both nonces
//! ```
//!
//! A recorded handshake is worth nothing later, as both nonces are new each time; a proof cannot be sent back to its
//! maker, as it names the role.

use super::{Malformed, Reader};
use crate::Rank;
use crate::id::Key;

const MAGIC: [u8; 4] = *b"wmh1";
const CLAIM: u8 = 1;
const CHALLENGE: u8 = 2;
const ANSWER: u8 = 3;
const VERDICT: u8 = 4;

/// No message of the handshake is longer.
pub(crate) const LONGEST: usize = 128;

pub(crate) type Nonce = [u8; 16];
pub(crate) type Proof = [u8; 32];

/// What both sides know when they prove themselves.
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
    pub(crate) fn proof(&self, key: &Key, role: Role) -> Proof {
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

    pub(crate) fn verify(&self, key: &Key, role: Role, proof: Proof) -> bool {
        // The comparison of hashes takes the same time wherever they differ.
        blake3::Hash::from_bytes(self.proof(key, role)) == blake3::Hash::from_bytes(proof)
    }
}

/// A child's first message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
}

/// A parent's first message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Challenge {
    pub(crate) parent: Rank,
    pub(crate) size: u32,
    pub(crate) nonce: Nonce,
    pub(crate) proof: Proof,
}

/// What a parent says to a child that has proved itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Welcome,
    RankTaken,
}

/// Any message of the handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hello {
    Claim(Claim),
    Challenge(Challenge),
    Answer(Proof),
    Verdict(Verdict),
}

impl Hello {
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
            Self::Answer(proof) => {
                bytes.push(ANSWER);
                bytes.extend(proof);
            }
            Self::Verdict(verdict) => {
                bytes.push(VERDICT);
                bytes.push(match verdict {
                    Verdict::Welcome => 0,
                    Verdict::RankTaken => 1,
                });
            }
        }
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(bytes);
        if reader.array()? != MAGIC {
            return Err(Malformed("it is no handshake of this version"));
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
            ANSWER => Self::Answer(reader.array()?),
            VERDICT => Self::Verdict(match reader.u8()? {
                0 => Verdict::Welcome,
                1 => Verdict::RankTaken,
                _ => return Err(Malformed("its verdict is unknown")),
            }),
            _ => return Err(Malformed("its kind is unknown")),
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
    fn a_proof_holds_for_its_transcript_role_and_secret_only() {
        let key = UniqueId::create_private().unwrap().key();
        let proof = transcript().proof(&key, Role::Child);
        assert!(transcript().verify(&key, Role::Child, proof));
        assert!(!transcript().verify(&key, Role::Parent, proof), "sent back to its maker");
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
    fn messages_survive_the_wire_and_are_short() {
        let challenge = Challenge { parent: Rank(1), size: 9, nonce: [3; 16], proof: [4; 32] };
        for hello in [
            Hello::Claim(transcript().claim),
            Hello::Challenge(challenge),
            Hello::Answer([7; 32]),
            Hello::Verdict(Verdict::Welcome),
            Hello::Verdict(Verdict::RankTaken),
        ] {
            let bytes = hello.encode();
            assert!(bytes.len() <= LONGEST);
            assert_eq!(Hello::decode(&bytes), Ok(hello));
            assert!(Hello::decode(&bytes[..bytes.len() - 1]).is_err());
            assert!(Hello::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
    }

    proptest! {
        #[test]
        fn whatever_is_decoded_is_what_would_have_been_sent(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            for prefix in [&b""[..], b"wmh1", b"wmh1\x01", b"wmh1\x02", b"wmh1\x03", b"wmh1\x04"] {
                let bytes = [prefix, &bytes].concat();
                if let Ok(hello) = Hello::decode(&bytes) {
                    prop_assert_eq!(hello.encode(), bytes);
                }
            }
        }
    }
}
