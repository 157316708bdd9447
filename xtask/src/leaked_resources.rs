//! The step `leftovers`: finds named shared memory and processes that a test run left on the machine.
//!
//! A process counts as leaked if its program is in our target folder, it started after xtask, and it is an orphan: the kernel has
//! reparented it to one of our own ancestors. A process that was started from the same folder by another command has a living
//! parent that is not our ancestor, and is ignored.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};

use crate::{command, report};

const SHARED_MEMORY: &str = "/dev/shm";

/// The maximum time to wait for the exit of processes that the last test killed.
const GRACE: Duration = Duration::from_secs(3);

/// The names of shared memory files in `/dev/shm` that begin with `wholemem`.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SharedMemoryNames {
    names: BTreeSet<String>,
}

impl SharedMemoryNames {
    pub(crate) fn list() -> Result<Self> {
        Self::list_in(Path::new(SHARED_MEMORY))
    }

    fn list_in(folder: &Path) -> Result<Self> {
        let mut names = BTreeSet::new();
        if folder.is_dir() {
            for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if name.starts_with("wholemem") {
                    names.insert(name);
                }
            }
        }
        Ok(Self { names })
    }

    fn added_in(&self, after: &Self) -> Vec<String> {
        after
            .names
            .difference(&self.names)
            .map(|name| format!("{SHARED_MEMORY}/{name} was not removed"))
            .collect()
    }
}

pub(crate) fn check(before: &Result<SharedMemoryNames>) -> Result<()> {
    let before =
        before.as_ref().map_err(|error| anyhow!("{error:#}").context("cannot list shared memory"))?;
    let target = command::target_folder()?;
    let target = target.canonicalize().unwrap_or(target);
    let start = Instant::now();
    let mut leaked = leaked_processes(&processes()?, process::id(), &target);
    while !leaked.is_empty() && start.elapsed() < GRACE {
        thread::sleep(Duration::from_millis(50));
        leaked = leaked_processes(&processes()?, process::id(), &target);
    }
    let mut findings = before.added_in(&SharedMemoryNames::list()?);
    findings.extend(leaked);
    report::no_findings(findings)
}

/// A process as listed in `/proc`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProcessStat {
    parent: u32,
    /// The start time of the process in clock ticks since boot.
    started: u64,
    /// The path of the executable, or `None` for processes of other users and for zombies.
    program: Option<PathBuf>,
}

fn processes() -> Result<BTreeMap<u32, ProcessStat>> {
    let mut processes = BTreeMap::new();
    for entry in fs::read_dir("/proc").context("cannot list /proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process that has exited since `/proc` was listed is skipped.
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let Some((parent, started)) = parent_and_start(&stat) else { continue };
        let program = fs::read_link(entry.path().join("exe")).ok();
        processes.insert(pid, ProcessStat { parent, started, program });
    }
    Ok(processes)
}

/// Returns the parent and the start time of a process, fields 4 and 22 of `/proc/PID/stat`. Field 2, the program's name in
/// parentheses, may itself contain parentheses and spaces.
fn parent_and_start(stat: &str) -> Option<(u32, u64)> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().skip(1);
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(17)?.parse().ok()?;
    Some((parent, started))
}

fn leaked_processes(processes: &BTreeMap<u32, ProcessStat>, own_pid: u32, target: &Path) -> Vec<String> {
    let own_start = processes.get(&own_pid).map_or(0, |process| process.started);
    let our_ancestors: BTreeSet<u32> = ancestors(processes, own_pid).collect();
    let built_program =
        |process: &ProcessStat| process.program.clone().filter(|path| path.starts_with(target));
    let mut findings = Vec::new();
    for (pid, process) in processes {
        let Some(program) = built_program(process) else { continue };
        if *pid == own_pid || process.started < own_start {
            continue;
        }
        // A leaked process may have leaked children, so the first ancestor whose program is not in the target folder decides if
        // it belongs to this run.
        let is_outside = |pid: &u32| *pid == own_pid || processes.get(pid).and_then(built_program).is_none();
        let owner = ancestors(processes, *pid).find(is_outside);
        if owner.is_none_or(|owner| our_ancestors.contains(&owner)) {
            findings.push(format!("process {pid} still runs {}", program.display()));
        }
    }
    findings
}

/// Returns a process, its parent, and so on up to process 1.
fn ancestors(processes: &BTreeMap<u32, ProcessStat>, pid: u32) -> impl Iterator<Item = u32> {
    let parent = |pid: &u32| processes.get(pid).map(|process| process.parent).filter(|parent| *parent != 0);
    // The processes are read at different times, so their parents may form a cycle. `take` bounds the iteration.
    std::iter::successors(Some(pid), parent).take(processes.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN_PID: u32 = 50;

    fn process(parent: u32, started: u64, program: &str) -> ProcessStat {
        ProcessStat { parent, started, program: Some(PathBuf::from(program)) }
    }

    /// Returns the processes of a machine: init -> shell -> xtask, and init -> another shell.
    fn machine() -> BTreeMap<u32, ProcessStat> {
        BTreeMap::from([
            (1, process(0, 0, "/sbin/init")),
            (40, process(1, 100, "/bin/sh")),
            (41, process(1, 100, "/bin/sh")),
            (OWN_PID, process(40, 1000, "/repo/target/debug/xtask")),
        ])
    }

    fn leaks_with(more: &[(u32, ProcessStat)]) -> Vec<String> {
        let mut processes = machine();
        processes.extend(more.iter().cloned());
        leaked_processes(&processes, OWN_PID, Path::new("/repo/target"))
    }

    #[test]
    fn without_other_processes_nothing_is_leaked() {
        assert_eq!(leaks_with(&[]), Vec::<String>::new());
    }

    #[test]
    fn an_orphan_from_our_target_folder_is_found() {
        assert_eq!(
            leaks_with(&[(60, process(1, 2000, "/repo/target/debug/deps/ranks-1f"))]),
            ["process 60 still runs /repo/target/debug/deps/ranks-1f"]
        );
    }

    #[test]
    fn an_orphan_whose_program_was_rebuilt_is_found() {
        assert_eq!(
            leaks_with(&[(60, process(1, 2000, "/repo/target/debug/wholemem (deleted)"))]),
            ["process 60 still runs /repo/target/debug/wholemem (deleted)"]
        );
    }

    #[test]
    fn the_children_of_an_orphan_are_found_too() {
        let orphan = process(40, 2000, "/repo/target/debug/wholemem");
        let child = process(60, 2001, "/repo/target/debug/wholemem");
        assert_eq!(leaks_with(&[(60, orphan), (61, child)]).len(), 2);
    }

    #[test]
    fn a_child_of_ours_is_found() {
        assert_eq!(leaks_with(&[(60, process(OWN_PID, 2000, "/repo/target/debug/wholemem"))]).len(), 1);
    }

    #[test]
    fn older_foreign_and_parented_processes_are_not_leaked() {
        let cargo = process(41, 1500, "/bin/cargo");
        let test = process(70, 2000, "/repo/target/debug/deps/ranks-1f");
        assert_eq!(
            leaks_with(&[
                (60, process(1, 999, "/repo/target/debug/wholemem")),
                (61, process(1, 2000, "/repo/targets/wholemem")),
                (62, process(41, 2000, "/repo/target/debug/wholemem")),
                (63, ProcessStat { program: None, ..process(1, 2000, "") }),
                (70, cargo),
                (71, test),
            ]),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_cycle_of_parents_terminates() {
        let program = "/repo/target/debug/wholemem";
        let found = leaks_with(&[(60, process(61, 2000, program)), (61, process(60, 2000, program))]);
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn a_program_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "77 (a) b (c) S 12 77 77 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 98765 1 2 3\n";
        assert_eq!(parent_and_start(stat), Some((12, 98765)));
        assert_eq!(parent_and_start("77 (a) S 12"), None);
        assert_eq!(parent_and_start(""), None);
    }

    #[test]
    fn the_test_process_is_listed() {
        let ours = processes().unwrap().remove(&process::id()).unwrap();
        assert_eq!(ours.parent, std::os::unix::process::parent_id());
        assert_eq!(ours.program, Some(std::env::current_exe().unwrap()));
    }

    #[test]
    fn only_new_wholemem_names_are_reported() {
        let folder = std::env::temp_dir().join(format!("xtask-leaks-{}", process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("wholemem-old"), "").unwrap();
        let before = SharedMemoryNames::list_in(&folder).unwrap();
        fs::write(folder.join("wholemem-new"), "").unwrap();
        fs::write(folder.join("other-project"), "").unwrap();
        let after = SharedMemoryNames::list_in(&folder).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(before.added_in(&after), ["/dev/shm/wholemem-new was not removed"]);
        assert_eq!(after.added_in(&before), Vec::<String>::new());
    }
}
