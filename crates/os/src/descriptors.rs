//! The limit on open file descriptors of this process.
//!
//! Shared memory is held by descriptors, and the usual soft limit of 1,024 is soon reached. A process may raise its
//! soft limit up to the hard limit.
//!
//! ```
//! wholemem_os::descriptors::raise_limit();
//! ```

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the soft limit on open file descriptors of this process to the hard limit. If the kernel refuses, the limit
/// is unchanged.
#[doc(alias = "RLIMIT_NOFILE")]
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, ..limit };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::debug!(%error, "cannot raise the limit on open files");
        }
    }
}

/// Returns the soft limit on open file descriptors of this process, or [`u64::MAX`] if there is none.
#[doc(alias = "RLIMIT_NOFILE")]
#[must_use]
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fork::child;

    #[test]
    fn the_soft_limit_is_raised_to_the_hard_limit() {
        // The test runs in a child process, since the limit on open files applies to a whole process.
        let child = child::fork(|| {
            let limit = getrlimit(Resource::Nofile);
            if setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limit }).is_err() {
                return 1;
            }
            raise_limit();
            u8::from(getrlimit(Resource::Nofile).current != limit.maximum)
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
    }
}
