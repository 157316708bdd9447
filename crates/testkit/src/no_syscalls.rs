//! Code that is to make no system call: a thread on which the kernel allows none.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;

/// Runs `body` on a thread of its own that is killed if it makes a system call, and says whether it lived. What it
/// panics with is lost, since panicking makes system calls; and the thread's stack is, since nobody can give it back.
///
/// # Panics
/// When no thread can be started.
#[must_use]
pub fn without_system_calls(body: impl FnOnce() + Send + 'static) -> bool {
    let (number, done) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
    let (their_number, their_done) = (Arc::clone(&number), Arc::clone(&done));
    let run = move || {
        // SAFETY: takes no pointer, and answers the number of this thread.
        their_number.store(unsafe { libc::gettid() }, Ordering::Release);
        // SAFETY: takes no pointer; from here on this thread may read, write and exit only.
        let code = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
        if code == 0 {
            body();
            their_done.store(true, Ordering::Release);
        }
        // SAFETY: ends this thread alone, which holds nothing that anybody waits for.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    };
    thread::Builder::new().spawn(run).expect("a thread");
    let number = loop {
        match number.load(Ordering::Acquire) {
            0 => thread::yield_now(),
            number => break number,
        }
    };
    let task = PathBuf::from(format!("/proc/self/task/{number}"));
    while task.exists() {
        thread::yield_now();
    }
    done.load(Ordering::Acquire)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_system_call_is_noticed_and_computing_is_not() {
        assert!(without_system_calls(|| assert_ne!(std::hint::black_box((0..1000_u64).sum::<u64>()), 0)));
        assert!(!without_system_calls(|| drop(std::hint::black_box(std::fs::read("/dev/null")))));
    }
}
