//! Many pieces, done by a few threads, watched by whoever waits for them.

use std::num::NonZero;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{Error, Result};

/// How far a rank has come with its own rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Bytes that are done.
    pub done: u64,
    /// Bytes that there are to do.
    pub total: u64,
}

/// Is told how far a rank has come, from any thread, and says whether to go on.
pub type Watch<'a> = &'a (dyn Fn(Copied) -> ControlFlow<()> + Sync);

/// Goes on to the end.
pub fn unwatched(_: Copied) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Files are not faster with more threads than this, of all ranks of a group together.
const MOST_THREADS: usize = 8;

/// Calls `work` for each piece, on so many threads, each with what `start` made for it; `len` says how many bytes a piece
/// has. The first error ends it.
pub(super) fn in_parallel<P: Sync, S>(
    threads: usize,
    pieces: &[P],
    len: impl Fn(&P) -> u64 + Sync,
    watch: Watch<'_>,
    start: impl Fn() -> Result<S> + Sync,
    work: impl Fn(&P, &mut S) -> Result<()> + Sync,
) -> Result<()> {
    let total = pieces.iter().map(&len).sum();
    let (next, done, ended) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let failure = Mutex::new(None);
    let run = || -> Result<()> {
        let mut own = start()?;
        while !ended.load(Ordering::Relaxed) {
            let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            work(piece, &mut own)?;
            let done = done.fetch_add(len(piece), Ordering::Relaxed) + len(piece);
            if watch(Copied { done, total }).is_break() {
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
        (1..threads.min(pieces.len())).for_each(|_| drop(scope.spawn(try_run)));
        try_run();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// How many threads each of some ranks has: they share the machine.
pub(super) fn threads_of(ranks: u32) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
    cores.div_ceil((ranks as usize).max(1))
}
