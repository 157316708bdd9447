//! Tensors that are divided among ranks (tables).

use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::sync::Arc;

use wholemem::files::{FileSource, LoadSpec, SaveSpec, ignore_progress};
use wholemem::{ElementRef, Kind, LocalRows, Location, TensorSpec, WholeTensor};

use crate::argument::{self, Output, Plain, flag, invalid};
use crate::call::call;
use crate::communicator::{CommState, wm_communicator_t};
use crate::dtype::{dtype_of, wm_dtype_t};
use crate::failure::Result;
use crate::handle::handle_type;
use crate::memory::{
    WM_KIND_CHUNKED, WM_KIND_CONTINUOUS, WM_LOCATION_DEVICE, WM_LOCATION_HOST, kind_of, location_of,
    rows_of_each, wm_global_ref_t, wm_kind_t, wm_location_t, wm_memory_t, wm_rows_t,
};
use crate::status::wm_status_t;

/// A tensor whose rows are divided among the ranks of a communicator, or a view of some of its rows and columns.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct wm_tensor_t {
    /// The number of the handle; 0 is no handle.
    pub value: u64,
}

/// A tensor, and what it shares with its communicator.
#[derive(Debug)]
pub(crate) struct TensorObject {
    pub(crate) tensor: WholeTensor,
    pub(crate) state: Arc<CommState>,
}

handle_type!(wm_tensor_t, TensorObject, Tensor);

/// The specification of a tensor, equal on all ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_tensor_spec_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The shape, rows first.
    pub shape: *const u64,
    /// The number of dimensions: at least 1.
    pub dimensions: u32,
    /// The element type.
    pub dtype: wm_dtype_t,
    /// `WM_KIND_CONTINUOUS` or `WM_KIND_CHUNKED`.
    pub kind: wm_kind_t,
    /// `WM_LOCATION_DEVICE` or `WM_LOCATION_HOST`.
    pub location: wm_location_t,
    /// 1 if the tensor must have the same addresses on all ranks, so that ranks can exchange pointers; otherwise 0.
    pub equal_addresses: u32,
    /// The number of `rows_of_each`: the number of ranks, or 0 to divide the rows evenly.
    pub rows_of_each_count: u32,
    /// The number of rows of each rank.
    pub rows_of_each: *const u64,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_tensor_spec_t {
    const FIRST_LEN: usize = 48;
}

/// Properties of a tensor.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_tensor_info_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// The number of rows.
    pub row_count: u64,
    /// The length of a row in bytes.
    pub row_len: u64,
    /// The number of bytes from one row to the next, within one rank's rows.
    pub stride: u64,
    /// The number of dimensions; `wm_tensor_shape` returns their lengths.
    pub dimensions: u32,
    /// The element type.
    pub dtype: wm_dtype_t,
    /// `WM_KIND_CONTINUOUS` or `WM_KIND_CHUNKED`.
    pub kind: wm_kind_t,
    /// `WM_LOCATION_DEVICE` or `WM_LOCATION_HOST`.
    pub location: wm_location_t,
}

// SAFETY: all fields are integers, and every bit pattern of those is valid.
unsafe impl Plain for wm_tensor_info_t {
    const FIRST_LEN: usize = 48;
}

/// The addresses of the elements of a table, for kernels: `wholemem::ElementRef` in `wholemem/abi.cuh`, from which a kernel creates a
/// `PtrGen`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_element_ref_t {
    /// The addresses of the rows.
    pub rows: wm_global_ref_t,
    /// The number of bytes in a row: fewer than the stride in a view of some columns.
    pub row_len: u64,
}

const _: () = assert!(size_of::<wm_element_ref_t>() == size_of::<ElementRef>());

/// Options with which a tensor is loaded, equal on all ranks.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct wm_load_options_t {
    /// The size of this structure in bytes, which the caller sets.
    pub struct_size: usize,
    /// `WM_KIND_CONTINUOUS` or `WM_KIND_CHUNKED`.
    pub kind: wm_kind_t,
    /// `WM_LOCATION_DEVICE` or `WM_LOCATION_HOST`.
    pub location: wm_location_t,
    /// The number of rows of each rank.
    pub rows_of_each: *const u64,
    /// The number of `rows_of_each`: the number of ranks, or 0 to divide the rows evenly.
    pub rows_of_each_count: u32,
    /// The element type of a raw file.
    pub raw_dtype: wm_dtype_t,
    /// The shape of a row of a raw file: contiguous little-endian elements without a header. Null for other files.
    pub raw_row_shape: *const u64,
    /// The number of `raw_row_shape`.
    pub raw_row_dimensions: u32,
    /// 1 if the file is raw, otherwise 0: the path then determines the format.
    pub is_raw: u32,
    /// The name of a tensor of a `.safetensors` file; null for a file with one tensor, and for other files.
    pub name: *const c_char,
}

// SAFETY: all fields are integers and raw pointers, and every bit pattern of those is valid.
unsafe impl Plain for wm_load_options_t {
    const FIRST_LEN: usize = 56;
}

/// Adds a tensor to the handle table.
fn handle_of(tensor: WholeTensor, state: &Arc<CommState>) -> Result<wm_tensor_t> {
    Ok(wm_tensor_t::create(TensorObject { tensor, state: Arc::clone(state) })?)
}

/// Creates a tensor of zeros. Collective: all ranks pass an equal specification. If a rank fails, all ranks fail with the same error,
/// which names the rank.
///
/// The caller frees the tensor with `wm_tensor_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_create(
    communicator: wm_communicator_t,
    spec: *const wm_tensor_spec_t,
    tensor: *mut wm_tensor_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(tensor, "tensor") }?;
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let spec = unsafe { argument::required(spec, "spec") }?;
        let state = communicator.get()?;
        // SAFETY: the specification has as many dimensions as it says, as the header requires.
        let shape = unsafe { argument::slice(spec.shape, spec.dimensions as usize, "shape") }?;
        let spec = TensorSpec {
            dtype: dtype_of(spec.dtype)?,
            shape: shape.to_vec(),
            kind: kind_of(spec.kind)?,
            location: location_of(spec.location)?,
            // SAFETY: the specification has as many numbers as it says, as the header requires.
            rows_of_each: unsafe { rows_of_each(spec.rows_of_each, spec.rows_of_each_count) }?,
            equal_addresses: flag(spec.equal_addresses, "equal_addresses")?,
        };
        output.write(handle_of(WholeTensor::create(&state.comm, &spec)?, &state)?);
        Ok(())
    })
}

/// Creates a tensor of zeros with the type and shape of another one, and as many rows on each rank. Collective: all ranks pass the same
/// tensor. The caller frees the new tensor with `wm_tensor_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_create_like(
    tensor: wm_tensor_t,
    created: *mut wm_tensor_t,
) -> wm_status_t {
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { view(tensor, created, "created", |object| Ok(object.tensor.like()?)) }
}

/// Creates a tensor over the rows of a whole memory, without a copy: row `i` of the tensor begins at row `i` of the memory. The lengths
/// of the other dimensions are the `dimensions` numbers of `row_shape`. The caller frees the tensor with `wm_tensor_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_of_memory(
    memory: wm_memory_t,
    dtype: wm_dtype_t,
    row_shape: *const u64,
    dimensions: u32,
    tensor: *mut wm_tensor_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(tensor, "tensor") }?;
        // SAFETY: the pointer is null or points to as many numbers, as the header requires.
        let row_shape = unsafe { argument::slice(row_shape, dimensions as usize, "row_shape") }?;
        let object = memory.get()?;
        let tensor = WholeTensor::of_memory(&object.memory, dtype_of(dtype)?, row_shape)?;
        output.write(handle_of(tensor, &object.state)?);
        Ok(())
    })
}

/// Loads a tensor from files. Collective: every rank reads its own rows.
///
/// `path` is the folder of a saved tensor, a `.npy` file, a `.safetensors` file, or a raw file; `options` may be null. Returns
/// `WM_ERROR_FILE` if a file is invalid or cannot be read. The caller frees the tensor with `wm_tensor_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_load(
    communicator: wm_communicator_t,
    path: *const c_char,
    options: *const wm_load_options_t,
    tensor: *mut wm_tensor_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(tensor, "tensor") }?;
        let state = communicator.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let path = unsafe { argument::path(path, "path") }?;
        let (mut source, mut spec) = (FileSource::new(&path), LoadSpec::default());
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        if let Some(options) = unsafe { argument::options(options, "options") }? {
            spec.kind = kind_of(options.kind)?;
            spec.location = location_of(options.location)?;
            // SAFETY: the options have as many numbers as they say, as the header requires.
            spec.rows_of_each = unsafe { rows_of_each(options.rows_of_each, options.rows_of_each_count) }?;
            let dimensions = options.raw_row_dimensions as usize;
            // SAFETY: the options have as many dimensions as they say, as the header requires.
            let row_shape = unsafe { argument::slice(options.raw_row_shape, dimensions, "raw_row_shape") }?;
            if flag(options.is_raw, "is_raw")? {
                source = FileSource::raw(&path, dtype_of(options.raw_dtype)?, row_shape);
            } else if !options.name.is_null() {
                // SAFETY: the pointer is a text that ends with a NUL, as the header requires.
                source = FileSource::tensor(&path, unsafe { argument::text(options.name, "name") }?);
            }
        }
        let loaded = WholeTensor::load(&state.comm, &source, &spec, &ignore_progress)?;
        output.write(handle_of(loaded, &state)?);
        Ok(())
    })
}

/// Saves a tensor as a folder, which appears only when it is completely written. Collective: every rank writes its own rows.
///
/// `overwrite` is 1 to replace a saved tensor, otherwise 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_save(
    tensor: wm_tensor_t,
    path: *const c_char,
    overwrite: u32,
) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or a text that ends with a NUL, as the header requires.
        let path = unsafe { argument::path(path, "path") }?;
        let spec = SaveSpec { overwrite: flag(overwrite, "overwrite")? };
        Ok(object.tensor.save(&path, spec, &ignore_progress)?)
    })
}

/// Frees the handle of a tensor. This rank's mappings are removed when no view and no work uses them. Does not wait for other ranks,
/// which may still use the tensor.
#[unsafe(no_mangle)]
pub extern "C" fn wm_tensor_destroy(tensor: wm_tensor_t) -> wm_status_t {
    call(|| Ok(tensor.free()?))
}

/// Returns a view of the rows from `first_row` to before `end_row`. It shares the memory. The caller frees the view with
/// `wm_tensor_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_rows(
    tensor: wm_tensor_t,
    first_row: u64,
    end_row: u64,
    part: *mut wm_tensor_t,
) -> wm_status_t {
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { view(tensor, part, "part", |object| Ok(object.tensor.rows(first_row..end_row)?)) }
}

/// Returns a view of the columns (the second dimension) from `first_column` to before `end_column`. It shares the memory. The caller
/// frees the view with `wm_tensor_destroy`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_columns(
    tensor: wm_tensor_t,
    first_column: u64,
    end_column: u64,
    part: *mut wm_tensor_t,
) -> wm_status_t {
    // SAFETY: the pointer is null or valid, as the header requires.
    unsafe { view(tensor, part, "part", |object| Ok(object.tensor.columns(first_column..end_column)?)) }
}

/// Creates a tensor from another one, and writes its handle.
///
/// # Safety
/// As the header requires: `to` is null or valid.
unsafe fn view(
    tensor: wm_tensor_t,
    to: *mut wm_tensor_t,
    argument: &str,
    work: impl FnOnce(&TensorObject) -> Result<WholeTensor>,
) -> wm_status_t {
    call(|| {
        // SAFETY: the caller of `view` guarantees that the pointer is null or valid.
        let output = unsafe { Output::new(to, argument) }?;
        let object = tensor.get()?;
        output.write(handle_of(work(&object)?, &object.state)?);
        Ok(())
    })
}

/// Writes the properties of a tensor to `info`, whose `struct_size` the caller has set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_info(tensor: wm_tensor_t, info: *mut wm_tensor_info_t) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
        let output = unsafe { Output::versioned(info, "info") }?;
        let object = tensor.get()?;
        let of = &object.tensor;
        output.write_versioned(wm_tensor_info_t {
            struct_size: size_of::<wm_tensor_info_t>(),
            row_count: of.row_count(),
            row_len: of.row_len() as u64,
            stride: of.stride() as u64,
            dimensions: u32::try_from(of.shape().len())
                .map_err(|_| invalid("the tensor has too many dimensions"))?,
            dtype: of.dtype().code(),
            kind: if of.memory().kind() == Kind::Chunked { WM_KIND_CHUNKED } else { WM_KIND_CONTINUOUS },
            location: match of.memory().location() {
                Location::Host => WM_LOCATION_HOST,
                _ => WM_LOCATION_DEVICE,
            },
        });
        Ok(())
    })
}

/// Writes the lengths of the dimensions to `shape`, which has space for `capacity` numbers. `wm_tensor_info` returns how many they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_shape(tensor: wm_tensor_t, shape: *mut u64, capacity: u32) -> wm_status_t {
    call(|| {
        let object = tensor.get()?;
        // SAFETY: the pointer is null or has space for `capacity` numbers, as the header requires.
        unsafe { argument::copy_out(object.tensor.shape(), shape, capacity as usize, "shape") }
    })
}

/// Writes the rows that this rank stores to `rows`, whose `struct_size` the caller has set. The address is valid until the tensor and
/// its views are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_local(tensor: wm_tensor_t, rows: *mut wm_rows_t) -> wm_status_t {
    // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
    unsafe { write_rows(tensor, rows, |object| Ok(object.tensor.local())) }
}

/// Writes the rows that a rank stores to `rows`, whose `struct_size` the caller has set, at the addresses where this rank has mapped
/// them. They are valid until the tensor and its views are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_rows_of(
    tensor: wm_tensor_t,
    rank: u32,
    rows: *mut wm_rows_t,
) -> wm_status_t {
    // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
    unsafe { write_rows(tensor, rows, |object| Ok(object.tensor.rows_of(object.state.rank(rank)?)?)) }
}

/// Writes all rows of a continuous tensor to `rows`, whose `struct_size` the caller has set. The address is valid until the tensor and
/// its views are released. Returns an error for the rows of several chunks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_all_rows(tensor: wm_tensor_t, rows: *mut wm_rows_t) -> wm_status_t {
    // SAFETY: the pointer is null or points to a structure with the size in its first field, as the header requires.
    unsafe { write_rows(tensor, rows, |object| Ok(object.tensor.all_rows()?)) }
}

/// Writes rows that are at one range of addresses.
///
/// # Safety
/// As the header requires: `to` is null or points to a structure with the size in its first field.
unsafe fn write_rows(
    tensor: wm_tensor_t,
    to: *mut wm_rows_t,
    work: impl FnOnce(&TensorObject) -> Result<Option<LocalRows>>,
) -> wm_status_t {
    call(|| {
        // SAFETY: the caller of `write_rows` guarantees that the pointer is null or points to such a structure.
        let output = unsafe { Output::versioned(to, "rows") }?;
        let struct_size = size_of::<wm_rows_t>();
        output.write_versioned(match work(&*tensor.get()?)? {
            Some(LocalRows { rows: Range { start, end }, span, stride }) => wm_rows_t {
                struct_size,
                first_row: start,
                row_count: end - start,
                address: argument::pointer(span.address()),
                stride: stride as u64,
                len: span.len() as u64,
            },
            None => {
                let address: *mut c_void = std::ptr::null_mut();
                wm_rows_t { struct_size, first_row: 0, row_count: 0, address, stride: 0, len: 0 }
            }
        });
        Ok(())
    })
}

/// Returns the addresses of the elements on this rank, for kernels. They are valid until the tensor and its views are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_tensor_element_ref(
    tensor: wm_tensor_t,
    reference: *mut wm_element_ref_t,
) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(reference, "reference") }?;
        let ElementRef { rows, row_len } = tensor.get()?.tensor.element_ref();
        output.write(wm_element_ref_t { rows: rows.into(), row_len });
        Ok(())
    })
}
