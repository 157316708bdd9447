//! Dividing positions among threads.

use std::ops::Range;

use rayon::prelude::*;

/// Below this many bytes one thread is done before a second would have begun.
const ALONE: u64 = 256 << 10;

/// How many bytes a thread takes at a time.
const SHARE: u64 = 128 << 10;

/// Calls `work` with ranges that are all of `0..count`, by several threads if there is work for them. `row_len` is what
/// one position costs, in bytes.
pub(super) fn walk(count: u64, row_len: u64, work: impl Fn(Range<u64>) + Sync) {
    // A position costs a cache line at least, however short its row is.
    let cost = row_len.max(16);
    if count.saturating_mul(cost) < ALONE {
        return work(0..count);
    }
    let step = (SHARE / cost).max(1);
    let shares = count.div_ceil(step);
    (0..shares).into_par_iter().for_each(|share| work(share * step..count.min((share + 1) * step)));
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn every_position_is_walked_once() {
        for (count, row_len) in [(0, 8), (1, 8), (100, 1), (100_000, 1), (100_001, 100), (7, 4 << 20)] {
            let seen = Mutex::new(Vec::new());
            walk(count, row_len, |range| seen.lock().unwrap().extend(range));
            let mut seen = seen.into_inner().unwrap();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..count));
        }
    }
}
