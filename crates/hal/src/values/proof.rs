//! What came of trying a capability.

use super::{Capability, Result};

/// A capability that was tried on a device, and the outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Proof {
    /// What was tried.
    pub capability: Capability,
    /// It worked, or why not.
    pub outcome: Result<()>,
}
