//! Open backends and their devices, and how the resources of a backend are released.
//!
//! | module | contents |
//! |---|---|
//! | [`open`] | an open backend |
//! | [`device`] | one of its devices |
//! | [`retire`] | teardown calls, made when a handle is dropped or retried later |
//! | [`in_flight`] | the operands of enqueued work |
//!
//! These four modules import each other: a device refers to its backend, a backend holds its pending teardowns, and a teardown
//! runs on its backend. The values that a teardown keeps alive, such as mappings, are opaque here ([`KeepAlive`]), so that the
//! modules for memory and queues import this one and not the reverse.

mod device;
mod in_flight;
mod open;
mod retire;

pub use device::Device;
pub(crate) use in_flight::{CapturedOperands, DrainingStream, InFlight};
pub use open::Backend;
pub(crate) use retire::{HostAddress, KeepAlive, Operand, OwnedResource, Retired, Teardown};
