//! Forks beside work that no child may see half done. In a process of its own: its children have maps of whatever is mapped.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use wholemem_os::fork::without_forks;
use wholemem_os::vm::{Protection, SharedMap, set_inherited};
use wholemem_os::{Memfd, memfd};

const LEN: usize = 1 << 16;

/// A child that waits to be killed.
struct Child(libc::pid_t);

impl Child {
    fn fork() -> Self {
        // SAFETY: the child only waits for a signal, which takes no lock and allocates nothing.
        match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: as above.
                unsafe { libc::pause() };
            },
            child => Self(child),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        assert!(self.0 > 0, "the process can fork");
        // SAFETY: the child is ours, and not waited for yet.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: as above; nobody asks how it ended.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

fn map_hidden(memory: &Memfd) -> SharedMap {
    let map = SharedMap::create(memory, Protection::ReadWrite).expect("a map");
    // SAFETY: the map is this test's, and no child uses it.
    unsafe { set_inherited(map.address(), LEN, false) }.expect("a map that is hidden");
    map
}

#[test]
fn no_child_has_a_map_that_is_made_and_hidden_without_forks() {
    let is_over = AtomicBool::new(false);
    let failed = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut children = VecDeque::new();
            while !is_over.load(Ordering::Relaxed) {
                children.push_back(Child::fork());
                if children.len() > 8 {
                    children.pop_front();
                }
            }
        });
        let failed = (0..2000).find_map(|_| {
            let memory = Memfd::create("test", LEN).unwrap();
            drop(without_forks(|| map_hidden(&memory)).unwrap());
            // A map that anybody has keeps it from being closed.
            memfd::close_for_writing(memory.as_fd()).err()
        });
        is_over.store(true, Ordering::Relaxed);
        failed
    });
    assert_eq!(failed, None);
}
