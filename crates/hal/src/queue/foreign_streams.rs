//! Streams that other code in this process created, by their handles.

use std::borrow::Cow;
use std::sync::{Mutex, MutexGuard, PoisonError};

use wholemem_os::ForkEpoch;

use super::Stream;
use crate::{Attempt, BackendKind, Device, Error, Result};

/// The streams of other code that a program passes by handle, such as `cudaStream_t`. Each is wrapped once, so that a call neither
/// allocates nor loses the operands of earlier work.
///
/// On the host backend, handles are ignored: there is one stream.
#[derive(Debug)]
pub struct ForeignStreams {
    device: Device,
    epoch: ForkEpoch,
    own: Stream,
    /// True if the device is one of the host backend.
    is_host: bool,
    /// The wrapped streams by handle, the most recently used first.
    cached: Mutex<Vec<(u64, Stream)>>,
}

impl ForeignStreams {
    /// Creates an empty set of the streams of a device.
    ///
    /// # Errors
    /// As [`Stream::create`].
    pub fn create(device: &Device) -> Result<Self> {
        let attempt = || Attempt::CreateStream { device: device.label() };
        let epoch = ForkEpoch::current()
            .map_err(|cause| Error::Failed { attempt: attempt(), cause: cause.into() })?;
        let is_host = device.backend().kind() == BackendKind::Host;
        let (device, own) = (device.clone(), device.stream()?);
        Ok(Self { device, epoch, own, is_host, cached: Mutex::default() })
    }

    /// Returns a stream of this crate on the device.
    #[must_use]
    pub fn own(&self) -> &Stream {
        &self.own
    }

    /// Returns the stream with a handle; zero is the default stream of the device.
    ///
    /// # Safety
    /// The handle is that of a stream of the device, which exists until it is [forgotten](Self::forget), or until this value and all
    /// clones of the stream are dropped.
    #[must_use]
    #[inline]
    pub unsafe fn at(&self, handle: u64) -> Cow<'_, Stream> {
        // In a forked child, a thread that was not forked may hold the mutex, so the cache is not used; any enqueue in the child is an
        // error.
        if self.is_host || !self.epoch.is_current() {
            return Cow::Borrowed(&self.own);
        }
        // SAFETY: the caller guarantees that `handle` is that of a stream of this device, which outlives its wrapper.
        Cow::Owned(unsafe { self.foreign(handle) })
    }

    /// Returns the wrapper of a stream.
    ///
    /// # Safety
    /// As [`at`](Self::at).
    unsafe fn foreign(&self, handle: u64) -> Stream {
        let mut cached = self.cached();
        let position = cached.iter().position(|(number, _)| *number == handle).unwrap_or_else(|| {
            // SAFETY: the caller of `foreign` guarantees that the stream is one of this device, and outlives its wrapper.
            cached.push((handle, unsafe { Stream::from_foreign_static(&self.device, handle) }));
            cached.len() - 1
        });
        cached.swap(0, position);
        cached[0].1.clone()
    }

    /// Forgets the stream with a handle, which its owner may destroy afterwards. The operands of its work are released when the work
    /// has run.
    pub fn forget(&self, handle: u64) {
        if self.epoch.is_current() {
            let mut cached = self.cached();
            let position = cached.iter().position(|(number, _)| *number == handle);
            let forgotten = position.map(|position| cached.remove(position));
            // The wrapper is dropped after the lock: dropping it may call the driver.
            drop(cached);
            drop(forgotten);
        }
    }

    fn cached(&self) -> MutexGuard<'_, Vec<(u64, Stream)>> {
        // The list is consistent after a panic: it is changed by single calls.
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, HostConfig};

    #[test]
    fn handles_are_ignored_on_the_host() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let streams = ForeignStreams::create(&device).unwrap();
        // SAFETY: on this backend handles are ignored.
        let stream = unsafe { streams.at(7) };
        assert_eq!(&*stream, streams.own());
        streams.forget(7);
        assert!(streams.cached().is_empty());
    }
}
