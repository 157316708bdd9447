//! Plain values that every layer above uses: numbers, names, rights, specifications and errors.
//!
//! They own no device memory and call no driver. Within this module, each file imports only those before it:
//!
//! | module | what it holds |
//! |---|---|
//! | [`device`] | the kind of a backend, and a device's number, label and description |
//! | [`rights`] | what a device may do with memory |
//! | [`share`], [`spec`] | kinds of handles for other processes, and what memory to create |
//! | [`capability`] | names of what not every device can do |
//! | [`driver_code`] | result codes of the CUDA driver |
//! | [`attempt`], [`error`] | what was tried, and what went wrong |
//! | [`granule`], [`proof`] | units of memory, and the outcome of trying a capability |
//! | [`launch`] | kernels, the shape of a launch and its arguments |

mod attempt;
mod capability;
mod device;
mod driver_code;
mod error;
mod granule;
mod launch;
mod proof;
mod rights;
mod share;
mod spec;

pub use attempt::Attempt;
pub use capability::Capability;
pub use device::{BackendKind, DeviceId, DeviceInfo, DeviceLabel};
pub use driver_code::DriverCode;
pub use error::{Cause, Error, Result};
pub use granule::{Granularity, Granule};
pub use launch::{Args, HostFunction, KernelImage, LaunchShape};
pub use proof::Proof;
pub(crate) use rights::RightsTable;
pub use rights::{Grant, Rights};
pub use share::{HandleKind, ShareHandle};
pub use spec::AllocationSpec;
