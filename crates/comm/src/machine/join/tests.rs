//! How one rank joins, step by step.

use super::*;

/// The record of a rank in its own place.
fn record(rank: u32, stage: Stage) -> JoinRecord {
    JoinRecord { stage, rank: Rank(rank), top: Rank(rank), seen: BTreeSet::new() }
}

fn decoded(protocol: &JoinProtocol) -> JoinRecord {
    JoinRecord::decode(protocol.record(), protocol.place()).unwrap()
}

const TIMEOUT: Duration = Duration::from_secs(4);

fn joining(rank: u32, size: u32) -> JoinProtocol {
    JoinProtocol::new(Tree::new(Rank(rank), size), TIMEOUT)
}

fn joined(ranks: &[u32]) -> News {
    News { joined: ranks.iter().copied().map(Rank).collect(), died: vec![] }
}

#[test]
fn a_group_of_one_stands_at_once() {
    assert_eq!(joining(0, 1).step(Duration::ZERO, Input::Tick), [Output::End(Ok(()))]);
}

#[test]
fn rank_0_lets_all_go_when_the_last_has_joined() {
    let mut root = joining(0, 3);
    assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(2))), []);
    assert_eq!(
        root.step(Duration::ZERO, Input::ChildProved(Rank(1))),
        [Output::Down(Rank(1), Ok(())), Output::Down(Rank(2), Ok(())), Output::End(Ok(()))]
    );
    assert_eq!(decoded(&root).stage, Stage::Decided);
}

#[test]
fn what_joined_before_the_parent_appeared_is_told_to_it() {
    let mut inner = joining(1, 8);
    assert_eq!(inner.step(Duration::ZERO, Input::ChildProved(Rank(5))), []);
    assert_eq!(decoded(&inner).stage, Stage::Alone);
    assert_eq!(inner.step(Duration::ZERO, Input::ParentProved), [Output::Up(joined(&[1, 5]))]);
    assert_eq!(decoded(&inner).stage, Stage::Joined);
    assert_eq!(inner.step(Duration::ZERO, Input::ChildProved(Rank(7))), [Output::Up(joined(&[7]))]);
    // A child that tells of ranks which are none of its own is not believed.
    assert_eq!(inner.step(Duration::ZERO, Input::News(joined(&[2, 7]))), []);
}

#[test]
fn a_death_is_told_when_all_others_have_joined() {
    let mut root = joining(0, 6);
    for child in [1, 2, 3] {
        assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(child))), []);
    }
    assert_eq!(root.step(Duration::ZERO, Input::Died(Rank(1), record(1, Stage::Joined))), []);
    // Rank 5, which is to join rank 1, joins rank 0 in its place.
    assert_eq!(root.vacant(), [Rank(1)]);
    assert_eq!(root.step(Duration::ZERO, Input::TookPlace(Rank(1))), []);
    assert_eq!(root.vacant(), []);
    assert_eq!(root.step(Duration::ZERO, Input::ChildProved(Rank(5))), []);
    let fault = Err(Fault::Lost(Rank(1)));
    let told = [2, 3, 4, 5].map(|child| Output::Down(Rank(child), fault.clone()));
    let outputs = root.step(Duration::ZERO, Input::ChildProved(Rank(4)));
    assert_eq!(outputs, [&told[..], &[Output::End(fault)]].concat());
}

#[test]
fn a_child_takes_the_place_of_rank_0_and_waits_for_the_others() {
    let mut heir = joining(1, 4);
    heir.step(Duration::ZERO, Input::ParentProved);
    assert_eq!((heir.seeks(), heir.vacant()), (None, vec![]));
    assert_eq!(heir.step(Duration::ZERO, Input::Died(Rank(0), record(0, Stage::Alone))), []);
    assert_eq!((heir.seeks(), heir.vacant()), (Some((Rank(1), Rank(0))), vec![Rank(0)]));
    assert_eq!(heir.step(Duration::ZERO, Input::TookPlace(Rank(0))), []);
    assert_eq!((heir.seeks(), heir.vacant(), decoded(&heir).stage), (None, vec![], Stage::Alone));
    assert_eq!(heir.step(Duration::ZERO, Input::ChildProved(Rank(3))), []);
    let fault = Err(Fault::Lost(Rank(0)));
    assert_eq!(
        heir.step(Duration::ZERO, Input::ChildProved(Rank(2))),
        [Output::Down(Rank(2), fault.clone()), Output::Down(Rank(3), fault.clone()), Output::End(fault)]
    );
}

#[test]
fn a_child_in_the_place_of_its_parent_joins_the_parent_of_that() {
    let mut heir = joining(5, 8);
    heir.step(Duration::ZERO, Input::ParentProved);
    heir.step(Duration::ZERO, Input::Died(Rank(1), record(1, Stage::Joined)));
    heir.step(Duration::ZERO, Input::TookPlace(Rank(1)));
    assert_eq!(heir.seeks(), Some((Rank(1), Rank(0))));
    let news = News { joined: vec![Rank(5)], died: vec![Rank(1)] };
    assert_eq!(heir.step(Duration::ZERO, Input::ParentProved), [Output::Up(news)]);
    assert_eq!(heir.step(Duration::ZERO, Input::ChildProved(Rank(7))), [Output::Up(joined(&[7]))]);

    let mut late = joining(5, 8);
    late.step(Duration::ZERO, Input::Died(Rank(1), record(1, Stage::Joined)));
    assert_eq!(
        late.step(Duration::ZERO, Input::Refused),
        [],
        "a rank in the place of rank 1 may accept it yet"
    );
    late.step(Duration::ZERO, Input::TookPlace(Rank(1)));
    let lost = Err(Fault::Lost(Rank(1)));
    assert_eq!(
        late.step(Duration::ZERO, Input::Refused),
        [],
        "a rank in the place of rank 0 may accept it yet"
    );
    assert_eq!(late.step(REFUSED_FOR / 2, Input::Reached), []);
    assert_eq!(late.step(REFUSED_FOR, Input::Refused), []);
    assert_eq!(late.step(2 * REFUSED_FOR, Input::Refused), [Output::End(lost)]);
}

#[test]
fn a_parent_that_had_decided_is_lost_at_once() {
    let mut orphan = joining(2, 4);
    orphan.step(Duration::ZERO, Input::ParentProved);
    let lost = Err(Fault::Lost(Rank(0)));
    assert_eq!(
        orphan.step(Duration::ZERO, Input::Died(Rank(0), record(0, Stage::Decided))),
        [Output::End(lost)],
        "another child may have left already"
    );
}

#[test]
fn heads_name_the_missing_when_their_timeout_has_passed_and_not_before() {
    let mut root = joining(0, 4);
    root.step(Duration::ZERO, Input::ChildProved(Rank(2)));
    let fault = Err(Fault::Missing(vec![Rank(1), Rank(3)]));
    let before = TIMEOUT - Duration::from_nanos(1);
    assert_eq!((root.next_tick(), root.step(before, Input::Tick)), (TIMEOUT, vec![]));
    assert_eq!(root.step(TIMEOUT, Input::Tick), [Output::Down(Rank(2), fault.clone()), Output::End(fault)]);
    let mut orphan = joining(1, 6);
    let fault = Err(Fault::Missing(vec![Rank(0), Rank(5)]));
    assert_eq!((orphan.next_tick(), orphan.step(before, Input::Tick)), (TIMEOUT, vec![]));
    assert_eq!(orphan.step(TIMEOUT, Input::Tick), [Output::End(fault)]);
}

#[test]
fn a_child_climbs_to_the_highest_place_whose_rank_is_known_to_be_dead() {
    let mut heir = joining(5, 8);
    heir.step(Duration::ZERO, Input::ParentProved);
    // Rank 1 died after it had seen rank 0 die, and before it took that place.
    let record = JoinRecord { top: Rank(0), ..record(1, Stage::Alone) };
    assert_eq!(heir.step(Duration::ZERO, Input::Died(Rank(1), record)), []);
    assert_eq!((heir.seeks(), heir.vacant()), (Some((Rank(5), Rank(1))), vec![Rank(1)]));
    heir.step(Duration::ZERO, Input::TookPlace(Rank(1)));
    assert_eq!((heir.seeks(), heir.vacant()), (Some((Rank(1), Rank(0))), vec![Rank(0)]));
    assert_eq!(decoded(&heir).top, Rank(0), "its own children climb as far");
    heir.step(Duration::ZERO, Input::TookPlace(Rank(0)));
    assert_eq!((heir.seeks(), heir.vacant()), (None, vec![]));
    let fault = Err(Fault::Lost(Rank(0)));
    assert_eq!(heir.step(TIMEOUT, Input::Tick), [Output::End(fault)]);
}

#[test]
fn a_rank_that_a_dead_rank_had_seen_is_waited_for_until_it_joins_or_is_gone() {
    let mut heir = joining(1, 4);
    heir.step(Duration::ZERO, Input::ParentProved);
    let seen = BTreeSet::from([1, 2, 3].map(Rank));
    let record = JoinRecord { seen, ..record(0, Stage::Alone) };
    heir.step(Duration::ZERO, Input::Died(Rank(0), record));
    heir.step(Duration::ZERO, Input::TookPlace(Rank(0)));
    assert_eq!(heir.unaccounted().collect::<Vec<_>>(), [Rank(2), Rank(3)]);
    assert_eq!(heir.step(Duration::ZERO, Input::ChildProved(Rank(2))), []);
    assert_eq!(heir.unaccounted().collect::<Vec<_>>(), [Rank(3)]);
    let fault = Err(Fault::Lost(Rank(0)));
    assert_eq!(
        heir.step(Duration::ZERO, Input::Gone(Rank(3))),
        [Output::Down(Rank(2), fault.clone()), Output::End(fault)]
    );
}

#[test]
fn a_child_is_published_before_it_is_told_that_it_is_admitted() {
    let mut root = joining(0, 3);
    assert_eq!(root.step(Duration::ZERO, Input::ChildAdmitted(Rank(2))), []);
    assert_eq!(decoded(&root).seen, BTreeSet::from([Rank(2)]));
}
