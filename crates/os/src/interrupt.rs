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

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use crate::Deadline;

/// How long a wait that can be interrupted sleeps before it asks.
pub const MOMENT: Duration = Duration::from_millis(50);

/// What the waits of a thread ask: whether they are to be given up.
pub type Question = Rc<dyn Fn() -> bool>;

thread_local! {
    static QUESTION: RefCell<Option<Question>> = const { RefCell::new(None) };
}

/// The question that was asked before, put back also when the wait panics.
struct Before(Option<Question>);

impl Drop for Before {
    fn drop(&mut self) {
        QUESTION.set(self.0.take());
    }
}

/// Calls `wait`; whatever waits in it, in this thread, gives up once `question` answers true.
pub fn interruptible<T>(question: impl Fn() -> bool + 'static, wait: impl FnOnce() -> T) -> T {
    interruptible_by(Rc::new(question), wait)
}

/// The same with a question that the caller keeps for the next call: those that rarely wait would be mostly the making of it.
pub fn interruptible_by<T>(question: Question, wait: impl FnOnce() -> T) -> T {
    let _before = Before(QUESTION.replace(Some(question)));
    wait()
}

/// Whether a wait of this thread is to be given up.
#[must_use]
pub fn is_interrupted() -> bool {
    // Not under the borrow: the answer may take calls that are themselves interruptible.
    let question = QUESTION.with_borrow(Clone::clone);
    question.is_some_and(|question| question())
}

/// When a wait until `deadline` has to ask next: then, or in a moment where somebody may interrupt it.
#[must_use]
pub fn next_question(deadline: Deadline) -> Deadline {
    let is_asked = QUESTION.with_borrow(Option::is_some);
    let far = deadline.remaining().is_none_or(|left| left > MOMENT);
    if is_asked && far { Deadline::after(MOMENT) } else { deadline }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

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
    fn a_question_may_be_kept_and_outlives_the_calls_it_is_given_to() {
        let asked = Rc::new(Cell::new(0));
        let count = Rc::clone(&asked);
        let question: Question = Rc::new(move || {
            // As one that begins in a handler, and is asked before this one is answered.
            assert!(!interruptible(|| false, is_interrupted));
            count.replace(count.get() + 1) > 0
        });
        let wait = || interruptible_by(Rc::clone(&question), is_interrupted);
        assert_eq!([wait(), wait(), is_interrupted()], [false, true, false]);
        assert_eq!((asked.get(), Rc::strong_count(&question)), (2, 1));
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
