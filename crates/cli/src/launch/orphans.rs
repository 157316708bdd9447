//! Orphaned descendants of ranks. The launcher is their subreaper, and kills them when the launch ends.

use std::fs;

use rustix::process::{Pid, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};
use wholemem_os::pidfd::Signal;

/// The maximum number of rounds in [`kill_all`], each of which kills a generation of processes and thereby orphans the next
/// one.
const MAX_GENERATIONS: usize = 1000;

/// Makes this process the parent of orphaned descendants, in any session or process group (PR_SET_CHILD_SUBREAPER).
pub(crate) fn become_subreaper() {
    // The call fails before Linux 3.4. Descendants that leave a rank's process group are then not found.
    let _ = set_child_subreaper(Some(getpid()));
}

/// Reaps orphans that have exited, so that a long launch does not accumulate zombies. Ranks are reaped by `LaunchedRank`.
pub(crate) fn reap(is_rank: impl Fn(Pid) -> bool) {
    for child in children().into_iter().filter(|child| !is_rank(*child)) {
        let _ = waitpid(Some(child), WaitOptions::NOHANG);
    }
}

/// Kills all children of this process, and their descendants, which become children when they are orphaned. The ranks must have
/// been reaped before.
pub(crate) fn kill_all() {
    for _ in 0..MAX_GENERATIONS {
        let killed = children().into_iter().filter(|child| kill_process(*child, Signal::KILL).is_ok());
        // Processes of another user cannot be killed, so they are not waited for.
        if killed.filter(|child| waitpid(Some(*child), WaitOptions::empty()).is_ok()).count() == 0 {
            return;
        }
    }
}

fn children() -> Vec<Pid> {
    let threads = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(pid).collect::<Vec<_>>()).collect()
}

fn pid(text: &str) -> Option<Pid> {
    text.parse().ok().and_then(Pid::from_raw)
}
