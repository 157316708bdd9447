//! The table of objects that handles refer to.
//!
//! ```text
//!   handle   | generation 32 | kind 8 | slot 24 |        0 is no handle: every kind is at least 1
//!
//!   segments   [64 slots] [128 slots] [256 slots] ...    allocated when needed, never moved or released
//!   slot       state word, object, first and current generation, link of the free list
//! ```
//!
//! Guarantees: a handle that was freed, or that another process or another copy of the library created, or that is of another kind, is
//! an error. An object that calls use while its handle is freed lives until the last of these calls ends. A lookup takes no lock: it
//! is one atomic operation at its begin and one at its end, on the slot of the object.
//!
//! The generation of a slot begins at a random number, so that handles of two processes differ. A slot whose generations are all used
//! is not used again, so no handle is ever valid twice.

use std::any::Any;
use std::cell::UnsafeCell;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::ops::Deref;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use super::free_list::FreeList;
use super::state::{KEY_SHIFT, Refused, SlotState};
use super::{HandleError, Kind, Object};

/// The number of slots of the first segment. Each further segment has twice as many.
const FIRST_LEN: u32 = 64;

/// The number of slots, which fit in the lower bits of a handle.
const MAX_SLOTS: u32 = 1 << KEY_SHIFT;

/// The number of segments that have at least [`MAX_SLOTS`] slots together.
const SEGMENTS: usize = 19;

/// A slot of the table. It has a cache line of its own, so that calls on different objects do not share one.
#[repr(align(64))]
#[derive(Default)]
struct Slot {
    state: SlotState<AtomicU64>,
    /// Written only by the owner of the slot: see [`SlotState`].
    object: UnsafeCell<Option<Box<dyn Any + Send + Sync>>>,
    /// The generation of the next handle. Read and written only by the owner of the slot.
    generation: AtomicU32,
    /// The link of the free list.
    link: AtomicU64,
}

// SAFETY: the object is `Send` and `Sync`. It is written only by the owner of the slot, and read only by calls that have entered the
// slot, whose state guarantees that there is no owner meanwhile.
unsafe impl Sync for Slot {}

/// The objects of a process, by handle.
pub(crate) struct HandleTable {
    segments: [AtomicPtr<Slot>; SEGMENTS],
    /// The number of slots that were ever used.
    used: AtomicU32,
    free: FreeList<AtomicU64>,
    /// A random number from which the first generations are derived; 0 until the first handle is created.
    seed: AtomicU64,
    /// The number of generations of a slot, less than 2^32 only in tests.
    generations: u32,
}

impl fmt::Debug for HandleTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandleTable").field("used", &self.used).finish_non_exhaustive()
    }
}

/// An object in use by a call. The object lives at least as long as this reference.
pub(crate) struct Used<'a, T> {
    table: &'a HandleTable,
    slot: &'a Slot,
    number: u32,
    /// A pointer, not a reference, because the object is dropped while `Used::drop` runs.
    object: NonNull<T>,
}

impl<T> fmt::Debug for Used<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Used").field("slot", &self.number).finish_non_exhaustive()
    }
}

impl<T> Deref for Used<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the call has entered the slot and not left it, so the object, to which `get` has created the pointer, is alive and
        // is not written.
        unsafe { self.object.as_ref() }
    }
}

impl<T> Drop for Used<'_, T> {
    #[inline]
    fn drop(&mut self) {
        if self.slot.state.leave() {
            self.table.take(self.slot, self.number);
        }
    }
}

impl HandleTable {
    pub(crate) const fn new() -> Self {
        Self::with_generations(u32::MAX)
    }

    const fn with_generations(generations: u32) -> Self {
        Self {
            segments: [const { AtomicPtr::new(ptr::null_mut()) }; SEGMENTS],
            used: AtomicU32::new(0),
            free: FreeList::new(AtomicU64::new(0)),
            seed: AtomicU64::new(0),
            generations,
        }
    }

    /// Adds an object, and returns its handle.
    ///
    /// # Errors
    /// [`HandleError::Full`].
    pub(crate) fn add<T: Object>(&self, object: T) -> Result<u64, HandleError> {
        let number = match self.free.pop(|number| &self.used_slot(number).link) {
            Some(number) => number,
            None => self.new_slot()?,
        };
        let slot = self.used_slot(number);
        let object: Box<dyn Any + Send + Sync> = Box::new(object);
        // SAFETY: this call owns the slot, which was new or was removed from the free list, so there is no other access.
        let previous = unsafe { ptr::replace(slot.object.get(), Some(object)) };
        debug_assert!(previous.is_none(), "a free slot has no object");
        let generation = slot.generation.load(Ordering::Relaxed);
        let key = u64::from(generation) << 8 | T::KIND as u64;
        slot.state.publish(key);
        Ok(key << KEY_SHIFT | u64::from(number))
    }

    /// Returns the object of a handle. The object is kept alive until the result is dropped.
    ///
    /// # Errors
    /// [`HandleError`] if there is no such object.
    #[inline]
    pub(crate) fn get<T: Object>(&self, handle: u64) -> Result<Used<'_, T>, HandleError> {
        let (key, number) = self.decode(handle, T::KIND)?;
        let Some(slot) = self.slot(number) else { return Err(HandleError::Unknown { handle }) };
        slot.state.enter(key).map_err(|refused| refused_error(refused, handle))?;
        // SAFETY: this call has entered the slot, so the object is not written until it leaves, in `Used::drop`.
        let object = unsafe { &*slot.object.get() };
        let object = object.as_ref().and_then(|object| object.downcast_ref());
        let Some(object) = object else { unreachable!("a slot has an object of the kind in its key") };
        Ok(Used { table: self, slot, number, object: NonNull::from(object) })
    }

    /// Frees a handle. The object is dropped here, or at the end of the last call that uses it.
    ///
    /// # Errors
    /// [`HandleError`] if there is no such object.
    pub(crate) fn free(&self, handle: u64, kind: Kind) -> Result<(), HandleError> {
        let (key, number) = self.decode(handle, kind)?;
        let Some(slot) = self.slot(number) else { return Err(HandleError::Unknown { handle }) };
        if slot.state.free(key).map_err(|refused| refused_error(refused, handle))? {
            self.take(slot, number);
        }
        Ok(())
    }

    /// Returns the key and the number of the slot of a handle, after checking the kind.
    #[inline]
    fn decode(&self, handle: u64, expected: Kind) -> Result<(u64, u32), HandleError> {
        let [.., kind, high, middle, low] = handle.to_be_bytes();
        if kind != expected as u8 {
            return Err(HandleError::of_other_kind(handle, kind, expected));
        }
        Ok((handle >> KEY_SHIFT, u32::from_be_bytes([0, high, middle, low])))
    }

    /// Takes the object of a slot whose state has made the caller its owner, drops it, and makes the slot free.
    #[cold]
    fn take(&self, slot: &Slot, number: u32) {
        // SAFETY: the handle is freed and no call uses the object, so the caller is the only one who accesses it.
        let object = unsafe { ptr::replace(slot.object.get(), None) };
        // The slot is made free first: a panic of the destructor must not lose it.
        let next = slot.generation.load(Ordering::Relaxed).wrapping_add(1);
        slot.generation.store(next, Ordering::Relaxed);
        if next != self.first_generation(number).wrapping_add(self.generations) {
            self.free.push(number, |number| &self.used_slot(number).link);
        }
        drop(object);
    }

    /// Returns a slot that was never used.
    fn new_slot(&self) -> Result<u32, HandleError> {
        let full = HandleError::Full { limit: MAX_SLOTS };
        let next = |used: u32| (used < MAX_SLOTS).then_some(used + 1);
        let number = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).map_err(|_| full)?;
        let (segment, _) = position(number);
        if self.segments[segment].load(Ordering::Acquire).is_null() {
            self.allocate(segment);
        }
        self.used_slot(number).generation.store(self.first_generation(number), Ordering::Relaxed);
        Ok(number)
    }

    /// Allocates a segment, unless another thread does so at the same time.
    fn allocate(&self, segment: usize) {
        let slots: Box<[Slot]> = (0..FIRST_LEN << segment).map(|_| Slot::default()).collect();
        let slots = Box::into_raw(slots);
        let place = &self.segments[segment];
        // Release: the initialised slots are visible to all threads that load the address.
        let exchanged =
            place.compare_exchange(ptr::null_mut(), slots.cast(), Ordering::Release, Ordering::Relaxed);
        if exchanged.is_err() {
            // SAFETY: `slots` comes from `Box::into_raw` above, and no other thread has its address.
            drop(unsafe { Box::from_raw(slots) });
        }
    }

    /// Returns a slot by its number; `None` if it was never used.
    #[inline]
    fn slot(&self, number: u32) -> Option<&Slot> {
        let (segment, offset) = position(number);
        let slots = self.segments.get(segment)?.load(Ordering::Acquire);
        if slots.is_null() {
            return None;
        }
        // SAFETY: the segment has `FIRST_LEN << segment` slots, and `position` returns an offset below that.
        let slot = unsafe { slots.add(offset) };
        // SAFETY: the slots of a segment are initialised before its address is stored, and are never released while the table exists.
        Some(unsafe { &*slot })
    }

    fn used_slot(&self, number: u32) -> &Slot {
        self.slot(number).unwrap_or_else(|| unreachable!("the segment of a used slot is allocated"))
    }

    /// Returns the generation of the first handle of a slot.
    fn first_generation(&self, number: u32) -> u32 {
        let mut seed = self.seed.load(Ordering::Relaxed);
        if seed == 0 {
            let random = RandomState::new().hash_one(0) | 1;
            let stored = self.seed.compare_exchange(0, random, Ordering::Relaxed, Ordering::Relaxed);
            seed = stored.map_or_else(|other| other, |_| random);
        }
        // Multiplication by an odd number spreads consecutive slots over all generations (Fibonacci hashing).
        let [a, b, c, d, ..] = (seed ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
        u32::from_be_bytes([a, b, c, d])
    }
}

impl Drop for HandleTable {
    fn drop(&mut self) {
        for (segment, slots) in self.segments.iter_mut().enumerate() {
            let (slots, len) = (*slots.get_mut(), (FIRST_LEN << segment) as usize);
            if !slots.is_null() {
                // SAFETY: `allocate` has created the segment as a box of `len` slots, and no reference to it exists any more.
                drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(slots, len)) });
            }
        }
    }
}

/// Returns the segment of a slot, and the offset in it.
#[inline]
fn position(number: u32) -> (usize, usize) {
    let from_first = number + FIRST_LEN;
    let segment = from_first.ilog2() - FIRST_LEN.ilog2();
    (segment as usize, (from_first - (FIRST_LEN << segment)) as usize)
}

#[cold]
fn refused_error(refused: Refused, handle: u64) -> HandleError {
    match refused {
        Refused::Stale => HandleError::Unknown { handle },
        Refused::TooManyCalls => HandleError::TooManyCalls { handle },
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
