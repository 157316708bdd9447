//! Tests of the assembly protocol on one rank, step by step.

use super::*;

const TIMEOUT: Duration = Duration::from_secs(8);
const SILENCE: Duration = Duration::from_secs(1);
const START: Duration = Duration::ZERO;

fn address(port: u16) -> SocketAddr {
    ([10, 9, 0, 1], port).into()
}

fn root(size: u32) -> RootAssembly {
    RootAssembly::new(Rank(0), size, address(0), TIMEOUT, SILENCE)
}

fn update(joined: &[u32], died: &[u32]) -> JoinUpdate {
    JoinUpdate {
        joined: joined.iter().copied().map(Rank).collect(),
        died: died.iter().copied().map(Rank).collect(),
    }
}

fn report(link: LinkNumber, leader: u32, joined: &[u32], died: &[u32]) -> RootInput {
    let port = u16::try_from(link).unwrap();
    RootInput::Report { link, leader: Rank(leader), address: address(port), update: update(joined, died) }
}

fn node(leader: u32, port: u16, ranks: &[u32]) -> NodeRanks {
    NodeRanks {
        leader: Rank(leader),
        address: address(port),
        ranks: ranks.iter().copied().map(Rank).collect(),
    }
}

#[test]
fn the_root_decides_when_the_last_rank_of_the_last_node_has_joined() {
    let mut root = root(5);
    assert_eq!(root.step(START, report(1, 4, &[4], &[])), []);
    assert_eq!(root.step(START, report(2, 3, &[3], &[])), []);
    assert_eq!(root.step(START, RootInput::Joined(Rank(1))), []);
    let map = vec![node(0, 0, &[0, 1]), node(4, 1, &[2, 4]), node(3, 2, &[3])];
    assert_eq!(root.step(START, report(1, 4, &[2], &[])), [RootOutput::End(Ok(map.clone()))]);
    assert!(NodeMap::new(map, 5).is_some());
}

#[test]
fn a_leader_reports_all_ranks_on_each_new_connection() {
    let mut leader = LeaderAssembly::new(Rank(3), Rank(0), TIMEOUT);
    assert_eq!(leader.step(START, LeaderInput::Joined(Rank(5))), []);
    assert_eq!(leader.step(START, LeaderInput::Connected), [LeaderOutput::Report(update(&[3, 5], &[]))]);
    assert_eq!(leader.step(START, LeaderInput::Joined(Rank(6))), [], "reports are collected");
    assert_eq!(leader.step(REPORT_INTERVAL, LeaderInput::Tick), [LeaderOutput::Report(update(&[6], &[]))]);
    assert_eq!(leader.step(TIMEOUT / 2, LeaderInput::Disconnected), []);
    assert_eq!(leader.step(TIMEOUT / 2, LeaderInput::Died(Rank(5))), []);
    assert_eq!(
        leader.step(TIMEOUT / 2, LeaderInput::Connected),
        [LeaderOutput::Report(update(&[3, 6], &[5]))]
    );
    // The root may have left because rank 5 died, so that death is reported and not one of the root.
    let lost = Err(GroupFault::Lost(Rank(5)));
    assert_eq!(leader.step(TIMEOUT / 2, LeaderInput::RootLost), [LeaderOutput::End(lost)]);
    let mut leader = LeaderAssembly::new(Rank(3), Rank(0), TIMEOUT);
    let lost = Err(GroupFault::Lost(Rank(0)));
    assert_eq!(leader.step(START, LeaderInput::RootLost), [LeaderOutput::End(lost)]);
}

#[test]
fn a_leader_that_gets_no_decision_gives_up_after_the_root() {
    let mut leader = LeaderAssembly::new(Rank(3), Rank(0), TIMEOUT);
    assert_eq!(leader.step(TIMEOUT, LeaderInput::Tick), []);
    let missing = Err(GroupFault::Missing(vec![Rank(0)]));
    assert_eq!(leader.step(give_up_on_joining_at(TIMEOUT), LeaderInput::Tick), [LeaderOutput::End(missing)]);
}

#[test]
fn missing_ranks_are_reported_when_the_timeout_expires_and_not_before() {
    let mut root = root(4);
    root.step(START, report(1, 2, &[2], &[]));
    assert_eq!(root.step(TIMEOUT - Duration::from_nanos(1), RootInput::Tick), []);
    let missing = Err(GroupFault::Missing(vec![Rank(1), Rank(3)]));
    assert_eq!(root.step(TIMEOUT, RootInput::Tick), [RootOutput::End(missing)]);
}

#[test]
fn a_new_leader_reports_the_death_of_the_previous_one() {
    // The end of the connection to the previous leader is detected before or after the report of the new one.
    for detected_first in [true, false] {
        let mut root = root(5);
        root.step(START, report(1, 1, &[1, 2, 3], &[]));
        if detected_first {
            assert_eq!(root.step(START, RootInput::Disconnected(1)), []);
        }
        assert_eq!(root.step(START, report(2, 2, &[2], &[1])), [], "rank 3 has not joined rank 2");
        assert_eq!(root.step(START, report(2, 2, &[3], &[])), [], "rank 4 has not joined");
        assert_eq!(root.step(START, RootInput::Disconnected(1)), []);
        let lost = Err(GroupFault::Lost(Rank(1)));
        assert_eq!(root.step(START, RootInput::Joined(Rank(4))), [RootOutput::End(lost)]);
    }
}

#[test]
fn the_ranks_of_a_node_without_a_leader_are_given_up_if_a_rank_has_died() {
    let mut root = root(4);
    root.step(START, report(1, 1, &[1, 2], &[]));
    assert_eq!(root.step(START, RootInput::Disconnected(1)), []);
    assert_eq!(root.step(START, RootInput::Joined(Rank(3))), []);
    assert_eq!(root.step(SILENCE, RootInput::Tick), [], "the leader may connect again");
    let lost = Err(GroupFault::Lost(Rank(1)));
    assert_eq!(root.step(SILENCE, RootInput::Died(Rank(1))), [RootOutput::End(lost)]);
}

#[test]
fn a_rank_on_two_nodes_is_refused_on_the_second() {
    let mut root = root(4);
    root.step(START, report(1, 1, &[1, 2], &[]));
    assert_eq!(
        root.step(START, report(2, 3, &[3, 2], &[])),
        [
            RootOutput::Taken(2, Rank(2)),
            RootOutput::End(Ok(vec![node(0, 0, &[0]), node(1, 1, &[1, 2]), node(3, 2, &[3]),]))
        ]
    );
    let mut root = self::root(4);
    assert_eq!(
        root.step(START, report(1, 0, &[0, 9], &[])),
        [RootOutput::Taken(1, Rank(0)), RootOutput::Taken(1, Rank(9))]
    );
}

#[test]
fn a_leader_that_connects_again_keeps_its_ranks_and_another_process_does_not_get_them() {
    let again = |link, joined: &[u32]| {
        let (leader, address) = (Rank(1), address(1));
        RootInput::Report { link, leader, address, update: update(joined, &[]) }
    };
    let mut root = root(4);
    root.step(START, report(1, 1, &[1, 2], &[]));
    assert_eq!(
        root.step(START, report(3, 1, &[1], &[])),
        [RootOutput::Taken(3, Rank(1))],
        "at another address"
    );
    assert_eq!(root.step(START, again(2, &[1, 2])), [], "on a second connection");
    assert_eq!(root.step(START, RootInput::Disconnected(1)), []);
    let map = vec![node(0, 0, &[0]), node(1, 1, &[1, 2, 3])];
    assert_eq!(root.step(START, again(2, &[3])), [RootOutput::End(Ok(map))]);
}

#[test]
fn a_new_leader_that_finds_no_root_reports_the_death_of_the_previous_one() {
    let lost = |rank| vec![LeaderOutput::End(Err(GroupFault::Lost(Rank(rank))))];
    let mut leader = LeaderAssembly::new(Rank(3), Rank(0), TIMEOUT).after_connected_leader();
    leader.step(START, LeaderInput::Died(Rank(2)));
    assert_eq!(leader.step(START, LeaderInput::RootRefuses), []);
    assert_eq!(leader.step(MAX_REFUSED, LeaderInput::RootRefuses), lost(2));
    // The root may not have started yet if no leader has reached it.
    let mut leader = LeaderAssembly::new(Rank(3), Rank(0), TIMEOUT);
    leader.step(START, LeaderInput::Died(Rank(2)));
    leader.step(START, LeaderInput::RootRefuses);
    assert_eq!(leader.step(MAX_REFUSED, LeaderInput::RootRefuses), []);
    assert_eq!(leader.step(MAX_REFUSED, LeaderInput::RootLost), lost(2));
}

#[test]
fn a_rank_that_gives_up_is_missing_and_not_dead() {
    let mut root = root(3);
    root.step(START, RootInput::Joined(Rank(1)));
    root.step(START, RootInput::Left(Rank(1)));
    let missing = Err(GroupFault::Missing(vec![Rank(1), Rank(2)]));
    assert_eq!(root.step(TIMEOUT, RootInput::Tick), [RootOutput::End(missing)]);
    let mut leader = LeaderAssembly::new(Rank(3), Rank(0), TIMEOUT);
    leader.step(START, LeaderInput::Joined(Rank(4)));
    leader.step(START, LeaderInput::Left(Rank(4)));
    let missing = Err(GroupFault::Missing(vec![Rank(0)]));
    assert_eq!(leader.step(give_up_on_joining_at(TIMEOUT), LeaderInput::Tick), [LeaderOutput::End(missing)]);
}

#[test]
fn the_death_of_a_refused_leader_is_not_one_of_the_rank_that_has_joined() {
    let mut root = root(3);
    root.step(START, report(1, 1, &[1], &[]));
    assert_eq!(root.step(START, report(2, 1, &[1], &[])), [RootOutput::Taken(2, Rank(1))]);
    assert_eq!(root.step(START, RootInput::LeaderDied(2, Rank(1))), []);
    let map = vec![node(0, 0, &[0, 2]), node(1, 1, &[1])];
    assert_eq!(root.step(START, RootInput::Joined(Rank(2))), [RootOutput::End(Ok(map))]);
}

#[test]
fn a_late_report_on_an_interrupted_connection_does_not_replace_the_new_one() {
    let mut root = root(4);
    let on = |link, joined: &[u32]| {
        let update = update(joined, &[]);
        RootInput::Report { link, leader: Rank(1), address: address(1), update }
    };
    root.step(START, on(1, &[1]));
    root.step(START, on(2, &[1, 2]));
    root.step(START, on(1, &[2]));
    root.step(START, RootInput::Disconnected(1));
    let map = vec![node(0, 0, &[0, 3]), node(1, 1, &[1, 2])];
    assert_eq!(root.step(START, RootInput::Joined(Rank(3))), [RootOutput::End(Ok(map))]);
}
