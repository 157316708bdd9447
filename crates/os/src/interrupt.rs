//! Interruptible waits: a thread installs a function that its blocking waits call at intervals, to decide whether to
//! end early.
//!
//! A caller that must be able to end a wait early (for example a Python interpreter that has to run the handler of
//! Ctrl-C) calls the waiting function within [`interruptible`]. The waits of that thread then sleep for at most
//! [`CHECK_INTERVAL`] at a time and call the check; if it returns true, the wait returns an error. Outside of
//! [`interruptible`] waits sleep until their deadline.
//!
//! ```
//! use wholemem_os::interrupt::{interruptible, is_interrupted};
//!
//! assert!(!is_interrupted());
//! assert!(interruptible(|| true, is_interrupted));
//! ```

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use crate::Deadline;

/// The time for which an interruptible wait sleeps between two calls of the thread's interrupt check.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// A function that the blocking waits of a thread call at intervals. It returns true if the wait must end early.
pub type InterruptCheck = Rc<dyn Fn() -> bool>;

thread_local! {
    static CHECK: RefCell<Option<InterruptCheck>> = const { RefCell::new(None) };
}

/// Restores the thread's previous interrupt check when dropped, also during a panic.
struct RestorePrevious(Option<InterruptCheck>);

impl Drop for RestorePrevious {
    fn drop(&mut self) {
        CHECK.set(self.0.take());
    }
}

/// Calls `wait`. While it runs, blocking waits of this thread end early once `check` returns true.
pub fn interruptible<T>(check: impl Fn() -> bool + 'static, wait: impl FnOnce() -> T) -> T {
    interruptible_by(Rc::new(check), wait)
}

/// Like [`interruptible`], with a check that the caller reuses, to save the allocation in calls that rarely wait.
pub fn interruptible_by<T>(check: InterruptCheck, wait: impl FnOnce() -> T) -> T {
    let _restore = RestorePrevious(CHECK.replace(Some(check)));
    wait()
}

/// Returns whether the waits of this thread must end now, as decided by the installed interrupt check.
#[must_use]
pub fn is_interrupted() -> bool {
    // The interrupt check is called after the borrow of `CHECK` has ended, since it may itself make interruptible
    // calls.
    let check = CHECK.with_borrow(Clone::clone);
    check.is_some_and(|check| check())
}

/// Returns the time at which a wait until `deadline` must call [`is_interrupted`] next: `deadline` itself, or an
/// earlier time if an interrupt check is installed.
#[must_use]
pub fn next_check(deadline: Deadline) -> Deadline {
    let is_installed = CHECK.with_borrow(Option::is_some);
    let far = deadline.remaining().is_none_or(|left| left > CHECK_INTERVAL);
    if is_installed && far { Deadline::after(CHECK_INTERVAL) } else { deadline }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_check_is_called_only_within_its_interruptible_call() {
        assert_eq!(next_check(Deadline::NEVER), Deadline::NEVER);
        let calls = Rc::new(RefCell::new(0));
        let count = Rc::clone(&calls);
        let check = move || {
            *count.borrow_mut() += 1;
            *count.borrow() == 2
        };
        interruptible(check, || {
            assert_ne!(next_check(Deadline::NEVER), Deadline::NEVER);
            assert_eq!(next_check(Deadline::NOW), Deadline::NOW);
            assert_eq!([is_interrupted(), is_interrupted(), is_interrupted()], [false, true, false]);
        });
        assert!(!is_interrupted());
        assert_eq!(*calls.borrow(), 3);
    }

    #[test]
    fn the_outer_check_is_restored_after_a_nested_call() {
        interruptible(
            || true,
            || {
                assert!(!interruptible(|| false, is_interrupted));
                assert!(is_interrupted());
                let panicked = std::panic::catch_unwind(|| interruptible(|| false, || panic!("on purpose")));
                assert!(panicked.is_err() && is_interrupted());
            },
        );
    }

    #[test]
    fn a_reused_check_may_nest_and_is_released_after_each_call() {
        let calls = Rc::new(Cell::new(0));
        let count = Rc::clone(&calls);
        let check: InterruptCheck = Rc::new(move || {
            // The check makes an interruptible call itself, as a Python signal handler may.
            assert!(!interruptible(|| false, is_interrupted));
            count.replace(count.get() + 1) > 0
        });
        let wait = || interruptible_by(Rc::clone(&check), is_interrupted);
        assert_eq!([wait(), wait(), is_interrupted()], [false, true, false]);
        assert_eq!((calls.get(), Rc::strong_count(&check)), (2, 1));
    }

    #[test]
    fn a_check_does_not_apply_to_other_threads() {
        interruptible(
            || true,
            || std::thread::scope(|scope| scope.spawn(|| assert!(!is_interrupted())).join()),
        )
        .expect("no panic");
    }
}
