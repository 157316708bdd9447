//! Copies blocks of rows between tensor files and memory in several threads, and reports progress to a callback.

use std::num::NonZero;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{Error, Result};

/// The progress of one rank in a save, load, export or check of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyProgress {
    /// The number of bytes that the rank has copied.
    pub done: u64,
    /// The number of bytes that the rank copies in total.
    pub total: u64,
}

/// A callback for the progress of a rank in a save, load, export or check of a tensor. Any thread may call it. If it returns
/// `Break`, the operation ends with [`Error::Interrupted`].
pub type ProgressCallback<'a> = &'a (dyn Fn(CopyProgress) -> ControlFlow<()> + Sync);

/// Ignores the progress of a save, load, export or check: a [`ProgressCallback`] that never interrupts.
pub fn ignore_progress(_: CopyProgress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// The maximum number of threads that the ranks of a group use together to copy files. More threads are not faster.
const MAX_THREADS: usize = 8;

/// Calls `work` for each item, in `threads` threads. Each thread passes the state that `start` created for it; `len` returns the
/// length of an item in bytes. The first error ends all threads.
pub(super) fn in_parallel<P: Sync, S>(
    threads: usize,
    items: &[P],
    len: impl Fn(&P) -> u64 + Sync,
    progress: ProgressCallback<'_>,
    start: impl Fn() -> Result<S> + Sync,
    work: impl Fn(&P, &mut S) -> Result<()> + Sync,
) -> Result<()> {
    let total = items.iter().map(&len).sum();
    let (next, done, ended) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let failure = Mutex::new(None);
    let run = || -> Result<()> {
        let mut state = start()?;
        while !ended.load(Ordering::Relaxed) {
            let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            work(item, &mut state)?;
            let done = done.fetch_add(len(item), Ordering::Relaxed) + len(item);
            if progress(CopyProgress { done, total }).is_break() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    };
    let try_run = || {
        if let Err(error) = run() {
            ended.store(true, Ordering::Relaxed);
            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    std::thread::scope(|scope| {
        (1..threads.min(items.len())).for_each(|_| drop(scope.spawn(try_run)));
        try_run();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Returns the number of threads with which each of `ranks` ranks on this node copies files.
pub(super) fn threads_of(ranks: u32) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get).min(MAX_THREADS);
    cores.div_ceil((ranks as usize).max(1))
}
