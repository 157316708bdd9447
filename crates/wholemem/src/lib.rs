//! Memory over many GPUs, processes and threads: its rows are divided among them, and gathered and scattered at memory
//! bandwidth.
//!
//! This page is an introduction. Each example runs without a GPU.
//!
//! # Ranks
//!
//! A [`Communicator`] is a group of ranks, each with a device. Usually each rank is a process, started by `wholemem launch` or
//! another launcher, which calls [`Communicator::from_env`]. Ranks can also be threads, or the devices of one process, as here:
//! [`Communicator::on_each`] makes a collective call on all of them.
//!
//! ```
//! use wholemem::Communicator;
//! use wholemem_hal::{Backend, HostConfig};
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
//! # use wholemem::{Dtype, Communicator, TensorSpec, WholeTensor};
//! # use wholemem_hal::{Backend, HostConfig};
//! # let backend = Backend::host(HostConfig::virtual_devices(2))?;
//! # let comms = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
//! let spec = TensorSpec { rows_of_each: Some(vec![900, 100]), ..TensorSpec::new(Dtype::F32, &[1000, 16]) };
//! let tables = Communicator::on_each(&comms, |comm| WholeTensor::create(comm, &spec))?;
//!
//! // Each rank fills its own rows.
//! for (table, comm) in tables.iter().zip(&comms) {
//!     let stream = comm.device().stream()?;
//!     if let Some(local) = table.local() {
//!         stream.fill(&local.span, 1)?;
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Gather and scatter
//!
//! [`gather_on`](WholeTensor::gather_on) copies the rows that [`Indices`] name, of any rank, into a [`RowBuffer`];
//! [`scatter_on`](WholeTensor::scatter_on) copies rows into the table, and [`scatter_add_on`](WholeTensor::scatter_add_on) adds them. They
//! are enqueued on a stream, and can be captured in a graph; those whose names end in `_sync` wait. Other ranks see what a rank
//! has scattered after a [`Communicator::barrier_on`].
//!
//! ```
//! # use wholemem::{Communicator, Dtype, Indices, Order, RowBuffer, TensorSpec, WholeTensor};
//! # use wholemem_hal::{Backend, HostConfig, PinnedBuffer};
//! # let backend = Backend::host(HostConfig::virtual_devices(2))?;
//! # let comms = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
//! let spec = TensorSpec::new(Dtype::I32, &[1000, 2]);
//! let sums = Communicator::on_each(&comms, |comm| {
//!     let table = WholeTensor::create(comm, &spec)?;
//!     let stream = comm.device().stream()?;
//!     let indices = PinnedBuffer::create(comm.device(), 3 * 8)?;
//!     let rows = PinnedBuffer::create(comm.device(), 3 * 8)?;
//!     let bytes = |values: &[i64]| values.iter().flat_map(|value| value.to_ne_bytes()).collect::<Vec<_>>();
//!     stream.write(&indices.all(), &bytes(&[7, 999, 7]))?;
//!     stream.write(&rows.all(), &[1, 0, 0, 0].repeat(6))?; // six times the number one
//!     let (indices, rows) = (Indices::i64(indices.all()), RowBuffer::new(rows.all(), Dtype::I32));
//!
//!     // Both ranks add one to both elements of rows 7, 999 and 7.
//!     table.scatter_add_on(&stream, &indices, &rows, Order::Any)?;
//!     comm.barrier_on(&stream)?;
//!     let mut row = [0; 8];
//!     table.read_rows_on(&stream, 7, &mut row)?;
//!     Ok(row)
//! })?;
//! assert_eq!(sums, [[4, 0, 0, 0, 4, 0, 0, 0]; 2]);
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! If an index names no row, its row of the output is zero and nothing else is written. The
//! [smallest position](Error::BadIndex) of such an index is reported by [`check`](WholeTensor::check) or by the next call.
//!
//! # Windows and collective calls
//!
//! A [`Window`] is memory of which every rank has a part and which every rank can access: new memory, by
//! [`SymmetricMemory::mem_alloc`], or existing memory. On windows, and on other memory, which is staged, ranks
//! [reduce](Lane::all_reduce), [gather](Lane::all_gather) and [broadcast](Lane::broadcast), and synchronize with a
//! [barrier](Lane::barrier). The result of a reduction is bitwise the same on every rank, for every algorithm and device. Calls
//! are enqueued on a stream, and can be captured in a graph. If a rank dies or does not arrive before the timeout, the call fails
//! with an error that names the rank.
//!
//! ```
//! # use wholemem::{Communicator, Dtype, ReduceOp, SymmetricMemory, SymmetricSpec};
//! # use wholemem_hal::{Backend, HostConfig};
//! # let backend = Backend::host(HostConfig::virtual_devices(2))?;
//! # let comms = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
//! let sums = Communicator::on_each(&comms, |comm| {
//!     let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
//!     let window = symmetric.mem_alloc(1000 * 4)?;
//!     let stream = comm.device().stream()?;
//!     stream.write(&window.part_of(comm.rank(), 0, 1000 * 4)?, &1.5_f32.to_ne_bytes().repeat(1000))?;
//!
//!     symmetric.all_reduce(&stream, &window, &window, Dtype::F32, ReduceOp::Sum)?; // in place
//!     let mut sum = [0; 4];
//!     stream.read(&window.part_of(comm.rank(), 4 * 999, 4)?, &mut sum)?;
//!     symmetric.check()?;
//!     Ok(f32::from_ne_bytes(sum))
//! })?;
//! assert_eq!(sums, [3.0; 2]);
//! # Ok::<(), wholemem::Error>(())
//! ```
//!
//! # Errors
//!
//! Creating memory is collective: it succeeds on all ranks, or fails on all ranks with the same [`Error`], which names the rank
//! that failed, and the group remains usable. Dropping memory is not collective and never waits. If a rank dies, calls of the
//! others return [`Error::Comm`].
//!
//! ```
//! # use wholemem::{Error, Communicator, MemorySpec, Rank, WholeMemory};
//! # use wholemem_hal::{Backend, HostConfig};
//! # let backend = Backend::host(HostConfig::virtual_devices(2))?;
//! # let comms = Communicator::local(&[backend.device(0)?, backend.device(1)?])?;
//! // Rank 1 is asked for 64 TiB.
//! let spec = MemorySpec { rows_of_each: Some(vec![1, 1 << 46]), ..MemorySpec::new((1 << 46) + 1, 1) };
//! let errors = Communicator::on_each(&comms, |comm| Ok(WholeMemory::create(comm, &spec).unwrap_err()))?;
//! assert!(matches!(errors[0], Error::OnRank { rank: Rank(1), .. }));
//! assert_eq!(errors[0], errors[1]);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Modules
//!
//! A module uses those below it only.
//!
//! ```text
//!   files           saves and loads tensors; reads .npy and .safetensors files
//!   collective      SymmetricMemory, Window, Lane: memory that every rank has, and collective calls over it
//!   table           WholeMemory, WholeTensor, Partition, Placement: memory divided among ranks; gather and scatter
//!   communicator    Communicator: ranks with devices; errors that are the same on all ranks
//!   kernels         the kernels of gather and scatter, loaded on a device
//!   cpu             all kernels as the CPU runs them, and the reference for those of GPUs
//!   abi             GlobalRef, ElementRef, LaneRef, WindowRef, requests: what host and device code both know
//!   error           Error, FileError
//!   dtype           Dtype, ReduceOp: element types, the table of their names and codes, and their arithmetic
//! ```
//!
//! This crate does not move rows between nodes: the ranks of a group share memory, so they are on one node.

#![deny(unsafe_code)]

#[allow(unreachable_pub, reason = "cbindgen exports what is `pub`")]
mod abi;
mod collective;
mod communicator;
#[allow(unsafe_code, reason = "loops over memory that other ranks write too")]
mod cpu;
mod dtype;
mod error;
pub mod files;
#[allow(unsafe_code, reason = "loading a kernel image is unsafe")]
mod kernels;
mod table;

#[doc(hidden)]
pub use abi::Mutant;
pub use abi::{
    CollectiveRequest, ElementRef, ElementsRequest, GlobalRef, IndexType, LaneRef, RowsRequest, WindowRef,
};
#[doc(hidden)]
pub use collective::Chaos;
pub use collective::{
    Algorithm, Buffer, Lane, SymmetricMemory, SymmetricSpec, Tuning, UnknownAlgorithm, Window,
};
pub use communicator::Communicator;
#[doc(hidden)]
pub use dtype::combine_naive;
pub use dtype::{Dtype, DtypeInfo, DtypeKind, Element, ReduceOp, UnknownDtype, UnknownReduceOp};
pub use error::{Error, Result};
pub use table::{
    Extent, Indices, Kind, LocalRows, Location, MemorySpec, OnBadIndex, Order, Partition, Placement,
    RowBuffer, TensorSpec, WholeMemory, WholeTensor,
};
pub use wholemem_comm::{Bootstrap, Rank};
