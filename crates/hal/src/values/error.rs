//! What can go wrong with devices, memory and streams, with the values it went wrong on.

use wholemem_os as os;
use wholemem_os::Size;

use super::{Attempt, BackendKind, Capability, DeviceId, DeviceLabel, DriverCode, Rights};

/// A result whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong with devices, memory and streams.
///
/// Most variants are bad input, found before anything was touched: nothing has changed. [`Error::Unsupported`] and
/// [`Error::Failed`] are the backend's answer; a `Failed` carries its own words as its source. What had been acquired
/// on the way was given back. After [`Error::TimedOut`] the work goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Memory, addresses or a copy of no bytes.
    #[error("cannot {attempt}: the length is zero")]
    ZeroLength {
        /// What was tried.
        attempt: Attempt,
    },

    /// A length that is no multiple of the granule.
    #[error("cannot {attempt}: the length is not a multiple of the granule, {}", Size(*granule))]
    UnalignedLength {
        /// What was tried.
        attempt: Attempt,
        /// The granule in bytes.
        granule: usize,
    },

    /// An offset that is no multiple of the granule.
    #[error("cannot {attempt}: the offset is not a multiple of the granule, {}", Size(*granule))]
    UnalignedOffset {
        /// What was tried.
        attempt: Attempt,
        /// The granule in bytes.
        granule: usize,
    },

    /// An alignment that is no power of two.
    #[error("cannot {attempt}: an alignment of {align} is not a power of two")]
    BadAlignment {
        /// What was tried.
        attempt: Attempt,
        /// The alignment in bytes.
        align: usize,
    },

    /// A map that would end beyond its reservation.
    #[error("cannot {attempt}: reservation is {}", Size(*reserved))]
    BeyondReservation {
        /// What was tried.
        attempt: Attempt,
        /// The length of the reservation.
        reserved: usize,
    },

    /// A map where something is mapped already.
    #[error("cannot {attempt}: {} at offset {} is mapped already", Size(*taken_len), Size(*taken_offset))]
    Occupied {
        /// What was tried.
        attempt: Attempt,
        /// Where the other map begins.
        taken_offset: usize,
        /// How long it is.
        taken_len: usize,
    },

    /// A device number this backend does not have.
    #[error("there is no device {device} on {backend}: it has {count}")]
    NoSuchDevice {
        /// The backend that was asked.
        backend: BackendKind,
        /// The device asked for.
        device: DeviceId,
        /// How many devices there are.
        count: usize,
    },

    /// Two things that belong to different backends, or to different openings of one.
    #[error("cannot {attempt}: its parts belong to different backends")]
    WrongBackend {
        /// What was tried.
        attempt: Attempt,
    },

    /// Something of one device used on a stream of another.
    #[error("cannot {attempt}: it belongs to {found}, and the stream to {expected}")]
    WrongDevice {
        /// What was tried.
        attempt: Attempt,
        /// The stream's device.
        expected: DeviceLabel,
        /// The other's.
        found: DeviceLabel,
    },

    /// A device, or the processor, that lacks a right to the memory.
    #[error("cannot {attempt}: {who} was granted {granted}, and needs {needed}")]
    Denied {
        /// What was tried.
        attempt: Attempt,
        /// Who lacks the right.
        who: DeviceLabel,
        /// The right it has.
        granted: Rights,
        /// The right it needs.
        needed: Rights,
    },

    /// A right that the handle through which the memory came does not carry.
    #[error("cannot {attempt}: the memory was received read-only")]
    ReadOnlyHandle {
        /// What was tried.
        attempt: Attempt,
    },

    /// A range that is not inside its memory.
    #[error("cannot use {} at offset {}: there are {}", Size(*len), Size(*offset), Size(*size))]
    OutOfRange {
        /// Where the range begins.
        offset: usize,
        /// How long it is.
        len: usize,
        /// How much memory there is.
        size: usize,
    },

    /// A copy between ranges of different lengths.
    #[error("cannot copy {} to {}", Size(*from), Size(*to))]
    LengthsDiffer {
        /// The length of the source.
        from: usize,
        /// The length of the target.
        to: usize,
    },

    /// A copy between ranges that overlap.
    #[error("cannot {attempt}: the two ranges overlap")]
    Overlap {
        /// What was tried.
        attempt: Attempt,
    },

    /// Device memory that the processor cannot address.
    #[error("the processor cannot address memory of {device}")]
    NotHostVisible {
        /// The device.
        device: DeviceLabel,
    },

    /// Something still in use elsewhere that was to be given back with its answer.
    #[error("cannot {attempt}: it is in use elsewhere, and goes with its last user")]
    InUse {
        /// What was tried.
        attempt: Attempt,
    },

    /// Something that a stream cannot do while it is being captured into a graph.
    #[error("cannot {attempt} while the stream is being captured")]
    Capturing {
        /// What was tried.
        attempt: Attempt,
    },

    /// A kernel that a module does not hold for this backend.
    #[error("the module has no function `{name}` for {backend}")]
    NoSuchFunction {
        /// The function asked for.
        name: String,
        /// The backend it was wanted for.
        backend: BackendKind,
    },

    /// A handle inherited through `fork`: only the process that made it may use it.
    #[error("cannot {attempt}: this process is a forked child, and the handle is its parent's")]
    Forked {
        /// What was tried.
        attempt: Attempt,
    },

    /// The deadline came first.
    #[error("cannot {attempt}: the deadline passed")]
    TimedOut {
        /// What was tried.
        attempt: Attempt,
    },

    /// Something this device cannot do, and why.
    #[error("{device} has no {capability}: {reason}")]
    Unsupported {
        /// What it cannot do.
        capability: Capability,
        /// The device.
        device: DeviceLabel,
        /// Why.
        reason: &'static str,
    },

    /// A backend that this machine does not have, and why.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// The backend.
        backend: BackendKind,
        /// Why.
        reason: String,
    },

    /// A configuration that makes no sense.
    #[error("cannot configure {what} as {value}: {rule}")]
    BadConfig {
        /// The setting.
        what: &'static str,
        /// What it was set to.
        value: usize,
        /// What it must be.
        rule: &'static str,
    },

    /// A handle that would allow nothing.
    #[error("cannot {attempt}: a handle allows reading at least")]
    NoRights {
        /// What was tried.
        attempt: Attempt,
    },

    /// A time between events of which one was never recorded, or not reached yet.
    #[error("cannot {attempt}: one of them was not recorded, or is not reached yet")]
    NotReached {
        /// What was tried.
        attempt: Attempt,
    },

    /// Ranges that were to be one, and do not follow each other.
    #[error("cannot join two ranges: one ends at {end:#x}, and the next begins at {next:#x}")]
    Gap {
        /// Where the one ends.
        end: u64,
        /// Where the next begins.
        next: u64,
    },

    /// The backend was asked and said no.
    #[error("cannot {attempt}")]
    Failed {
        /// What was tried.
        attempt: Attempt,
        /// What the backend said.
        #[source]
        cause: Cause,
    },
}

impl Error {
    /// A number for this error that never changes: the same in C, in Python and between processes.
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
            Self::Failed { cause, .. } => cause.code(),
        }
    }
}

impl Error {
    /// What a person can do about it, where something can be done.
    ///
    /// ```
    /// use wholemem_hal::{Backend, HostConfig};
    ///
    /// let device = Backend::host(HostConfig::default())?.device(0)?;
    /// let error = device.allocate(1000).unwrap_err();
    /// assert_eq!(error.hint(), Some("`Granule::round_up` makes a length fit"));
    /// # Ok::<(), wholemem_hal::Error>(())
    /// ```
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::UnalignedLength { .. } => Some("`Granule::round_up` makes a length fit"),
            Self::Unavailable { backend: BackendKind::Cuda, .. } => {
                Some("`wholemem doctor` says what was tried; the host backend works without a GPU")
            }
            Self::NoSuchDevice { backend: BackendKind::Cuda, .. } => {
                Some("`CUDA_VISIBLE_DEVICES` may hide GPUs from this process")
            }
            Self::Forked { .. } => {
                Some("open a backend in the child itself, or start a new program instead of forking")
            }
            Self::Failed { cause: Cause::Driver { code, .. }, .. } => code.hint(),
            Self::Failed { cause: Cause::Os(os::Error::Call { errno, .. }), .. } => match *errno {
                os::Errno::MFILE => Some("this process may open no more files; raise `ulimit -n`"),
                os::Errno::NOMEM | os::Errno::NOSPC => {
                    Some("the machine, or this process's control group, is out of memory")
                }
                _ => None,
            },
            _ => None,
        }
    }
}

/// What a backend answered when it said no.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// The operating system said no.
    #[error(transparent)]
    Os(#[from] os::Error),

    /// The driver of the devices said no.
    #[error("`{call}` answered {code}")]
    Driver {
        /// The call, by its C name.
        call: &'static str,
        /// What it answered.
        code: DriverCode,
    },

    /// There is not that much memory to be had.
    #[error("only {} of memory are available", Size(*available))]
    OutOfMemory {
        /// How much there is.
        available: usize,
    },

    /// This backend cannot do it at all.
    #[error("{reason}")]
    Unsupported {
        /// What it cannot do.
        capability: Capability,
        /// Why.
        reason: &'static str,
    },
}

impl Cause {
    fn code(&self) -> u32 {
        match self {
            Self::Os(os::Error::Call { .. }) => 100,
            Self::Os(os::Error::NotAMemfd { .. }) => 101,
            Self::Os(os::Error::Unsealed { .. }) => 102,
            Self::Os(os::Error::WrongLength { .. }) => 103,
            Self::Os(_) => 104,
            Self::OutOfMemory { .. } => 105,
            Self::Driver { .. } => 106,
            // Above the raw traits this becomes `Error::Unsupported`.
            Self::Unsupported { .. } => 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_say_what_was_tried_with_which_values() {
        let attempt = Attempt::Map { len: 3 << 20, offset: 1 << 20 };
        let beyond = Error::BeyondReservation { attempt: attempt.clone(), reserved: 2 << 20 };
        assert_eq!(beyond.to_string(), "cannot map 3 MiB at offset 1 MiB: reservation is 2 MiB");

        let occupied = Error::Occupied { attempt, taken_offset: 0, taken_len: 2 << 20 };
        let text = "cannot map 3 MiB at offset 1 MiB: 2 MiB at offset 0 B is mapped already";
        assert_eq!(occupied.to_string(), text);
    }

    #[test]
    fn a_failure_keeps_the_backends_words_as_its_source() {
        let cause = Cause::Os(os::Error::Call { call: "fallocate", errno: os::Errno::NOSPC });
        let error = Error::Failed { attempt: Attempt::Reserve { len: 4096 }, cause };
        assert_eq!(error.to_string(), "cannot reserve 4 KiB of addresses");
        let source = std::error::Error::source(&error).expect("a cause");
        assert_eq!(source.to_string(), "`fallocate` failed: No space left on device (os error 28)");
        assert_eq!(error.code(), 100);
    }
}
