//! An object store: named objects in shared memory that outlive the process that created them, their readers and the server.
//!
//! ```text
//!   client --- socket ---> server  <--- socket pair --- keeper
//!     \                      |                             \__ holds every descriptor, and starts the server
//!      \__ maps the index    \__ writes the index
//!          for reading           and reads the pins
//!          and writes its pins
//! ```
//!
//! One process creates an object, writes it and seals it. A sealed object never changes, and any process gets it by name. The
//! memory, on the host or on a GPU, is mapped and not copied. Sealing a new object with the same name replaces the old one under
//! that name; processes that hold the old object keep it.
//!
//! | item or module | contents |
//! |---|---|
//! | [`Client`], [`Draft`], [`Object`] | the API of a process that uses a store |
//! | [`Pack`] | several objects in one allocation |
//! | [`Serve`] | runs a store: a keeper process and a server process |
//! | [`socket()`] | the default path of the socket |
//! | `index` | the table of all objects, in memory that clients map read-only; it is also the journal |
//! | `pin` | references to objects that take no system call |
//! | `protocol` | the messages between clients and server |
//! | `server`, `keeper` | state machines of the form `step(now, input) -> outputs`, and the event loops that run them |
//!
//! Guarantees: `kill -9` of the server loses no sealed object and does not disturb readers. The resources of a client that exits
//! are freed. Readers cannot write an object, nor can other users. Not guaranteed: processes of the server's own user are not
//! protected from each other, any process that can connect can read every object, and if the keeper and the server die together,
//! the store is lost.
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
    Client, Draft, Entry, Mirror, Object, Pack, PackDraft, PackMember, PackObject, PendingSeal, SealError,
    Sealed, Watch,
};
pub use error::{Error, Result};
pub use id::{AllocationId, ObjectId, ParseIdError};
pub use index::IndexError;
pub use keeper::{Launch, ProcessRole};
pub use protocol::{Event, EventKind, NamedValue, Refusal, RequestStatistics, Statistics, Status, Usage};
pub use serve::Serve;
pub use socket::socket;
