//! What the simulated world shows of the machines.

use std::time::Duration;

use super::super::{give_up_on_joining_at, give_up_on_word_at};
use super::{Dice, LATEST, SLOWEST, TIMEOUT, What, World};
use crate::Rank;
use crate::fault::Fault;

/// Runs `case` with many seeds, and prints the one that fails.
fn for_seeds(cases: u64, case: impl Fn(u64) + std::panic::RefUnwindSafe) {
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

fn some_size(dice: &mut Dice) -> u32 {
    let most = [3, 8, 40, 200, 1000][usize::try_from(dice.below(5)).expect("small")];
    2 + u32::try_from(dice.below(most - 1)).expect("small")
}

#[test]
fn a_group_of_any_size_comes_together() {
    for_seeds(60, |seed| {
        let size = some_size(&mut Dice(seed ^ 1));
        let mut world = World::new(seed, size, false);
        world.run();
        world.assert_nobody_hangs();
        assert!(world.survivors().all(|(_, outcome)| outcome.is_ok()), "{size} ranks");
        assert_eq!(world.survivors().count(), size as usize);
    });
}

#[test]
fn a_death_while_a_group_comes_together_is_told_to_all_or_the_dead_rank_is_missed() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 2);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, false);
        let at = dice.micros(LATEST + 50_000);
        world.push(at, victim, What::Kill);
        world.run();
        world.assert_nobody_hangs();
        world.assert_learnt_together();
        for (rank, outcome) in world.survivors() {
            match outcome {
                // It had left the group before it died; ranks that have returned see the death in the next operation.
                Ok(_) => assert!(world.members.iter().all(|member| member.started.is_some())),
                Err(Fault::Lost(lost)) => assert_eq!(*lost, victim, "to {rank}"),
                Err(Fault::Missing(missing)) => {
                    assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
                }
                Err(other) => panic!("{other:?} to {rank}"),
            }
        }
    });
}

#[test]
fn a_death_in_the_midst_of_telling_others_is_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let mut dice = Dice(seed ^ 7);
        let size = some_size(&mut dice);
        // High in the tree, where most messages are sent.
        let victim = Rank(u32::try_from(dice.below(size.min(6).into())).expect("a rank"));
        let mut world = World::new(seed, size, false);
        world.fuse = Some((victim, 1 + dice.below(16)));
        world.run();
        world.assert_nobody_hangs();
        world.assert_learnt_together();
        for (rank, outcome) in world.survivors() {
            match outcome {
                Ok(_) => {}
                Err(Fault::Lost(lost)) => assert_eq!(*lost, victim, "to {rank}"),
                // It told nobody but those it died before.
                Err(Fault::Missing(missing)) => {
                    assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
                }
                Err(other) => panic!("{other:?} to {rank}"),
            }
        }
    });
}

#[test]
fn ranks_that_know_of_a_death_wait_for_one_that_comes_late() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 8);
        let size = 7 + u32::try_from(dice.below(200)).expect("small");
        // Both have several neighbours, of which at least one is there.
        let victim = Rank(u32::try_from(dice.below(2)).expect("a rank"));
        let late = (victim.0 + 1 + u32::try_from(dice.below(u64::from(size) - 1)).expect("small")) % size;
        let mut world = World::new(seed, size, false);
        let comes = Duration::from_secs(3);
        world.delay(Rank(late), comes);
        world.push(Duration::from_micros(2 * LATEST), victim, What::Kill);
        world.run();
        world.assert_nobody_hangs();
        world.assert_learnt_together();
        for (rank, outcome) in world.survivors() {
            assert_eq!(*outcome, Err(Fault::Lost(victim)), "to {rank} of {size}, {late} is late");
            let (at, _) = world.members[rank.index()].outcome.as_ref().expect("it has one");
            assert!(*at >= comes && *at < TIMEOUT, "at {at:?}");
        }
    });
}

/// Kills a rank while one is late, and then some of the ranks that take the places of those killed, one after the other.
fn kill_successors(seed: u64, size: u32, victim: Rank, places: Vec<Rank>, deaths: u32) {
    let mut dice = Dice(seed ^ 9);
    let late = (victim.0 + 1 + u32::try_from(dice.below(u64::from(size) - 1)).expect("small")) % size;
    let mut world = World::new(seed, size, false);
    let comes = Duration::from_secs(3);
    world.delay(Rank(late), comes);
    world.doomed = (places, deaths);
    world.push(Duration::from_micros(2 * LATEST), victim, What::Kill);
    world.run();
    world.assert_nobody_hangs();
    let dead = |rank: Rank| !world.members[rank.index()].alive;
    let killed: Vec<_> = (0..size).map(Rank).filter(|rank| dead(*rank)).collect();
    let knows = |rank: Rank| world.members[rank.index()].joining.died().next().is_some();
    if !world.survivors().any(|(rank, _)| knows(rank)) {
        // Each was connected with ranks that live, or with none: it cannot tell the dead from ranks that have yet to start.
        return;
    }
    world.assert_learnt_together();
    for (rank, outcome) in world.survivors() {
        let context = format!("to {rank} of {size}, {late} is late, {killed:?} were killed");
        let Err(Fault::Lost(lost)) = outcome else { panic!("{outcome:?} {context}") };
        assert!(killed.contains(lost), "{lost} {context}");
        let (at, _) = world.members[rank.index()].outcome.as_ref().expect("it has one");
        assert!(*at < TIMEOUT, "at {at:?} {context}");
    }
}

#[test]
fn ranks_that_only_the_dead_have_seen_are_learnt_dead_by_all_together() {
    for_seeds(100, |seed| {
        let mut dice = Dice(seed ^ 13);
        // All are within two levels of rank 0.
        let size = 4 + u32::try_from(dice.below(18)).expect("small");
        let mut world = World::new(seed, size, false);
        // Rank 1 is late, rank 2 lives, and ranks 5 to 8 have not joined any; rank 0 and some others die at the same time.
        world.delay(Rank(1), Duration::from_secs(3));
        let mut dies = |rank: &u32| !(5..9).contains(rank) && dice.below(3) == 0;
        let killed: Vec<_> = (3..size).filter(|rank| dies(rank)).chain([0]).map(Rank).collect();
        for rank in &killed {
            world.push(Duration::from_micros(2 * LATEST), *rank, What::Kill);
        }
        world.run();
        world.assert_nobody_hangs();
        world.assert_learnt_together();
        for (rank, outcome) in world.survivors() {
            assert_eq!(*outcome, Err(Fault::Lost(Rank(0))), "to {rank} of {size}, {killed:?} were killed");
            let (at, _) = world.members[rank.index()].outcome.as_ref().expect("it has one");
            assert!(*at < TIMEOUT, "at {at:?} to {rank} of {size}, {killed:?} were killed");
        }
    });
}

#[test]
fn a_death_of_the_successor_of_rank_0_is_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let size = 3 + u32::try_from(Dice(seed ^ 10).below(60)).expect("small");
        kill_successors(seed, size, Rank(0), vec![Rank(0)], 1);
    });
}

#[test]
fn deaths_of_successors_of_successors_are_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let mut dice = Dice(seed ^ 11);
        let size = 3 + u32::try_from(dice.below(60)).expect("small");
        let deaths = 2 + u32::try_from(dice.below(4)).expect("small");
        kill_successors(seed, size, Rank(0), vec![Rank(0)], deaths);
    });
}

#[test]
fn deaths_of_successors_at_inner_places_are_learnt_by_all_together() {
    for_seeds(200, |seed| {
        let mut dice = Dice(seed ^ 12);
        let size = 7 + u32::try_from(dice.below(100)).expect("small");
        let victim = Rank(u32::try_from(dice.below(2)).expect("a rank"));
        let places = vec![Rank(0), Rank(1), Rank(5)];
        // Fewer than rank 0 has children: if all that were connected with it die before it is known to be dead, the others
        // cannot tell that from a decision that they have missed.
        let deaths = 1 + u32::try_from(dice.below(2)).expect("small");
        kill_successors(seed, size, victim, places, deaths);
    });
}

#[test]
fn a_rank_that_never_comes_is_named_to_all() {
    for_seeds(60, |seed| {
        let mut dice = Dice(seed ^ 3);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, false);
        world.member(victim).stopped = true;
        world.run();
        world.assert_nobody_hangs();
        for (rank, outcome) in world.survivors() {
            let Err(Fault::Missing(missing)) = outcome else { panic!("{outcome:?} to {rank}") };
            assert!(missing.contains(&victim), "{missing:?} lacks {victim}, to {rank} of {size}");
        }
    });
}

#[test]
fn a_collective_of_any_size_counts_every_vote_once() {
    for_seeds(60, |seed| {
        let size = some_size(&mut Dice(seed ^ 4));
        let mut world = World::new(seed, size, true);
        world.run();
        world.assert_nobody_hangs();
        assert!(world.survivors().all(|(_, outcome)| *outcome == Ok(size.to_le_bytes().to_vec())));
    });
}

#[test]
fn a_death_in_a_collective_reaches_every_survivor() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 5);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, true);
        let at = dice.micros(LATEST + 50_000);
        world.push(at, victim, What::Kill);
        world.run();
        world.assert_nobody_hangs();
        for (rank, _) in world.survivors() {
            let group = &world.members[rank.index()].group;
            assert_eq!(group.fault(), Some(&Fault::Lost(victim)), "at {rank} of {size}");
        }
    });
}

#[test]
fn a_stopped_rank_in_a_collective_is_named_to_all() {
    for_seeds(120, |seed| {
        let mut dice = Dice(seed ^ 6);
        let size = some_size(&mut dice);
        let victim = Rank(u32::try_from(dice.below(size.into())).expect("a rank"));
        let mut world = World::new(seed, size, true);
        let at = dice.micros(LATEST);
        world.push(at, victim, What::Stop);
        world.run();
        world.assert_nobody_hangs();
        for (rank, outcome) in world.survivors() {
            match outcome {
                Ok(_) => {}
                Err(Fault::Missing(missing)) => assert!(missing.contains(&victim), "{missing:?} at {rank}"),
                Err(other) => panic!("{other:?} at {rank} of {size}"),
            }
        }
    });
}

#[test]
fn ten_thousand_ranks_come_together() {
    for_seeds(1, |seed| {
        let mut world = World::new(seed, 10_000, false);
        world.run();
        world.assert_nobody_hangs();
        assert_eq!(world.survivors().filter(|(_, outcome)| outcome.is_ok()).count(), 10_000);
    });
}

#[test]
fn there_is_time_to_hear_from_above() {
    let late = Duration::from_micros(LATEST + 10 * SLOWEST);
    assert!(give_up_on_joining_at(TIMEOUT) - TIMEOUT > late);
    assert!(give_up_on_word_at(TIMEOUT) - TIMEOUT > late);
}
