//! Tests of the protocols between ranks in the seeded simulator.

use std::time::Duration;

use super::super::{give_up_on_decision_at, give_up_on_joining_at};
use super::{MAX_MESSAGE_DELAY, MAX_START_DELAY, Rng, SimulatedEvent, Simulation, TIMEOUT};
use crate::Rank;
use crate::fault::GroupFault;

/// Runs `case` with many seeds, and prints the first seed with which it fails.
pub(super) fn for_seeds(cases: u64, case: impl Fn(u64) + std::panic::RefUnwindSafe) {
    let fresh = || std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let given = std::env::var("WHOLEMEM_SEED").ok().and_then(|text| text.parse().ok());
    let many = if std::env::var_os("WHOLEMEM_EXHAUSTIVE").is_some() { 20 } else { 1 };
    let (first, cases) = given.map_or_else(|| (fresh(), cases * many), |seed| (seed, 1));
    for seed in (0..cases).map(|n| first.wrapping_add(n)) {
        if let Err(panic) = std::panic::catch_unwind(|| case(seed)) {
            eprintln!("failed with seed {seed} (repeat with WHOLEMEM_SEED={seed})");
            std::panic::resume_unwind(panic);
        }
    }
}

fn some_size(rng: &mut Rng) -> u32 {
    let most = [3, 8, 40, 200, 1000][usize::try_from(rng.below(5)).expect("small")];
    2 + u32::try_from(rng.below(most - 1)).expect("small")
}

#[test]
fn a_group_of_any_size_is_formed() {
    for_seeds(60, |seed| {
        let size = some_size(&mut Rng(seed ^ 1));
        let mut simulation = Simulation::new(seed, size, false);
        simulation.run();
        simulation.assert_no_rank_hangs();
        assert!(simulation.survivors().all(|(_, outcome)| outcome.is_ok()), "{size} ranks");
        assert_eq!(simulation.survivors().count(), size as usize);
    });
}

#[test]
fn a_death_while_joining_is_reported_to_all_or_the_dead_rank_is_missing() {
    for_seeds(120, |seed| {
        let mut rng = Rng(seed ^ 2);
        let size = some_size(&mut rng);
        let victim = Rank(u32::try_from(rng.below(size.into())).expect("a rank"));
        let mut simulation = Simulation::new(seed, size, false);
        let at = rng.micros(MAX_START_DELAY + 50_000);
        simulation.push(at, victim, SimulatedEvent::Kill);
        simulation.run();
        simulation.assert_no_rank_hangs();
        simulation.assert_all_learn_together();
        for (rank, outcome) in simulation.survivors() {
            match outcome {
                // The group was complete before the death, so all ranks have started. Ranks that have returned detect
                // the death in the next operation.
                Ok(_) => assert!(simulation.members.iter().all(|member| member.started.is_some())),
                Err(GroupFault::Lost(lost)) => assert_eq!(*lost, victim, "to {rank}"),
                Err(GroupFault::Missing(missing)) => {
                    assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
                }
                Err(other) => panic!("{other:?} to {rank}"),
            }
        }
    });
}

#[test]
fn a_death_while_sending_messages_is_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let mut rng = Rng(seed ^ 7);
        let size = some_size(&mut rng);
        // The killed rank is high in the tree, where ranks send the most messages.
        let victim = Rank(u32::try_from(rng.below(size.min(6).into())).expect("a rank"));
        let mut simulation = Simulation::new(seed, size, false);
        simulation.kill_after_sends = Some((victim, 1 + rng.below(16)));
        simulation.run();
        simulation.assert_no_rank_hangs();
        simulation.assert_all_learn_together();
        for (rank, outcome) in simulation.survivors() {
            match outcome {
                Ok(_) => {}
                Err(GroupFault::Lost(lost)) => assert_eq!(*lost, victim, "to {rank}"),
                // The killed rank died before any other rank learnt that it had joined.
                Err(GroupFault::Missing(missing)) => {
                    assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
                }
                Err(other) => panic!("{other:?} to {rank}"),
            }
        }
    });
}

#[test]
fn ranks_that_know_of_a_death_wait_for_a_rank_that_starts_late() {
    for_seeds(120, |seed| {
        let mut rng = Rng(seed ^ 8);
        let size = 7 + u32::try_from(rng.below(200)).expect("small");
        // The victim is rank 0 or 1: both have several neighbours, of which at least one has started.
        let victim = Rank(u32::try_from(rng.below(2)).expect("a rank"));
        let late = (victim.0 + 1 + u32::try_from(rng.below(u64::from(size) - 1)).expect("small")) % size;
        let mut simulation = Simulation::new(seed, size, false);
        let start = Duration::from_secs(3);
        simulation.delay(Rank(late), start);
        simulation.push(Duration::from_micros(2 * MAX_START_DELAY), victim, SimulatedEvent::Kill);
        simulation.run();
        simulation.assert_no_rank_hangs();
        simulation.assert_all_learn_together();
        for (rank, outcome) in simulation.survivors() {
            assert_eq!(*outcome, Err(GroupFault::Lost(victim)), "to {rank} of {size}, {late} is late");
            let (at, _) = simulation.members[rank.index()].outcome.as_ref().expect("an outcome");
            assert!(*at >= start && *at < TIMEOUT, "at {at:?}");
        }
    });
}

/// Kills a rank while another rank is late, and then some of the successors that take the position of a dead rank, one
/// after the other.
fn kill_successors(seed: u64, size: u32, victim: Rank, positions: Vec<Rank>, deaths: u32) {
    let mut rng = Rng(seed ^ 9);
    let late = (victim.0 + 1 + u32::try_from(rng.below(u64::from(size) - 1)).expect("small")) % size;
    let mut simulation = Simulation::new(seed, size, false);
    let start = Duration::from_secs(3);
    simulation.delay(Rank(late), start);
    simulation.successor_kills = (positions, deaths);
    simulation.push(Duration::from_micros(2 * MAX_START_DELAY), victim, SimulatedEvent::Kill);
    simulation.run();
    simulation.assert_no_rank_hangs();
    let dead = |rank: Rank| !simulation.members[rank.index()].alive;
    let killed: Vec<_> = (0..size).map(Rank).filter(|rank| dead(*rank)).collect();
    let knows = |rank: Rank| simulation.members[rank.index()].joining.died().next().is_some();
    if !simulation.survivors().any(|(rank, _)| knows(rank)) {
        // No survivor was connected to a dead rank, so no survivor can distinguish dead ranks from ranks that have not
        // started.
        return;
    }
    simulation.assert_all_learn_together();
    for (rank, outcome) in simulation.survivors() {
        let context = format!("to {rank} of {size}, {late} is late, {killed:?} were killed");
        let Err(GroupFault::Lost(lost)) = outcome else { panic!("{outcome:?} {context}") };
        assert!(killed.contains(lost), "{lost} {context}");
        let (at, _) = simulation.members[rank.index()].outcome.as_ref().expect("an outcome");
        assert!(*at < TIMEOUT, "at {at:?} {context}");
    }
}

#[test]
fn deaths_of_ranks_known_only_to_dead_ranks_are_learnt_by_all_together() {
    for_seeds(100, |seed| {
        let mut rng = Rng(seed ^ 13);
        // The group is so small that all ranks are within two levels of rank 0.
        let size = 4 + u32::try_from(rng.below(18)).expect("small");
        let mut simulation = Simulation::new(seed, size, false);
        // Rank 1 starts late, rank 2 lives, and ranks 5 to 8 have joined no rank. Rank 0 and some other ranks die at
        // the same time.
        simulation.delay(Rank(1), Duration::from_secs(3));
        let mut dies = |rank: &u32| !(5..9).contains(rank) && rng.below(3) == 0;
        let killed: Vec<_> = (3..size).filter(|rank| dies(rank)).chain([0]).map(Rank).collect();
        for rank in &killed {
            simulation.push(Duration::from_micros(2 * MAX_START_DELAY), *rank, SimulatedEvent::Kill);
        }
        simulation.run();
        simulation.assert_no_rank_hangs();
        simulation.assert_all_learn_together();
        for (rank, outcome) in simulation.survivors() {
            assert_eq!(
                *outcome,
                Err(GroupFault::Lost(Rank(0))),
                "to {rank} of {size}, {killed:?} were killed"
            );
            let (at, _) = simulation.members[rank.index()].outcome.as_ref().expect("an outcome");
            assert!(*at < TIMEOUT, "at {at:?} to {rank} of {size}, {killed:?} were killed");
        }
    });
}

#[test]
fn a_death_of_the_successor_of_rank_0_is_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let size = 3 + u32::try_from(Rng(seed ^ 10).below(60)).expect("small");
        kill_successors(seed, size, Rank(0), vec![Rank(0)], 1);
    });
}

#[test]
fn deaths_of_successors_of_successors_are_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let mut rng = Rng(seed ^ 11);
        let size = 3 + u32::try_from(rng.below(60)).expect("small");
        let deaths = 2 + u32::try_from(rng.below(4)).expect("small");
        kill_successors(seed, size, Rank(0), vec![Rank(0)], deaths);
    });
}

#[test]
fn deaths_of_successors_at_inner_positions_are_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let mut rng = Rng(seed ^ 12);
        let size = 7 + u32::try_from(rng.below(100)).expect("small");
        let victim = Rank(u32::try_from(rng.below(2)).expect("a rank"));
        let positions = vec![Rank(0), Rank(1), Rank(5)];
        // Fewer ranks die than rank 0 has children: if all ranks connected to rank 0 died before its death is known,
        // the other ranks could not distinguish its death from a decision that they have missed.
        let deaths = 1 + u32::try_from(rng.below(2)).expect("small");
        kill_successors(seed, size, victim, positions, deaths);
    });
}

#[test]
fn a_rank_that_never_starts_is_reported_to_all() {
    for_seeds(60, |seed| {
        let mut rng = Rng(seed ^ 3);
        let size = some_size(&mut rng);
        let victim = Rank(u32::try_from(rng.below(size.into())).expect("a rank"));
        let mut simulation = Simulation::new(seed, size, false);
        simulation.member(victim).stopped = true;
        simulation.run();
        simulation.assert_no_rank_hangs();
        for (rank, outcome) in simulation.survivors() {
            let Err(GroupFault::Missing(missing)) = outcome else { panic!("{outcome:?} to {rank}") };
            assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
        }
    });
}

#[test]
fn a_collective_of_any_size_counts_every_vote_once() {
    for_seeds(60, |seed| {
        let size = some_size(&mut Rng(seed ^ 4));
        let mut simulation = Simulation::new(seed, size, true);
        simulation.run();
        simulation.assert_no_rank_hangs();
        assert!(simulation.survivors().all(|(_, outcome)| *outcome == Ok(size.to_le_bytes().to_vec())));
    });
}

#[test]
fn a_death_in_a_collective_reaches_every_survivor() {
    for_seeds(120, |seed| {
        let mut rng = Rng(seed ^ 5);
        let size = some_size(&mut rng);
        let victim = Rank(u32::try_from(rng.below(size.into())).expect("a rank"));
        let mut simulation = Simulation::new(seed, size, true);
        let at = rng.micros(MAX_START_DELAY + 50_000);
        simulation.push(at, victim, SimulatedEvent::Kill);
        simulation.run();
        simulation.assert_no_rank_hangs();
        for (rank, _) in simulation.survivors() {
            let group = &simulation.members[rank.index()].group;
            assert_eq!(group.fault(), Some(&GroupFault::Lost(victim)), "at {rank} of {size}");
        }
    });
}

#[test]
fn a_stopped_rank_in_a_collective_is_reported_to_all() {
    for_seeds(120, |seed| {
        let mut rng = Rng(seed ^ 6);
        let size = some_size(&mut rng);
        let victim = Rank(u32::try_from(rng.below(size.into())).expect("a rank"));
        let mut simulation = Simulation::new(seed, size, true);
        let at = rng.micros(MAX_START_DELAY);
        simulation.push(at, victim, SimulatedEvent::Stop);
        simulation.run();
        simulation.assert_no_rank_hangs();
        for (rank, outcome) in simulation.survivors() {
            match outcome {
                Ok(_) => {}
                Err(GroupFault::Missing(missing)) => {
                    assert!(missing.contains(&victim), "{missing:?} at {rank}")
                }
                Err(other) => panic!("{other:?} at {rank} of {size}"),
            }
        }
    });
}

#[test]
fn a_group_of_ten_thousand_ranks_is_formed() {
    for_seeds(1, |seed| {
        let mut simulation = Simulation::new(seed, 10_000, false);
        simulation.run();
        simulation.assert_no_rank_hangs();
        assert_eq!(simulation.survivors().filter(|(_, outcome)| outcome.is_ok()).count(), 10_000);
    });
}

#[test]
fn the_margins_suffice_for_messages_from_rank_0() {
    let late = Duration::from_micros(MAX_START_DELAY + 10 * MAX_MESSAGE_DELAY);
    assert!(give_up_on_joining_at(TIMEOUT) - TIMEOUT > late);
    assert!(give_up_on_decision_at(TIMEOUT) - TIMEOUT > late);
}
