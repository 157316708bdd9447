//! Memory that this process has already, as objects: nothing is copied.

use std::ops::Range;

use wholemem_hal::{Allocation, BackendKind, HandleKind, Rights};

use super::{Client, Sealed, label};
use crate::ObjectId;
use crate::protocol::{Ask, Part};
use crate::{Error, Result};

impl Client {
    /// Makes a range of memory an object, as it is, with what its users are told of it: up to 216 bytes. The store holds the
    /// memory from now on, whatever becomes of this process, and all of it counts against the quota.
    ///
    /// Host memory must not be mapped for writing any more, by anybody: it is sealed, and stays what it is. On a device
    /// nobody can be kept from writing: whoever has it mapped is trusted not to, as long as the object is there.
    ///
    /// Only the user who serves a store may give it memory.
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
    /// [`Refusal::CannotAdopt`](crate::Refusal::CannotAdopt) for memory that is still mapped for writing, or not what it
    /// is said to be; [`Refusal::NotTrusted`](crate::Refusal::NotTrusted);
    /// [`Refusal::OutOfRange`](crate::Refusal::OutOfRange); [`Error::DeviceHidden`] for a device that the server has not;
    /// as [`Client::create`].
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
        let fd = handle.into_fd().ok_or(Error::Protocol { rule: "memory is given as a descriptor" })?;
        let ask = Ask::Adopt { label, place, len: len as u64, part };
        self.core.with_room(len, place, self.wait, || {
            self.core.request_adoption(ask.clone(), std::os::fd::AsFd::as_fd(&fd))
        })
    }

    /// Gives a range of the memory that a sealed object was made in a name of its own: counted from the beginning of what was
    /// [adopted](Client::adopt), or of the object or pack that was made at once.
    ///
    /// # Errors
    /// As [`Client::publish_described`]; [`Refusal::OutOfRange`](crate::Refusal::OutOfRange).
    pub fn publish_part(
        &self,
        name: &str,
        meta: &[u8],
        object: ObjectId,
        range: Range<usize>,
    ) -> Result<Sealed> {
        let label = label(name, meta);
        label.check()?;
        self.core.request_sealed(Ask::Publish { label, object, part: Some(part(&range)) }, &[])
    }

    /// Whether an object is no more, and nobody holds it: what it was made of may be used for something else. No server is
    /// asked.
    #[must_use]
    pub fn has_gone(&self, object: ObjectId) -> bool {
        self.core.index.state(object).is_none()
    }
}

fn part(range: &Range<usize>) -> Part {
    Part { offset: range.start as u64, len: range.len() as u64 }
}
