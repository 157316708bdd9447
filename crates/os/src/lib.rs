//! The parts of Linux that shared memory stands on, made safe: sealed memory files, maps, shared bytes,
//! waiting, and packets that carry file descriptors.
//!
//! | module | what it holds |
//! |---|---|
//! | [`memfd`] | physical memory with a name only its file descriptor knows, sealed so that nobody can resize it |
//! | [`vm`], [`private`] | address ranges, and memory files mapped at chosen places in them, shared or copied on write |
//! | [`shared`] | bytes that other processes may write at any moment: copied in and out, or reached by atomics |
//! | [`futex`], [`deadline`], [`interrupt`] | waiting for a shared word to change, but never for ever |
//! | [`packet`] | datagrams between processes that keep their boundaries and carry file descriptors |
//! | [`pidfd`], [`robust`] | knowing that another process has died, without trusting its sockets |
//! | [`fork`] | noticing that this process is a forked child, where inherited handles must do nothing |
//! | [`signal`], [`access_fault`] | signals as something to be read, and a name for memory that was written though it is read-only |
//! | [`replace`] | files that are replaced whole or not at all |
//! | [`descriptors`], [`heap`] | how many descriptors a process may have, and freed memory that it still has |
//! | [`time_slice`] | how long a busy thread keeps its core |
//! | [`numa`], [`meminfo`] | which memory is near which processor, and how much is left |
//! | [`size`], [`visible`] | byte counts, and text that others have chosen, as people read them |
//! | [`width`] | conversions between `usize` and `u64` that cannot fail |
//! | [`probe`] | which of all this the kernel really does, each thing tried |
//!
//! What it keeps true: every system call whose failure is an error goes through one function, which names it there
//! and lets a test make the nth one fail (`fault`); every wait has a [`Deadline`]; every file descriptor is an
//! `OwnedFd` and closes on exec. What it will not do: know about devices, ranks or objects. Those live above.
//!
//! ```
//! use wholemem_os::{Memfd, SharedMap, vm::Protection};
//!
//! let memory = Memfd::create("example", 64 << 10)?;
//! let writer = SharedMap::create(&memory, Protection::ReadWrite)?;
//! let reader = SharedMap::create(&memory, Protection::Read)?;
//!
//! writer.bytes().write_at(0, b"one memory")?;
//! let mut seen = [0; 10];
//! reader.bytes().read_at(0, &mut seen)?;
//! assert_eq!(&seen, b"one memory");
//! # Ok::<(), wholemem_os::Error>(())
//! ```
//!
//! The feature `test-hooks`, off by default, adds `fault`, which makes the nth system call of a thread fail. It is for tests.

#![allow(unsafe_code, reason = "this crate wraps the unsafe calls of Linux in safe ones")]

#[cfg(not(target_os = "linux"))]
compile_error!("wholemem runs on Linux: its memory is memfd, and its handles are Linux file descriptors");

pub mod access_fault;
mod call;
pub mod deadline;
pub mod descriptors;
mod error;
#[cfg(feature = "test-hooks")]
pub mod fault;
pub mod fork;
pub mod futex;
pub mod heap;
pub mod interrupt;
mod large;
pub mod memfd;
pub mod meminfo;
pub mod numa;
pub mod packet;
pub mod pidfd;
pub mod private;
pub mod probe;
pub mod replace;
pub mod robust;
pub mod shared;
pub mod signal;
pub mod size;
pub mod time_slice;
pub mod visible;
pub mod vm;
pub mod width;

pub use deadline::Deadline;
pub use error::{Error, FileKind, Result};
pub use fork::ForkEpoch;
pub use memfd::Memfd;
pub use packet::PacketSocket;
pub use pidfd::PidFd;
pub use private::PrivateMap;
pub use rustix::io::Errno;
pub use shared::SharedSlice;
pub use size::Size;
pub use visible::Visible;
pub use vm::SharedMap;
