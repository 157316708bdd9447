//! Plain values that every other module uses: device numbers, rights, granules, launch arguments and errors.
//!
//! They own no device memory and call no driver. Each file imports only files listed before it:
//!
//! | module | contents |
//! |---|---|
//! | [`device`] | the kind of a backend, and a device's number, label and description |
//! | [`rights`] | what a device may do with memory |
//! | [`share`], [`spec`] | handles that share memory with other processes; the properties of memory to create |
//! | [`capability`] | names of optional device capabilities |
//! | [`driver_code`] | result codes of the CUDA driver |
//! | [`attempt`], [`error`] | the attempted operation that an error names; all errors of this crate |
//! | [`block`] | the memory of one allocation that contains an address |
//! | [`granule`], [`probe`] | the allocation granularity of a device; the result of a capability test |
//! | [`launch`] | kernels, the shape of a launch and its arguments |

mod attempt;
mod block;
mod capability;
mod device;
mod driver_code;
mod error;
mod granule;
mod launch;
mod probe;
mod rights;
mod share;
mod spec;

pub use attempt::Attempt;
pub use block::MemoryBlock;
pub use capability::Capability;
pub use device::{BackendKind, DeviceId, DeviceInfo, DeviceLabel};
pub use driver_code::DriverCode;
pub use error::{BackendError, Error, Result};
pub use granule::{Granularity, Granule};
pub use launch::{Args, HostFunction, KernelImage, LaunchShape};
pub use probe::CapabilityProbe;
pub(crate) use rights::RightsTable;
pub use rights::{Grant, Rights};
pub use share::{HandleKind, ShareHandle};
pub use spec::AllocationSpec;
