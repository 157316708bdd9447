//! Re-exports the names that most programs with tables and collective calls use: `use wholemem::prelude::*`.
//!
//! It does not include `Error` and `Result`, which would shadow those of the program and of the standard library. Write
//! [`wholemem::Error`](crate::Error) and [`wholemem::Result`](crate::Result).
//!
//! ```
//! use wholemem::prelude::*;
//!
//! let sums = Communicator::run_local(2, |comm| {
//!     let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
//!     let mut values = [comm.rank().0 as f32; 4];
//!     symmetric.all_reduce_slice(&mut values, ReduceOp::Sum)?;
//!     Ok(values)
//! })?;
//! assert_eq!(sums, [[1.0; 4]; 2]);
//! # Ok::<(), wholemem::Error>(())
//! ```

pub use wholemem_comm::Rank;
pub use wholemem_hal::{Backend, Device, HostConfig, PinnedBuffer, Span, Stream};
pub use wholemem_os::Deadline;

pub use crate::collective::{SymmetricMemory, SymmetricSpec, Window};
pub use crate::communicator::Communicator;
pub use crate::dtype::{Dtype, Element, ReduceOp};
pub use crate::table::{
    Indices, Kind, Location, MemorySpec, Order, RowBuffer, TensorSpec, WholeMemory, WholeTensor,
};
