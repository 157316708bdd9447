//! Deadlines: points in time on the monotonic clock at which a wait fails.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// A point in time on the monotonic clock at which a wait fails, or never.
///
/// A deadline is absolute, so a wait that is interrupted and resumed, or that consists of several steps, does not
/// restart its timeout.
///
/// ```
/// use std::time::Duration;
/// use wholemem_os::Deadline;
///
/// assert!(!Deadline::after(Duration::from_secs(60)).has_passed());
/// assert!(Deadline::NOW.has_passed());
/// assert!(!Deadline::NEVER.has_passed());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deadline(Option<Timespec>);

impl Deadline {
    /// A deadline that never passes, for waits that are certain to end and for interactive use.
    pub const NEVER: Self = Self(None);

    /// A deadline in the past: a wait with it polls once and does not block.
    pub const NOW: Self = Self(Some(Timespec { tv_sec: 0, tv_nsec: 0 }));

    /// Returns the deadline `duration` from now, or [`Deadline::NEVER`] if the clock cannot represent it.
    #[must_use]
    pub fn after(duration: Duration) -> Self {
        Self(Timespec::try_from(duration).ok().and_then(|wait| monotonic().checked_add(wait)))
    }

    /// Returns whether the deadline has passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.remaining().is_some_and(|left| left.is_zero())
    }

    /// Returns the time left: zero if the deadline has passed, `None` if there is no deadline.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        let deadline = self.0?;
        let left = deadline.checked_sub(monotonic()).and_then(|left| Duration::try_from(left).ok());
        Some(left.unwrap_or(Duration::ZERO))
    }

    /// Returns the absolute time of the deadline, for system calls that take one.
    pub(crate) fn absolute_time(&self) -> Option<Timespec> {
        self.0
    }

    /// Returns the time left until the deadline, for system calls that take a relative timeout.
    pub(crate) fn timeout(&self) -> Option<Timespec> {
        self.remaining().map(|left| Timespec::try_from(left).expect("a difference of two `Timespec`s"))
    }
}

fn monotonic() -> Timespec {
    clock_gettime(ClockId::Monotonic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_that_the_clock_cannot_represent_becomes_never() {
        assert_eq!(Deadline::after(Duration::MAX), Deadline::NEVER);
    }

    #[test]
    fn the_remaining_time_does_not_exceed_the_requested_duration() {
        let hour = Duration::from_secs(3600);
        let left = Deadline::after(hour).remaining().expect("a finite deadline");
        assert!(left <= hour && !left.is_zero());
    }

    #[test]
    fn a_passed_deadline_has_no_time_left() {
        assert_eq!(Deadline::NOW.remaining(), Some(Duration::ZERO));
        assert_eq!(Deadline::NEVER.remaining(), None);
    }
}
