//! Tests that the second process of a command ends when the program is killed.

use std::fs;
use std::io::Read;
use std::process::Child;

use wholemem_os::PidFd;
use wholemem_os::pidfd::Signal;

use crate::run::{program, timeout};

/// Waits until process `pid` has a child, and returns the child, or `None` if the process exits first.
fn wait_for_child(parent: &PidFd, pid: u32) -> Option<u32> {
    while !parent.has_exited().unwrap() {
        if let Some(child) = child_of(pid) {
            return Some(child);
        }
        std::thread::yield_now();
    }
    None
}

fn child_of(parent: u32) -> Option<u32> {
    let processes =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    processes.filter_map(|name| name.parse().ok()).find(|&pid: &u32| {
        // The line in /proc/PID/stat is `pid (name) state parent ...`, where the name may contain any character.
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent_of = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
        parent_of == Some(parent.to_string().as_str())
    })
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the program, and returns pidfds of the program and of its second process.
fn start(args: &[&str]) -> (KillOnDrop, PidFd, PidFd) {
    let first = KillOnDrop(program(args).spawn().unwrap());
    let pid = first.0.id();
    let watch = PidFd::open(pid).unwrap();
    let child = wait_for_child(&watch, pid).expect("a second process");
    let child = PidFd::open(child).unwrap();
    assert!(!child.has_exited().unwrap(), "the second process exited too early");
    (first, watch, child)
}

fn assert_both_end(args: &[&str], signal: Signal) {
    let (_first, watch, child) = start(args);
    watch.signal(signal).unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "{args:?} outlives {signal:?}");
    assert!(child.wait_exit(timeout()).unwrap(), "the second process of {args:?} outlives it");
}

/// The arguments of a benchmark with so many rounds that only a signal ends it.
const ENDLESS: [&str; 8] =
    ["bench", "share", "--backend", "host", "--sizes", "64KiB", "--rounds", "4000000000"];

#[test]
fn a_benchmark_ended_by_a_signal_leaves_no_process() {
    for signal in [Signal::KILL, Signal::INT, Signal::TERM] {
        assert_both_end(&ENDLESS, signal);
    }
}

#[test]
fn a_killed_demo_leaves_no_process() {
    // The size is large enough that the demo's second process still runs when the test has found it.
    assert_both_end(&["demo", "--backend", "host", "--size", "256MiB"], Signal::KILL);
}

#[test]
fn the_exit_status_of_a_killed_second_process_is_reported() {
    let (mut first, watch, child) = start(&ENDLESS);
    child.kill().unwrap();
    assert!(watch.wait_exit(timeout()).unwrap(), "the first process waits for the killed process");
    assert_eq!(first.0.wait().unwrap().code(), Some(1));
    let mut text = String::new();
    first.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(text.starts_with("error: the other process ("), "{text}");
    assert!(text.ends_with(") exited before its work was done: signal: 9 (SIGKILL)\n"), "{text}");
}
