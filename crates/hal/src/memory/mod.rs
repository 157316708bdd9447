//! Memory: physical allocations, reserved addresses, the maps between them, and handles for other processes.
//!
//! ```text
//!   Allocation (physical)   [====A====]          [==B==]        created here, or imported from a handle
//!                                |                  |
//!   Mapping (whole, with rights) |      +-----------+
//!                                v      v
//!   Reservation (addresses) [....[====A====][==B==]......]      offsets are whole granules
//! ```
//!
//! A [`Mapping`] holds its allocation and its reservation, so whatever order a program drops things in, addresses
//! are emptied before they are given back and memory is released after its last map.

mod allocation;
mod foreign;
mod mapping;
mod pinned;
mod plain;
mod registration;
mod reservation;
mod span;

use allocation::AllocationCore;
pub use allocation::{Allocation, Segment};
pub use mapping::Mapping;
pub use pinned::PinnedBuffer;
pub use plain::PlainBuffer;
pub use registration::Registration;
pub use reservation::Reservation;
use reservation::ReservationCore;
pub(crate) use span::Addressable;
pub use span::Span;
