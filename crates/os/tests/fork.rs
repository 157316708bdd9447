//! Tests that a child which another thread forks sees no work half done. They run in their own process, since
//! children inherit all mappings.

#![allow(unsafe_code, reason = "`fork` is unsafe")]

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use wholemem_os::fork::without_forks;
use wholemem_os::vm::{LARGE_PAGE, Protection, SharedMap, set_inherited};
use wholemem_os::{Memfd, memfd};

const LEN: usize = 1 << 16;

/// A child process that sleeps until it is killed.
struct Child(libc::pid_t);

impl Child {
    fn fork() -> Self {
        // SAFETY: the child only waits for a signal, without locking or allocating.
        match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: `pause` neither locks nor allocates, as is required in a child of a process with threads.
                unsafe { libc::pause() };
            },
            child => Self(child),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        assert!(self.0 > 0, "fork succeeds");
        // SAFETY: the child belongs to this process and is not reaped yet, so its id refers to no other process.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: the child belongs to this process, and is not reaped yet; with a null pointer no status is written.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

fn map_without_inheritance(memory: &Memfd) -> SharedMap {
    let map = SharedMap::create(memory, Protection::ReadWrite).expect("a mapping");
    // SAFETY: the mapping belongs to this test, and no child uses it.
    unsafe { set_inherited(map.address(), LEN, false) }.expect("madvise");
    map
}

/// Repeats an operation while another thread forks children, and returns the first error.
fn repeat_while_forking<E: Send>(times: u32, once: impl Fn() -> Result<(), E> + Sync) -> Option<E> {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut children = VecDeque::new();
            while !is_over.load(Ordering::Relaxed) {
                children.push_back(Child::fork());
                if children.len() > 8 {
                    children.pop_front();
                }
            }
        });
        let failed = (0..times).find_map(|_| once().err());
        is_over.store(true, Ordering::Relaxed);
        failed
    })
}

// The tests use that a file cannot be sealed against writing while any process has a writable mapping of it.

#[test]
fn no_child_inherits_a_mapping_created_without_forks() {
    let failed = repeat_while_forking(2000, || {
        let memory = Memfd::create("test", LEN).unwrap();
        drop(without_forks(|| map_without_inheritance(&memory)).unwrap());
        memfd::seal_writes(memory.as_fd())
    });
    assert_eq!(failed, None);
}

#[test]
fn no_child_inherits_the_mapping_that_fills_large_pages() {
    let failed = repeat_while_forking(200, || {
        let memory = Memfd::create_large("test", LARGE_PAGE + LEN).unwrap();
        memfd::seal_writes(memory.as_fd())
    });
    assert_eq!(failed, None);
}
