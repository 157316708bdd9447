//! What a rank makes of frames that no rank keeping to the protocol would send.

use super::*;
use crate::handshake::{Joined, own_fds};
use crate::rank::Tree;
use crate::wire::frame::{News, encode_fault, encode_news, encode_ranks};
use crate::{Rank, UniqueId};

/// Rank 1 of 30, whose neighbours are 0 and 5 to 8; 21 to 24 are below 5. It has met rank 5.
fn rank_1() -> (Progress, PacketSocket) {
    let id = UniqueId::create_private().unwrap();
    let core = Arc::new(Core::create(id, Tree::new(Rank(1), 30)).unwrap());
    let mut progress = Progress::new(Arc::clone(&core), Duration::from_secs(60), None, None);
    let (here, there) = PacketSocket::pair().unwrap();
    let fds = own_fds(&core.heart).unwrap().into();
    assert!(progress.meet(Joined { rank: Rank(5), socket: here, fds }));
    (progress, there)
}

fn frame(kind: Kind, src: u32, dst: u32) -> Header {
    Header::new(kind, What::AllToAll, Rank(src), Rank(dst), 1)
}

#[test]
fn a_frame_that_cannot_be_is_told_from_one_that_can() {
    let (mut progress, _there) = rank_1();
    let mut take = |from, header: Header| progress.take(Rank(from), &header.encode(&[]), Vec::new());
    for header in [
        frame(Kind::Up, 5, 1),
        frame(Kind::Direct, 21, 1),
        frame(Kind::Direct, 21, 2),
        frame(Kind::Offer, 21, 1),
        frame(Kind::Declined, 21, 1),
    ] {
        assert_eq!(take(5, header), Ok(()), "{header:?}");
    }
    let needs_none = "a link is offered or answered by a rank that needs none";
    let somebody_else = "a frame is for somebody else";
    for (from, header, rule) in [
        (5, frame(Kind::Offer, 5, 1), needs_none),
        (5, frame(Kind::Offer, 1, 1), needs_none),
        (5, frame(Kind::Accepted, 30, 1), needs_none),
        (5, frame(Kind::Declined, 0, 1), needs_none),
        (5, frame(Kind::Direct, 21, 22), "a frame came the wrong way"),
        (5, frame(Kind::Direct, 21, 30), somebody_else),
        (5, frame(Kind::Up, 5, 0), somebody_else),
        (5, frame(Kind::Up, 21, 1), "a frame was passed on that is for neighbours only"),
        (5, frame(Kind::Greeting, 5, 1), "a rank greeted twice"),
        (9, frame(Kind::Up, 9, 1), "a frame came by a link that is for messages only"),
        (
            5,
            Header { fds: 1, ..frame(Kind::Fds, 5, 1) },
            "a frame has another number of descriptors than it says",
        ),
    ] {
        assert_eq!(take(from, header), Err(Malformed(rule)), "{header:?}");
    }
    let unknown = Rank(30);
    let not_in_the_group = Err(Malformed("a frame names a rank that is not in the group"));
    for (kind, payload) in [
        (Kind::News, encode_news(&News { joined: vec![], died: vec![unknown] })),
        (Kind::News, encode_news(&News { joined: vec![unknown], died: vec![] })),
        (Kind::Decision, encode_fault(Some(&Fault::Lost(unknown)))),
        (Kind::Fall, encode_fault(Some(&Fault::Missing(vec![Rank(2), unknown])))),
        (Kind::Report, encode_ranks(&[unknown])),
    ] {
        let frames = frame(kind, 5, 1).frames(&payload);
        assert_eq!(progress.take(Rank(5), &frames[0], Vec::new()), not_in_the_group, "{kind:?}");
    }
    let gap = Header { total: 9, offset: 4, ..frame(Kind::Up, 5, 1) }.encode(&[7]);
    let rule = "a frame does not follow the one before it";
    assert_eq!(progress.take(Rank(5), &gap, Vec::new()), Err(Malformed(rule)));
}

#[test]
fn who_has_left_does_not_stand_still() {
    let (mut progress, _there) = rank_1();
    // Nobody holds the heart of rank 5.
    progress.look();
    assert!(progress.peers.is_empty());
    assert!(progress.core.still().is_empty());
}
