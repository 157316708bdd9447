//! How many file descriptors this process may have open at once.
//!
//! Shared memory is held by descriptors, and the usual limit of 1,024 is soon reached. Every process may raise its own
//! limit up to a second, harder one.
//!
//! ```
//! wholemem_os::descriptors::raise_limit();
//! ```

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit of this process as far as it may. Where that is refused, the old limit stands.
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

/// How many descriptors this process may have open, as the limit is now; [`u64::MAX`] without a limit.
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
    fn the_limit_is_as_high_as_it_may_be() {
        // In a child: the limit is of a process, and other tests lower theirs.
        let child = child::fork(|| {
            let limit = getrlimit(Resource::Nofile);
            if setrlimit(Resource::Nofile, Rlimit { current: Some(64), ..limit }).is_err() {
                return 1;
            }
            raise_limit();
            u8::from(getrlimit(Resource::Nofile).current != limit.maximum)
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
    }
}
