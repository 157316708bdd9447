//! The errors of devices, memory and streams, with the operands that caused them.

use wholemem_os as os;
use wholemem_os::Size;

use super::{Attempt, BackendKind, Capability, DeviceId, DeviceLabel, DriverCode, Rights};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of a device, memory or stream operation.
///
/// Most variants report bad input, which is rejected before anything changes. [`Error::Unsupported`] and
/// [`Error::Failed`] come from the backend; the source of `Failed` is the backend's own error. A call that fails
/// releases everything it acquired. After [`Error::TimedOut`] the work continues.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The length of memory, a reservation or a copy is zero.
    #[error("cannot {attempt}: the length is zero")]
    ZeroLength {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// A length is not a multiple of the granule: the allocation unit of the device, or the unit of the operation.
    #[error(
        "cannot {attempt}: the length is not a multiple of the granule, {granule_size}",
        granule_size = Size(*granule)
    )]
    UnalignedLength {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The granule of the device, or the unit of the operation, in bytes.
        granule: usize,
    },

    /// An offset or an address is not a multiple of the granule: the allocation unit of the device, or the unit of the operation.
    #[error(
        "cannot {attempt}: the offset or the address is not a multiple of the granule, {granule_size}",
        granule_size = Size(*granule)
    )]
    UnalignedOffset {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The granule of the device, or the unit of the operation, in bytes.
        granule: usize,
    },

    /// A requested alignment is not a power of two.
    #[error("cannot {attempt}: an alignment of {align} is not a power of two")]
    BadAlignment {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The requested alignment in bytes.
        align: usize,
    },

    /// A mapping would extend past the end of its reservation (a range of addresses).
    #[error("cannot {attempt}: the length of the reservation is {reserved_size}", reserved_size = Size(*reserved))]
    BeyondReservation {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The length of the reservation in bytes.
        reserved: usize,
    },

    /// Another mapping occupies part of the range to map.
    #[error(
        "cannot {attempt}: a range of {size} at offset {at} is already mapped",
        size = Size(*taken_len), at = Size(*taken_offset)
    )]
    Occupied {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The offset of the other mapping in the reservation.
        taken_offset: usize,
        /// The length of the other mapping in bytes.
        taken_len: usize,
    },

    /// The backend has no device with the requested number.
    #[error("there is no device {device} on the {backend} backend: the number of devices is {count}")]
    NoSuchDevice {
        /// The backend on which the device was requested.
        backend: BackendKind,
        /// The number of the requested device.
        device: DeviceId,
        /// The number of devices that the backend has.
        count: usize,
    },

    /// The operands of an operation belong to different backends, or to different openings of one backend.
    #[error("cannot {attempt}: the operands belong to different backends")]
    WrongBackend {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// An operand of one device was used on a stream of another device.
    #[error("cannot {attempt}: the operand belongs to device {found}, but the stream to device {expected}")]
    WrongDevice {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The device of the stream on which the operand was used.
        expected: DeviceLabel,
        /// The device to which the operand belongs.
        found: DeviceLabel,
    },

    /// A device lacks the access rights that the operation needs.
    #[error("cannot {attempt}: {device} was granted {granted} to the memory, but needs {needed}")]
    Denied {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The device that lacks the rights.
        device: DeviceLabel,
        /// The access rights that the device has.
        granted: Rights,
        /// The access rights that the device needs.
        needed: Rights,
    },

    /// Write access was requested to memory that was imported through a read-only handle.
    #[error("cannot {attempt}: the memory was imported through a read-only handle")]
    ReadOnlyHandle {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// The range to access is not inside the memory.
    #[error(
        "cannot use a range of {range_size} at offset {at}: the length of the memory is {whole}",
        range_size = Size(*len), at = Size(*offset), whole = Size(*size)
    )]
    OutOfRange {
        /// The offset of the range in the memory.
        offset: usize,
        /// The length of the range in bytes.
        len: usize,
        /// The length of the memory in bytes.
        size: usize,
    },

    /// The source and the destination of a copy have different lengths.
    #[error(
        "cannot copy {from_size} to a range of {to_size}: the lengths differ",
        from_size = Size(*from), to_size = Size(*to)
    )]
    LengthsDiffer {
        /// The length of the source of the copy in bytes.
        from: usize,
        /// The length of the destination of the copy in bytes.
        to: usize,
    },

    /// The source and the destination of a copy overlap.
    #[error("cannot {attempt}: the two ranges overlap")]
    Overlap {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// The CPU cannot address the memory of a device.
    #[error("the CPU cannot address memory of {device}")]
    NotHostVisible {
        /// The device whose memory the CPU cannot address.
        device: DeviceLabel,
    },

    /// A resource cannot be released explicitly, or the CPU's access to it cannot be revoked, because the resource is in use.
    #[error("cannot {attempt}: the resource is in use; it is released with its last reference")]
    InUse {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// An operation is not possible while its stream is being captured.
    #[error("cannot {attempt} while the stream is being captured")]
    Capturing {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// A graph cannot be launched because memory that its work uses was freed after the capture.
    #[error("cannot launch a graph: its memory at {address:#x} was freed")]
    Freed {
        /// The address of the freed memory.
        address: u64,
    },

    /// A kernel module has no kernel of the requested name for its backend.
    #[error("the kernel module has no function `{name}` for the {backend} backend")]
    NoSuchFunction {
        /// The name of the requested kernel.
        name: String,
        /// The backend of the module.
        backend: BackendKind,
    },

    /// A forked child used a handle that it inherited; only the process that created a handle may use it.
    #[error("cannot {attempt}: this process is a forked child, and the handle belongs to its parent")]
    Forked {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// The deadline of a wait for a stream or an event passed before the wait ended.
    #[error("cannot {attempt}: the deadline passed")]
    TimedOut {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// A device lacks a capability that the operation needs.
    #[error("{device} has no {capability}: {reason}")]
    Unsupported {
        /// The capability that the device lacks.
        capability: Capability,
        /// The device that lacks the capability.
        device: DeviceLabel,
        /// The reason why the device lacks the capability.
        reason: &'static str,
    },

    /// A backend cannot be opened on this machine.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// The backend that cannot be opened.
        backend: BackendKind,
        /// The reason why the backend cannot be opened.
        reason: String,
    },

    /// A configuration value is invalid.
    #[error("cannot set {setting} to {value}: {rule}")]
    BadConfig {
        /// The name of the setting that was given the invalid value.
        setting: &'static str,
        /// The invalid value of the setting.
        value: usize,
        /// The rule that the value of the setting breaks.
        rule: &'static str,
    },

    /// A handle was requested that would grant no access rights.
    #[error("cannot {attempt}: a handle must grant at least read access")]
    NoRights {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// The time between two events was requested before both were recorded and completed.
    #[error("cannot {attempt}: one of the events was not recorded or has not completed")]
    NotReached {
        /// The operation that was attempted and failed.
        attempt: Attempt,
    },

    /// Two spans to be joined are not contiguous.
    #[error("cannot join two spans: one ends at {end:#x}, the next begins at {next:#x}")]
    Gap {
        /// The end address of the first span.
        end: u64,
        /// The start address of the next span.
        next: u64,
    },

    /// A call of the backend failed.
    #[error("cannot {attempt}")]
    Failed {
        /// The operation that was attempted and failed.
        attempt: Attempt,
        /// The error that the backend returned.
        #[source]
        cause: BackendError,
    },
}

impl Error {
    /// Returns a stable numeric code of the error, which is the same in C, in Python and between processes.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig};
    ///
    /// let backend = Backend::host(HostConfig::default())?;
    /// assert_eq!(backend.device(99).unwrap_err().code(), 7);
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn code(&self) -> u32 {
        match self {
            Self::ZeroLength { .. } => 1,
            Self::UnalignedLength { .. } => 2,
            Self::UnalignedOffset { .. } => 3,
            Self::BadAlignment { .. } => 4,
            Self::BeyondReservation { .. } => 5,
            Self::Occupied { .. } => 6,
            Self::NoSuchDevice { .. } => 7,
            Self::WrongBackend { .. } => 8,
            Self::Denied { .. } => 9,
            Self::ReadOnlyHandle { .. } => 10,
            Self::OutOfRange { .. } => 11,
            Self::LengthsDiffer { .. } => 12,
            Self::Overlap { .. } => 13,
            Self::NotHostVisible { .. } => 14,
            Self::InUse { .. } => 15,
            Self::Capturing { .. } => 16,
            Self::NoSuchFunction { .. } => 17,
            Self::Forked { .. } => 18,
            Self::TimedOut { .. } => 19,
            Self::Unsupported { .. } => 20,
            Self::Unavailable { .. } => 21,
            Self::BadConfig { .. } => 22,
            Self::NoRights { .. } => 23,
            Self::NotReached { .. } => 24,
            Self::WrongDevice { .. } => 25,
            Self::Gap { .. } => 26,
            Self::Freed { .. } => 27,
            Self::Failed { cause, .. } => cause.code(),
        }
    }
}

impl Error {
    /// Returns advice for the user about the error, if there is a known remedy.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let error = device.allocate(1000).unwrap_err();
    /// assert_eq!(error.hint(), Some("`Granule::round_up` rounds a length up to whole granules"));
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnalignedLength { .. } => Some("`Granule::round_up` rounds a length up to whole granules"),
            Self::Unavailable { backend: BackendKind::Cuda, .. } => {
                Some("`wholemem doctor` lists the failed checks; the host backend works without a GPU")
            }
            Self::NoSuchDevice { backend: BackendKind::Cuda, .. } => {
                Some("`CUDA_VISIBLE_DEVICES` may hide GPUs from this process")
            }
            Self::Forked { .. } => {
                Some("open a backend in the child itself, or start a new program instead of forking")
            }
            Self::Failed { cause: BackendError::Driver { code, .. }, .. } => code.hint(),
            Self::Failed { cause: BackendError::Os(os::Error::Call { errno, .. }), .. } => match *errno {
                os::Errno::MFILE => Some("this process may open no more files; raise `ulimit -n`"),
                os::Errno::NOMEM | os::Errno::NOSPC => {
                    Some("the machine, or the cgroup of this process, is out of memory")
                }
                _ => None,
            },
            _ => None,
        }
    }
}

/// The error that a backend returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A system call or an operating system object failed.
    #[error(transparent)]
    Os(#[from] os::Error),

    /// A call of the CUDA driver failed.
    #[error("`{call}` returned {code}")]
    Driver {
        /// The C name of the driver function.
        call: &'static str,
        /// The result code that the driver function returned.
        code: DriverCode,
    },

    /// Less memory is available than was requested.
    #[error("only {free_size} of memory are available", free_size = Size(*available))]
    OutOfMemory {
        /// The number of available bytes of memory.
        available: usize,
    },

    /// The backend does not support the operation.
    #[error("{reason}")]
    Unsupported {
        /// The capability that the backend lacks.
        capability: Capability,
        /// The reason why the backend does not support the operation.
        reason: &'static str,
    },
}

impl BackendError {
    fn code(&self) -> u32 {
        match self {
            Self::Os(os::Error::Call { .. }) => 100,
            Self::Os(os::Error::NotAMemfd { .. }) => 101,
            Self::Os(os::Error::Unsealed { .. }) => 102,
            Self::Os(os::Error::WrongLength { .. }) => 103,
            Self::Os(_) => 104,
            Self::OutOfMemory { .. } => 105,
            Self::Driver { .. } => 106,
            // `Unsupported` has the code of `Error::Unsupported`, to which the safe types convert it.
            Self::Unsupported { .. } => 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_operation_and_its_operands() {
        let attempt = Attempt::Map { len: 3 << 20, offset: 1 << 20 };
        let beyond = Error::BeyondReservation { attempt: attempt.clone(), reserved: 2 << 20 };
        assert_eq!(
            beyond.to_string(),
            "cannot map 3 MiB at offset 1 MiB: the length of the reservation is 2 MiB"
        );

        let occupied = Error::Occupied { attempt, taken_offset: 0, taken_len: 2 << 20 };
        let text = "cannot map 3 MiB at offset 1 MiB: a range of 2 MiB at offset 0 B is already mapped";
        assert_eq!(occupied.to_string(), text);
    }

    #[test]
    fn the_source_of_a_failure_is_the_backend_error() {
        let cause = BackendError::Os(os::Error::Call { call: "fallocate", errno: os::Errno::NOSPC });
        let error = Error::Failed { attempt: Attempt::Reserve { len: 4096 }, cause };
        assert_eq!(error.to_string(), "cannot reserve 4 KiB of addresses");
        let source = std::error::Error::source(&error).expect("a cause");
        assert_eq!(source.to_string(), "`fallocate` failed: No space left on device (os error 28)");
        assert_eq!(error.code(), 100);
    }
}
