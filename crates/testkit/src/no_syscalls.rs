//! Checks that code makes no system call, by running it on a thread in strict seccomp mode.

#![allow(unsafe_code, reason = "`prctl` is unsafe")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;

/// Runs `body` on a new thread that the kernel kills if it makes a system call, and returns true if the thread
/// survived. A panic message of `body` is lost, because panicking makes system calls. The thread's stack is leaked,
/// because no code can free it.
///
/// # Panics
/// If no thread can be started.
#[must_use]
pub fn without_system_calls(body: impl FnOnce() + Send + 'static) -> bool {
    let (number, done) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
    let (thread_number, thread_done) = (Arc::clone(&number), Arc::clone(&done));
    let run = move || {
        // SAFETY: `gettid` takes no pointer, and returns the id of the calling thread.
        thread_number.store(unsafe { libc::gettid() }, Ordering::Release);
        // SAFETY: this `prctl` takes no pointer. From here on the calling thread may only read, write and exit.
        let code = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
        if code == 0 {
            body();
            thread_done.store(true, Ordering::Release);
        }
        // SAFETY: `SYS_exit` ends only the calling thread, which holds no lock or resource.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    };
    thread::Builder::new().spawn(run).expect("cannot start a thread");
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
    fn system_calls_are_detected_and_computation_is_allowed() {
        assert!(without_system_calls(|| assert_ne!(std::hint::black_box((0..1000_u64).sum::<u64>()), 0)));
        assert!(!without_system_calls(|| drop(std::hint::black_box(std::fs::read("/dev/null")))));
    }
}
