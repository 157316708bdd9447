//! Divides the indices of a gather or scatter among threads.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The length in bytes from which a gather or scatter uses several threads. One thread finishes shorter work before a second
/// thread has woken up.
const MAX_SINGLE_THREAD_LEN: u64 = 1 << 20;

/// The number of bytes that a thread takes from the shared counter at a time.
const CHUNK_LEN: u64 = 128 << 10;

/// Calls `work` with ranges that together are `0..count`, in several threads if there is enough work. `row_len` is the cost in
/// bytes of one element of a range.
pub(super) fn for_each_range(count: u64, row_len: u64, work: impl Fn(Range<u64>) + Sync) {
    // Each row costs at least the transfer of one cache line.
    let cost = row_len.max(64);
    if count.saturating_mul(cost) < MAX_SINGLE_THREAD_LEN {
        return work(0..count);
    }
    let step = (CHUNK_LEN / cost).max(1);
    let next = AtomicU64::new(0);
    let take_shares = || {
        let shares = std::iter::repeat_with(|| next.fetch_add(step, Ordering::Relaxed));
        shares.take_while(|start| *start < count).for_each(|start| work(start..count.min(start + step)));
    };
    let threads = rayon::current_num_threads() as u64;
    // The calling thread also takes ranges, and begins while the other threads wake up.
    rayon::in_place_scope(|scope| {
        (1..threads.min(count.div_ceil(step))).for_each(|_| scope.spawn(|_| take_shares()));
        take_shares();
    });
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_position_is_visited_once() {
        for (count, row_len) in [(0, 8), (1, 8), (100, 1), (100_000, 1), (100_001, 100), (7, 4 << 20)] {
            let seen = Mutex::new(Vec::new());
            for_each_range(count, row_len, |range| seen.lock().unwrap().extend(range));
            let mut seen = seen.into_inner().unwrap();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count));
        }
    }
}
