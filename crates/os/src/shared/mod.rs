//! Bytes that other processes may write at any moment.
//!
//! Two rules make them safe to use from Rust, and this module is where both are kept. There is never a `&[u8]` or
//! `&mut [u8]` to shared bytes: they are copied in and out by a routine the compiler cannot see into
//! (`copy`), or reached as atomics. And what was copied out is checked after the copy, since the original
//! may have changed since.
//!
//! ```
//! use std::sync::atomic::Ordering;
//! use wholemem_os::{Error, Memfd, SharedMap, vm::Protection};
//!
//! let memory = Memfd::create("example", 4096)?;
//! let map = SharedMap::create(&memory, Protection::ReadWrite)?;
//! let bytes = map.bytes();
//!
//! bytes.write_at(8, b"payload")?;
//! bytes.atomic_u64(0)?.store(7, Ordering::Release); // the length, published after the payload
//!
//! assert_eq!(bytes.write_at(4090, b"payload"), Err(Error::OutOfRange { offset: 4090, len: 7, size: 4096 }));
//! # Ok::<(), Error>(())
//! ```

mod copy;
mod slice;
mod stream;
mod word;

pub use slice::SharedSlice;
pub use word::{ReadU32, ReadU64};
