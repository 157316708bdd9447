//! When the work of host streams runs: at once, or whenever a test kit's schedule gets to it.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use wholemem_os::{Deadline, SharedSlice};

use super::HostEvent;
use crate::raw::Address;
use crate::{Args, HostFunction, LaunchShape};

/// The number of a stream within its queue.
pub type StreamId = u64;

/// One piece of work, with the arguments of its kernel: borrowed where it is submitted, its own where it is
/// [kept](Work::keep) to run later.
#[derive(Clone)]
pub enum Work<A = Args> {
    /// Copy bytes.
    Copy {
        /// Where to.
        to: Address,
        /// Where from.
        from: Address,
        /// How many.
        len: usize,
    },
    /// Set bytes.
    Fill {
        /// Where.
        to: Address,
        /// To what.
        value: u8,
        /// How many.
        len: usize,
    },
    /// Say that this point was reached.
    Record {
        /// The event that says so.
        event: Arc<HostEvent>,
        /// Which of its records this is.
        ticket: u64,
    },
    /// Go on only when another point was reached.
    Wait {
        /// The event that says so.
        event: Arc<HostEvent>,
        /// Which of its records to wait for.
        ticket: u64,
    },
    /// Run a kernel.
    Call {
        /// The kernel.
        function: HostFunction,
        /// Its shape.
        shape: LaunchShape,
        /// Its arguments.
        args: A,
    },
    /// Run all of these in order.
    Graph(Arc<Vec<Work>>),
}

impl<A> fmt::Debug for Work<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy { to, from, len } => write!(f, "Copy({to:?} <- {from:?}, {len})"),
            Self::Fill { to, value, len } => write!(f, "Fill({to:?} = {value}, {len})"),
            Self::Record { ticket, .. } => write!(f, "Record({ticket})"),
            Self::Wait { ticket, .. } => write!(f, "Wait({ticket})"),
            Self::Call { shape, .. } => write!(f, "Call({shape:?})"),
            Self::Graph(works) => f.debug_tuple("Graph").field(works).finish(),
        }
    }
}

impl Work<&Args> {
    /// The same work, for a time when whoever submitted it has gone on.
    #[must_use]
    pub fn keep(self) -> Work {
        match self {
            Self::Copy { to, from, len } => Work::Copy { to, from, len },
            Self::Fill { to, value, len } => Work::Fill { to, value, len },
            Self::Record { event, ticket } => Work::Record { event, ticket },
            Self::Wait { event, ticket } => Work::Wait { event, ticket },
            Self::Call { function, shape, args } => Work::Call { function, shape, args: args.clone() },
            Self::Graph(works) => Work::Graph(works),
        }
    }
}

impl<A: Borrow<Args>> Work<A> {
    /// Whether it could run now without waiting.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Wait { event, ticket } => event.has_reached(*ticket),
            _ => true,
        }
    }

    /// Does it.
    ///
    /// # Safety
    /// What it touches is mapped with the rights it needs, and its kernel is given what it takes.
    pub unsafe fn run(&self) {
        match self {
            Self::Copy { to, from, len } => {
                // SAFETY: the caller answers for the range.
                let to = unsafe { bytes(*to, *len, true) };
                // SAFETY: the caller answers for the range.
                let from = unsafe { bytes(*from, *len, false) };
                to.copy_from(0, &from).expect("both ranges have the same length");
            }
            Self::Fill { to, value, len } => {
                // SAFETY: the caller answers for the range.
                let to = unsafe { bytes(*to, *len, true) };
                to.fill(*value).expect("the view is writable");
            }
            Self::Record { event, ticket } => event.reach(*ticket, monotonic()),
            Self::Wait { event, ticket } => {
                if let Err(error) = event.wait(*ticket, Deadline::NEVER) {
                    tracing::error!(%error, "a stream could not wait for an event and goes on without it");
                }
            }
            // SAFETY: the caller answers for the arguments.
            Self::Call { function, shape, args } => unsafe { function(shape, args.borrow()) },
            Self::Graph(works) => {
                for work in works.iter() {
                    // SAFETY: passed on from the caller.
                    unsafe { work.run() };
                }
            }
        }
    }
}

/// # Safety
/// The range is mapped, writable if `writable`, for as long as the view is used.
unsafe fn bytes<'a>(at: Address, len: usize, writable: bool) -> SharedSlice<'a> {
    let pointer = at.to_host().expect("mapped memory is not at null");
    // SAFETY: passed on from the caller.
    unsafe { SharedSlice::new(pointer, len, writable) }
}

fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).expect("the monotonic clock is not negative")
}

/// Decides when submitted work runs.
///
/// # Safety
/// Work of one stream runs once and in order, a `Wait` only when it is ready, and a stream is idle only when all its
/// work has run.
pub unsafe trait Schedule: fmt::Debug + Send + Sync {
    /// Whether submitting is running.
    fn runs_inline(&self) -> bool;

    /// Takes work over.
    ///
    /// # Safety
    /// What the work touches stays as [`Work::run`] needs it until it has run.
    unsafe fn submit(&self, stream: StreamId, work: Work<&Args>);

    /// Whether all work of a stream has run.
    fn is_idle(&self, stream: StreamId) -> bool;

    /// Runs one piece of work that is ready, of any stream; `false` when there is none.
    fn advance(&self) -> bool;
}

/// Runs work where it is submitted.
#[derive(Debug)]
pub(super) struct Inline;

// SAFETY: each submission runs to its end before the next of the same thread; threads that share a stream are ordered
// by the stream's lock above.
unsafe impl Schedule for Inline {
    fn runs_inline(&self) -> bool {
        true
    }

    unsafe fn submit(&self, _stream: StreamId, work: Work<&Args>) {
        // SAFETY: passed on from the caller.
        unsafe { work.run() };
    }

    fn is_idle(&self, _stream: StreamId) -> bool {
        true
    }

    fn advance(&self) -> bool {
        false
    }
}
