//! Tables that are divided among all ranks: shared memory, tensors, gather and scatter.
//!
//! ```text
//!   WholeTensor     elements with a shape: views, copies of rows, gather_scatter/
//!   WholeMemory     memory/: bytes; all ranks create it collectively and every rank maps all of it
//!   Partition       which rank has which rows          Placement   which rank stores which bytes
//! ```
//!
//! [`Partition`] and [`Placement`] are pure plans. A [`Kind`] is how ranks address a memory, a [`Location`] where its
//! bytes are stored.

mod directory;
mod gather_scatter;
mod kind;
mod memory;
mod partition;
mod placement;
mod row_slices;
mod tensor;

pub use gather_scatter::{Indices, OnBadIndex, Order, RowBuffer};
pub use kind::{Kind, Location};
pub use memory::{MemorySpec, WholeMemory};
pub use partition::Partition;
pub use placement::{Extent, Placement};
pub use tensor::{LocalRows, TensorSpec, WholeTensor};
