//! A bounds-checked view of shared bytes: copies in and out, and atomics.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::copy::{copy, fill};
use super::stream::copy_nonoverlapping;
use super::word::{ReadU32, ReadU64};
use crate::{Error, Result};

/// A range of bytes that other processes may write concurrently, and that is mapped during the lifetime `'a`.
///
/// Every access is checked against the length and the access rights, and no reference to plain bytes is created.
#[derive(Debug, Clone, Copy)]
pub struct SharedSlice<'a> {
    at: NonNull<u8>,
    len: usize,
    writable: bool,
    memory: PhantomData<&'a ()>,
}

// SAFETY: every access through a `SharedSlice` is atomic, or a copy that allows concurrent writers.
unsafe impl Send for SharedSlice<'_> {}
// SAFETY: every access through a `&SharedSlice` is atomic, or a copy that allows concurrent writers.
unsafe impl Sync for SharedSlice<'_> {}

/// Creates a read-only view of private bytes, for functions that accept shared bytes.
impl<'a> From<&'a [u8]> for SharedSlice<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { at: NonNull::from(bytes).cast(), len: bytes.len(), writable: false, memory: PhantomData }
    }
}

impl<'a> SharedSlice<'a> {
    /// Creates a view of `len` shared bytes at address `at`.
    ///
    /// # Safety
    /// For all of `'a` the range is mapped, readable, and writable if `writable`; it cannot become shorter; and this
    /// process creates no reference to its bytes except through such views.
    #[must_use]
    pub unsafe fn new(at: NonNull<u8>, len: usize, writable: bool) -> Self {
        Self { at, len, writable, memory: PhantomData }
    }

    /// Returns the length of the view in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length of the view is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether this process may write through the view.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Returns the address of the first byte. The caller may copy through the pointer or access atomics, but must not
    /// create references to the shared bytes.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.at
    }

    /// Returns a view of the `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn part(&self, offset: usize, len: usize) -> Result<SharedSlice<'a>> {
        let at = self.checked_address(offset, len)?;
        Ok(Self { at, len, ..*self })
    }

    /// Returns a read-only view of the bytes of this view.
    #[must_use]
    pub fn read_only(&self) -> SharedSlice<'a> {
        Self { writable: false, ..*self }
    }

    /// Copies shared bytes from `offset` on into all of `target`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn read_at(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let from = self.checked_address(offset, target.len())?;
        // SAFETY: `checked_address` has checked that the source is in a range that is readable for `'a`; `target` is
        // exclusive.
        unsafe { copy_nonoverlapping(from.as_ptr(), target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies all bytes of `source` into the shared bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`].
    pub fn write_at(&self, offset: usize, source: &[u8]) -> Result<()> {
        let to = self.checked_writable(offset, source.len())?;
        // SAFETY: `checked_writable` has checked that the target is in a range that is writable for `'a`, and
        // `source` cannot overlap it, since no reference to shared bytes exists.
        unsafe { copy_nonoverlapping(source.as_ptr(), to.as_ptr(), source.len()) };
        Ok(())
    }

    /// Copies all bytes of `source`, which may be shared too, to `offset` in this view. If the two ranges overlap,
    /// bytes are copied in ascending order.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`].
    pub fn copy_from(&self, offset: usize, source: &SharedSlice<'_>) -> Result<()> {
        let to = self.checked_writable(offset, source.len)?;
        if to.addr().get().abs_diff(source.at.addr().get()) >= source.len {
            // SAFETY: both ranges are accessible for their lifetimes, and neither begins within the other.
            unsafe { copy_nonoverlapping(source.at.as_ptr(), to.as_ptr(), source.len) };
            return Ok(());
        }
        // SAFETY: both ranges are accessible for their lifetimes, and `copy` is sound if other threads or processes
        // access them concurrently. It copies in ascending order: if the target overlaps the source at a higher
        // address, bytes are repeated, but no byte outside the two ranges is accessed.
        unsafe { copy(source.at.as_ptr(), to.as_ptr(), source.len) };
        Ok(())
    }

    /// Sets every byte of the view to `value`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`].
    pub fn fill(&self, value: u8) -> Result<()> {
        let to = self.checked_writable(0, self.len)?;
        // SAFETY: `checked_writable` has checked that this process may write the whole view.
        unsafe { fill(to.as_ptr(), value, self.len) };
        Ok(())
    }

    /// Returns the four bytes at `offset` as an atomic.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Misaligned`].
    #[inline]
    pub fn atomic_u32(&self, offset: usize) -> Result<&'a AtomicU32> {
        let at = self.checked_writable(offset, size_of::<u32>())?;
        aligned::<AtomicU32>(at, offset)
    }

    /// Returns the eight bytes at `offset` as an atomic.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Misaligned`].
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> Result<&'a AtomicU64> {
        let at = self.checked_writable(offset, size_of::<u64>())?;
        aligned::<AtomicU64>(at, offset)
    }

    /// Returns the four bytes at `offset` as a read-only atomic.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn read_u32(&self, offset: usize) -> Result<ReadU32<'a>> {
        let at = self.checked_address(offset, size_of::<u32>())?;
        aligned::<AtomicU32>(at, offset).map(ReadU32::new)
    }

    /// Returns the eight bytes at `offset` as a read-only atomic.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn read_u64(&self, offset: usize) -> Result<ReadU64<'a>> {
        let at = self.checked_address(offset, size_of::<u64>())?;
        aligned::<AtomicU64>(at, offset).map(ReadU64::new)
    }

    #[inline]
    fn checked_writable(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        if self.writable { self.checked_address(offset, len) } else { Err(Error::ReadOnly) }
    }

    /// Checks the bounds of an access to the view, and returns the address of the access. An empty access at the end
    /// is allowed.
    #[inline]
    fn checked_address(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        match offset.checked_add(len) {
            // SAFETY: `offset <= self.len`, so the result is inside the range or one past its end.
            Some(end) if end <= self.len => Ok(unsafe { self.at.add(offset) }),
            _ => Err(Error::OutOfRange { offset, len, size: self.len }),
        }
    }
}

#[inline]
fn aligned<'a, Atomic>(at: NonNull<u8>, offset: usize) -> Result<&'a Atomic> {
    if at.cast::<Atomic>().is_aligned() {
        // SAFETY: the callers have checked that the bytes are in a range that is mapped for `'a`; an atomic may be
        // shared with writers in other processes, and every bit pattern is valid.
        Ok(unsafe { at.cast::<Atomic>().as_ref() })
    } else {
        Err(Error::Misaligned { offset, align: align_of::<Atomic>() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    /// Calls `test` with a view of 16 aligned words of eight bytes.
    fn with_bytes(writable: bool, test: impl FnOnce(SharedSlice<'_>)) {
        let mut words = [0_u64; 16];
        let at = NonNull::from(&mut words).cast();
        // SAFETY: `words` outlives the call and is not accessed otherwise while the view exists.
        test(unsafe { SharedSlice::new(at, size_of_val(&words), writable) });
    }

    #[test]
    fn an_access_may_end_at_the_end_but_not_beyond_it() {
        with_bytes(true, |bytes| {
            bytes.write_at(120, &[7; 8]).unwrap();
            bytes.write_at(128, &[]).unwrap();
            let beyond = Error::OutOfRange { offset: 121, len: 8, size: 128 };
            assert_eq!(bytes.write_at(121, &[7; 8]), Err(beyond.clone()));
            assert_eq!(bytes.read_at(121, &mut [0; 8]), Err(beyond));
            let overflow = Error::OutOfRange { offset: usize::MAX, len: 2, size: 128 };
            assert_eq!(bytes.read_at(usize::MAX, &mut [0; 2]), Err(overflow));
            assert_eq!(
                bytes.read_at(129, &mut []),
                Err(Error::OutOfRange { offset: 129, len: 0, size: 128 })
            );
        });
    }

    #[test]
    fn offsets_in_a_part_count_from_its_start() {
        with_bytes(true, |bytes| {
            let part = bytes.part(32, 16).unwrap();
            part.write_at(8, &[9]).unwrap();
            let mut seen = [0];
            bytes.read_at(40, &mut seen).unwrap();
            assert_eq!(seen, [9]);
            assert_eq!(part.write_at(16, &[9]), Err(Error::OutOfRange { offset: 16, len: 1, size: 16 }));
            let beyond = bytes.part(120, 16).unwrap_err();
            assert_eq!(beyond, Error::OutOfRange { offset: 120, len: 16, size: 128 });
        });
    }

    #[test]
    fn a_read_only_view_refuses_writes() {
        with_bytes(false, |bytes| {
            assert_eq!(bytes.write_at(0, &[1]), Err(Error::ReadOnly));
            assert_eq!(bytes.fill(1), Err(Error::ReadOnly));
            assert_eq!(bytes.copy_from(0, &bytes), Err(Error::ReadOnly));
            assert_eq!(bytes.atomic_u32(0).unwrap_err(), Error::ReadOnly);
            assert_eq!(bytes.atomic_u64(0).unwrap_err(), Error::ReadOnly);
            assert_eq!(bytes.part(8, 8).unwrap().write_at(0, &[1]), Err(Error::ReadOnly));
            assert_eq!(bytes.read_u64(0).unwrap().load_acquire(), 0);
        });
        with_bytes(true, |bytes| assert_eq!(bytes.read_only().write_at(0, &[1]), Err(Error::ReadOnly)));
    }

    #[test]
    fn atomics_are_checked_for_alignment_and_bounds() {
        with_bytes(true, |bytes| {
            bytes.atomic_u64(120).unwrap().store(5, Ordering::Release);
            assert_eq!(bytes.read_u64(120).unwrap().load_acquire(), 5);
            bytes.atomic_u32(4).unwrap().store(6, Ordering::Relaxed);
            assert_eq!(bytes.read_u32(4).unwrap().load_relaxed(), 6);
            assert_eq!(bytes.atomic_u64(4).unwrap_err(), Error::Misaligned { offset: 4, align: 8 });
            assert_eq!(bytes.read_u32(2).unwrap_err(), Error::Misaligned { offset: 2, align: 4 });
            let beyond = Error::OutOfRange { offset: 128, len: 8, size: 128 };
            assert_eq!(bytes.atomic_u64(128).unwrap_err(), beyond);
        });
    }

    #[test]
    fn shared_bytes_can_be_copied_to_shared_bytes() {
        with_bytes(true, |bytes| {
            bytes.fill(3).unwrap();
            bytes.part(0, 8).unwrap().fill(4).unwrap();
            bytes.copy_from(64, &bytes.part(0, 16).unwrap()).unwrap();
            let mut seen = [0; 17];
            bytes.read_at(64, &mut seen).unwrap();
            assert_eq!(seen, [4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
        });
    }

    #[test]
    fn overlapping_copies_are_in_ascending_order_and_long_copies_are_complete() {
        with_bytes(true, |bytes| {
            bytes.part(0, 4).unwrap().copy_from(0, &(&[1, 2, 3, 4][..]).into()).unwrap();
            bytes.copy_from(1, &bytes.part(0, 4).unwrap()).unwrap();
            let mut seen = [0; 6];
            bytes.read_at(0, &mut seen).unwrap();
            assert_eq!(seen, [1, 1, 1, 1, 1, 0]);
        });
        // Under Miri the copy is shorter, since Miri is slow and does not use the streaming copy.
        let mut long = vec![0_u8; if cfg!(miri) { 1000 } else { (1 << 20) + 77 }];
        let from: Vec<_> = (0..long.len()).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let (at, len) = (NonNull::from(&mut long[..]).cast(), long.len());
        // SAFETY: the vector outlives the view, and is not accessed otherwise while the view exists.
        let to = unsafe { SharedSlice::new(at, len, true) };
        to.copy_from(0, &from[..].into()).unwrap();
        assert_eq!(long, from);
    }

    #[test]
    fn a_view_of_private_bytes_can_be_read_but_not_written() {
        let bytes = SharedSlice::from(&b"hello"[..]);
        let mut seen = [0; 4];
        bytes.read_at(1, &mut seen).unwrap();
        assert_eq!(&seen, b"ello");
        assert_eq!(bytes.write_at(0, b"j"), Err(Error::ReadOnly));
        assert!(SharedSlice::from(&b""[..]).is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no memory that two threads may race on")]
    fn a_racing_copy_sees_only_bytes_that_were_written() {
        with_bytes(true, |bytes| {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..2000).for_each(|round| bytes.fill([0, 0xFF][round % 2]).unwrap()));
                for _ in 0..2000 {
                    let mut seen = [1; 128];
                    bytes.read_at(0, &mut seen).unwrap();
                    assert!(seen.iter().all(|byte| [0, 0xFF].contains(byte)));
                }
            });
        });
    }
}
