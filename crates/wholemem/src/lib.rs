//! One memory over many GPUs, processes and threads.

mod dtype;
mod error;
mod global_ref;
mod kind;
mod partition;
mod placement;

pub use dtype::Dtype;
pub use error::{Error, Result};
pub use global_ref::GlobalRef;
pub use kind::{Kind, Location};
pub use partition::Partition;
pub use placement::{Extent, Placement};
pub use wholemem_comm::Rank;
