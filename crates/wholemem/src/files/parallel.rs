//! Many pieces, done by a few threads, watched by whoever waits for them.

use std::num::NonZero;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use wholemem_hal::Stream;

use crate::{Error, Group, Result};

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

/// Calls `work` for each piece with a stream and a buffer; `len` says how many bytes a piece has. The first error ends it.
pub(super) fn in_parallel<P: Sync>(
    group: &Group,
    pieces: &[P],
    len: impl Fn(&P) -> u64 + Sync,
    watch: Watch<'_>,
    work: impl Fn(&P, &Stream, &mut Vec<u8>) -> Result<()> + Sync,
) -> Result<()> {
    let total = pieces.iter().map(&len).sum();
    let (next, done, ended) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let failure = Mutex::new(None);
    let run = || -> Result<()> {
        let stream = group.device().stream()?;
        let mut buffer = Vec::new();
        while !ended.load(Ordering::Relaxed) {
            let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            work(piece, &stream, &mut buffer)?;
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
    let threads = threads(group).min(pieces.len());
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| drop(scope.spawn(try_run)));
        try_run();
    });
    failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// How many threads a rank has: the machine is shared with the other ranks.
fn threads(group: &Group) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
    let ranks = usize::try_from(group.size()).unwrap_or(usize::MAX);
    cores.div_ceil(ranks)
}
