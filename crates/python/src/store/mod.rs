//! Named objects that outlive whoever made them, as arrays: see `wholemem.store` in Python.
//!
//! | room | what it holds |
//! |---|---|
//! | `client` | a connection: put, get, publish, delete, list |
//! | `given` | what is put: arrays, wherever they are |
//! | `share` | arrays of a GPU that become objects where they lie |
//! | `lease` | an object, or a pack of them, as arrays that keep it |
//! | `draft` | what is being written, until it is sealed |
//! | `watch` | being told of what happens to names |
//! | `mirror` | a host view of memory that may be on a device |
//! | `entry` | what there is to know of objects, and of the store |
//! | `description` | shape and type of an array, as its object carries them |
//! | `error` | errors of the store as exceptions |
//!
//! What it keeps true: an object whose memory is mapped already is got without a system call, but for a look at the
//! connection now and then, and without giving up the interpreter's lock. Everything else gives it up first, and nothing
//! that is dropped waits for anybody.

mod client;
mod description;
mod draft;
mod entry;
mod error;
mod given;
mod lease;
mod mirror;
mod share;
mod watch;

pub(crate) use client::{Client, collect_shared};
pub(crate) use draft::{Draft, PackDraft};
pub(crate) use entry::{Entry, Status};
pub(crate) use lease::Pack;
pub(crate) use mirror::Mirror;
pub(crate) use watch::{Event, Watch};
