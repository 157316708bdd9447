//! The harness itself: what fails in a rank fails the test, what hangs is ended, and nothing is left running.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use wholemem_testkit::{Ranks, test_name};

/// What the harness says when it fails.
fn failure(run: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("the harness fails");
    *panic.downcast::<String>().expect("it fails with words")
}

/// The processes whose parent is this one.
fn children() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let children =
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    children.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn ranks_know_each_other_and_speak() {
    Ranks::of(4).run(test_name!(), |rank| {
        assert_eq!(rank.count(), 4);
        for peer in (0..4).filter(|peer| *peer != rank.id()) {
            rank.send(peer, format!("{} to {peer}", rank.id()).as_bytes(), &[]);
        }
        for peer in (0..4).filter(|peer| *peer != rank.id()) {
            assert_eq!(rank.recv(peer).0, format!("{peer} to {}", rank.id()).into_bytes());
        }
        rank.barrier();
    });
}

#[test]
fn a_rank_that_fails_fails_the_test_and_ends_the_others() {
    let words = failure(|| {
        Ranks::of(3).run(test_name!(), |rank| match rank.id() {
            1 => panic!("as asked"),
            _ => rank.wait_to_be_killed(),
        });
    });
    assert!(words.starts_with("rank 1 failed: exit status: 101"), "{words}");
    assert!(words.contains("as asked"), "the rank's own words are shown: {words}");
    // Of this thread alone: other tests have ranks of their own.
    let left = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    assert_eq!(left, "", "nobody is left running, or dead and not waited for");
}

#[test]
fn a_test_that_hangs_is_ended_by_the_watchdog() {
    let words = failure(|| {
        let ranks = Ranks::of(2).patience(Duration::from_millis(200));
        ranks.run(test_name!(), |rank| rank.wait_to_be_killed());
    });
    assert!(words.starts_with("the watchdog ended the test: ranks [0, 1] did not end"), "{words}");
}

#[test]
fn a_rank_that_should_have_been_killed_and_was_not_fails_the_test() {
    let words = failure(|| Ranks::of(1).killed(0).run(test_name!(), |_| {}));
    assert!(words.starts_with("rank 0 was to be killed, and ended with exit status: 0"), "{words}");
}

#[test]
fn a_rank_that_never_ran_the_test_fails_it() {
    let words = failure(|| Ranks::of(1).run("there_is_no_such_test", |_| {}));
    assert!(words.starts_with("rank 0 ended without running the test"), "{words}");
}

#[test]
fn a_killed_rank_is_what_was_asked_for() {
    Ranks::of(2).killed(0).run(test_name!(), |rank| match rank.id() {
        0 => rank.wait_to_be_killed(),
        _ => rank.kill(0),
    });
}

#[test]
fn ranks_that_are_started_start_no_ranks_of_their_own() {
    // The test's own process has children only while `run` is at work, in whichever thread.
    Ranks::of(2).run(test_name!(), |_| assert_eq!(children(), [] as [&str; 0]));
}
