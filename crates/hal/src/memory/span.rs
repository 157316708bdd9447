//! A part of some memory, as streams take it: it keeps the memory alive, and knows who may do what with it.

use std::ptr::NonNull;
use std::sync::Arc;

use wholemem_os::SharedSlice;
use wholemem_os::width::to_usize;

use crate::backend::Held;
use crate::raw::Address;
use crate::{Attempt, Backend, Device, DeviceId, Error, Result, Rights};

/// Memory that has an address and outlives the work that uses it.
pub(crate) trait Addressable: Held {
    fn backend(&self) -> &Backend;
    fn rights_of(&self, device: DeviceId) -> Rights;

    /// Where this process reaches `len` bytes of it that devices have at `at`, if it does so other than through a map.
    fn host_pointer(&self, _at: Address, _len: usize) -> Option<NonNull<u8>> {
        None
    }
}

/// Where the host reaches `len` bytes at `at`, in memory that is `all` long and begins at two addresses.
pub(super) fn within(
    (begin, pointer): (Address, NonNull<u8>),
    all: usize,
    at: Address,
    len: usize,
) -> Option<NonNull<u8>> {
    let offset = to_usize(at.0.checked_sub(begin.0)?);
    // SAFETY: not beyond the end of what the pointer is of.
    (offset.checked_add(len)? <= all).then(|| unsafe { pointer.add(offset) })
}

/// Several memories as one: what all of them allow is allowed.
#[derive(Debug)]
struct Joined {
    /// At least one.
    parts: Vec<Arc<dyn Addressable>>,
}

impl Addressable for Joined {
    fn backend(&self) -> &Backend {
        self.parts[0].backend()
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        self.parts.iter().map(|part| part.rights_of(device)).min().unwrap_or(Rights::None)
    }

    fn host_pointer(&self, at: Address, len: usize) -> Option<NonNull<u8>> {
        self.parts.iter().find_map(|part| part.host_pointer(at, len))
    }
}

/// A part of a [`Mapping`](crate::Mapping) or of a [`PinnedBuffer`](crate::PinnedBuffer), or several of them
/// [joined](Span::join).
///
/// ```
/// use wholemem_hal::{Backend, HostConfig, Rights};
///
/// let device = Backend::host(HostConfig::default())?.device(0)?;
/// let map = device.allocate(1 << 20)?.map(Rights::ReadWrite)?;
/// let header = map.span(0, 4096)?;
/// let field = header.part(64, 8)?;
/// assert_eq!(field.address(), map.address() + 64);
/// # Ok::<(), wholemem_hal::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Span {
    memory: Arc<dyn Addressable>,
    at: Address,
    len: usize,
}

impl Span {
    pub(crate) fn new(memory: Arc<dyn Addressable>, at: Address, len: usize) -> Self {
        Self { memory, at, len }
    }

    /// The part from `offset`, `len` bytes long.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn part(&self, offset: usize, len: usize) -> Result<Span> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                Ok(Self { memory: Arc::clone(&self.memory), at: self.at.after(offset), len })
            }
            _ => Err(Error::OutOfRange { offset, len, size: self.len }),
        }
    }

    /// One span of several that follow each other without a gap, as maps side by side in one reservation do.
    ///
    /// ```
    /// use wholemem_hal::{Backend, Grant, HostConfig, Mapping, Reservation, Rights, Span};
    ///
    /// let backend = Backend::host(HostConfig::default())?;
    /// let device = backend.device(0)?;
    /// let (whole, rights) = (Reservation::create(&backend, 2 << 20)?, Rights::ReadWrite);
    /// let grants = [Grant { device: device.id(), rights }];
    /// let low = Mapping::create(&whole, 0, &device.allocate(1 << 20)?, &grants)?;
    /// let high = Mapping::create(&whole, 1 << 20, &device.allocate(1 << 20)?, &grants)?;
    ///
    /// let both = Span::join(&[low.all(), high.all()])?;
    /// device.stream()?.write(&both.part((1 << 20) - 2, 4)?, b"over")?; // the seam is not felt
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ZeroLength`] for none at all; [`Error::Gap`] where one does not begin at the end of the one before it;
    /// [`Error::WrongBackend`].
    pub fn join(spans: &[Span]) -> Result<Span> {
        let len = spans.iter().map(Span::len).sum();
        let attempt = || Attempt::Access { len };
        let Some(first) = spans.first() else { return Err(Error::ZeroLength { attempt: attempt() }) };
        if spans.iter().any(|span| span.memory.backend() != first.memory.backend()) {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        for pair in spans.windows(2) {
            let (end, next) = (pair[0].at.after(pair[0].len), pair[1].at);
            if end != next {
                return Err(Error::Gap { end: end.0, next: next.0 });
            }
        }
        if spans.len() == 1 {
            return Ok(first.clone());
        }
        let parts = spans.iter().map(|span| Arc::clone(&span.memory)).collect();
        Ok(Self { memory: Arc::new(Joined { parts }), at: first.at, len })
    }

    /// Nothing of the memory of several spans, which keeps all of it: one operand in place of many. `None` of none.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig, PinnedBuffer, Span};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let two = [PinnedBuffer::create(&device, 8)?.all(), PinnedBuffer::create(&device, 8)?.all()];
    /// let both = Span::keep(&two)?.expect("there are two");
    /// drop(two); // their memory stays
    /// assert!(both.is_empty());
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongBackend`].
    pub fn keep<'a>(spans: impl IntoIterator<Item = &'a Span>) -> Result<Option<Span>> {
        let spans: Vec<_> = spans.into_iter().collect();
        let Some(first) = spans.first() else { return Ok(None) };
        if spans.iter().any(|span| span.memory.backend() != first.memory.backend()) {
            return Err(Error::WrongBackend { attempt: Attempt::Access { len: 0 } });
        }
        let parts = spans.iter().map(|span| Arc::clone(&span.memory)).collect();
        Ok(Some(Self { memory: Arc::new(Joined { parts }), at: first.at, len: 0 }))
    }

    /// Where it begins, as the devices see it: what to pass to a kernel.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at.0
    }

    /// Its length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn at(&self) -> Address {
        self.at
    }

    pub(crate) fn memory(&self) -> &Arc<dyn Addressable> {
        &self.memory
    }

    /// Its bytes, where they are the host's own and do not lie across a seam.
    pub(crate) fn host_bytes(&self, writable: bool) -> Option<SharedSlice<'_>> {
        let pointer = self.memory.host_pointer(self.at, self.len)?;
        // SAFETY: the memory lives as long as `self` is borrowed, and is reached by views alone; who asks to write it has
        // checked the rights.
        Some(unsafe { SharedSlice::new(pointer, self.len, writable) })
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.at < other.at.after(other.len) && other.at < self.at.after(self.len)
    }

    /// Checks that work of `device` may use it so: what a launch does not check, and its caller answers for.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::WrongBackend`], [`Error::Forked`], naming the attempt.
    pub fn check(&self, device: &Device, needed: Rights, attempt: impl Fn() -> Attempt) -> Result<()> {
        // First: in a forked child the lock of the rights may be held by a thread that is not there.
        device.backend().check_fork(&attempt)?;
        if self.memory.backend() != device.backend() {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        let granted = self.memory.rights_of(device.id());
        if granted < needed {
            return Err(Error::Denied { attempt: attempt(), who: device.label(), granted, needed });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Grant, HostConfig, Mapping, Reservation};

    #[test]
    fn joined_spans_follow_each_other_and_allow_what_all_of_them_do() {
        let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
        let device = backend.device(0).unwrap();
        let granule = device.granularity().unwrap().minimum.len();
        let whole = Reservation::create(&backend, 3 * granule).unwrap();
        let map = |place: usize, rights| {
            let grants = [Grant { device: device.id(), rights }];
            Mapping::create(&whole, place * granule, &device.allocate(granule).unwrap(), &grants).unwrap()
        };
        let maps = [map(0, Rights::ReadWrite), map(1, Rights::Read), map(2, Rights::ReadWrite)];
        let [first, second, third] = maps.each_ref().map(Mapping::all);

        let joined = Span::join(&[first.clone(), second.clone()]).unwrap();
        assert_eq!((joined.address(), joined.len()), (first.address(), 2 * granule));
        let attempt = || Attempt::Access { len: 1 };
        assert_eq!(joined.check(&device, Rights::Read, attempt), Ok(()));
        let denied = joined.check(&device, Rights::ReadWrite, attempt);
        let (who, granted, needed) = (device.label(), Rights::Read, Rights::ReadWrite);
        assert_eq!(denied, Err(Error::Denied { attempt: attempt(), who, granted, needed }));

        let gap = Error::Gap { end: second.address(), next: third.address() };
        assert_eq!(Span::join(&[first.clone(), third]).unwrap_err(), gap);
        let nothing = Error::ZeroLength { attempt: Attempt::Access { len: 0 } };
        assert_eq!(Span::join(&[]).unwrap_err(), nothing);
        let stranger = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let stranger = stranger.allocate(granule).unwrap().map(Rights::Read).unwrap().all();
        let mixed = Span::join(&[first, stranger]).unwrap_err();
        assert_eq!(mixed, Error::WrongBackend { attempt: Attempt::Access { len: 2 * granule } });
    }

    #[test]
    fn a_joined_span_keeps_its_memory() {
        let backend = Backend::host(HostConfig::default()).unwrap();
        let device = backend.device(0).unwrap();
        let granule = device.granularity().unwrap().minimum.len();
        let whole = Reservation::create(&backend, 2 * granule).unwrap();
        let grants = [Grant { device: device.id(), rights: Rights::ReadWrite }];
        let map = |place| {
            Mapping::create(&whole, place, &device.allocate(granule).unwrap(), &grants).unwrap().all()
        };
        let joined = Span::join(&[map(0), map(granule)]).unwrap();
        let stream = device.stream().unwrap();
        stream.fill(&joined, 7).unwrap();
        let mut seen = [0; 4];
        stream.read(&joined.part(granule - 2, 4).unwrap(), &mut seen).unwrap();
        assert_eq!(seen, [7; 4]);
    }

    #[test]
    fn the_host_reaches_its_own_memory_where_it_is() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let (first, second) = [5, 6]
            .map(|value| {
                let buffer = crate::PinnedBuffer::create(&device, 8).unwrap();
                buffer.bytes().unwrap().write_at(0, &[value; 8]).unwrap();
                buffer.all()
            })
            .into();
        let byte = |span: &Span| {
            let mut byte = [0];
            span.host_bytes(false).map(|bytes| bytes.read_at(0, &mut byte).unwrap()).map(|()| byte[0])
        };
        let both = Span::keep(&[first.clone(), second.clone()]).unwrap().unwrap();
        let in_both = |of: &Span, len| Span::new(Arc::clone(both.memory()), of.at(), len);
        assert_eq!([byte(&first.part(7, 1).unwrap()), byte(&in_both(&second, 8))], [Some(5), Some(6)]);
        assert_eq!(byte(&in_both(&first, 9)), None, "not all of it is of one memory");
        let granule = device.granularity().unwrap().minimum.len();
        let map = device.allocate(granule).unwrap().map(Rights::ReadWrite).unwrap();
        assert_eq!(byte(&map.all()), None, "a map has rights of its own");
    }
}
