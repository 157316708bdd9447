//! Tests of running groups on several nodes in the simulator.

use std::time::Duration;

use super::super::Rng;
use super::super::tests::for_seeds;
use super::running::{Event, RunningGroup, SILENCE};
use crate::Rank;
use crate::fault::GroupFault;

/// The time after a failure in which every survivor must know of it: the survivors of a cut link may detect it one after
/// the other.
const LIMIT: Duration = Duration::from_secs(3);

fn small(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

fn some_counts(rng: &mut Rng) -> Vec<u32> {
    let nodes = 2 + rng.below(4);
    (0..nodes).map(|_| 1 + u32::try_from(rng.below(5)).expect("small")).collect()
}

fn group(seed: u64) -> (Rng, RunningGroup) {
    let mut rng = Rng(seed ^ 0x6e6f_6465);
    let counts = some_counts(&mut rng);
    (rng, RunningGroup::new(seed, &counts))
}

/// Asserts that all survivors have learnt of a fault within the limit after `at`, and returns the faults.
fn faults_after(group: &RunningGroup, at: Duration) -> Vec<(Rank, GroupFault)> {
    let fault = |(rank, fault): (Rank, Option<(GroupFault, Duration)>)| {
        let (fault, when) = fault.unwrap_or_else(|| panic!("rank {rank} knows of no fault"));
        assert!(when <= at + LIMIT, "rank {rank} learnt {fault:?} at {when:?}, {at:?} was the failure");
        (rank, fault)
    };
    group.survivors().into_iter().map(fault).collect()
}

#[test]
fn a_collective_over_several_nodes_counts_every_vote_once_also_with_a_slow_node() {
    for_seeds(40, |seed| {
        let (mut rng, mut group) = group(seed);
        if rng.below(2) == 0 {
            group.network.slow.insert(small(rng.below(2)));
        }
        group.run();
        for (rank, fault) in group.survivors() {
            assert_eq!(fault, None, "at {rank}");
            assert_eq!(group.result(rank), Some(&group.size().to_le_bytes()[..]), "at {rank}");
        }
    });
}

#[test]
fn killed_ranks_leaders_and_nodes_are_lost_to_every_survivor() {
    for_seeds(100, |seed| {
        let (mut rng, mut group) = group(seed);
        let at = rng.micros(400_000);
        let node = small(rng.below(2));
        let victims = match rng.below(3) {
            // A leader, all ranks of a node, or some ranks.
            0 => vec![group.node(node)[0]],
            1 => group.node(node).to_vec(),
            _ => (0..group.size()).filter(|_| rng.below(3) == 0).map(Rank).collect(),
        };
        for victim in &victims {
            let at = at + rng.micros(30_000);
            group.network.at(at, *victim, Event::Kill);
        }
        group.run();
        if victims.is_empty() {
            return;
        }
        assert_eq!(group.dead().len(), victims.len());
        for (rank, fault) in faults_after(&group, at + Duration::from_millis(30)) {
            assert!(
                matches!(fault, GroupFault::Lost(lost) if victims.contains(&lost)),
                "{fault:?} at {rank}"
            );
        }
    });
}

#[test]
fn a_stopped_node_is_named_and_not_given_up_early() {
    for_seeds(80, |seed| {
        let (mut rng, mut group) = group(seed);
        let at = rng.micros(400_000);
        let node = small(rng.below(2));
        // All ranks of the node are stopped, or only its leader.
        let only_leader = rng.below(2) == 0;
        let count = if only_leader { 1 } else { group.node(node).len() };
        let stopped = group.node(node)[..count].to_vec();
        for rank in stopped {
            group.network.at(at, rank, Event::Stop);
        }
        group.run();
        for (rank, fault) in faults_after(&group, at) {
            let GroupFault::NodeSilent { node: silent, ranks, .. } = fault else {
                panic!("{fault:?} at {rank}")
            };
            assert_eq!(small(silent.into()), node, "at {rank}");
            assert!(ranks.contains(&group.node(node)[0]), "{ranks:?}");
        }
        let first = group.survivors().into_iter().filter_map(|(_, fault)| Some(fault?.1)).min();
        assert!(first.is_some_and(|first| first + SILENCE / 4 >= at + SILENCE), "{first:?} after {at:?}");
    });
}

#[test]
fn a_cut_link_ends_the_group_on_both_sides() {
    for_seeds(100, |seed| {
        let (mut rng, mut group) = group(seed);
        let at = rng.micros(400_000);
        let directions = match rng.below(3) {
            0 => vec![(0, 1), (1, 0)],
            1 => vec![(0, 1)],
            _ => vec![(1, 0)],
        };
        group.network.at(at, Rank(0), Event::Cut(directions.clone()));
        group.run();
        for (rank, fault) in faults_after(&group, at) {
            let is_named = matches!(fault, GroupFault::NodeSilent { node: 0 | 1, .. });
            assert!(is_named, "{fault:?} at {rank}, {directions:?} are cut");
        }
    });
}

#[test]
fn after_a_link_is_cut_and_healed_all_ranks_have_failed_or_none_has() {
    for_seeds(100, |seed| {
        let (mut rng, mut group) = group(seed);
        let at = rng.micros(400_000);
        let both = vec![(0, 1), (1, 0)];
        let directions = if rng.below(2) == 0 { both } else { vec![(0, 1)] };
        group.network.at(at, Rank(0), Event::Cut(directions));
        group.network.at(at + rng.micros(1_500_000), Rank(0), Event::Heal);
        group.run();
        let failed = group.survivors().iter().filter(|(_, fault)| fault.is_some()).count();
        assert!(
            failed == 0 || failed == group.size() as usize,
            "{failed} of {} ranks have failed",
            group.size()
        );
        if failed == 0 {
            let done = group.survivors().iter().all(|(rank, _)| group.result(*rank).is_some());
            assert!(done, "the collective of a group that has not failed has finished");
        }
    });
}

#[test]
fn a_reset_connection_ends_the_group_on_all_nodes() {
    for_seeds(80, |seed| {
        let (mut rng, mut group) = group(seed);
        let at = rng.micros(400_000);
        group.network.at(at, Rank(0), Event::Reset(1));
        group.run();
        for (rank, fault) in faults_after(&group, at) {
            assert!(matches!(fault, GroupFault::NodeSilent { node: 0 | 1, .. }), "{fault:?} at {rank}");
        }
    });
}

#[test]
fn a_node_that_was_stopped_briefly_is_not_given_up() {
    for_seeds(40, |seed| {
        let (mut rng, mut group) = group(seed);
        let at = rng.micros(400_000);
        for rank in group.node(1).to_vec() {
            group.network.at(at, rank, Event::Stop);
        }
        group.network.at(at + rng.micros(500_000), Rank(0), Event::Continue);
        group.run();
        assert!(group.survivors().iter().all(|(_, fault)| fault.is_none()));
        assert_eq!(group.survivors().len(), group.size() as usize);
    });
}

#[test]
fn without_heartbeats_a_group_that_is_idle_fails() {
    for_seeds(5, |seed| {
        let (_, mut group) = group(seed);
        group.has_heartbeats = false;
        group.run();
        assert!(group.survivors().iter().all(|(_, fault)| fault.is_some()), "the mutant is detected");
    });
}
