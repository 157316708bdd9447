//! The index: what objects there are and where, in memory that the server writes and clients read.
//!
//! ```text
//!   header | words | buckets | allocations | records
//!
//!   words        one per slot: generation and state, changed by one store
//!   buckets      hashes of names, each the id of the object that has the name now
//!   allocations  the pieces of memory there are
//!   records      one per slot: name, place, length; written while the slot is free, then never again
//! ```
//!
//! It is also the journal. Every operation fills what nobody reads yet and then makes exactly one store that counts, its
//! commit: a word of a slot. What follows (buckets, the words of a pack's members, versions that were replaced) is
//! derived from words and records, and recovery derives it again. So a server killed after any store leaves an index
//! in which each operation has happened, or has not.
//!
//! What it will not do: know which memory is really there, who is alive, or who has pinned what. See
//! [`server`](crate::server).

mod layout;
mod lookup;
mod record;

pub use layout::IndexError;
pub(crate) use layout::{AllocationRecord, Geometry, Index, Location};
pub(crate) use record::{MAX_META, MAX_NAME, Record, Region};
