//! A bounded view of shared bytes: copies in and out, and atomics.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::copy::{copy, fill};
use super::stream::copy_apart;
use super::word::{ReadU32, ReadU64};
use crate::{Error, Result};

/// A range of bytes that other processes may write at any moment, for as long as `'a`.
///
/// Every access is checked against its length and rights, and none makes a reference to plain bytes.
#[derive(Debug, Clone, Copy)]
pub struct SharedSlice<'a> {
    at: NonNull<u8>,
    len: usize,
    writable: bool,
    memory: PhantomData<&'a ()>,
}

// SAFETY: every access is atomic or goes through a copy made for memory that others write meanwhile.
unsafe impl Send for SharedSlice<'_> {}
// SAFETY: a shared reference gives the same accesses, which are atomic or copies made for memory that others write
// meanwhile.
unsafe impl Sync for SharedSlice<'_> {}

/// Bytes of this process that nobody writes, where shared ones may stand too. They are not written through the view.
impl<'a> From<&'a [u8]> for SharedSlice<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { at: NonNull::from(bytes).cast(), len: bytes.len(), writable: false, memory: PhantomData }
    }
}

impl<'a> SharedSlice<'a> {
    /// A view of `len` bytes at `at`.
    ///
    /// # Safety
    /// For all of `'a` the range is mapped, readable, and writable if `writable`; it cannot become shorter; and this
    /// process makes no reference to its bytes other than through views like this.
    #[must_use]
    pub unsafe fn new(at: NonNull<u8>, len: usize, writable: bool) -> Self {
        Self { at, len, writable, memory: PhantomData }
    }

    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this process may write here.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Where the bytes are. Reading or writing through the pointer is subject to this module's two rules.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.at
    }

    /// The part from `offset`, `len` bytes long.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn part(&self, offset: usize, len: usize) -> Result<SharedSlice<'a>> {
        let at = self.place(offset, len)?;
        Ok(Self { at, len, ..*self })
    }

    /// The same bytes, for reading only.
    #[must_use]
    pub fn read_only(&self) -> SharedSlice<'a> {
        Self { writable: false, ..*self }
    }

    /// Copies bytes out into `target`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn read_at(&self, offset: usize, target: &mut [u8]) -> Result<()> {
        let from = self.place(offset, target.len())?;
        // SAFETY: `place` checked the source against a range that is readable for `'a`; the target is exclusive.
        unsafe { copy_apart(from.as_ptr(), target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies `source` in.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`].
    pub fn write_at(&self, offset: usize, source: &[u8]) -> Result<()> {
        let to = self.writable_place(offset, source.len())?;
        // SAFETY: `writable_place` checked the target against a range that is writable for `'a`, and `source` cannot
        // overlap it: no reference to shared bytes exists.
        unsafe { copy_apart(source.as_ptr(), to.as_ptr(), source.len()) };
        Ok(())
    }

    /// Copies all of `source`, itself shared, to `offset`. Where the two overlap, the bytes go in ascending order.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`].
    pub fn copy_from(&self, offset: usize, source: &SharedSlice<'_>) -> Result<()> {
        let to = self.writable_place(offset, source.len)?;
        if to.addr().get().abs_diff(source.at.addr().get()) >= source.len {
            // SAFETY: as below, and neither begins within the other.
            unsafe { copy_apart(source.at.as_ptr(), to.as_ptr(), source.len) };
            return Ok(());
        }
        // SAFETY: both ranges are accessible for their lifetimes; the copy tolerates every race, and an overlap the
        // wrong way round repeats bytes within the two ranges without leaving them.
        unsafe { copy(source.at.as_ptr(), to.as_ptr(), source.len) };
        Ok(())
    }

    /// Sets every byte to `value`.
    ///
    /// # Errors
    /// [`Error::ReadOnly`].
    pub fn fill(&self, value: u8) -> Result<()> {
        let to = self.writable_place(0, self.len)?;
        // SAFETY: `writable_place` checked the range.
        unsafe { fill(to.as_ptr(), value, self.len) };
        Ok(())
    }

    /// The four bytes at `offset` as an atomic.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Misaligned`].
    #[inline]
    pub fn atomic_u32(&self, offset: usize) -> Result<&'a AtomicU32> {
        let at = self.writable_place(offset, size_of::<u32>())?;
        aligned::<AtomicU32>(at, offset)
    }

    /// The eight bytes at `offset` as an atomic.
    ///
    /// # Errors
    /// [`Error::ReadOnly`], [`Error::OutOfRange`], [`Error::Misaligned`].
    #[inline]
    pub fn atomic_u64(&self, offset: usize) -> Result<&'a AtomicU64> {
        let at = self.writable_place(offset, size_of::<u64>())?;
        aligned::<AtomicU64>(at, offset)
    }

    /// The four bytes at `offset`, to be read while others write them.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn read_u32(&self, offset: usize) -> Result<ReadU32<'a>> {
        let at = self.place(offset, size_of::<u32>())?;
        aligned::<AtomicU32>(at, offset).map(ReadU32::new)
    }

    /// The eight bytes at `offset`, to be read while others write them.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::Misaligned`].
    pub fn read_u64(&self, offset: usize) -> Result<ReadU64<'a>> {
        let at = self.place(offset, size_of::<u64>())?;
        aligned::<AtomicU64>(at, offset).map(ReadU64::new)
    }

    #[inline]
    fn writable_place(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
        if self.writable { self.place(offset, len) } else { Err(Error::ReadOnly) }
    }

    /// The one place where offsets meet the length. An empty access at the very end is legal.
    #[inline]
    fn place(&self, offset: usize, len: usize) -> Result<NonNull<u8>> {
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
        // SAFETY: callers checked that the bytes lie in a range mapped for `'a`; an atomic may be shared with
        // writers in other processes, and has no invalid value.
        Ok(unsafe { at.cast::<Atomic>().as_ref() })
    } else {
        Err(Error::Misaligned { offset, align: align_of::<Atomic>() })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    /// Sixteen words, so that alignment is known, reached as shared bytes only.
    fn with_bytes(writable: bool, test: impl FnOnce(SharedSlice<'_>)) {
        let mut words = [0_u64; 16];
        let at = NonNull::from(&mut words).cast();
        // SAFETY: `words` outlives the call and is not touched by name while the view exists.
        test(unsafe { SharedSlice::new(at, size_of_val(&words), writable) });
    }

    #[test]
    fn an_access_may_end_at_the_end_but_not_beyond() {
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
    fn a_part_counts_from_its_own_start() {
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
    fn a_read_only_view_writes_nothing() {
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
    fn atomics_are_aligned_and_within() {
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
    fn shared_bytes_are_copied_to_shared_bytes() {
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
    fn copies_that_overlap_go_in_ascending_order_and_long_ones_are_whole() {
        with_bytes(true, |bytes| {
            bytes.part(0, 4).unwrap().copy_from(0, &(&[1, 2, 3, 4][..]).into()).unwrap();
            bytes.copy_from(1, &bytes.part(0, 4).unwrap()).unwrap();
            let mut seen = [0; 6];
            bytes.read_at(0, &mut seen).unwrap();
            assert_eq!(seen, [1, 1, 1, 1, 1, 0]);
        });
        // Every byte takes Miri a while, and it streams none.
        let mut long = vec![0_u8; if cfg!(miri) { 1000 } else { (1 << 20) + 77 }];
        let from: Vec<_> = (0..long.len()).map(|at| (at % 251).to_le_bytes()[0]).collect();
        let (at, len) = (NonNull::from(&mut long[..]).cast(), long.len());
        // SAFETY: the vector outlives the view, and is not touched by name while it exists.
        let to = unsafe { SharedSlice::new(at, len, true) };
        to.copy_from(0, &from[..].into()).unwrap();
        assert_eq!(long, from);
    }

    #[test]
    fn bytes_of_this_process_are_read_as_shared_ones_and_not_written() {
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
