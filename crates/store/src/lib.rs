//! Named objects in shared memory that outlive their maker, their readers and the daemon.
//!
//! ```text
//!   client --- socket ---> server  <--- socket pair --- keeper
//!     \                      |                             \__ holds every descriptor, and starts the server
//!      \__ maps the index    \__ writes the index
//!          for reading           and reads the pins
//!          and writes its pins
//! ```
//!
//! An object is created, written and sealed by one process; from then on it never changes, and any other gets it by name:
//! mapped, not copied, on the host or on a GPU. Sealing a new object of the same name makes the name mean that one, and
//! whoever holds the old one keeps it.
//!
//! | room | what it holds |
//! |---|---|
//! | [`Client`], [`Draft`], [`Object`] | what a process does with a store |
//! | [`Pack`] | many objects in one piece of memory |
//! | [`Serve`] | what serves it: a keeper and a server |
//! | [`socket()`] | where they meet, unless told otherwise |
//! | `index` | what objects there are, in memory that clients read: also the journal |
//! | `pin` | how an object is held without a system call |
//! | `protocol` | what clients and server say to each other |
//! | `server`, `keeper` | machines of `step(now, input) -> outputs`, and the loops that run them |
//!
//! What it keeps true: `kill -9` of the server loses no sealed object, and readers notice nothing; a dead client leaves
//! nothing behind; an object is memory that its readers cannot write, and other users can neither. What it will not do:
//! keep processes of the server's own user from each other, hide what is in a store from who may connect to it, or
//! keep anything when keeper and server are both dead.
//!
//! ```no_run
//! use wholemem_store::Client;
//!
//! let client = Client::connect("/run/user/1000/wholemem.sock")?;
//! client.put("greeting", b"hello")?;
//! assert_eq!(client.get("greeting")?.to_vec()?, b"hello");
//! # Ok::<(), wholemem_store::Error>(())
//! ```
//!
//! The feature `test-hooks`, off by default, adds entry points for fuzzing. It is for this crate's own tests.

#![forbid(unsafe_code)]

mod cells;
mod client;
mod convert;
mod error;
#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub mod fuzz;
mod id;
mod index;
mod keeper;
mod pin;
mod protocol;
mod serve;
mod server;
mod socket;

pub use client::{
    Client, Draft, Entry, Mirror, Object, Pack, PackDraft, PackMember, PackObject, Sealed, Sealing, Unsealed,
    Watch,
};
pub use error::{Error, Result};
pub use id::{AllocationId, ObjectId, ParseIdError};
pub use index::IndexError;
pub use keeper::Role;
pub use protocol::{Event, EventKind, Refusal, Status, Usage};
pub use serve::{Launch, Serve};
pub use socket::socket;
