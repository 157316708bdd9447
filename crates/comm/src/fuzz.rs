//! What a fuzzer feeds: functions over any bytes that panic where a promise about hostile bytes is broken.
//!
//! The corpora in `fuzz/corpus` are played to them in the tests, with changes by a seeded dice. Nothing else uses this.

use crate::Rank;
use crate::id::{Home, UniqueId};
use crate::wire::frame;
use crate::wire::hello::{Hello, LONGEST, Role, Transcript};

/// Bytes as a frame of a neighbour.
///
/// # Panics
/// When what is decoded is not what was encoded, or leaves its bounds.
pub fn frame(bytes: &[u8]) {
    if let Ok((header, payload)) = frame::decode(bytes) {
        assert!(header.offset + payload.len() as u64 <= header.total, "a frame is within its message");
        assert!(payload.len() <= frame::MAX_PAYLOAD || bytes.len() > frame::HEADER + frame::MAX_PAYLOAD);
        if let Ok(ranks) = frame::decode_ranks(payload) {
            assert_eq!(frame::encode_ranks(&ranks), payload);
        }
        if let Ok(news) = frame::decode_news(payload) {
            assert_eq!(frame::encode_news(&news), payload);
        }
        if let Ok(fault) = frame::decode_fault(payload) {
            assert_eq!(frame::encode_fault(fault.as_ref()), payload);
        }
    }
}

/// Bytes as the packets of an unauthenticated peer, each behind a byte that says how long it is.
///
/// # Panics
/// When a peer without the secret is authenticated, or what is decoded is not what was encoded.
pub fn handshake(bytes: &[u8]) {
    let key = UniqueId::agreed(Home::Namespace(0), "fuzz", Some("a secret that no corpus holds")).key();
    let mut rest = bytes;
    let mut transcript = None;
    while let Some((len, after)) = rest.split_first() {
        let (packet, after) = after.split_at(usize::from(*len).min(after.len()));
        rest = after;
        let Ok(hello) = Hello::decode(packet) else { continue };
        assert_eq!(hello.encode(), packet);
        assert!(packet.len() <= LONGEST);
        match (hello, transcript) {
            (Hello::Claim(claim), _) => {
                let parent_nonce = [0x5a; 16];
                transcript = Some(Transcript { claim, parent: Rank(0), parent_size: 3, parent_nonce });
            }
            (Hello::Answer(proof), Some(transcript)) => {
                assert!(
                    !transcript.verify(&key, Role::Child, proof),
                    "a peer without the secret was authenticated"
                );
            }
            _ => {}
        }
    }
}
