//! A test that goes on in a forked child, where inherited handles must refuse to work.

#![allow(unsafe_code, reason = "`fork` is unsafe")]

use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Forks, runs `body` in the child, and fails here if it failed there.
///
/// # Panics
/// When `body` panicked, with its words; when the process cannot fork.
pub fn in_forked_child(body: impl FnOnce()) {
    let (mut reader, mut writer) = std::io::pipe().expect("a pipe can be had");
    // SAFETY: the child runs on with one thread, a copy of this one. The C library makes its allocator usable there;
    // `body` takes no lock that another thread of ours could have held.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
        0 => {
            let words = match catch_unwind(AssertUnwindSafe(body)) {
                Ok(()) => "ok".to_owned(),
                Err(panic) => panic_words(&*panic),
            };
            let _ = writer.write_all(words.as_bytes());
            // SAFETY: ends the child at once, running nothing that belongs to the parent.
            unsafe { libc::_exit(0) }
        }
        child => {
            drop(writer);
            let mut words = String::new();
            reader.read_to_string(&mut words).expect("the child's words are text");
            // SAFETY: the child is ours, and is waited for once.
            let waited = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
            assert_eq!(waited, child, "the child was waited for");
            assert_eq!(words, "ok", "in the forked child");
        }
    }
}

/// Forks a child that runs `body`, ends, and is waited for by nobody here.
///
/// # Panics
/// When the process cannot fork.
pub fn leave_forked_child(body: impl FnOnce()) {
    // SAFETY: as in `in_forked_child`.
    match unsafe { libc::fork() } {
        -1 => panic!("cannot fork: {}", std::io::Error::last_os_error()),
        0 => {
            let _ = catch_unwind(AssertUnwindSafe(body));
            // SAFETY: as in `in_forked_child`.
            unsafe { libc::_exit(0) }
        }
        _ => {}
    }
}

fn panic_words(panic: &(dyn std::any::Any + Send)) -> String {
    let words = panic.downcast_ref::<String>().map(String::as_str);
    words.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic without words").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_in_the_child_is_a_failure_here() {
        let failure = catch_unwind(|| in_forked_child(|| panic!("as asked")));
        let words = panic_words(&*failure.expect_err("the child failed"));
        assert!(words.contains("as asked"), "{words}");
    }
}
