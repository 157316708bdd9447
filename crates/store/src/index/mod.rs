//! The index: the table of all objects of a store, in memory that the server writes and clients map read-only.
//!
//! ```text
//!   header | words | buckets | allocations | records
//!
//!   words        one per slot: generation and state, changed by one store
//!   buckets      hash table of names, each bucket the id of the object that has the name
//!   allocations  the allocations that hold objects
//!   records      one per slot: name, location, length; written only while the slot is free
//! ```
//!
//! The index is also the journal. Every operation first writes cells that no process reads yet, and then commits by exactly one
//! store to the word of a slot. Everything else (buckets, the words of a pack's other members, replaced versions) is derived from
//! words and records, and recovery derives it again. So if the server is killed after any store, each operation has either
//! happened completely or not at all.
//!
//! The index does not record which memory really exists, which clients are alive, or which objects are pinned. See
//! [`server`](crate::server).

mod layout;
mod lookup;
mod record;

pub use layout::IndexError;
pub(crate) use layout::{AllocationRecord, Geometry, ObjectIndex, ObjectLocation};
pub(crate) use record::{MAX_META, MAX_NAME, ObjectRecord, Region};
