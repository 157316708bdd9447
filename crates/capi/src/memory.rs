//! Whole memory: bytes that are divided among the ranks' devices, and that every rank has mapped.

use std::ffi::c_void;
use std::sync::Arc;

use wholemem::{GlobalRef, Kind, Location, MemorySpec, Rank, WholeMemory};

use crate::argument::{self, Output, Plain, flag, invalid};
use crate::call::call;
use crate::communicator::{CommState, wm_communicator_t};
use crate::failure::Result;
use crate::handle::handle_type;
use crate::status::wm_status_t;

/// How a rank addresses a memory: `WM_KIND_CONTINUOUS` or `WM_KIND_CHUNKED`.
pub type wm_kind_t = u32;
/// One range of addresses over all ranks' rows.
pub const WM_KIND_CONTINUOUS: wm_kind_t = 0;
/// One range of addresses for each rank's rows.
pub const WM_KIND_CHUNKED: wm_kind_t = 1;

/// Where a memory is: `WM_LOCATION_DEVICE` or `WM_LOCATION_HOST`.
pub type wm_location_t = u32;
/// The memory of each rank's device.
pub const WM_LOCATION_DEVICE: wm_location_t = 0;
/// Host memory, which the devices access too.
pub const WM_LOCATION_HOST: wm_location_t = 1;

/// Bytes that are divided among the ranks of a communicator, and that every rank has mapped.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_memory_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A whole memory, and what it shares with its communicator.
#[derive(Debug)]
pub(crate) struct MemoryObject {
    pub(crate) memory: WholeMemory,
    pub(crate) state: Arc<CommState>,
}

handle_type!(wm_memory_t, MemoryObject, Memory);

/// The specification of a whole memory, equal on all ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_memory_spec_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The number of rows.
    pub rows: u64,
    /// The length of a row in bytes. A row is never divided between ranks.
    pub row_len: u64,
    /// `WM_KIND_CONTINUOUS` or `WM_KIND_CHUNKED`.
    pub kind: wm_kind_t,
    /// `WM_LOCATION_DEVICE` or `WM_LOCATION_HOST`.
    pub location: wm_location_t,
    /// 1 if the memory must have the same addresses on all ranks, so that ranks can exchange pointers; otherwise 0.
    pub equal_addresses: u32,
    /// The number of `rows_of_each`: the number of ranks, or 0 to divide the rows evenly.
    pub rows_of_each_count: u32,
    /// The number of rows of each rank.
    pub rows_of_each: *const u64,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_memory_spec_t {
    const FIRST_LEN: usize = 48;
}

/// Rows that are at one range of addresses.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_rows_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The number of the first row.
    pub first_row: u64,
    /// The number of rows. It may be 0, and the other fields are 0 then.
    pub row_count: u64,
    /// The address of the first row.
    pub address: *mut c_void,
    /// The number of bytes from one row to the next.
    pub stride: u64,
    /// The number of bytes from the begin of the first row to the end of the last.
    pub len: u64,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_rows_t {
    const FIRST_LEN: usize = 48;
}

/// The addresses of the rows of a table, for kernels: `wholemem::GlobalRef` in `wholemem/abi.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_global_ref_t {
    /// With one chunk, the address of row 0; otherwise that of a directory.
    pub base: u64,
    /// The number of rows.
    pub rows: u64,
    /// The number that is added to an index before its chunk is looked up.
    pub first_row: u64,
    /// The number of bytes from one row to the next.
    pub stride: u64,
    /// The number of bytes that is added to the address of a row.
    pub offset: u64,
    /// The number of rows in every chunk but the last; 0 if the chunks differ.
    pub chunk_rows: u64,
    /// The multiplier with which kernels divide by `chunk_rows`.
    pub magic: u64,
    /// The shift with which kernels divide by `chunk_rows`.
    pub shift: u32,
    /// The number of ranges of addresses.
    pub chunks: u32,
}

impl From<GlobalRef> for wm_global_ref_t {
    fn from(of: GlobalRef) -> Self {
        let GlobalRef { base, rows, first_row, stride, offset, chunk_rows, magic, shift, chunks } = of;
        Self { base, rows, first_row, stride, offset, chunk_rows, magic, shift, chunks }
    }
}

const _: () = assert!(size_of::<wm_global_ref_t>() == size_of::<GlobalRef>());

pub(crate) fn kind_of(number: wm_kind_t) -> Result<Kind> {
    match number {
        WM_KIND_CONTINUOUS => Ok(Kind::Continuous),
        WM_KIND_CHUNKED => Ok(Kind::Chunked),
        _ => Err(invalid(format!("there is no kind {number} of memory"))),
    }
}

pub(crate) fn location_of(number: wm_location_t) -> Result<Location> {
    match number {
        WM_LOCATION_DEVICE => Ok(Location::Device),
        WM_LOCATION_HOST => Ok(Location::Host),
        _ => Err(invalid(format!("there is no location {number} of memory"))),
    }
}

/// Returns the numbers of rows of the ranks, or `None` to divide the rows evenly.
///
/// # Safety
/// As the header requires: `rows_of_each` points to `count` numbers.
pub(crate) unsafe fn rows_of_each(rows_of_each: *const u64, count: u32) -> Result<Option<Vec<u64>>> {
    // SAFETY: the caller guarantees the numbers.
    let rows = unsafe { argument::slice(rows_of_each, count as usize, "rows_of_each") }?;
    Ok((count > 0).then(|| rows.to_vec()))
}

/// Creates a whole memory filled with zeros. Collective: all ranks pass an equal specification. If a rank fails, all ranks fail with
/// the same error, which names the rank.
///
/// The caller frees the memory with `wm_memory_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_create(
    communicator: wm_communicator_t,
    spec: *const wm_memory_spec_t,
    memory: *mut wm_memory_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(memory, "memory") }?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let spec = unsafe { argument::required(spec, "spec") }?;
        let state = Arc::clone(&*communicator.get()?);
        let spec = MemorySpec {
            rows: spec.rows,
            row_len: argument::size(spec.row_len, "row_len")?,
            kind: kind_of(spec.kind)?,
            location: location_of(spec.location)?,
            // SAFETY: the specification has as many numbers as it says, as the header requires.
            rows_of_each: unsafe { rows_of_each(spec.rows_of_each, spec.rows_of_each_count) }?,
            equal_addresses: flag(spec.equal_addresses, "equal_addresses")?,
        };
        let memory = WholeMemory::create(&state.comm, &spec)?;
        output.write(wm_memory_t::create(MemoryObject { memory, state })?);
        Ok(())
    })
}

/// Frees the handle of a memory. This rank's mappings are removed when no tensor and no work uses them. Does not wait for other ranks,
/// which may still use the memory.
#[unsafe(no_mangle)]
pub extern "C" fn wm_memory_destroy(memory: wm_memory_t) -> wm_status_t {
    call(|| Ok(memory.free()?))
}

/// Returns the number of bytes of all rows.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_len(memory: wm_memory_t, len: *mut u64) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(len, "len") }?;
        output.write(memory.get()?.memory.len() as u64);
        Ok(())
    })
}

/// Returns the rows of a rank: the number of the first one, and how many they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_rows_of(
    memory: wm_memory_t,
    rank: u32,
    first_row: *mut u64,
    row_count: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let first = unsafe { Output::new(first_row, "first_row") }?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let count = unsafe { Output::new(row_count, "row_count") }?;
        let object = memory.get()?;
        let rows = object.memory.partition().range(object.state.rank(rank)?);
        first.write(rows.start);
        count.write(rows.end - rows.start);
        Ok(())
    })
}

/// Returns the address at which this rank has mapped the rows of a rank, and their length in bytes. The address is null if the rank has
/// no rows. It is valid until the memory is released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_address_of(
    memory: wm_memory_t,
    rank: u32,
    address: *mut *mut c_void,
    len: *mut u64,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let address = unsafe { Output::new(address, "address") }?;
        // SAFETY: the pointer is null or valid, as the header requires.
        let len = unsafe { Output::new(len, "len") }?;
        let object = memory.get()?;
        let rank = object.state.rank(rank)?;
        let rows = object.memory.partition().range(rank);
        address.write(argument::pointer(object.memory.address_of(rank).unwrap_or(0)));
        len.write((rows.end - rows.start) * object.memory.row_len() as u64);
        Ok(())
    })
}

/// Copies `len` bytes to the memory from byte `offset` on, and waits for the copy. The bytes are in host memory. Other ranks see them
/// after the next `wm_communicator_barrier`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_write(
    memory: wm_memory_t,
    offset: u64,
    bytes: *const c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = memory.get()?;
        // SAFETY: the pointer is null or points to `len` bytes, as the header requires.
        let bytes = unsafe { argument::slice(bytes.cast::<u8>(), len, "bytes") }?;
        let offset = argument::size(offset, "offset")?;
        Ok(object.memory.write(object.state.own_stream(), offset, bytes)?)
    })
}

/// Copies `len` bytes of the memory from byte `offset` on to `bytes`, which is host memory, and waits for the copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_read(
    memory: wm_memory_t,
    offset: u64,
    bytes: *mut c_void,
    len: usize,
) -> wm_status_t {
    call(|| {
        let object = memory.get()?;
        // SAFETY: the pointer is null or points to `len` bytes of the caller, as the header requires.
        let bytes = unsafe { argument::slice_mut(bytes.cast::<u8>(), len, "bytes") }?;
        let offset = argument::size(offset, "offset")?;
        Ok(object.memory.read(object.state.own_stream(), offset, bytes)?)
    })
}

/// Returns the addresses of the rows on this rank, for kernels. They are valid until the memory is released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_memory_global_ref(
    memory: wm_memory_t,
    reference: *mut wm_global_ref_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(reference, "reference") }?;
        output.write(memory.get()?.memory.global_ref().into());
        Ok(())
    })
}

impl CommState {
    /// Returns the rank with a number.
    pub(crate) fn rank(&self, number: u32) -> Result<Rank> {
        let (rank, size) = (Rank(number), self.comm.size());
        if number < size { Ok(rank) } else { Err(wholemem_comm::Error::NoSuchRank { rank, size }.into()) }
    }
}
