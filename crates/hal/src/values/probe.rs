//! The result of testing a capability.

use super::{Capability, Result};

/// The result of testing a capability on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilityProbe {
    /// The capability that was tested.
    pub capability: Capability,
    /// `Ok` if the capability works, otherwise the error of the test.
    pub outcome: Result<()>,
}
