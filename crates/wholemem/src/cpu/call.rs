//! One collective call, as ranks of the processor meet in it: a word that only grows, spun on for a while and slept on
//! after that.
//!
//! ```text
//!   rank r's memory of the lane:  line r            how far r has come; who sleeps until it comes farther, sleeps here
//!                                 line ranks + r    how many do
//!                                 slot r            how far r has come in calls of packets, which follow it
//! ```
//!
//! A GPU's ranks store their flags into each other's memory; here each stores one word, and its cache line goes to
//! whoever looks, with the packets that are in it. Who has come looks whether anybody sleeps, who goes to sleep says so
//! first and looks again: one of the two sees the other. That look has to wait until the word has left this core, so it
//! is taken only when there is nothing better to do: when the others have come too, or before this rank lets others run.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use wholemem_comm::Rank;
use wholemem_os::{Deadline, futex, interrupt};

use super::call_lock::Turn;
use crate::abi::{
    ABORT, ABORTED, ASLEEP, BLOCKS, CALL_LOCK, CAUSE, DELAYS, FIRST_COUNTER, GIVEN_UP, LINE, LaneRef, MISSED,
    MISSING, Mutants, PHASE, POISON, SEQUENCE, SPINS, TIMEOUT, cause, slot_at,
};

/// How often a rank looks before it lets others run, where each rank has a core, and where they share them: then whoever is
/// waited for may need this core, or be about to come on another.
const SPINS_ALONE: u64 = 2000;
const SPINS_SHARED: u64 = 20;

/// How often it lets others run before it sleeps.
const YIELDS: u32 = 50;

/// How long it sleeps at a time: who gives up wakes all who sleep, and misses who was about to.
const NAP: Duration = Duration::from_millis(50);

/// Delays that the kernel would make ten times as long.
const SHORT: Duration = Duration::from_micros(20);

/// How often ranks look before they let others run.
pub(crate) fn spins(share_cores: bool) -> u64 {
    if share_cores { SPINS_SHARED } else { SPINS_ALONE }
}

/// Why a meeting came to nothing. The report says the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GaveUp;

/// Where ranks say how far they have come in a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Signals {
    /// In a line of their own.
    Lines,
    /// Before their packets, which whoever hears of them needs next.
    Packets,
}

/// One call, on one rank.
#[derive(Debug)]
pub(super) struct Meeting<'a> {
    lane: &'a LaneRef,
    signals: Signals,
    /// The number of the call.
    number: u64,
    mutants: u64,
    /// When this rank first looked whether it should go on.
    began: Option<Instant>,
    _turn: Turn<'a>,
}

impl<'a> Meeting<'a> {
    /// Begins the next call of a lane, when those of other threads are over; none that has failed before.
    ///
    /// # Safety
    /// The lane's memory, counters and report are accessible for as long as this lives.
    pub(super) unsafe fn begin(lane: &'a LaneRef, signals: Signals) -> Result<Self, GaveUp> {
        // SAFETY: the caller answers for the counters.
        let control = |index: usize| unsafe { word_at(lane.control + index as u64 * 8) };
        let has_failed = || control(POISON).load(Ordering::Relaxed) != 0;
        // Before a lane is ready, nobody has a turn.
        if has_failed() {
            return Err(GaveUp);
        }
        let turn = Turn::take(lower_half(control(CALL_LOCK)));
        // The call before this one may have.
        if has_failed() {
            return Err(GaveUp);
        }
        let number = control(FIRST_COUNTER).load(Ordering::Relaxed);
        let mut meeting = Self { lane, signals, number, mutants: 0, began: None, _turn: turn };
        if lane.debug != 0 {
            meeting.mutants = meeting.word(lane.debug).load(Ordering::Relaxed);
        }
        meeting.pause(0);
        // What others have brought along is of no use to a group that has fallen.
        match meeting.report(ABORT).load(Ordering::Acquire) {
            0 => Ok(meeting),
            why => Err(meeting.give_up(0, why)),
        }
    }

    /// Which of two buffers the `piece`th piece of this call takes.
    pub(super) fn parity(&self, piece: u64) -> u64 {
        if self.breaks(Mutants::ONE_BUFFER) { 0 } else { (self.number + piece) & 1 }
    }

    /// Whether a test wants a rule to be broken.
    pub(super) fn breaks(&self, mutant: Mutants) -> bool {
        self.mutants & mutant.0 != 0
    }

    /// What others see of this rank when it has announced a phase.
    pub(super) fn flag(&self, phase: u64) -> u64 {
        self.number << 16 | phase
    }

    /// A place in a rank's memory of the lane.
    pub(super) fn place(&self, rank: u32, at: u64) -> u64 {
        self.lane.base + u64::from(rank) * self.lane.stride + at
    }

    /// Every rank but this one.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.lane.rank;
        (0..self.lane.ranks).filter(move |rank| *rank != own)
    }

    /// Where a rank says how far it has come in this call.
    pub(super) fn signal_at(&self, rank: u32) -> u64 {
        match self.signals {
            Signals::Lines => self.place(rank, u64::from(rank) * LINE),
            Signals::Packets => self.place(rank, slot_at(self.lane, rank, self.parity(0))),
        }
    }

    /// Says that this rank has come to a phase: what it has written before can be read by those who hear it.
    pub(super) fn announce(&self, phase: u64) {
        self.pause(2 * phase);
        self.signal(self.lane.rank).store(self.flag(phase), Ordering::Release);
    }

    /// Waits until all ranks have come to a phase that this one has announced.
    pub(super) fn await_all(&mut self, phase: u64) -> Result<(), GaveUp> {
        for rank in self.others() {
            self.wait(rank, phase)?;
        }
        self.rouse(phase);
        self.pause(2 * phase + 1);
        Ok(())
    }

    /// A barrier. `mutant` is the wish that it be none.
    pub(super) fn sync(&mut self, phase: u64, mutant: Mutants) -> Result<(), GaveUp> {
        self.announce(phase);
        if self.breaks(mutant) {
            self.rouse(phase);
            return Ok(());
        }
        self.await_all(phase)
    }

    /// Waits until a rank has come to a phase.
    fn wait(&mut self, rank: u32, phase: u64) -> Result<(), GaveUp> {
        let (signal, flag) = (self.signal(rank), self.flag(phase));
        for _ in 0..self.control(SPINS).load(Ordering::Relaxed) {
            if has_come(signal.load(Ordering::Acquire), flag) {
                return Ok(());
            }
            spin_loop();
        }
        self.wait_long(rank, phase)
    }

    /// Waits, and lets others run meanwhile.
    #[cold]
    fn wait_long(&mut self, rank: u32, phase: u64) -> Result<(), GaveUp> {
        self.rouse(phase);
        let (signal, flag) = (self.signal(rank), self.flag(phase));
        for _ in 0..YIELDS {
            std::thread::yield_now();
            if has_come(signal.load(Ordering::Acquire), flag) {
                return Ok(());
            }
        }
        self.sleep(rank, phase)
    }

    /// Wakes who sleeps until this rank comes to the phase that it has announced.
    fn rouse(&self, phase: u64) {
        let own = self.lane.rank;
        // In one order: the announcement, and the look at who sleeps.
        fence(Ordering::SeqCst);
        if self.sleepers(own).load(Ordering::Relaxed) != 0 {
            // The word that they sleep on changes, also where it is not what they wait for.
            self.said(own).store(self.flag(phase), Ordering::SeqCst);
            wake(self.said(own));
        }
    }

    #[cold]
    fn sleep(&mut self, rank: u32, phase: u64) -> Result<(), GaveUp> {
        let (signal, flag) = (self.signal(rank), self.flag(phase));
        let (said, sleepers, asleep) = (self.said(rank), self.sleepers(rank), self.report(ASLEEP));
        let deadline = self.deadline();
        sleepers.fetch_add(1, Ordering::SeqCst);
        asleep.store(1, Ordering::SeqCst);
        let outcome = loop {
            let seen = said.load(Ordering::SeqCst);
            // In this order: who has left, or died, may have come before.
            let why = self.cause_to_give_up();
            let is_there = || has_come(signal.load(Ordering::SeqCst), flag);
            if is_there() {
                break Ok(());
            }
            if let Some(why) = why {
                break Err(why);
            }
            // The lower half of the word changes with every phase.
            let half = u32::try_from(seen & 0xffff_ffff).unwrap_or_default();
            // It fails when its time is over, which is looked at, or where the memory is gone, and then nobody comes.
            let slept = futex::wait(lower_half(said), half, nap(deadline));
            if slept == Err(wholemem_os::Error::TimedOut) {
                // Awake: the answer may take what somebody holds who waits until nobody sleeps, or be given by one who does.
                asleep.store(0, Ordering::SeqCst);
                let is_interrupted = interrupt::is_interrupted();
                asleep.store(1, Ordering::SeqCst);
                if is_interrupted {
                    break Err(cause(ABORTED, Rank(self.lane.rank)));
                }
            }
            if deadline.has_passed() {
                break if is_there() { Ok(()) } else { Err(cause(MISSED, Rank(rank))) };
            }
        };
        asleep.store(0, Ordering::SeqCst);
        sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome.map_err(|cause| self.give_up(phase, cause))
    }

    /// When this rank's patience is over.
    fn deadline(&mut self) -> Deadline {
        let nanoseconds = self.control(TIMEOUT).load(Ordering::Relaxed);
        if nanoseconds == 0 {
            return Deadline::NEVER;
        }
        let began = *self.began.get_or_insert_with(Instant::now);
        Deadline::after(Duration::from_nanos(nanoseconds).saturating_sub(began.elapsed()))
    }

    /// Whether this rank was told to give up, or another has.
    fn cause_to_give_up(&self) -> Option<u64> {
        let notice = |rank: u32| self.notice(self.lane.rank, rank).load(Ordering::Acquire);
        let told = self.report(ABORT).load(Ordering::SeqCst);
        [told].into_iter().chain(self.others().map(notice)).find(|cause| *cause != 0)
    }

    /// Says why, here and to the others, and that no further call is to begin.
    #[cold]
    fn give_up(&self, phase: u64, why: u64) -> GaveUp {
        self.control(POISON).store(1, Ordering::Relaxed);
        let flag = self.flag(phase);
        for rank in self.others() {
            if why >> 32 == MISSED && !has_come(self.signal(rank).load(Ordering::Acquire), flag) {
                self.report(MISSING + rank as usize / 64).fetch_or(1 << (rank % 64), Ordering::Relaxed);
            }
            self.notice(rank, self.lane.rank).store(why, Ordering::Release);
        }
        self.report(SEQUENCE).store(self.number, Ordering::Relaxed);
        self.report(PHASE).store(phase, Ordering::Relaxed);
        self.report(CAUSE).store(why, Ordering::Relaxed);
        self.report(GIVEN_UP).store(1, Ordering::Release);
        // Whoever sleeps looks at the notices.
        (0..self.lane.ranks).for_each(|rank| wake(self.said(rank)));
        GaveUp
    }

    /// Ends the call.
    pub(super) fn end(self) {
        self.control(FIRST_COUNTER).store(self.number.wrapping_add(1), Ordering::Relaxed);
    }

    /// Waits as long as a test wants this rank to, at a point of a call.
    pub(super) fn pause(&self, point: u64) {
        if self.lane.debug != 0 {
            self.pause_as_wanted(point);
        }
    }

    #[cold]
    fn pause_as_wanted(&self, point: u64) {
        let wish = |index: u64| self.word(self.lane.debug + 8 * index).load(Ordering::Relaxed);
        let (seed, most) = (wish(1), wish(2));
        let fixed = wish(DELAYS as u64 + point.min(7) * u64::from(BLOCKS));
        let random =
            if most == 0 { 0 } else { scramble(seed ^ scramble(self.number << 3 | point)) % (most + 1) };
        let delay = Duration::from_nanos(fixed + random);
        if delay > SHORT {
            std::thread::sleep(delay);
        }
        let start = Instant::now();
        while delay <= SHORT && start.elapsed() < delay {
            std::thread::yield_now();
        }
    }

    /// A word of the lane's memory, counters, report or wishes.
    fn word(&self, address: u64) -> &'a AtomicU64 {
        // SAFETY: whoever began the meeting answers for all of them, in which words are aligned, and accessed as atomics
        // alone.
        unsafe { word_at(address) }
    }

    fn signal(&self, rank: u32) -> &'a AtomicU64 {
        self.word(self.signal_at(rank))
    }

    /// What who waits for a rank sleeps on.
    fn said(&self, rank: u32) -> &'a AtomicU64 {
        self.word(self.place(rank, u64::from(rank) * LINE))
    }

    fn sleepers(&self, rank: u32) -> &'a AtomicU32 {
        lower_half(self.word(self.place(rank, u64::from(self.lane.ranks + rank) * LINE)))
    }

    /// Where `from` tells `rank` that it has given up.
    fn notice(&self, rank: u32, from: u32) -> &'a AtomicU64 {
        self.word(self.place(rank, self.lane.notices_at + u64::from(from) * 8))
    }

    fn control(&self, index: usize) -> &'a AtomicU64 {
        self.word(self.lane.control + index as u64 * 8)
    }

    fn report(&self, index: usize) -> &'a AtomicU64 {
        self.word(self.lane.report + index as u64 * 8)
    }
}

/// A word of a lane's memory, counters, report or wishes.
///
/// # Safety
/// It is accessible for all of `'a`, and aligned, and accessed as an atomic alone.
unsafe fn word_at<'a>(address: u64) -> &'a AtomicU64 {
    let at = std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0));
    // SAFETY: passed on from the caller.
    unsafe { AtomicU64::from_ptr(at) }
}

/// Whether a word that only grows has reached another, also behind its largest number.
fn has_come(said: u64, flag: u64) -> bool {
    said.wrapping_sub(flag) < 1 << 63
}

/// The half of a word that the kernel compares before it puts anybody to sleep.
fn lower_half(word: &AtomicU64) -> &AtomicU32 {
    const { assert!(cfg!(target_endian = "little"), "the lower half comes first") };
    // SAFETY: the lower half of a word that lives as long; it is a word's own, or passed to the kernel alone.
    unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
}

/// When who sleeps looks again in any case: the deadline, or sooner.
fn nap(deadline: Deadline) -> Deadline {
    if deadline.remaining().is_some_and(|left| left < NAP) { deadline } else { Deadline::after(NAP) }
}

fn wake(said: &AtomicU64) {
    // It fails only where the memory is gone, and then nobody sleeps on it.
    let _ = futex::wake_all(lower_half(said));
}

/// Numbers that look random.
fn scramble(number: u64) -> u64 {
    let mixed = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_compared_over_their_end() {
        assert!(has_come(5, 5) && has_come(6, 5) && !has_come(4, 5));
        assert!(has_come(1, u64::MAX) && !has_come(u64::MAX, 1));
    }
}
