//! What ranks have started and left behind: it becomes ours when its parent ends, so that it can be ended with the run.

use std::fs;

use rustix::process::{Pid, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid};
use wholemem_os::pidfd::Signal;

/// How many generations are ended: each makes orphans of the next.
const MAX_GENERATIONS: usize = 1000;

/// From now on, whoever is orphaned below this process is its child, in whichever session or group.
pub(crate) fn become_subreaper() {
    // Every kernel we run on can. Without it, what leaves a rank's group would not be found.
    let _ = set_child_subreaper(Some(getpid()));
}

/// Takes the ends of those who have ended, so that a long run does not fill the machine with them. The ends of ranks
/// are for others to take.
pub(crate) fn reap(is_rank: impl Fn(Pid) -> bool) {
    for child in children().into_iter().filter(|child| !is_rank(*child)) {
        let _ = waitpid(Some(child), WaitOptions::NOHANG);
    }
}

/// Ends all children of this process, and those that become its children by that. No rank is among them any more.
pub(crate) fn kill_all() {
    for _ in 0..MAX_GENERATIONS {
        let ended = children().into_iter().filter(|child| kill_process(*child, Signal::KILL).is_ok());
        // Who cannot be ended, because it runs as another user, is not waited for.
        if ended.filter(|child| waitpid(Some(*child), WaitOptions::empty()).is_ok()).count() == 0 {
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
