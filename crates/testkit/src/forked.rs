//! Runs part of a test in a forked child process, where handles inherited from the parent must return errors.

#![allow(unsafe_code, reason = "`fork` is unsafe")]

use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Forks a child process that runs `body`, and panics if `body` failed in the child.
///
/// # Panics
/// If `body` panics, with its message; if the process cannot fork.
pub fn in_forked_child(body: impl FnOnce()) {
    let (mut reader, mut writer) = std::io::pipe().expect("cannot create a pipe");
    // SAFETY: the child continues with one thread, a copy of the calling thread. The C library makes its allocator
    // usable in the child, and `body` takes no lock that another thread of the test could hold.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
        0 => {
            let message = match catch_unwind(AssertUnwindSafe(body)) {
                Ok(()) => "ok".to_owned(),
                Err(panic) => panic_message(&*panic),
            };
            let _ = writer.write_all(message.as_bytes());
            // SAFETY: `_exit` ends the child at once, without running destructors or exit handlers of the parent.
            unsafe { libc::_exit(0) }
        }
        child => {
            drop(writer);
            let mut message = String::new();
            reader.read_to_string(&mut message).expect("the child's message is text");
            // SAFETY: `child` is a child of this process, and this is the only wait for it.
            let waited = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            assert_eq!(waited, child, "waitpid returns the child");
            assert_eq!(message, "ok", "in the forked child");
        }
    }
}

/// Forks a child process that runs `body` and exits. The parent does not wait for the child.
///
/// # Panics
/// If the process cannot fork.
pub fn leave_forked_child(body: impl FnOnce()) {
    // SAFETY: the child continues with one thread, and `body` takes no lock that another thread of the test could hold.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
        0 => {
            let _ = catch_unwind(AssertUnwindSafe(body));
            // SAFETY: `_exit` ends the child at once, without running destructors or exit handlers of the parent.
            unsafe { libc::_exit(0) }
        }
        _ => {}
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let message = panic.downcast_ref::<String>().map(String::as_str);
    message.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_in_the_child_fails_the_parent() {
        let failure = catch_unwind(|| in_forked_child(|| panic!("intended by the test")));
        let message = panic_message(&*failure.expect_err("the child failed"));
        assert!(message.contains("intended by the test"), "{message}");
    }
}
