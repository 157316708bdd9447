//! The Python interface of the store: named objects that outlive the process that created them, and that Python accesses as
//! arrays.
//!
//! | module | content |
//! |---|---|
//! | `client` | a connection: put, get, publish, delete, list |
//! | `arguments` | timeouts, default values and names as arguments of its calls |
//! | `put_value` | the value of a `put`: arrays in host memory or on a GPU |
//! | `share` | publishes GPU memory without a copy |
//! | `stored` | an object, or a pack of objects, as arrays that hold its pin |
//! | `draft` | objects that are being written, until they are sealed |
//! | `watch` | events of names |
//! | `mirror` | copies in host memory of objects on a device |
//! | `entry` | descriptions of objects and of the store |
//! | `description` | shape and type of an array in the metadata of its object |
//! | `error` | errors of the store as exceptions |
//!
//! Getting an object whose memory is already mapped makes no system call, except for a periodic check of the connection, and
//! keeps the GIL. All other calls release the GIL. Dropping an object does not block.

mod arguments;
mod client;
mod description;
mod draft;
mod entry;
mod error;
mod mirror;
mod put_value;
mod share;
mod stored;
mod watch;

pub(crate) use client::{Client, collect_shared};
pub(crate) use draft::{Draft, PackDraft};
pub(crate) use entry::{Entry, Status};
pub(crate) use mirror::Mirror;
pub(crate) use stored::Pack;
pub(crate) use watch::{Event, Watch};
