//! Tests of how a rank handles frames that violate the protocol.

use super::*;
use crate::fault::Disagreement;
use crate::handshake::{JoinedPeer, liveness_fds};
use crate::rank::Tree;
use crate::wire::frame::{JoinUpdate, encode_fault, encode_join_update, encode_ranks};
use crate::{Rank, UniqueId};

/// Creates the progress thread of rank 1 of 30, connected to rank 5. The neighbours of rank 1 are ranks 0 and 5 to 8;
/// ranks 21 to 24 are below rank 5.
fn rank_1() -> (ProgressThread, PacketSocket) {
    let id = UniqueId::create_private().unwrap();
    let core = Arc::new(RankCore::create(id, Tree::new(Rank(1), 30)).unwrap());
    let mut progress = ProgressThread::new(Arc::clone(&core), Duration::from_secs(60), None, None);
    let (here, there) = PacketSocket::pair().unwrap();
    let fds = liveness_fds(&core.liveness).unwrap().into();
    assert!(progress.add_peer(JoinedPeer { rank: Rank(5), socket: here, fds }));
    (progress, there)
}

fn frame(kind: FrameKind, src: u32, dst: u32) -> FrameHeader {
    FrameHeader::new(kind, Operation::AllToAllV, Rank(src), Rank(dst), 1)
}

fn disagreement(rank: Rank) -> GroupFault {
    let calls = [(Rank(0), Operation::Barrier), (rank, Operation::Agree)];
    GroupFault::RanksDisagree(Disagreement::new(1, calls[0], calls[1]).unwrap())
}

#[test]
fn invalid_frames_are_refused_and_valid_ones_accepted() {
    let (mut progress, _there) = rank_1();
    let mut on_frame =
        |from, header: FrameHeader| progress.on_frame(Rank(from), &header.encode(&[]), Vec::new());
    for header in [
        frame(FrameKind::Vote, 5, 1),
        frame(FrameKind::Direct, 21, 1),
        frame(FrameKind::Direct, 21, 2),
        frame(FrameKind::LinkOffer, 21, 1),
        frame(FrameKind::LinkDeclined, 21, 1),
    ] {
        assert_eq!(on_frame(5, header), Ok(()), "{header:?}");
    }
    let needs_none = "a link was offered or answered by a neighbour or an unknown rank";
    let wrong_destination = "a frame has a destination that it cannot be forwarded to";
    for (from, header, rule) in [
        (5, frame(FrameKind::LinkOffer, 5, 1), needs_none),
        (5, frame(FrameKind::LinkOffer, 1, 1), needs_none),
        (5, frame(FrameKind::LinkAccepted, 30, 1), needs_none),
        (5, frame(FrameKind::LinkDeclined, 0, 1), needs_none),
        (5, frame(FrameKind::Direct, 1, 1), "a message is from this rank or from an unknown rank"),
        (5, frame(FrameKind::Direct, 30, 1), "a message is from this rank or from an unknown rank"),
        (5, frame(FrameKind::Direct, 21, 22), "a frame was forwarded in the wrong direction"),
        (5, frame(FrameKind::Direct, 21, 30), wrong_destination),
        (5, frame(FrameKind::Vote, 5, 0), wrong_destination),
        (5, frame(FrameKind::Vote, 21, 1), "a frame for neighbours only was forwarded"),
        (5, frame(FrameKind::Greeting, 5, 1), "a rank sent a second greeting"),
        (9, frame(FrameKind::Vote, 9, 1), "a direct link carried a frame that is not a message"),
        (
            5,
            FrameHeader { fds: 1, ..frame(FrameKind::Fds, 5, 1) },
            "a frame has another number of descriptors than its header",
        ),
    ] {
        assert_eq!(on_frame(from, header), Err(Malformed(rule)), "{header:?}");
    }
    let unknown = Rank(30);
    let not_in_the_group = Err(Malformed("a frame contains a rank that is not in the group"));
    for (kind, payload) in [
        (FrameKind::JoinUpdate, encode_join_update(&JoinUpdate { joined: vec![], died: vec![unknown] })),
        (FrameKind::JoinUpdate, encode_join_update(&JoinUpdate { joined: vec![unknown], died: vec![] })),
        (FrameKind::JoinDecision, encode_fault(Some(&GroupFault::Lost(unknown)))),
        (FrameKind::GroupFailed, encode_fault(Some(&GroupFault::Missing(vec![Rank(2), unknown])))),
        (FrameKind::GroupFailed, encode_fault(Some(&disagreement(unknown)))),
        (FrameKind::MissingReport, encode_ranks(&[unknown])),
    ] {
        let frames = frame(kind, 5, 1).frames(&payload);
        assert_eq!(progress.on_frame(Rank(5), &frames[0], Vec::new()), not_in_the_group, "{kind:?}");
    }
    let before_joining = encode_fault(Some(&disagreement(Rank(2))));
    let frames = frame(FrameKind::JoinDecision, 5, 1).frames(&before_joining);
    let rule = "ranks disagreed before they had joined";
    assert_eq!(progress.on_frame(Rank(5), &frames[0], Vec::new()), Err(Malformed(rule)));
    let gap = FrameHeader { total: 9, offset: 4, ..frame(FrameKind::Vote, 5, 1) }.encode(&[7]);
    let rule = "a frame does not continue the previous one";
    assert_eq!(progress.on_frame(Rank(5), &gap, Vec::new()), Err(Malformed(rule)));
}

#[test]
fn a_rank_that_has_left_is_not_stalled() {
    let (mut progress, _there) = rank_1();
    // Rank 5 counts as having left, because no thread holds its liveness lock.
    progress.probe_neighbours();
    assert!(progress.peers.is_empty());
    assert!(progress.core.stalled().is_empty());
}
