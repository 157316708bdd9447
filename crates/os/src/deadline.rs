//! The moment a wait gives up: every wait of this crate takes one.

use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// A moment of the monotonic clock, or never.
///
/// It is a moment and not a duration, so that a wait that is interrupted and taken up again, or made of several
/// steps, does not start its time anew.
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
    /// No limit. For waits whose end is certain, and for people at a terminal.
    pub const NEVER: Self = Self(None);

    /// Already passed: a wait with it only looks.
    pub const NOW: Self = Self(Some(Timespec { tv_sec: 0, tv_nsec: 0 }));

    /// The moment `duration` from now; [`Deadline::NEVER`] when the clock cannot count that far.
    #[must_use]
    pub fn after(duration: Duration) -> Self {
        Self(Timespec::try_from(duration).ok().and_then(|wait| monotonic().checked_add(wait)))
    }

    /// Whether the moment has come.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.remaining().is_some_and(|left| left.is_zero())
    }

    /// How long until the moment: zero when it has passed, `None` when it never comes.
    #[must_use]
    pub fn remaining(&self) -> Option<Duration> {
        let moment = self.0?;
        let left = moment.checked_sub(monotonic()).and_then(|left| Duration::try_from(left).ok());
        Some(left.unwrap_or(Duration::ZERO))
    }

    /// The moment itself, for calls that take an absolute time.
    pub(crate) fn moment(&self) -> Option<Timespec> {
        self.0
    }

    /// The time left, for calls that take a relative time.
    pub(crate) fn timeout(&self) -> Option<Timespec> {
        self.remaining().map(|left| Timespec::try_from(left).expect("it is a difference of two `Timespec`s"))
    }
}

fn monotonic() -> Timespec {
    clock_gettime(ClockId::Monotonic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_beyond_the_clock_is_never() {
        assert_eq!(Deadline::after(Duration::MAX), Deadline::NEVER);
    }

    #[test]
    fn the_remaining_time_never_exceeds_what_was_asked() {
        let hour = Duration::from_secs(3600);
        let left = Deadline::after(hour).remaining().expect("it comes");
        assert!(left <= hour && !left.is_zero());
    }

    #[test]
    fn a_passed_deadline_has_nothing_left() {
        assert_eq!(Deadline::NOW.remaining(), Some(Duration::ZERO));
        assert_eq!(Deadline::NEVER.remaining(), None);
    }
}
