//! Tables that are divided among many GPUs, processes and threads, with gather and scatter at memory bandwidth, and collective
//! calls.
//!
//! This page is an introduction. Each example runs without a GPU.
//!
//! ```
//! use wholemem::prelude::*;
//!
//! let rows = Communicator::run_local(4, |comm| {
//!     let table = WholeTensor::create(comm, &TensorSpec::of::<f32>(&[1_000_000, 16]))?; // a quarter of the rows on each rank
//!     table.fill_local(comm.rank().0 as f32)?; // every rank fills its own rows
//!     comm.barrier()?;
//!     table.gather::<f32>(&[999_999, 0]) // and accesses the rows of all ranks
//! })?;
//! assert_eq!(rows, vec![[[3.0; 16], [0.0; 16]].concat(); 4]);
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! # Ranks
//!
//! A [`Communicator`] is a group of ranks, each with a device. Usually each rank is a process, started by `wholemem launch` or
//! another launcher, which calls [`Communicator::from_env`]. Ranks can also be threads of one process:
//! [`Communicator::run_local`] starts them on the available devices, [`Communicator::local`] creates them on given devices, and
//! [`Communicator::on_each`] makes a collective call on all of them.
//!
//! ```
//! use wholemem::{Backend, Communicator, HostConfig};
//!
//! let backend = Backend::host(HostConfig::virtual_devices(4))?; // or Backend::auto()?, for GPUs
//! let devices: Vec<_> = (0..4).map(|id| backend.device(id)).collect::<Result<_, _>>()?;
//! let comms = Communicator::local(&devices)?;
//! assert_eq!(comms[3].rank().0, 3);
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! # Tables
//!
//! A [`WholeTensor`] has elements with a shape, rows first. Each rank stores its share of the rows on its device, and every
//! rank can access all rows. [`TensorSpec`] describes it: [`Kind::Continuous`] is one range of addresses, [`Kind::Chunked`] one
//! for each rank; [`Location::Host`] is host memory instead of device memory. Rows are divided evenly, or as given.
//!
//! ```
//! # use wholemem::prelude::*;
//! # Communicator::run_local(2, |comm| {
//! let spec = TensorSpec { rows_of_each: Some(vec![900, 100]), ..TensorSpec::of::<f32>(&[1000, 16]) };
//! let table = WholeTensor::create(comm, &spec)?;
//! let own = table.local().map(|local| local.rows);
//! assert_eq!(own, Some(if comm.rank() == Rank(0) { 0..900 } else { 900..1000 }));
//! # Ok(())
//! # })?;
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! # Gather and scatter
//!
//! [`gather`](WholeTensor::gather) returns rows of any rank by their indices, [`scatter`](WholeTensor::scatter) writes rows, and
//! [`scatter_add`](WholeTensor::scatter_add) adds to them. [`read_rows`](WholeTensor::read_rows) and
//! [`write_rows`](WholeTensor::write_rows) are for contiguous rows. They accept slices of an [`Element`] type, such as `f32`, and
//! wait for the result. Other ranks see the rows that a rank has written after a [`Communicator::barrier`].
//!
//! ```
//! # use wholemem::prelude::*;
//! # Communicator::run_local(2, |comm| {
//! let table = WholeTensor::create(comm, &TensorSpec::of::<i32>(&[1000, 2]))?;
//! table.scatter_add(&[7, 999, 7], &[1, 2, 1, 2, 1, 2])?; // by both ranks
//! comm.barrier()?;
//! assert_eq!(table.gather::<i32>(&[7, 999, 0])?, [4, 8, 2, 4, 0, 0]);
//! # Ok(())
//! # })?;
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! Calls whose names end in `_on` are enqueued on a [`Stream`], between buffers that the device can access, and can be captured in
//! a [`Graph`]: [`gather_on`](WholeTensor::gather_on) copies the rows that [`Indices`] name into a [`RowBuffer`]. Rows can have a
//! stride, and elements can be converted. Calls whose names end in `_on_sync` wait. Other ranks see the results of enqueued calls
//! after a [`Communicator::barrier_on`].
//!
//! ```
//! # use wholemem::prelude::*;
//! # Communicator::run_local(2, |comm| {
//! let table = WholeTensor::create(comm, &TensorSpec::of::<f32>(&[1000, 2]))?;
//! let (device, stream) = (comm.device(), comm.device().stream()?);
//! let (indices, rows) = (PinnedBuffer::create(device, 3 * 8)?, PinnedBuffer::create(device, 3 * 2 * 2)?);
//! indices.bytes()?.write_at(0, [7_i64, 999, 7].map(i64::to_ne_bytes).as_flattened())?;
//!
//! let halves = RowBuffer::new(rows.all(), Dtype::F16).converted();
//! table.gather_on(&stream, &Indices::i64(indices.all()), &halves)?;
//! stream.synchronize(Deadline::NEVER)?;
//! # Ok(())
//! # })?;
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! If an index names no row, a gather zeroes its row of the output, and a scatter skips the row. A call that waits returns
//! [`Error::BadIndex`] with the smallest position of such an index; a bad index of an enqueued call is reported by
//! [`check`](WholeTensor::check) or by the next call.
//!
//! # Windows and collective calls
//!
//! A [`Window`] is memory of which every rank has a part and which every rank can access: new memory from
//! [`SymmetricMemory::mem_alloc`], or existing memory. The collective calls are [all-reduce](Lane::all_reduce),
//! [all-gather](Lane::all_gather), [broadcast](Lane::broadcast) and [barrier](Lane::barrier). Memory outside of windows is staged.
//! The result of a reduction is bitwise the same on every rank, for every algorithm and device. Calls are enqueued on a stream, and
//! can be captured in a graph. If a rank dies or does not arrive before the timeout, the call fails with an error that names the
//! rank. Calls on slices, such as [`all_reduce_slice`](Lane::all_reduce_slice), wait.
//!
//! ```
//! # use wholemem::prelude::*;
//! # Communicator::run_local(2, |comm| {
//! let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
//! let mut values = [1.5_f32; 1000];
//! symmetric.all_reduce_slice(&mut values, ReduceOp::Sum)?;
//! assert_eq!(values, [3.0; 1000]);
//!
//! // In place, through a window, which needs no copies.
//! let (window, stream) = (symmetric.mem_alloc(1000 * 4)?, comm.device().stream()?);
//! symmetric.all_reduce(&stream, &window, &window, Dtype::F32, ReduceOp::Sum)?;
//! stream.synchronize(Deadline::NEVER)?;
//! symmetric.check()?;
//! # Ok(())
//! # })?;
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! # Errors
//!
//! Creating memory is collective: it succeeds on all ranks, or fails on all ranks with the same [`Error`], which names the rank
//! that failed, and the group remains usable. Dropping memory is not collective and never waits. If a rank dies, calls of the
//! others return [`Error::Comm`]. The operator `?` converts the errors of [`hal`], [`comm`] and [`os`] to [`Error`].
//!
//! ```
//! # use wholemem::{Communicator, Error, MemorySpec, Rank, WholeMemory};
//! # Communicator::run_local(2, |comm| {
//! // Rank 1 would have to allocate 64 TiB.
//! let spec = MemorySpec { rows_of_each: Some(vec![1, 1 << 46]), ..MemorySpec::new((1 << 46) + 1, 1) };
//! let error = WholeMemory::create(comm, &spec).unwrap_err();
//! assert!(matches!(error, Error::OnRank { rank: Rank(1), .. }));
//! # Ok(())
//! # })?;
//! # Ok::<(), Error>(())
//! ```
//!
//! # The crates below
//!
//! Programs need only this crate. It re-exports the types of devices, memory and streams (`wholemem-hal`), ranks (`wholemem-comm`)
//! and Linux (`wholemem-os`) that tables and collective calls use, and the crates themselves as [`hal`], [`comm`] and [`os`].
//! [`prelude`] re-exports the names that most programs use.
//!
//! # Modules
//!
//! A module uses only the modules below it.
//!
//! ```text
//!   prelude         the names that most programs use
//!   files           saves and loads tensors; reads .npy and .safetensors files
//!   collective      SymmetricMemory, Window, Lane: memory that every rank has, and collective calls over it
//!   table           WholeMemory, WholeTensor, Partition, Placement: memory divided among ranks; gather and scatter
//!   communicator    Communicator: ranks with devices; errors that are the same on all ranks; staging of host slices
//!   kernels         the kernels of gather and scatter, loaded on a device
//!   cpu             all kernels as the CPU runs them, and the reference for those of GPUs
//!   abi             GlobalRef, ElementRef, LaneRef, WindowRef, requests: structures that host and device code share
//!   error           Error, FileError
//!   dtype           Dtype, Element, ReduceOp: element types, the table of their names and codes, and their arithmetic
//! ```
//!
//! # Logging
//!
//! The crates emit events of `tracing`. At `debug`, each kind of collective call is logged once, with its algorithm and memory path. A
//! program that has no subscriber of its own can install a small one, with the filter of the environment variable `WHOLEMEM_LOG`:
//!
//! ```
//! use wholemem::os::log::{LogFilter, LogSubscriber};
//!
//! if let Some(filter) = LogFilter::from_env()? {
//!     LogSubscriber::new(filter, |record| eprintln!("{} {}: {}", record.level, record.target, record.message)).install();
//! }
//! # Ok::<(), wholemem::os::log::BadLogVariable>(())
//! ```
//!
//! # Features
//!
//! None is on by default.
//!
//! | feature | effect |
//! |---|---|
//! | `test-hooks` | for this crate's own tests: delays in collective calls, and broken synchronization rules that tests must detect |
//!
//! This crate does not move rows between nodes: the ranks of a group share memory, so they are on one node.

#[allow(unreachable_pub, reason = "cbindgen exports only `pub` items")]
mod abi;
mod collective;
mod communicator;
mod cpu;
mod dtype;
mod error;
pub mod files;
mod kernels;
pub mod prelude;
mod table;

#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub use abi::Mutant;
pub use abi::{
    CollectiveRequest, ElementRef, ElementsRequest, GlobalRef, IndexType, LaneRef, RowsRequest, WindowRef,
};
#[cfg(feature = "test-hooks")]
#[doc(hidden)]
pub use collective::CallFaults;
pub use collective::{
    Algorithm, Buffer, CaptureRecording, Lane, RecordedWindows, SymmetricMemory, SymmetricSpec, Tuning,
    UnknownAlgorithm, Window,
};
pub use communicator::Communicator;
#[doc(hidden)]
pub use dtype::combine_naive;
pub use dtype::{Dtype, DtypeInfo, DtypeKind, Element, ReduceOp, UnknownDtype, UnknownReduceOp};
pub use error::{Error, Result};
#[doc(no_inline)]
pub use half::{bf16, f16};
pub use table::{
    Extent, Indices, Kind, LocalRows, Location, MemorySpec, OnBadIndex, Order, Partition, Placement,
    RowBuffer, TensorSpec, WholeMemory, WholeTensor,
};
/// The crate for ranks without devices: joining, deaths, messages and file descriptors.
#[doc(no_inline)]
pub use wholemem_comm as comm;
/// The crate for devices, memory, streams and kernels.
#[doc(no_inline)]
pub use wholemem_hal as hal;
/// The crate with Linux system calls as safe types.
#[doc(no_inline)]
pub use wholemem_os as os;

pub use wholemem_comm::{Bootstrap, Network, Rank, UniqueId};
pub use wholemem_hal::{
    Allocation, Args, Backend, BackendKind, CudaMallocBuffer, Device, DeviceId, Event, EventKind, Function,
    Granule, Graph, HandleKind, HostConfig, KernelImage, LaunchShape, Module, PinnedBuffer, Rights,
    ShareHandle, Span, Stream,
};
pub use wholemem_os::Deadline;
