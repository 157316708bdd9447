//! Safe types over the Linux system calls that shared memory needs: sealed memory files, mappings, shared bytes,
//! waits, and packets that carry file descriptors.
//!
//! | module | contents |
//! |---|---|
//! | [`memfd`] | memory files (memfd): anonymous, resident, sealed against resizing |
//! | [`vm`], [`private`] | reserved address ranges, and memory files mapped into them: shared or copy-on-write |
//! | [`shared`] | bytes that other processes write concurrently: copied in and out, or accessed with atomics |
//! | [`futex`], [`deadline`], [`interrupt`] | waits for a shared word, bounded by a deadline or interrupted by the caller |
//! | [`packet`] | `SOCK_SEQPACKET` sockets that carry file descriptors |
//! | [`pidfd`], [`robust`] | detecting the death of another process, without relying on its sockets |
//! | [`fork`] | detecting that this process is a forked child, which must not use inherited handles |
//! | [`signal`], [`access_fault`] | signals as a readable descriptor; error messages for writes to read-only objects |
//! | [`replace`] | atomic replacement of files |
//! | [`descriptors`], [`heap`] | the limit on open descriptors; returning freed heap memory to the kernel |
//! | [`time_slice`] | the scheduler time slice of a busy thread |
//! | [`interface`] | network interfaces and their addresses |
//! | [`numa`], [`meminfo`] | NUMA nodes and page placement; available memory |
//! | [`log`] | for programs: the filter of `WHOLEMEM_LOG`, and a subscriber of `tracing` events |
//! | [`size`], [`visible`] | byte counts and untrusted text, formatted for people |
//! | [`width`] | conversions between `usize` and `u64` that cannot fail |
//! | [`probe`] | tests which of these features the running kernel supports |
//!
//! Guarantees: every system call whose failure is an error goes through one function, which puts the call's name into
//! the error and lets a test fail the nth call (`fault`); every wait has a [`Deadline`]; every file descriptor is
//! an `OwnedFd` with close-on-exec set. Devices, ranks and objects are concepts of the crates above.
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
pub mod activation;
mod call;
pub mod deadline;
pub mod descriptors;
mod error;
#[cfg(feature = "test-hooks")]
pub mod fault;
pub mod fork;
pub mod futex;
pub mod heap;
pub mod interface;
pub mod interrupt;
mod large;
pub mod log;
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
