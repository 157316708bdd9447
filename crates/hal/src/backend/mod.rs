//! An open backend, its devices, and giving back what was made with it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`open`] | a backend that was opened |
//! | [`device`] | one of its devices |
//! | [`retire`] | teardowns, run when a handle is dropped or later |
//! | [`in_flight`] | what enqueued work still uses |
//!
//! These four refer to each other: a device has its backend, a backend has what it still has to give back, and a teardown
//! is run with the backend it belongs to. What the teardowns keep alive, such as maps, is opaque here ([`Held`]), so
//! that memory and queues are built on this module and not the other way round.

mod device;
mod in_flight;
mod open;
mod retire;

pub use device::Device;
pub(crate) use in_flight::{Drain, InFlight, Recorded};
pub use open::Backend;
pub(crate) use retire::{Held, HostAddress, Operand, Owned, Retired, Teardown};
