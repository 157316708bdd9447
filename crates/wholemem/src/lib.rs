//! One memory over many GPUs, processes and threads.

#![deny(unsafe_code)]

mod dtype;
mod element;
mod error;
mod global_ref;
mod group;
#[allow(unsafe_code, reason = "loops over memory that other ranks write too")]
mod host;
mod house;
mod kind;
mod memory;
mod ops;
mod partition;
mod placement;
mod tensor;
mod verdict;

pub use dtype::Dtype;
pub use error::{Error, Result};
pub use global_ref::GlobalRef;
pub use group::Group;
pub use kind::{Kind, Location};
pub use memory::{MemorySpec, WholeMemory};
pub use ops::{Dense, ElementsRequest, IndexType, Indices, OnBadIndex, Order, RowsRequest};
pub use partition::Partition;
pub use placement::{Extent, Placement};
pub use tensor::{LocalRows, TensorSpec, WholeTensor};
pub use wholemem_comm::{Communicator, Rank};
