//! Devices, memory, streams and kernels: one safe interface over Linux shared memory and CUDA's virtual memory.
//!
//! Both offer the same seven operations: create physical memory, reserve addresses, map memory at reserved addresses,
//! set each device's access rights, export and import handles, unmap, release. This crate provides these operations as
//! safe types, written once for both backends. The sections below introduce them; every example runs on a machine
//! without a GPU.
//!
//! # Allocations, reservations and mappings
//!
//! A [`Backend`] has [`Device`]s. An [`Allocation`] is physical memory on a device and has no address. A
//! [`Reservation`] is a range of addresses without memory. A [`Mapping`] is a whole allocation mapped at an offset of a
//! reservation. Lengths and offsets are multiples of the [`Granule`].
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
//! A mapping holds references to its allocation and its reservation, so the three can be dropped in any order.
//!
//! # Reading and writing the bytes
//!
//! Other processes may write shared memory at any time, so this crate never creates a `&[u8]` to it. On the host,
//! [`Mapping::bytes`] returns a view that copies bytes in and out. On every backend, a [`Stream`] copies.
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
//! # Sharing memory with another process
//!
//! [`Allocation::export`] returns a [`ShareHandle`]; within one node it is a file descriptor. Send it over a Unix
//! socket. The receiver calls [`Allocation::import`], which validates the descriptor: it must be sealed memory of
//! exactly the expected length. The memory lives while any process holds a reference to it, even after the creating
//! process exits.
//!
//! ```
//! use wholemem_hal::{Allocation, Backend, HandleKind, HostConfig, Rights};
//! use wholemem_os::{Deadline, PacketSocket};
//! use std::os::fd::AsFd;
//!
//! let device = Backend::host(HostConfig::default())?.device(0)?;
//! let (here, there) = PacketSocket::pair()?; // another process would hold `there`
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
//! # Streams, events and graphs
//!
//! A [`Stream`] runs copies, fills and kernels in order. Other streams, the CPU and other processes can wait for an
//! [`Event`]. A [`Graph`] is captured once and launched many times. A stream keeps the operands of its work alive: a
//! mapping can be dropped right after a copy into it is enqueued.
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
//! drop(from); // the stream keeps the memory mapped until the copy has run
//! second.synchronize(Deadline::NEVER)?;
//! # Ok::<(), wholemem_hal::Error>(())
//! ```
//!
//! # Errors
//!
//! An [`Error`] contains the attempted operation, its values and the cause; a call that fails releases everything it
//! acquired. Bad input is rejected before anything changes. In a forked child, calls on inherited handles return
//! [`Error::Forked`], and dropping the handles has no effect.
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
//! # Implementation
//!
//! Backends implement two raw traits, which check nothing and are hidden from this documentation. The safe types above
//! them make all checks. The host backend is not a mock: it serves host memory in production and is the reference that
//! other backends are compared with. It can present many virtual devices with large granules ([`HostConfig`]), so that
//! a program for eight GPUs can be tested on a laptop. A [`Suballocator`] divides an allocation among small users.
//!
//! ```text
//!   doctor   limits   pattern    diagnostics; with the feature `bench`: raw calls, a fill pattern with a checksum
//!      |        |        |
//!   probe       |        |       tests each capability of a device
//!      |        |        |
//!   queue ------+--------+       streams, events, graphs, modules
//!      |        |
//!   memory -----+                allocations, reservations, maps, spans
//!      |        |
//!   backend     |                an open backend, its devices, deferred teardown, operands of work in flight
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
//! A module imports only modules below it; `suballocator` imports only `values`. `cargo xtask test --only crate-graph`
//! rejects import cycles.
//!
//! # Features
//!
//! None is on by default.
//!
//! | feature | what it adds |
//! |---|---|
//! | `bench` | for benchmarks and tests: `limits`, the raw calls to measure against, and `pattern`, a fill pattern with a checksum |
//!
//! This crate does not discover or monitor other processes and does not interpret the stored bytes. The crates above it
//! do.

#![allow(unsafe_code, reason = "this crate wraps the unsafe calls of drivers in safe ones")]

mod backend;
/// Generated bindings of the CUDA driver: types, result codes and function versions.
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
#[doc(hidden)]
pub mod host;
#[cfg(feature = "bench")]
pub mod limits;
mod memory;
#[cfg(feature = "bench")]
pub mod pattern;
mod probe;
mod queue;
#[doc(hidden)]
pub mod raw;
mod suballocator;
mod values;

pub use backend::{Backend, Device};
pub use host::HostConfig;
pub use memory::{
    Allocation, BorrowedMemory, CudaMallocBuffer, Mapping, PinnedBuffer, Registration, Reservation, Segment,
    Span,
};
pub use queue::{Event, ForeignStreams, Function, Graph, LaunchCheck, Module, Stream};
pub use raw::{AllocationProperties, BackendFact, EventHandle, EventKind};
pub use suballocator::{Suballocator, SuballocatorError};
pub use values::{
    AllocationSpec, Args, Attempt, BackendError, BackendKind, Capability, CapabilityProbe, DeviceId,
    DeviceInfo, DeviceLabel, DriverCode, Error, Grant, Granularity, Granule, HandleKind, HostFunction,
    KernelImage, LaunchShape, MemoryBlock, Result, Rights, ShareHandle,
};
