//! A span: a range of memory that is an operand of stream work. It keeps the memory alive and knows the rights of each device.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use wholemem_os::SharedSlice;
use wholemem_os::width::to_usize;

use crate::backend::KeepAlive;
use crate::raw::Address;
use crate::{Attempt, Backend, Device, DeviceId, Error, Result, Rights};

/// Memory that has an address and stays alive until the work that uses it has run.
pub(crate) trait Addressable: KeepAlive {
    fn backend(&self) -> &Backend;
    fn rights_of(&self, device: DeviceId) -> Rights;

    /// Returns the host pointer to `len` bytes at device address `at`, for memory that the host accesses without a mapping.
    fn host_pointer(&self, _at: Address, _len: usize) -> Option<NonNull<u8>> {
        None
    }
}

/// Translates the device address `at` to a host pointer, in memory of `all` bytes that starts at the device address `begin` and
/// the host pointer `pointer`. Returns `None` unless `len` bytes at `at` are inside the memory.
pub(super) fn host_pointer_within(
    (begin, pointer): (Address, NonNull<u8>),
    all: usize,
    at: Address,
    len: usize,
) -> Option<NonNull<u8>> {
    let offset = to_usize(at.0.checked_sub(begin.0)?);
    // SAFETY: `offset` is at most the length of the memory to which `pointer` points.
    (offset.checked_add(len)? <= all).then(|| unsafe { pointer.add(offset) })
}

/// Several memories that are one operand of stream work. A device has the lowest of its rights to the memories.
#[derive(Debug)]
struct JoinedMemory {
    /// The joined memories: at least one.
    parts: Vec<Arc<dyn Addressable>>,
}

impl Addressable for JoinedMemory {
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

/// Memory that also keeps another value alive.
struct OwnedMemory {
    memory: Arc<dyn Addressable>,
    /// It is dropped after `memory`.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for OwnedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedMemory").field("memory", &self.memory).finish_non_exhaustive()
    }
}

impl Addressable for OwnedMemory {
    fn backend(&self) -> &Backend {
        self.memory.backend()
    }

    fn rights_of(&self, device: DeviceId) -> Rights {
        self.memory.rights_of(device)
    }

    fn host_pointer(&self, at: Address, len: usize) -> Option<NonNull<u8>> {
        self.memory.host_pointer(at, len)
    }
}

/// A span: a range of a [`Mapping`](crate::Mapping), a [`PinnedBuffer`](crate::PinnedBuffer) or other memory, or several
/// contiguous ranges that were [joined](Span::join).
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

    /// Returns the part of the span with `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Result<Span> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                Ok(Self { memory: Arc::clone(&self.memory), at: self.at.after(offset), len })
            }
            _ => Err(Error::OutOfRange { offset, len, size: self.len }),
        }
    }

    /// Joins contiguous spans, such as adjacent mappings of one reservation, into one span.
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
    /// device.stream()?.write(&both.part((1 << 20) - 2, 4)?, b"over")?; // spans both mappings
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ZeroLength`] if `spans` is empty; [`Error::Gap`] if the spans are not contiguous; [`Error::WrongBackend`].
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
        Ok(Self { memory: Arc::new(JoinedMemory { parts }), at: first.at, len })
    }

    /// Returns an empty span that keeps the memory of all `spans` alive, so that one operand replaces many; `None` if `spans` is
    /// empty.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig, PinnedBuffer, Span};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let two = [PinnedBuffer::create(&device, 8)?.all(), PinnedBuffer::create(&device, 8)?.all()];
    /// let both = Span::keep_alive(&two)?.expect("there are two");
    /// drop(two); // `both` keeps their memory alive
    /// assert!(both.is_empty());
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongBackend`].
    pub fn keep_alive<'a>(spans: impl IntoIterator<Item = &'a Span>) -> Result<Option<Span>> {
        let spans: Vec<_> = spans.into_iter().collect();
        let Some(first) = spans.first() else { return Ok(None) };
        if spans.iter().any(|span| span.memory.backend() != first.memory.backend()) {
            return Err(Error::WrongBackend { attempt: Attempt::Access { len: 0 } });
        }
        let parts = spans.iter().map(|span| Arc::clone(&span.memory)).collect();
        Ok(Some(Self { memory: Arc::new(JoinedMemory { parts }), at: first.at, len: 0 }))
    }

    /// Returns this span, which also keeps `owner` alive: until the last work that uses the span has run. The owner is dropped
    /// after this span's reference to the memory, by any thread.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use wholemem_hal::{Backend, HostConfig, PinnedBuffer};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let owner = Arc::new("a ticket");
    /// let span = PinnedBuffer::create(&device, 8)?.all().with_owner(owner.clone());
    /// assert_eq!(Arc::strong_count(&owner), 2);
    /// drop(span);
    /// assert_eq!(Arc::strong_count(&owner), 1);
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn with_owner(self, owner: Arc<dyn Any + Send + Sync>) -> Span {
        let Self { memory, at, len } = self;
        Self { memory: Arc::new(OwnedMemory { memory, _owner: owner }), at, len }
    }

    /// Returns the device address of the first byte of the span, as a kernel argument.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at.0
    }

    /// Returns the length of the span in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length of the span is zero.
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

    /// Returns a view of the span's bytes, if the host accesses them without a mapping and they are within one memory.
    pub(crate) fn host_bytes(&self, writable: bool) -> Option<SharedSlice<'_>> {
        let pointer = self.memory.host_pointer(self.at, self.len)?;
        // SAFETY: the memory lives as long as `self` is borrowed and is accessed only through views; callers that write have
        // checked the access rights.
        Some(unsafe { SharedSlice::new(pointer, self.len, writable) })
    }

    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.at < other.at.after(other.len) && other.at < self.at.after(self.len)
    }

    /// Checks that work of `device` may access the span with the needed rights. A kernel launch does not check its operands, so
    /// its caller does.
    ///
    /// # Errors
    /// [`Error::Denied`], [`Error::WrongBackend`] and [`Error::Forked`], all with the given operation.
    pub fn check(&self, device: &Device, needed: Rights, attempt: impl Fn() -> Attempt) -> Result<()> {
        // The fork is checked before the lock is taken: if another thread held the lock at the fork, it is never released in the
        // child.
        device.backend().check_fork(&attempt)?;
        if self.memory.backend() != device.backend() {
            return Err(Error::WrongBackend { attempt: attempt() });
        }
        let granted = self.memory.rights_of(device.id());
        if granted < needed {
            return Err(Error::Denied { attempt: attempt(), device: device.label(), granted, needed });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Grant, HostConfig, Mapping, Reservation};

    #[test]
    fn join_requires_contiguous_spans_and_intersects_their_rights() {
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
        let (label, granted, needed) = (device.label(), Rights::Read, Rights::ReadWrite);
        assert_eq!(denied, Err(Error::Denied { attempt: attempt(), device: label, granted, needed }));

        let gap = Error::Gap { end: second.address(), next: third.address() };
        assert_eq!(Span::join(&[first.clone(), third]).unwrap_err(), gap);
        let nothing = Error::ZeroLength { attempt: Attempt::Access { len: 0 } };
        assert_eq!(Span::join(&[]).unwrap_err(), nothing);
        let foreign = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let foreign = foreign.allocate(granule).unwrap().map(Rights::Read).unwrap().all();
        let mixed = Span::join(&[first, foreign]).unwrap_err();
        assert_eq!(mixed, Error::WrongBackend { attempt: Attempt::Access { len: 2 * granule } });
    }

    #[test]
    fn a_joined_span_keeps_its_memory_alive() {
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
    fn host_bytes_views_pinned_memory_without_a_copy() {
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
        let both = Span::keep_alive(&[first.clone(), second.clone()]).unwrap().unwrap();
        let in_both = |of: &Span, len| Span::new(Arc::clone(both.memory()), of.at(), len);
        assert_eq!([byte(&first.part(7, 1).unwrap()), byte(&in_both(&second, 8))], [Some(5), Some(6)]);
        assert_eq!(byte(&in_both(&first, 9)), None, "the range spans two memories");
        let granule = device.granularity().unwrap().minimum.len();
        let map = device.allocate(granule).unwrap().map(Rights::ReadWrite).unwrap();
        assert_eq!(byte(&map.all()), None, "host_bytes does not cover mappings");
    }
}
