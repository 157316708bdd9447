//! One collective call on one CPU rank: ranks signal progress by counters that only grow. Waiters poll them first, and then wait
//! with a futex.
//!
//! ```text
//!   memory of rank r in the lane:  line r           the progress of r (call, phase) and its mark (call, digest of its terms);
//!                                                   ranks that wait for r sleep on the progress
//!                                  line ranks + r   the number of ranks that sleep on it
//!                                  slot r           progress and mark of r in calls that use packets; the packets follow
//!                                  terms            the terms of r's call, if r waits long
//! ```
//!
//! Ranks on GPUs store flags into each other's memory. A CPU rank stores one word in its own memory, and the others read
//! its cache line. A waiter registers itself, fences and re-checks the progress; a signaller stores its progress, fences and checks
//! for waiters. At least one of them sees the other (Dekker). The fence of the signaller waits until its store is visible, so it
//! is executed late: after all other ranks have arrived, or before this rank yields.
//!
//! If the marks of two ranks differ in a call, neither completes the call: each waits as if the other had not arrived. A rank that
//! waits long publishes the terms of its call, fences and compares the terms of the other ranks. At least one of two ranks that
//! disagree sees the terms of the other (Dekker), and aborts the call on all ranks.

mod hooks;

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use wholemem_comm::Rank;
use wholemem_os::{Deadline, futex, interrupt};

use super::call_lock::CallLock;
use crate::abi::{
    Cause, CollectiveRequest, ControlWord, DIGEST_BITS, LaneRef, PHASE_BITS, ReportWord, SIGNAL_STRIDE,
    TERMS_WORDS, slot_at, tag_of,
};
use wholemem_os::width::to_usize;

pub(super) use hooks::Rule;

/// The number of times that a waiting rank polls before it yields its core: if each rank has its own core, and if ranks share
/// cores. In the second case the rank that it waits for may need this core.
const SPINS_ALONE: u64 = 2000;
const SPINS_SHARED: u64 = 20;

/// The number of times that a waiting rank yields its core before it sleeps.
const YIELDS: u32 = 50;

/// The maximum duration of one futex wait. An aborting rank wakes all sleeping ranks, but misses a rank that is about to sleep.
const WAIT_SLICE: Duration = Duration::from_millis(50);

/// The maximum duration of one futex wait for a rank that is in the same call with other terms.
const PUBLISH_SLICE: Duration = Duration::from_millis(1);

/// Returns the number of times that a waiting rank polls before it yields its core.
pub(crate) fn spins(share_cores: bool) -> u64 {
    if share_cores { SPINS_SHARED } else { SPINS_ALONE }
}

/// The error that a collective call was aborted. The report of the lane has the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Aborted;

/// The words in which ranks store their progress in a collective call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signals {
    /// Each rank stores its progress in a separate cache line.
    Lines,
    /// Each rank stores its progress in front of its packets, which the ranks that read the progress need next.
    Packets,
}

/// One collective call of a lane (a sequence of calls), on one CPU rank.
#[derive(Debug)]
pub(super) struct CollectiveCall<'a> {
    lane: &'a LaneRef,
    request: &'a CollectiveRequest,
    signals: Signals,
    /// The sequence number of this collective call in its lane.
    number: u64,
    /// The time of the first long wait of this call, from which its deadline is computed; `None` before that wait.
    began: Option<Instant>,
    _lock: CallLock<'a>,
}

impl<'a> CollectiveCall<'a> {
    /// Begins the next collective call of a lane, after the calls of other threads of this rank. Fails if an earlier call of the
    /// lane has failed.
    ///
    /// # Safety
    /// The memory of the request's lane on all ranks, its control words, its report and, with the feature `test-hooks` and if
    /// `debug` is not zero, its debug words are mapped for `'a`, aligned to words, and accessed as atomics only.
    pub(super) unsafe fn begin(request: &'a CollectiveRequest, signals: Signals) -> Result<Self, Aborted> {
        let lane = &request.lane;
        // SAFETY: the caller of `begin` guarantees that the control words are mapped for `'a`, aligned and accessed as atomics
        // only.
        let control = |word: ControlWord| unsafe { word_at(word_address(lane.control, word as u32)) };
        let has_failed = || control(ControlWord::Poison).load(Ordering::Relaxed) != 0;
        // A lane under construction is poisoned, and its call lock is not initialized.
        if has_failed() {
            return Err(Aborted);
        }
        let lock = CallLock::acquire(lower_half(control(ControlWord::CallLock)));
        // The previous call of this lane may have failed while this thread waited for the call lock.
        if has_failed() {
            return Err(Aborted);
        }
        let number = control(ControlWord::Sequence).load(Ordering::Relaxed);
        let call = Self { lane, request, signals, number, began: None, _lock: lock };
        call.pause(0);
        // If the group has failed, the other ranks may not arrive in this call.
        match call.report(ReportWord::Abort).load(Ordering::Acquire) {
            0 => Ok(call),
            why => Err(call.abort(0, why)),
        }
    }

    /// Returns the index (0 or 1) of the staging buffer or packet slot that the given piece of this call uses. Consecutive pieces
    /// alternate.
    pub(super) fn parity(&self, piece: u64) -> u64 {
        if self.follows(Rule::AlternateBuffers) { (self.number + piece) & 1 } else { 0 }
    }

    /// Returns the progress value of a rank that has announced the given phase of this call.
    pub(super) fn flag(&self, phase: u64) -> u64 {
        self.number << PHASE_BITS | phase
    }

    /// Returns the mark of this rank in this call: the number of the call, and the digest of its terms.
    fn mark(&self) -> u64 {
        self.number << DIGEST_BITS | u64::from(self.request.digest)
    }

    /// Returns the address of the byte at offset `at` in a rank's memory of the lane.
    pub(super) fn address(&self, rank: u32, at: u64) -> u64 {
        self.lane.base + u64::from(rank) * self.lane.stride + at
    }

    /// Returns all ranks except this one.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.lane.rank;
        (0..self.lane.ranks).filter(move |rank| *rank != own)
    }

    /// Returns the address at which a rank stores its progress in this call. Its mark follows.
    pub(super) fn signal_at(&self, rank: u32) -> u64 {
        match self.signals {
            Signals::Lines => self.address(rank, u64::from(rank) * SIGNAL_STRIDE),
            Signals::Packets => self.address(rank, slot_at(self.lane, rank, self.parity(0))),
        }
    }

    /// Announces to the other ranks that this rank has reached a phase (release store). Ranks that read the announcement also see
    /// earlier writes of this rank.
    pub(super) fn announce(&self, phase: u64) {
        self.pause(2 * phase);
        let own = self.lane.rank;
        self.mark_of(own).store(self.mark(), Ordering::Relaxed);
        self.signal(own).store(self.flag(phase), Ordering::Release);
    }

    /// Returns true if a rank has reached a phase of this call, and the terms of its call are equal to those of this rank.
    fn has_arrived(&self, rank: u32, phase: u64) -> bool {
        has_reached(self.signal(rank).load(Ordering::Acquire), self.flag(phase)) && self.agrees(rank)
    }

    /// Returns true if the mark of a rank that has reached this call is equal to the mark of this rank, or of a later call. A rank
    /// makes a later call only after it has found the marks of all ranks in this call equal to its own.
    fn agrees(&self, rank: u32) -> bool {
        let (mark, own) = (self.mark_of(rank).load(Ordering::Relaxed), self.mark());
        mark == own || !self.follows(Rule::CompareDigests) || is_of_later_call(mark, own)
    }

    /// Waits until all ranks have reached a phase that this rank has announced.
    pub(super) fn await_all(&mut self, phase: u64) -> Result<(), Aborted> {
        for rank in self.others() {
            self.wait(rank, phase)?;
        }
        self.wake_waiters(phase);
        self.pause(2 * phase + 1);
        Ok(())
    }

    /// Announces a phase, and waits until all ranks have reached it, as a barrier does. Tests can disable the wait by breaking
    /// `rule`.
    pub(super) fn sync(&mut self, phase: u64, rule: Rule) -> Result<(), Aborted> {
        self.announce(phase);
        if self.follows(rule) {
            return self.await_all(phase);
        }
        self.wake_waiters(phase);
        Ok(())
    }

    /// Waits until another rank has reached a phase: polls first, then yields and sleeps.
    fn wait(&mut self, rank: u32, phase: u64) -> Result<(), Aborted> {
        for _ in 0..self.control(ControlWord::Spins).load(Ordering::Relaxed) {
            if self.has_arrived(rank, phase) {
                return Ok(());
            }
            spin_loop();
        }
        self.wait_long(rank, phase)
    }

    /// Waits until another rank has reached a phase: yields the core repeatedly, then sleeps.
    #[cold]
    fn wait_long(&mut self, rank: u32, phase: u64) -> Result<(), Aborted> {
        self.publish_terms();
        self.wake_waiters(phase);
        for _ in 0..YIELDS {
            std::thread::yield_now();
            if self.has_arrived(rank, phase) {
                return Ok(());
            }
        }
        self.sleep_until(rank, phase)
    }

    /// Publishes the terms of this call, for ranks that wait for this rank although it has arrived with other terms.
    fn publish_terms(&self) {
        for (at, word) in (0..).zip(self.request.terms.words) {
            self.term(self.lane.rank, at).store(self.term_word(word), Ordering::Relaxed);
        }
    }

    /// Returns the form in which a word of the terms of this call is published: below the tag of the call.
    fn term_word(&self, word: u32) -> u64 {
        tag_of(self.number) << 32 | u64::from(word)
    }

    /// Returns the lowest rank that has published terms of this call that differ from those of this rank.
    fn disagreeing_rank(&self) -> Option<u32> {
        let differs = |rank: &u32| {
            let mut words = (0..).zip(self.request.terms.words).map(|(at, own)| {
                let word = self.term(*rank, at).load(Ordering::Relaxed);
                (word, self.term_word(own))
            });
            let mut differs = false;
            let is_published = words.all(|(word, own)| {
                differs |= word & 0xffff_ffff != own & 0xffff_ffff;
                word >> 32 == own >> 32 || !self.follows(Rule::CheckCallOfTerms)
            });
            is_published && differs && self.follows(Rule::CompareDigests)
        };
        self.others().find(differs)
    }

    /// Wakes the ranks that sleep until this rank reaches `phase`, which it has announced.
    fn wake_waiters(&self, phase: u64) {
        let own = self.lane.rank;
        // The fence orders the announcement before the check for waiters.
        fence(Ordering::SeqCst);
        if self.waiters(own).load(Ordering::Relaxed) != 0 {
            // Waiters sleep on the progress word even if this call announces phases in its packet slots, so the progress word
            // must change.
            self.progress(own).store(self.flag(phase), Ordering::SeqCst);
            wake(self.progress(own));
        }
    }

    #[cold]
    fn sleep_until(&mut self, rank: u32, phase: u64) -> Result<(), Aborted> {
        let (progress, waiters, asleep) =
            (self.progress(rank), self.waiters(rank), self.report(ReportWord::Asleep));
        let deadline = self.deadline();
        waiters.fetch_add(1, Ordering::SeqCst);
        asleep.store(1, Ordering::SeqCst);
        let outcome = loop {
            let seen = progress.load(Ordering::SeqCst);
            // The abort cause is read before the progress, because a rank that left or died may have arrived in this call before.
            let why = self.abort_cause();
            if self.has_arrived(rank, phase) {
                break Ok(());
            }
            if let Some(other) = self.disagreeing_rank() {
                break Err(Cause::Disagreed.word(Rank(other)));
            }
            if let Some(why) = why {
                break Err(why);
            }
            // A rank that is in this call with other terms is about to publish them, which does not wake this rank.
            let has_other_mark = has_reached(seen, self.flag(0))
                && self.line_mark_of(rank).load(Ordering::Relaxed) != self.mark();
            let slice = if has_other_mark { PUBLISH_SLICE } else { WAIT_SLICE };
            // The lower half of the progress word changes with every phase.
            let half = u32::try_from(seen & 0xffff_ffff).expect("masked to 32 bits");
            // The wait fails if its time slice is over, or if the memory is unmapped; then the deadline ends the loop.
            let slept = futex::wait(lower_half(progress), half, wait_end(deadline, slice));
            if slept == Err(wholemem_os::Error::TimedOut) {
                // The thread is marked awake before the interrupt check, because the check may need a lock whose holder waits
                // until no thread of this rank sleeps.
                asleep.store(0, Ordering::SeqCst);
                let is_interrupted = interrupt::is_interrupted();
                asleep.store(1, Ordering::SeqCst);
                if is_interrupted {
                    break Err(Cause::Aborted.word(Rank(self.lane.rank)));
                }
            }
            if deadline.has_passed() {
                break if self.has_arrived(rank, phase) {
                    Ok(())
                } else {
                    Err(Cause::TimedOut.word(Rank(rank)))
                };
            }
        };
        asleep.store(0, Ordering::SeqCst);
        waiters.fetch_sub(1, Ordering::SeqCst);
        outcome.map_err(|cause| self.abort(phase, cause))
    }

    /// Returns the time at which this rank's waits in this call fail.
    fn deadline(&mut self) -> Deadline {
        let nanoseconds = self.control(ControlWord::Timeout).load(Ordering::Relaxed);
        if nanoseconds == 0 {
            return Deadline::NEVER;
        }
        let began = *self.began.get_or_insert_with(Instant::now);
        Deadline::after(Duration::from_nanos(nanoseconds).saturating_sub(began.elapsed()))
    }

    /// Returns the cause for which this call must abort, if the host or another rank has stored one.
    fn abort_cause(&self) -> Option<u64> {
        let own = Cause::Disagreed.word(Rank(self.lane.rank));
        let notice = |rank: u32| match self.notice(self.lane.rank, rank).load(Ordering::Acquire) {
            // The other rank has reported a disagreement with this rank, so this rank reports a disagreement with the other rank.
            word if word == own => Cause::Disagreed.word(Rank(rank)),
            word => word,
        };
        let request = self.report(ReportWord::Abort).load(Ordering::SeqCst);
        [request].into_iter().chain(self.others().map(notice)).find(|cause| *cause != 0)
    }

    /// Aborts this call: stores the cause in the report and in the notices of the other ranks, and poisons the lane.
    #[cold]
    fn abort(&self, phase: u64, why: u64) -> Aborted {
        self.control(ControlWord::Poison).store(1, Ordering::Relaxed);
        let cause = Cause::of_word(why);
        let timed_out = cause.is_some_and(|(cause, _)| cause == Cause::TimedOut);
        for rank in self.others() {
            if timed_out && !self.has_arrived(rank, phase) {
                self.missing(rank).fetch_or(1 << (rank % 64), Ordering::Relaxed);
            }
            self.notice(rank, self.lane.rank).store(why, Ordering::Release);
        }
        if let Some((Cause::Disagreed, Rank(other))) = cause {
            for (at, own) in (0..).zip(self.request.terms.words) {
                let word = self.term(other, at).load(Ordering::Relaxed);
                self.report_at(ReportWord::OwnTerms as u32 + at)
                    .store(self.term_word(own), Ordering::Relaxed);
                self.report_at(ReportWord::PeerTerms as u32 + at).store(word, Ordering::Relaxed);
            }
        }
        self.report(ReportWord::Call).store(self.number, Ordering::Relaxed);
        self.report(ReportWord::Phase).store(phase, Ordering::Relaxed);
        self.report(ReportWord::Cause).store(why, Ordering::Relaxed);
        self.report(ReportWord::Aborted).store(1, Ordering::Release);
        // The progress words are unchanged, but sleeping ranks check their notices when they wake.
        (0..self.lane.ranks).for_each(|rank| wake(self.progress(rank)));
        Aborted
    }

    /// Ends this call, so that the next call of the lane can begin.
    pub(super) fn end(self) {
        self.control(ControlWord::Sequence).store(self.number.wrapping_add(1), Ordering::Relaxed);
    }

    /// Returns a word of the lane's memory, or one of its control, report or debug words.
    fn word(&self, address: u64) -> &'a AtomicU64 {
        // SAFETY: the caller of `begin` guarantees that all words of the lane are mapped for `'a`, aligned and accessed as
        // atomics only.
        unsafe { word_at(address) }
    }

    fn signal(&self, rank: u32) -> &'a AtomicU64 {
        self.word(self.signal_at(rank))
    }

    /// Returns the mark of a rank, which follows its progress in this call.
    fn mark_of(&self, rank: u32) -> &'a AtomicU64 {
        self.word(self.signal_at(rank) + 8)
    }

    /// Returns the mark of a rank that follows its progress word.
    fn line_mark_of(&self, rank: u32) -> &'a AtomicU64 {
        self.word(self.address(rank, u64::from(rank) * SIGNAL_STRIDE + 8))
    }

    /// Returns word `at` of the terms that a rank has published.
    fn term(&self, rank: u32, at: u32) -> &'a AtomicU64 {
        debug_assert!(at < TERMS_WORDS, "word {at} of the terms");
        self.word(self.address(rank, self.lane.terms_at + u64::from(at) * 8))
    }

    /// Returns the progress word of `rank`, on which the ranks that wait for it sleep.
    fn progress(&self, rank: u32) -> &'a AtomicU64 {
        self.word(self.address(rank, u64::from(rank) * SIGNAL_STRIDE))
    }

    fn waiters(&self, rank: u32) -> &'a AtomicU32 {
        lower_half(self.word(self.address(rank, u64::from(self.lane.ranks + rank) * SIGNAL_STRIDE)))
    }

    /// Returns the word in which rank `from` tells `rank` why it has aborted.
    fn notice(&self, rank: u32, from: u32) -> &'a AtomicU64 {
        self.word(self.address(rank, self.lane.notices_at + u64::from(from) * 8))
    }

    fn control(&self, word: ControlWord) -> &'a AtomicU64 {
        self.word(word_address(self.lane.control, word as u32))
    }

    fn report(&self, word: ReportWord) -> &'a AtomicU64 {
        self.report_at(word as u32)
    }

    fn report_at(&self, word: u32) -> &'a AtomicU64 {
        self.word(word_address(self.lane.report, word))
    }

    /// Returns the report word that has the bit of a missing rank.
    fn missing(&self, rank: u32) -> &'a AtomicU64 {
        self.report_at(ReportWord::Missing as u32 + rank / 64)
    }
}

/// Returns the address of word number `word`, where `first` is the address of word 0.
fn word_address(first: u64, word: u32) -> u64 {
    first + u64::from(word) * 8
}

/// Returns a word of a lane's memory, or one of its control, report or debug words.
///
/// # Safety
/// The word is mapped for `'a`, aligned, and accessed as an atomic only.
unsafe fn word_at<'a>(address: u64) -> &'a AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(to_usize(address));
    // SAFETY: the caller of `word_at` guarantees that the word at `address` is mapped for `'a`, aligned, and accessed as an
    // atomic only.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Returns true if a progress counter has reached a value. The counter may have wrapped around.
fn has_reached(progress: u64, flag: u64) -> bool {
    progress.wrapping_sub(flag) < 1 << 63
}

/// Returns true if a mark is of a later call than another mark. The number of the call may have wrapped around.
fn is_of_later_call(mark: u64, than: u64) -> bool {
    let digest = (1 << DIGEST_BITS) - 1;
    let later = (mark | digest).wrapping_sub(than | digest);
    later != 0 && later < 1 << 63
}

/// Returns the lower 32 bits of a word, which a futex wait compares.
fn lower_half(word: &AtomicU64) -> &AtomicU32 {
    const { assert!(cfg!(target_endian = "little"), "the lower half comes first") };
    // SAFETY: the pointer is to the lower half of `word`, which lives for the returned lifetime, and is aligned to four bytes.
    // Either only this half of the word is used, or the half is only passed to the futex call.
    unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
}

/// Returns the end of the next futex wait: the deadline, or the end of the wait slice if that is earlier.
fn wait_end(deadline: Deadline, slice: Duration) -> Deadline {
    if deadline.remaining().is_some_and(|remaining| remaining < slice) {
        deadline
    } else {
        Deadline::after(slice)
    }
}

fn wake(word: &AtomicU64) {
    // The wake-up fails only if the word's memory is unmapped, and then no rank sleeps on the word.
    let _ = futex::wake_all(lower_half(word));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_compared_across_a_wrap() {
        assert!(has_reached(5, 5) && has_reached(6, 5) && !has_reached(4, 5));
        assert!(has_reached(1, u64::MAX) && !has_reached(u64::MAX, 1));
        let mark = |call: u64, digest: u64| call << DIGEST_BITS | digest;
        assert!(is_of_later_call(mark(6, 0), mark(5, 9)) && !is_of_later_call(mark(5, 9), mark(6, 0)));
        assert!(!is_of_later_call(mark(5, 9), mark(5, 8)) && !is_of_later_call(mark(5, 8), mark(5, 9)));
        assert!(
            is_of_later_call(mark(0, 7), mark(u64::MAX, 7))
                && !is_of_later_call(mark(u64::MAX, 7), mark(0, 7))
        );
    }
}
