//! Creates objects of a store from existing memory of this process, without a copy.

use std::ops::Range;

use wholemem_hal::{Allocation, BackendKind, HandleKind, Rights};

use super::{Client, Sealed, label};
use crate::ObjectId;
use crate::protocol::{ByteRange, RequestKind};
use crate::{Error, Result};

impl Client {
    /// Creates an object from a range of existing memory, without a copy and with up to 216 bytes of metadata. The store holds
    /// the memory from now on, even if this process exits, and all of the memory counts against the quota.
    ///
    /// Host memory must not be mapped for writing by any process: it is sealed and becomes immutable. Device memory cannot be
    /// protected: processes that have it mapped must not write it while the object exists.
    ///
    /// Only the user who serves a store may share memory with it.
    ///
    /// ```no_run
    /// use wholemem_hal::{Backend, HostConfig, Rights};
    ///
    /// # let client = wholemem_store::Client::connect("socket")?;
    /// let memory = Backend::host(HostConfig::default())?.device(0)?.allocate(1 << 20)?;
    /// memory.map(Rights::ReadWrite)?.bytes()?.write_at(100, b"hello")?;
    /// client.adopt("greeting", b"", &memory, 100..105)?;
    /// assert_eq!(client.get("greeting")?.to_vec()?, b"hello");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Refusal::CannotAdopt`](crate::Refusal::CannotAdopt) if the memory is still mapped for writing or has another length;
    /// [`Refusal::NotTrusted`](crate::Refusal::NotTrusted); [`Refusal::OutOfRange`](crate::Refusal::OutOfRange);
    /// [`Error::DeviceHidden`] if the server does not have the device; as [`Client::create`].
    pub fn adopt(&self, name: &str, meta: &[u8], memory: &Allocation, range: Range<usize>) -> Result<Sealed> {
        let label = label(name, meta);
        label.check()?;
        let (device, len) = (memory.device(), memory.len());
        let place = match device.backend().kind() {
            BackendKind::Host => 0,
            _ => self.core.maps.place(&device)?,
        };
        let part = part(&range);
        part.check(len as u64)?;
        let handle = memory.export(HandleKind::Fd, Rights::ReadWrite)?;
        let fd = handle.into_fd().ok_or(Error::Protocol { rule: "memory is exported as a descriptor" })?;
        let kind = RequestKind::Adopt { label, place, len: len as u64, part };
        self.core.with_space(len, place, self.wait, || {
            self.core.request_adoption(kind.clone(), std::os::fd::AsFd::as_fd(&fd))
        })
    }

    /// Creates a named object from a range of the memory of a sealed object. The range is relative to the memory that was
    /// [adopted](Client::adopt), or to the object or pack that was created.
    ///
    /// # Errors
    /// As [`Client::publish_with_meta`]; [`Refusal::OutOfRange`](crate::Refusal::OutOfRange).
    pub fn publish_range(
        &self,
        name: &str,
        meta: &[u8],
        object: ObjectId,
        range: Range<usize>,
    ) -> Result<Sealed> {
        let label = label(name, meta);
        label.check()?;
        self.core.request_sealed(RequestKind::Publish { label, object, part: Some(part(&range)) }, &[])
    }

    /// Returns true if an object was deleted and no process holds it, so that the memory adopted for it may be reused. Sends no
    /// request.
    #[must_use]
    pub fn is_freed(&self, object: ObjectId) -> bool {
        self.core.index.state(object).is_none()
    }
}

fn part(range: &Range<usize>) -> ByteRange {
    ByteRange { offset: range.start as u64, len: range.len() as u64 }
}
