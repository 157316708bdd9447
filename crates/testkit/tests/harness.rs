//! Tests of the harness that runs tests as several rank processes: failures and hangs of a rank fail the test, and no
//! process is left running.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use wholemem_testkit::{Ranks, test_name};

/// Returns the panic message of `run`, a test with rank processes that must fail.
fn failure(run: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("the harness succeeds");
    *panic.downcast::<String>().expect("the panic has no message")
}

/// Returns the ids of the child processes of this process.
fn children() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let children =
        tasks.map(|task| fs::read_to_string(task.unwrap().path().join("children")).unwrap_or_default());
    children.flat_map(|list| list.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn ranks_exchange_messages() {
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
fn a_failing_rank_fails_the_test_and_kills_the_other_ranks() {
    let message = failure(|| {
        Ranks::of(3).run(test_name!(), |rank| match rank.id() {
            1 => panic!("intended by the test"),
            _ => rank.wait_to_be_killed(),
        });
    });
    assert!(message.starts_with("rank 1 failed: exit status: 101"), "{message}");
    assert!(message.contains("intended by the test"), "the output of the rank is shown: {message}");
    // Only the children of this thread are listed: other tests run concurrently and have rank processes of their own.
    let left = fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    assert_eq!(left, "", "no child is left running or unreaped");
}

#[test]
fn the_watchdog_ends_a_hanging_test() {
    let message = failure(|| {
        let ranks = Ranks::of(2).timeout(Duration::from_millis(200));
        ranks.run(test_name!(), |rank| rank.wait_to_be_killed());
    });
    assert!(message.starts_with("the watchdog ended the test: ranks [0, 1] did not finish"), "{message}");
}

#[test]
fn a_rank_that_survives_against_expectation_fails_the_test() {
    let message = failure(|| Ranks::of(1).killed(0).run(test_name!(), |_| {}));
    assert!(message.starts_with("rank 0 should have been killed but ended with exit status: 0"), "{message}");
}

#[test]
fn a_rank_that_runs_no_test_fails_the_test() {
    let message = failure(|| Ranks::of(1).run("there_is_no_such_test", |_| {}));
    assert!(message.starts_with("rank 0 ended without running the test"), "{message}");
}

#[test]
fn an_expected_kill_passes_the_test() {
    Ranks::of(2).killed(0).run(test_name!(), |rank| match rank.id() {
        0 => rank.wait_to_be_killed(),
        _ => rank.kill(0),
    });
}

#[test]
fn ranks_start_no_further_ranks() {
    // Only the harness has child processes, and only while `run` is active; a rank process has none.
    Ranks::of(2).run(test_name!(), |_| assert_eq!(children(), [] as [&str; 0]));
}
