//! Devices, memory, streams and kernels: one safe interface over Linux shared memory and CUDA's virtual memory.
//!
//! The two are the same seven verbs: create physical memory, reserve addresses, map the one at the other, set who may
//! access it, export and import handles, unmap, release. This crate is those verbs made safe, written once for both
//! backends. This page is a short course; each example runs on a machine without a GPU.
//!
//! # Memory, and where it is mapped
//!
//! A [`Backend`] has [`Device`]s. An [`Allocation`] is physical memory on a device and has no address. A
//! [`Reservation`] is addresses and has no memory. A [`Mapping`] is a whole allocation at a place of a reservation.
//! Lengths and offsets are whole [`Granule`]s.
//!
//! ```
//! use wholemem_hal::{Backend, Grant, Mapping, Reservation, Rights};
//!
//! let backend = Backend::auto()?;
//! let device = backend.device(0)?;
//! let granule = device.granularity()?.minimum.len();
//!
//! let addresses = Reservation::create(&backend, 4 * granule)?;
//! let memory = device.allocate(2 * granule)?;
//! let rights = [Grant { device: device.id(), rights: Rights::ReadWrite }];
//! let map = Mapping::create(&addresses, granule, &memory, &rights)?;
//!
//! assert_eq!(map.address(), addresses.address() + granule as u64);
//! # Ok::<(), wholemem_hal::Error>(())
//! ```
//!
//! A mapping holds its allocation and its reservation. Drop them in any order.
//!
//! # Reaching the bytes
//!
//! Other processes may write shared memory at any moment, so there is never a `&[u8]` to it. On the host,
//! [`Mapping::bytes`] gives a view that copies in and out. On every backend, a [`Stream`] copies.
//!
//! ```
//! # use wholemem_hal::{Backend, Rights};
//! let device = Backend::auto()?.device(0)?;
//! let granule = device.granularity()?.minimum.len();
//! let map = device.allocate(granule)?.map(Rights::ReadWrite)?;
//!
//! let stream = device.stream()?;
//! stream.write(&map.span(0, 5)?, b"hello")?;
//! let mut seen = [0; 5];
//! stream.read(&map.span(0, 5)?, &mut seen)?;
//! assert_eq!(&seen, b"hello");
//! # Ok::<(), wholemem_hal::Error>(())
//! ```
//!
//! # Sharing it
//!
//! [`Allocation::export`] makes a [`ShareHandle`], on one machine a file descriptor. Send it over a Unix socket; the
//! receiver calls [`Allocation::import`], which trusts nothing: the descriptor must be sealed memory of exactly the
//! promised length. The memory lives while any process holds it, whatever becomes of the one that made it.
//!
//! ```
//! use wholemem_hal::{Allocation, Backend, HandleKind, HostConfig, Rights};
//! use wholemem_os::{Deadline, PacketSocket};
//! use std::os::fd::AsFd;
//!
//! let device = Backend::host(HostConfig::default())?.device(0)?;
//! let (here, there) = PacketSocket::pair()?; // `there` would be another process's end
//!
//! let memory = device.allocate(1 << 20)?;
//! let handle = memory.export(HandleKind::Fd, Rights::Read)?.into_fd().expect("a file descriptor");
//! here.send(b"weights", &[handle.as_fd()], Deadline::NEVER)?;
//!
//! let mut name = [0; 16];
//! let (len, mut fds) = there.recv_with_fds(&mut name, 1, Deadline::NEVER)?;
//! let received = Allocation::import(&device, fds.remove(0).into(), 1 << 20)?;
//! assert_eq!((&name[..len], received.rights()), (&b"weights"[..], Rights::Read));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Work
//!
//! A [`Stream`] runs copies, fills and kernels in order; an [`Event`] marks a point that other streams, the processor
//! and other processes wait for; a [`Graph`] repeats work. A stream keeps alive what its work uses: dropping a
//! mapping right after enqueuing a copy into it is safe.
//!
//! ```
//! use wholemem_hal::{Backend, Event, EventKind, Rights};
//! use wholemem_os::Deadline;
//!
//! let device = Backend::auto()?.device(0)?;
//! let granule = device.granularity()?.minimum.len();
//! let (from, to) = (device.allocate(granule)?, device.allocate(granule)?);
//! let (from, to) = (from.map(Rights::ReadWrite)?, to.map(Rights::ReadWrite)?);
//!
//! let (first, second) = (device.stream()?, device.stream()?);
//! let filled = Event::create(&device, EventKind::Order)?;
//! first.fill(&from.all(), 7)?;
//! first.record(&filled)?;
//! second.await_event(&filled)?;
//! second.copy(&to.all(), &from.all())?;
//! drop(from); // still there until the copy has run
//! second.synchronize(Deadline::NEVER)?;
//! # Ok::<(), wholemem_hal::Error>(())
//! ```
//!
//! # When something is wrong
//!
//! An [`Error`] says what was attempted, with which values, and why it could not be; what was acquired on the way has
//! been given back. Bad input is found before anything is touched. After `fork`, handles inherited by the child
//! answer [`Error::Forked`] and their drops do nothing there.
//!
//! ```
//! use wholemem_hal::{Backend, HostConfig};
//!
//! let device = Backend::host(HostConfig::default())?.device(0)?;
//! let error = device.allocate(1000).unwrap_err();
//! let expected = "cannot create 1000 B on host:0: the length is not a multiple of the granule, 64 KiB";
//! assert_eq!(error.to_string(), expected);
//! # Ok::<(), wholemem_hal::Error>(())
//! ```
//!
//! # What is underneath
//!
//! Backends implement two raw traits, unchecked and hidden from this documentation; all checks are made once, in the
//! safe types above them. The host backend is no mock: it is how host memory works in production, and the oracle for
//! the others. It can pretend to be many devices with large granules ([`HostConfig`]), so that a program for eight GPUs
//! is tested on a laptop. A [`Suballocator`] divides an allocation among small users.
//!
//! ```text
//!   doctor   limits   pattern    reports; with the feature `bench`: raw calls, a fill pattern with a checksum
//!      |        |        |
//!   experiment  |        |       tries each capability with the safe types
//!      |        |        |
//!   queue ------+--------+       streams, events, graphs, modules
//!      |        |
//!   memory -----+                allocations, reservations, maps, spans
//!      |        |
//!   backend     |                an open backend, its devices, teardowns, operands of work in flight
//!      |        |
//!   host, cuda -+                implementations of the raw traits
//!      |
//!   raw                          the two raw traits, addresses and raw handles
//!      |
//!   values                       numbers, rights, granules, specifications, errors
//!      |
//!   bindings                     generated from the headers of the CUDA driver
//! ```
//!
//! A module imports from those below it only; `suballocator` uses none of them. `cargo xtask test --only crate-graph`
//! refuses import cycles.
//!
//! # Features
//!
//! None is on by default.
//!
//! | feature | what it adds |
//! |---|---|
//! | `bench` | for benchmarks and tests: `limits`, the raw calls to measure against, and `pattern`, a fill pattern with a checksum |
//!
//! This crate does not find or watch other processes, and does not interpret the bytes. The crates above it do.

#![allow(unsafe_code, reason = "this crate wraps the unsafe calls of drivers in safe ones")]

mod backend;
/// Types, result codes and function versions of the CUDA driver.
#[rustfmt::skip]
#[path = "generated/bindings.rs"]
#[allow(
    dead_code, missing_docs, non_camel_case_types, non_snake_case, unreachable_pub, unused_imports,
    unused_qualifications,
    clippy::all, clippy::pedantic, clippy::ptr_as_ptr, clippy::undocumented_unsafe_blocks,
    reason = "generated from NVIDIA's headers, with their names"
)]
mod bindings;
mod cuda;
pub mod doctor;
mod experiment;
#[doc(hidden)]
pub mod host;
#[cfg(feature = "bench")]
pub mod limits;
mod memory;
#[cfg(feature = "bench")]
pub mod pattern;
mod queue;
#[doc(hidden)]
pub mod raw;
mod suballocator;
mod values;

pub use backend::{Backend, Device};
pub use host::HostConfig;
pub use memory::{Allocation, Mapping, PinnedBuffer, PlainBuffer, Registration, Reservation, Segment, Span};
pub use queue::{Event, Function, Graph, Module, Stream};
pub use raw::{EventHandle, EventKind, Fact, Properties};
pub use suballocator::{Suballocator, SuballocatorError};
pub use values::{
    AllocationSpec, Args, Attempt, BackendKind, Capability, Cause, DeviceId, DeviceInfo, DeviceLabel,
    DriverCode, Error, Grant, Granularity, Granule, HandleKind, HostFunction, KernelImage, LaunchShape,
    Proof, Result, Rights, ShareHandle,
};
