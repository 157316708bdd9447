//! Tests of the join protocol on one rank, step by step.

use super::*;

/// Returns the join record of a rank that has only its own position in the tree.
fn record(rank: u32, stage: JoinStage) -> JoinRecord {
    JoinRecord { stage, rank: Rank(rank), top: Rank(rank), seen: BTreeSet::new() }
}

fn decoded(protocol: &JoinProtocol) -> JoinRecord {
    JoinRecord::decode(protocol.record(), protocol.position()).unwrap()
}

const TIMEOUT: Duration = Duration::from_secs(4);

fn joining(rank: u32, size: u32) -> JoinProtocol {
    JoinProtocol::new(Tree::new(Rank(rank), size), TIMEOUT)
}

fn joined(ranks: &[u32]) -> JoinUpdate {
    JoinUpdate { joined: ranks.iter().copied().map(Rank).collect(), died: vec![] }
}

#[test]
fn a_group_of_one_is_complete_at_once() {
    assert_eq!(joining(0, 1).step(Duration::ZERO, Input::Tick), [Output::End(Ok(()))]);
}

#[test]
fn rank_0_sends_the_decision_when_the_last_rank_has_joined() {
    let mut root = joining(0, 3);
    assert_eq!(root.step(Duration::ZERO, Input::ChildJoined(Rank(2))), []);
    assert_eq!(
        root.step(Duration::ZERO, Input::ChildJoined(Rank(1))),
        [Output::Down(Rank(1), Ok(())), Output::Down(Rank(2), Ok(())), Output::End(Ok(()))]
    );
    assert_eq!(decoded(&root).stage, JoinStage::Decided);
}

#[test]
fn ranks_that_joined_before_the_parent_appeared_are_reported_to_it() {
    let mut inner = joining(1, 8);
    assert_eq!(inner.step(Duration::ZERO, Input::ChildJoined(Rank(5))), []);
    assert_eq!(decoded(&inner).stage, JoinStage::Alone);
    assert_eq!(inner.step(Duration::ZERO, Input::ParentJoined), [Output::Up(joined(&[1, 5]))]);
    assert_eq!(decoded(&inner).stage, JoinStage::Joined);
    assert_eq!(inner.step(Duration::ZERO, Input::ChildJoined(Rank(7))), [Output::Up(joined(&[7]))]);
    // Rank 2 is not below rank 1, so its entry in the update is ignored; rank 7 is already known.
    assert_eq!(inner.step(Duration::ZERO, Input::Update(joined(&[2, 7]))), []);
}

#[test]
fn a_death_is_reported_when_all_others_have_joined() {
    let mut root = joining(0, 6);
    for child in [1, 2, 3] {
        assert_eq!(root.step(Duration::ZERO, Input::ChildJoined(Rank(child))), []);
    }
    assert_eq!(root.step(Duration::ZERO, Input::Died(Rank(1), record(1, JoinStage::Joined))), []);
    // Rank 0 takes the position of the dead rank 1. Rank 5, a child of rank 1, joins rank 0 in that position.
    assert_eq!(root.vacant_positions(), [Rank(1)]);
    assert_eq!(root.step(Duration::ZERO, Input::PositionTaken(Rank(1))), []);
    assert_eq!(root.vacant_positions(), []);
    assert_eq!(root.step(Duration::ZERO, Input::ChildJoined(Rank(5))), []);
    let fault = Err(GroupFault::Lost(Rank(1)));
    let informed = [2, 3, 4, 5].map(|child| Output::Down(Rank(child), fault.clone()));
    let outputs = root.step(Duration::ZERO, Input::ChildJoined(Rank(4)));
    assert_eq!(outputs, [&informed[..], &[Output::End(fault)]].concat());
}

#[test]
fn a_child_takes_the_position_of_rank_0_and_waits_for_the_others() {
    let mut successor = joining(1, 4);
    successor.step(Duration::ZERO, Input::ParentJoined);
    assert_eq!((successor.target(), successor.vacant_positions()), (None, vec![]));
    assert_eq!(successor.step(Duration::ZERO, Input::Died(Rank(0), record(0, JoinStage::Alone))), []);
    assert_eq!((successor.target(), successor.vacant_positions()), (Some((Rank(1), Rank(0))), vec![Rank(0)]));
    assert_eq!(successor.step(Duration::ZERO, Input::PositionTaken(Rank(0))), []);
    assert_eq!(
        (successor.target(), successor.vacant_positions(), decoded(&successor).stage),
        (None, vec![], JoinStage::Alone)
    );
    assert_eq!(successor.step(Duration::ZERO, Input::ChildJoined(Rank(3))), []);
    let fault = Err(GroupFault::Lost(Rank(0)));
    assert_eq!(
        successor.step(Duration::ZERO, Input::ChildJoined(Rank(2))),
        [Output::Down(Rank(2), fault.clone()), Output::Down(Rank(3), fault.clone()), Output::End(fault)]
    );
}

#[test]
fn a_child_in_the_position_of_its_parent_joins_the_grandparent() {
    let mut successor = joining(5, 8);
    successor.step(Duration::ZERO, Input::ParentJoined);
    successor.step(Duration::ZERO, Input::Died(Rank(1), record(1, JoinStage::Joined)));
    successor.step(Duration::ZERO, Input::PositionTaken(Rank(1)));
    assert_eq!(successor.target(), Some((Rank(1), Rank(0))));
    let update = JoinUpdate { joined: vec![Rank(5)], died: vec![Rank(1)] };
    assert_eq!(successor.step(Duration::ZERO, Input::ParentJoined), [Output::Up(update)]);
    assert_eq!(successor.step(Duration::ZERO, Input::ChildJoined(Rank(7))), [Output::Up(joined(&[7]))]);

    let mut late = joining(5, 8);
    late.step(Duration::ZERO, Input::Died(Rank(1), record(1, JoinStage::Joined)));
    assert_eq!(late.step(Duration::ZERO, Input::Refused), [], "a successor of rank 1 may still accept it");
    late.step(Duration::ZERO, Input::PositionTaken(Rank(1)));
    let lost = Err(GroupFault::Lost(Rank(1)));
    assert_eq!(late.step(Duration::ZERO, Input::Refused), [], "a successor of rank 0 may still accept it");
    assert_eq!(late.step(MAX_REFUSED / 2, Input::Reached), []);
    assert_eq!(late.step(MAX_REFUSED, Input::Refused), []);
    assert_eq!(late.step(2 * MAX_REFUSED, Input::Refused), [Output::End(lost)]);
}

#[test]
fn a_parent_that_died_after_its_decision_is_reported_at_once() {
    let mut orphan = joining(2, 4);
    orphan.step(Duration::ZERO, Input::ParentJoined);
    let lost = Err(GroupFault::Lost(Rank(0)));
    assert_eq!(
        orphan.step(Duration::ZERO, Input::Died(Rank(0), record(0, JoinStage::Decided))),
        [Output::End(lost)],
        "another child may have left already"
    );
}

#[test]
fn missing_ranks_are_reported_when_the_timeout_expires_and_not_before() {
    let mut root = joining(0, 4);
    root.step(Duration::ZERO, Input::ChildJoined(Rank(2)));
    let fault = Err(GroupFault::Missing(vec![Rank(1), Rank(3)]));
    let before = TIMEOUT - Duration::from_nanos(1);
    assert_eq!((root.next_tick(), root.step(before, Input::Tick)), (TIMEOUT, vec![]));
    assert_eq!(root.step(TIMEOUT, Input::Tick), [Output::Down(Rank(2), fault.clone()), Output::End(fault)]);
    let mut orphan = joining(1, 6);
    let fault = Err(GroupFault::Missing(vec![Rank(0), Rank(5)]));
    assert_eq!((orphan.next_tick(), orphan.step(before, Input::Tick)), (TIMEOUT, vec![]));
    assert_eq!(orphan.step(TIMEOUT, Input::Tick), [Output::End(fault)]);
}

#[test]
fn a_child_takes_positions_up_to_the_highest_dead_rank() {
    let mut successor = joining(5, 8);
    successor.step(Duration::ZERO, Input::ParentJoined);
    // Rank 1 died after it had detected the death of rank 0, and before it took the position of rank 0.
    let record = JoinRecord { top: Rank(0), ..record(1, JoinStage::Alone) };
    assert_eq!(successor.step(Duration::ZERO, Input::Died(Rank(1), record)), []);
    assert_eq!((successor.target(), successor.vacant_positions()), (Some((Rank(5), Rank(1))), vec![Rank(1)]));
    successor.step(Duration::ZERO, Input::PositionTaken(Rank(1)));
    assert_eq!((successor.target(), successor.vacant_positions()), (Some((Rank(1), Rank(0))), vec![Rank(0)]));
    assert_eq!(decoded(&successor).top, Rank(0), "its own children take positions up to the same rank");
    successor.step(Duration::ZERO, Input::PositionTaken(Rank(0)));
    assert_eq!((successor.target(), successor.vacant_positions()), (None, vec![]));
    let fault = Err(GroupFault::Lost(Rank(0)));
    assert_eq!(successor.step(TIMEOUT, Input::Tick), [Output::End(fault)]);
}

#[test]
fn a_rank_in_the_record_of_a_dead_rank_is_awaited_until_it_joins_or_is_gone() {
    let mut successor = joining(1, 4);
    successor.step(Duration::ZERO, Input::ParentJoined);
    let seen = BTreeSet::from([1, 2, 3].map(Rank));
    let record = JoinRecord { seen, ..record(0, JoinStage::Alone) };
    successor.step(Duration::ZERO, Input::Died(Rank(0), record));
    successor.step(Duration::ZERO, Input::PositionTaken(Rank(0)));
    assert_eq!(successor.unaccounted().collect::<Vec<_>>(), [Rank(2), Rank(3)]);
    assert_eq!(successor.step(Duration::ZERO, Input::ChildJoined(Rank(2))), []);
    assert_eq!(successor.unaccounted().collect::<Vec<_>>(), [Rank(3)]);
    let fault = Err(GroupFault::Lost(Rank(0)));
    assert_eq!(
        successor.step(Duration::ZERO, Input::Gone(Rank(3))),
        [Output::Down(Rank(2), fault.clone()), Output::End(fault)]
    );
}

#[test]
fn a_child_is_published_before_its_admission_is_sent() {
    let mut root = joining(0, 3);
    assert_eq!(root.step(Duration::ZERO, Input::ChildAdmitted(Rank(2))), []);
    assert_eq!(decoded(&root).seen, BTreeSet::from([Rank(2)]));
}
