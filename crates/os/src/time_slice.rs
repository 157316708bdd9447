//! How long a thread runs before others that wait for its core get a turn.
//!
//! Linux gives a thread that is always busy a slice of several milliseconds, and from 6.6 on does not interrupt it before its
//! slice is used, also not for a thread that has just been woken. A server that shares a core with its clients then delays
//! each answer by a slice. With a short slice the kernel switches earlier, and the server keeps its share of the core.
//!
//! ```
//! use std::time::Duration;
//!
//! // A hint: kernels before 6.12 do not know it.
//! wholemem_os::time_slice::request(Duration::from_micros(100));
//! ```

use std::time::Duration;

/// `struct sched_attr` of `sched_setattr(2)`, as it was first defined: kernels take every length that they know.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Attributes {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    /// Of an ordinary thread, the slice in nanoseconds; zero stands for the kernel's own choice.
    runtime: u64,
    deadline: u64,
    period: u64,
}

// A struct of 48 bytes is at most as long as a number of 32 bits can say.
#[expect(clippy::cast_possible_truncation, reason = "48 bytes")]
const SIZE: u32 = size_of::<Attributes>() as u32;

/// The policy of ordinary threads, `SCHED_OTHER`.
const ORDINARY: u32 = 0;

/// Asks for slices of this length for the calling thread and the threads that it starts. Kernels limit it to between 0.1 and
/// 100 ms.
///
/// It is a hint. Where the kernel refuses it, or the thread is of another policy than the ordinary one, nothing changes.
#[doc(alias = "sched_setattr")]
pub fn request(slice: Duration) {
    let Some(current) = attributes().filter(|current| current.policy == ORDINARY) else { return };
    let wanted = Attributes { runtime: u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX), ..current };
    // SAFETY: the kernel reads `size` bytes at the address, which are those of `wanted`.
    let refused = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const wanted, 0) };
    if refused != 0 {
        tracing::debug!(?slice, "the kernel does not take a time slice");
    }
}

/// The attributes of the calling thread. `None` where the kernel does not tell.
fn attributes() -> Option<Attributes> {
    let mut current = Attributes::default();
    // SAFETY: the kernel writes at most `SIZE` bytes at the address, which `current` has.
    let refused = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut current, SIZE, 0) };
    (refused == 0).then_some(current)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_that_was_asked_for_is_the_threads_own_and_changes_nothing_else() {
        let thread = std::thread::spawn(|| {
            let before = attributes();
            request(Duration::from_micros(200));
            (before, attributes())
        });
        let (Some(before), Some(after)) = thread.join().expect("a thread that does not panic") else {
            return;
        };
        // Kernels that do not know it leave it as it was.
        let is_taken = after.runtime == 200_000;
        assert!(is_taken || after.runtime == before.runtime, "{before:?}, {after:?}");
        assert_eq!(Attributes { runtime: before.runtime, ..after }, before);
    }
}
