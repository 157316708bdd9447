//! Fuzzing entry points: functions over arbitrary bytes that panic if decoding hostile bytes violates an invariant.
//!
//! The tests run them on the corpora in `fuzz/corpus`, with seeded mutations. No other code uses them.

use crate::Rank;
use crate::id::{SocketLocation, UniqueId};
use crate::wire::frame;
use crate::wire::handshake::{HandshakeMessage, MAX_LEN, Role, Transcript};

/// Decodes arbitrary bytes as a frame (a packet) from a neighbour.
///
/// # Panics
/// If re-encoding the decoded frame gives other bytes, or the frame exceeds its bounds.
pub fn frame(bytes: &[u8]) {
    if let Ok((header, payload)) = frame::decode(bytes) {
        assert!(header.offset + payload.len() as u64 <= header.total, "a frame is within its message");
        assert!(payload.len() <= frame::MAX_PAYLOAD || bytes.len() > frame::HEADER + frame::MAX_PAYLOAD);
        if let Ok(ranks) = frame::decode_ranks(payload) {
            assert_eq!(frame::encode_ranks(&ranks), payload);
        }
        if let Ok(update) = frame::decode_join_update(payload) {
            assert_eq!(frame::encode_join_update(&update), payload);
        }
        if let Ok(fault) = frame::decode_fault(payload) {
            assert_eq!(frame::encode_fault(fault.as_ref()), payload);
        }
    }
}

/// Decodes arbitrary bytes as the handshake packets of an unauthenticated peer. A byte with its length precedes each
/// packet.
///
/// # Panics
/// If a peer without the secret is authenticated, or re-encoding a decoded message gives other bytes.
pub fn handshake(bytes: &[u8]) {
    let key =
        UniqueId::from_text(SocketLocation::Namespace(0), "fuzz", Some("a secret that no corpus holds"))
            .key();
    let mut rest = bytes;
    let mut transcript = None;
    while let Some((len, after)) = rest.split_first() {
        let (packet, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let Ok(hello) = HandshakeMessage::decode(packet) else { continue };
        assert_eq!(hello.encode(), packet);
        assert!(packet.len() <= MAX_LEN);
        match (hello, transcript) {
            (HandshakeMessage::Claim(claim), _) => {
                let parent_nonce = [0x5a; 16];
                transcript = Some(Transcript { claim, parent: Rank(0), parent_size: 3, parent_nonce });
            }
            (HandshakeMessage::Response(proof), Some(transcript)) => {
                assert!(
                    !transcript.verify(&key, Role::Child, proof),
                    "a peer without the secret was authenticated"
                );
            }
            _ => {}
        }
    }
}
