//! Forks beside work that no child may see half done. In a process of its own: its children have maps of whatever is mapped.

#![allow(unsafe_code, reason = "`fork` is unsafe")]

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};

use wholemem_os::fork::without_forks;
use wholemem_os::vm::{LARGE_PAGE, Protection, SharedMap, set_inherited};
use wholemem_os::{Memfd, memfd};

const LEN: usize = 1 << 16;

/// A child that waits to be killed.
struct Child(libc::pid_t);

impl Child {
    fn fork() -> Self {
        // SAFETY: the child only waits for a signal, which takes no lock and allocates nothing.
        match unsafe { libc::fork() } {
            0 => loop {
                // SAFETY: `pause` takes no lock and allocates nothing, as a child of a process with threads must.
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
        // SAFETY: the child is ours, and not waited for yet; a null pointer asks for no status.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

fn map_hidden(memory: &Memfd) -> SharedMap {
    let map = SharedMap::create(memory, Protection::ReadWrite).expect("a map");
    // SAFETY: the map is this test's, and no child uses it.
    unsafe { set_inherited(map.address(), LEN, false) }.expect("a map that is hidden");
    map
}

/// Does something over and over while there are always children, and says what failed.
fn beside_children<E: Send>(times: u32, once: impl Fn() -> Result<(), E> + Sync) -> Option<E> {
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

// A map that anybody has keeps a file from being closed for writing.

#[test]
fn no_child_has_a_map_that_is_made_and_hidden_without_forks() {
    let failed = beside_children(2000, || {
        let memory = Memfd::create("test", LEN).unwrap();
        drop(without_forks(|| map_hidden(&memory)).unwrap());
        memfd::close_for_writing(memory.as_fd())
    });
    assert_eq!(failed, None);
}

#[test]
fn no_child_has_a_map_by_which_large_pages_are_made() {
    let failed = beside_children(200, || {
        let memory = Memfd::create_large("test", LARGE_PAGE + LEN).unwrap();
        memfd::close_for_writing(memory.as_fd())
    });
    assert_eq!(failed, None);
}
