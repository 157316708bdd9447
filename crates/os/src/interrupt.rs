//! Letting go of a wait before its time: a question of the caller's own, which the waits of its thread ask now and then.
//!
//! A program in which something else than the wait decides when it is over (an interpreter that has to run a handler
//! for Ctrl-C, say) makes its calls within [`interruptible`]. The waits below it sleep no longer than
//! [a moment](MOMENT) at a time, ask, and give up with an error of their own once the answer is yes. Everywhere else
//! nothing is asked, and waits sleep as long as they have to.
//!
//! ```
//! use wholemem_os::interrupt::{interruptible, is_interrupted};
//!
//! assert!(!is_interrupted());
//! assert!(interruptible(|| true, is_interrupted));
//! ```

use std::cell::Cell;
use std::mem;
use std::ptr::NonNull;
use std::time::Duration;

use crate::Deadline;

/// How long a wait that can be interrupted sleeps before it asks.
pub const MOMENT: Duration = Duration::from_millis(50);

type Question = NonNull<dyn Fn() -> bool>;

thread_local! {
    static QUESTION: Cell<Option<Question>> = const { Cell::new(None) };
}

/// The question that was asked before, put back also when the wait panics.
struct Before(Option<Question>);

impl Drop for Before {
    fn drop(&mut self) {
        QUESTION.set(self.0);
    }
}

/// Calls `wait`; whatever waits in it, in this thread, gives up once `question` answers true.
pub fn interruptible<T>(question: impl Fn() -> bool, wait: impl FnOnce() -> T) -> T {
    let asked: NonNull<dyn Fn() -> bool + '_> = NonNull::from_ref(&question);
    // SAFETY: only how long it may be asked is forgotten: until the one before is put back, when this call ends.
    let asked = unsafe { mem::transmute::<NonNull<dyn Fn() -> bool + '_>, Question>(asked) };
    let _before = Before(QUESTION.replace(Some(asked)));
    wait()
}

/// Whether a wait of this thread is to be given up.
#[must_use]
pub fn is_interrupted() -> bool {
    // SAFETY: a question is there while the call runs that it was given to, which is one that this one is made in.
    QUESTION.get().is_some_and(|question| unsafe { question.as_ref() }())
}

/// When a wait until `deadline` has to ask next: then, or in a moment where somebody may interrupt it.
#[must_use]
pub fn next_question(deadline: Deadline) -> Deadline {
    let is_asked = QUESTION.get().is_some();
    let far = deadline.remaining().is_none_or(|left| left > MOMENT);
    if is_asked && far { Deadline::after(MOMENT) } else { deadline }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::cell::RefCell;
    use std::rc::Rc;

    #[test]
    fn a_question_is_asked_within_its_call_only() {
        assert_eq!(next_question(Deadline::NEVER), Deadline::NEVER);
        let asked = Rc::new(RefCell::new(0));
        let count = Rc::clone(&asked);
        let question = move || {
            *count.borrow_mut() += 1;
            *count.borrow() == 2
        };
        interruptible(question, || {
            assert_ne!(next_question(Deadline::NEVER), Deadline::NEVER);
            assert_eq!(next_question(Deadline::NOW), Deadline::NOW);
            assert_eq!([is_interrupted(), is_interrupted(), is_interrupted()], [false, true, false]);
        });
        assert!(!is_interrupted());
        assert_eq!(*asked.borrow(), 3);
    }

    #[test]
    fn the_question_before_is_asked_again_after_one_within_it() {
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
    fn other_threads_are_not_asked() {
        interruptible(
            || true,
            || std::thread::scope(|scope| scope.spawn(|| assert!(!is_interrupted())).join()),
        )
        .expect("no panic");
    }
}
