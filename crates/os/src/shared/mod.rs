//! Bytes of shared memory that other processes may write concurrently.
//!
//! Two rules make such bytes safe to use in Rust. No `&[u8]` or `&mut [u8]` to shared bytes is ever created: they are
//! copied in and out by code that the compiler does not interpret (`copy`), or accessed as atomics. And bytes are
//! validated after they were copied out, since the original may change at any time.
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
//! bytes.atomic_u64(0)?.store(7, Ordering::Release); // publishes the length after the payload
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
