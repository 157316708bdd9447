//! Tests that a process in a real cgroup reads the memory limit of that cgroup.

use std::path::Path;

use wholemem_os::Memfd;
use wholemem_os::meminfo::{MemoryLimit, MemoryProbe};
use wholemem_testkit::{MemoryGroup, Ranks, skipped, test_name};

const LIMIT: usize = 200 << 20;
const FILLED: usize = 64 << 20;

#[test]
fn a_process_in_a_cgroup_reads_the_memory_that_its_limit_leaves() {
    let group = if Ranks::is_rank() { None } else { Some(MemoryGroup::create("meminfo", LIMIT)) };
    let folder = match &group {
        Some(Err(reason)) => return skipped(reason),
        Some(Ok(group)) => group.folder().to_str().unwrap(),
        None => "",
    };
    Ranks::of(1).parameter(folder).run(test_name!(), |rank| {
        let folder = rank.parameter();
        let mut probe = MemoryProbe::open().unwrap();
        MemoryGroup::join(Path::new(&folder));
        let before = probe.read().unwrap();
        let MemoryLimit::Group { path, len } = &before.limit else { panic!("{before:?}") };
        assert!(path.to_str().unwrap().contains("wholemem-meminfo-"), "{before:?}");
        assert_eq!(*len, LIMIT);
        assert!((LIMIT / 2..=LIMIT).contains(&before.len), "{before:?}");
        let memory = Memfd::create("test", FILLED).unwrap();
        let filled = probe.read().unwrap();
        // The remaining memory may shrink by less than `FILLED`: the kernel charges memory to a cgroup in batches, partly
        // before the memory is used.
        assert!(filled.len <= before.len - FILLED / 2, "{before:?}, then {filled:?}");
        drop(memory);
        let after = probe.read().unwrap();
        assert!(after.len > filled.len, "{filled:?}, then {after:?}");
    });
}
