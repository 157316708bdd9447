//! Memory: physical allocations, reserved addresses, mappings, and handles for other processes.
//!
//! ```text
//!   Allocation (physical)   [====A====]          [==B==]        created here, or imported from a handle
//!                                |                  |
//!   Mapping (whole, with rights) |      +-----------+
//!                                v      v
//!   Reservation (addresses) [....[====A====][==B==]......]      offsets are whole granules
//! ```
//!
//! A [`Mapping`] holds its allocation and its reservation. In whatever order a program drops them, a mapping is removed
//! before its addresses are freed, and memory is released after its last mapping.

mod allocation;
mod borrowed;
mod cuda_malloc;
mod foreign;
mod mapping;
mod pinned;
mod registration;
mod reservation;
mod span;

use allocation::AllocationCore;
pub use allocation::{Allocation, Segment};
pub use borrowed::BorrowedMemory;
pub use cuda_malloc::CudaMallocBuffer;
pub use mapping::Mapping;
pub use pinned::PinnedBuffer;
pub use registration::Registration;
pub use reservation::Reservation;
use reservation::ReservationCore;
pub(crate) use span::Addressable;
pub use span::Span;
