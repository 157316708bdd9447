//! Schedules, which decide when the work of host streams runs. The default runs it inline; the test kit's runs it
//! later.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use wholemem_os::{Deadline, SharedSlice};

use super::HostEvent;
use crate::raw::Address;
use crate::{Args, HostFunction, LaunchShape};

/// The id of a stream within its queue.
pub type StreamId = u64;

/// One operation on a host stream. The arguments of a kernel are borrowed when it is submitted, and owned after
/// [`Work::into_owned`], if the kernel runs later.
#[derive(Clone)]
pub enum Work<A = Args> {
    /// Copies bytes between two ranges of memory.
    Copy {
        /// The address to which the bytes are copied.
        to: Address,
        /// The address from which the bytes are copied.
        from: Address,
        /// The number of bytes to copy.
        len: usize,
    },
    /// Sets the bytes of a range of memory to a value.
    Fill {
        /// The address of the bytes to set.
        to: Address,
        /// The value to which the bytes are set.
        value: u8,
        /// The number of bytes to set.
        len: usize,
    },
    /// Completes a record of an event.
    Record {
        /// The event whose record is completed.
        event: Arc<HostEvent>,
        /// The ticket (the number) of the record that is completed.
        ticket: u64,
    },
    /// Waits until a record of an event completes.
    Wait {
        /// The event for whose record the stream waits.
        event: Arc<HostEvent>,
        /// The ticket (the number) of the record for which the stream waits.
        ticket: u64,
    },
    /// Runs a host kernel.
    Call {
        /// The function of the host kernel.
        function: HostFunction,
        /// The grid and block dimensions of the kernel launch.
        shape: LaunchShape,
        /// The arguments of the kernel.
        args: A,
    },
    /// Runs all operations of a graph in order.
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
    /// Copies the borrowed kernel arguments, so that the work can run after the submitting call returns.
    #[must_use]
    pub fn into_owned(self) -> Work {
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
    /// Returns whether the operation could run now without waiting.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match self {
            Self::Wait { event, ticket } => event.is_complete(*ticket),
            _ => true,
        }
    }

    /// Runs the operation on the calling thread.
    ///
    /// # Safety
    /// The memory that the work accesses is mapped with the rights it needs, and the arguments match the kernel's
    /// parameters.
    pub unsafe fn run(&self) {
        match self {
            Self::Copy { to, from, len } => {
                // SAFETY: the caller of `run` guarantees that `len` bytes at `to` are writable.
                let to = unsafe { bytes(*to, *len, true) };
                // SAFETY: the caller of `run` guarantees that `len` bytes at `from` are readable.
                let from = unsafe { bytes(*from, *len, false) };
                to.copy_from(0, &from).expect("both ranges have the same length");
            }
            Self::Fill { to, value, len } => {
                // SAFETY: the caller of `run` guarantees that `len` bytes at `to` are writable.
                let to = unsafe { bytes(*to, *len, true) };
                to.fill(*value).expect("the view is writable");
            }
            Self::Record { event, ticket } => event.complete(*ticket, monotonic()),
            Self::Wait { event, ticket } => {
                if let Err(error) = event.wait(*ticket, Deadline::NEVER) {
                    tracing::error!(%error, "a stream cannot wait for an event and continues without waiting");
                }
            }
            // SAFETY: the caller of `run` guarantees that the arguments match the kernel's parameters.
            Self::Call { function, shape, args } => unsafe { function(shape, args.borrow()) },
            Self::Graph(works) => {
                for work in works.iter() {
                    // SAFETY: the caller of `run` guarantees the requirements of `run` for every operation of the
                    // graph.
                    unsafe { work.run() };
                }
            }
        }
    }
}

/// Returns a view of `len` bytes of mapped memory at an address.
///
/// # Safety
/// The range is mapped, and writable if `writable`, while the view is used.
unsafe fn bytes<'a>(at: Address, len: usize, writable: bool) -> SharedSlice<'a> {
    let pointer = at.to_host().expect("mapped memory is not at null");
    // SAFETY: the caller of `bytes` guarantees that the range is mapped, and writable if `writable`.
    unsafe { SharedSlice::new(pointer, len, writable) }
}

fn monotonic() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).expect("the monotonic clock is not negative")
}

/// Decides when submitted work of host streams runs.
///
/// # Safety
/// Work of one stream runs once and in order, a `Wait` runs only when it is ready, and a stream is idle only when all
/// its work has run.
pub unsafe trait Schedule: fmt::Debug + Send + Sync {
    /// Returns whether `submit` runs the work before it returns.
    fn runs_inline(&self) -> bool;

    /// Accepts an operation for a stream, which runs now or later.
    ///
    /// # Safety
    /// The requirements of [`Work::run`] hold until the work has run.
    unsafe fn submit(&self, stream: StreamId, work: Work<&Args>);

    /// Returns whether all submitted work of a stream has run.
    fn is_idle(&self, stream: StreamId) -> bool;

    /// Runs one ready operation of any stream. Returns `false` if no operation is ready.
    fn advance(&self) -> bool;
}

/// A schedule that runs work inline, inside `submit`.
#[derive(Debug)]
pub(super) struct Inline;

// SAFETY: work runs inside `submit`, so the work of one thread runs in order; the stream's lock orders threads that
// share a stream.
unsafe impl Schedule for Inline {
    fn runs_inline(&self) -> bool {
        true
    }

    unsafe fn submit(&self, _stream: StreamId, work: Work<&Args>) {
        // SAFETY: the caller of `submit` guarantees the requirements of `Work::run`.
        unsafe { work.run() };
    }

    fn is_idle(&self, _stream: StreamId) -> bool {
        true
    }

    fn advance(&self) -> bool {
        false
    }
}
