//! Tables through C, compared with the same calls through Rust.

use std::ffi::CString;
use std::ptr;

use wholemem::{
    Backend, Communicator, Dtype, HostConfig, Kind, Location, Partition, TensorSpec, WholeTensor,
};
use wholemem_capi::communicator::*;
use wholemem_capi::dtype::*;
use wholemem_capi::memory::*;
use wholemem_capi::rows::*;
use wholemem_capi::status::*;
use wholemem_capi::tensor::*;

use super::support::{fails, local, ok, on_each};

const RANKS: u32 = 3;
const ROWS: u64 = 100;
const COLUMNS: u64 = 4;

/// The indices of all calls: of every rank, unsorted, with repetitions.
const INDICES: [i64; 8] = [99, 0, 34, 33, 7, 99, 67, 50];

/// A kind of table, by its numbers in C.
#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: wm_dtype_t,
    kind: wm_kind_t,
    location: wm_location_t,
    given: bool,
}

const GIVEN: [u64; RANKS as usize] = [10, 0, 90];

fn cases() -> impl Iterator<Item = Case> {
    let kinds = [WM_KIND_CONTINUOUS, WM_KIND_CHUNKED];
    let places = [WM_LOCATION_DEVICE, WM_LOCATION_HOST];
    let kinds = kinds.into_iter().flat_map(move |kind| places.map(|location| (kind, location)));
    kinds.flat_map(|(kind, location)| {
        [(WM_DTYPE_U8, false), (WM_DTYPE_F16, true), (WM_DTYPE_F32, false), (WM_DTYPE_I64, true)]
            .map(|(dtype, given)| Case { dtype, kind, location, given })
    })
}

impl Case {
    fn element_len(self) -> usize {
        Dtype::from_code(self.dtype).unwrap().len()
    }

    fn row_len(self) -> usize {
        usize::try_from(COLUMNS).unwrap() * self.element_len()
    }

    /// Returns rows of small numbers, which are exact in every element type: row `n` has the elements `n % 16 + column`.
    fn rows(self, first: u64, count: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for row in first..first + count {
            for column in 0..COLUMNS {
                let number = row % 16 + column;
                match self.dtype {
                    WM_DTYPE_U8 => bytes.push(number as u8),
                    WM_DTYPE_F16 => bytes.extend(wholemem::f16::from_f32(number as f32).to_ne_bytes()),
                    WM_DTYPE_F32 => bytes.extend((number as f32).to_ne_bytes()),
                    _ => bytes.extend(number.to_ne_bytes()),
                }
            }
        }
        bytes
    }

    /// Returns the tensor's rows after the calls of this test, as Rust makes them.
    fn through_rust(self) -> Vec<u8> {
        let backend = Backend::host(HostConfig::virtual_devices(RANKS as usize)).unwrap();
        let devices: Vec<_> = (0..RANKS).map(|id| backend.device(id).unwrap()).collect();
        let groups = Communicator::local(&devices).unwrap();
        let spec = TensorSpec {
            kind: if self.kind == WM_KIND_CHUNKED { Kind::Chunked } else { Kind::Continuous },
            location: if self.location == WM_LOCATION_HOST { Location::Host } else { Location::Device },
            rows_of_each: self.given.then(|| GIVEN.to_vec()),
            ..TensorSpec::new(Dtype::from_code(self.dtype).unwrap(), &[ROWS, COLUMNS])
        };
        let all = Communicator::on_each(&groups, |group| {
            let table = WholeTensor::create(group, &spec)?;
            let stream = group.device().stream()?;
            if let Some(local) = table.local() {
                let count = local.rows.end - local.rows.start;
                table.write_rows_on(&stream, local.rows.start, &self.rows(local.rows.start, count))?;
            }
            group.barrier()?;
            let rows = self.rows(20, INDICES.len() as u64);
            macro_rules! add {
                ($type:ty, $of:expr) => {{
                    let values: Vec<$type> = rows.chunks(size_of::<$type>()).map($of).collect();
                    table.scatter_add::<$type>(&INDICES, &values)?;
                }};
            }
            match self.dtype {
                WM_DTYPE_U8 => add!(u8, |bytes: &[u8]| bytes[0]),
                WM_DTYPE_F16 => {
                    add!(wholemem::f16, |bytes: &[u8]| wholemem::f16::from_ne_bytes(
                        bytes.try_into().unwrap()
                    ))
                }
                WM_DTYPE_F32 => add!(f32, |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().unwrap())),
                _ => add!(i64, |bytes: &[u8]| i64::from_ne_bytes(bytes.try_into().unwrap())),
            }
            group.barrier()?;
            let mut all = vec![0; usize::try_from(ROWS).unwrap() * self.row_len()];
            table.read_rows_on(&stream, 0, &mut all)?;
            Ok(all)
        });
        let [all, ..] = &all.unwrap()[..] else { unreachable!() };
        all.clone()
    }
}

fn create(communicator: wm_communicator_t, case: Case) -> wm_tensor_t {
    let (shape, mut tensor) = ([ROWS, COLUMNS], wm_tensor_t { value: 0 });
    let spec = wm_tensor_spec_t {
        struct_size: size_of::<wm_tensor_spec_t>(),
        shape: shape.as_ptr(),
        dimensions: 2,
        dtype: case.dtype,
        kind: case.kind,
        location: case.location,
        equal_addresses: 0,
        rows_of_each_count: if case.given { RANKS } else { 0 },
        rows_of_each: GIVEN.as_ptr(),
    };
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_tensor_create(communicator, &raw const spec, &raw mut tensor) });
    tensor
}

fn no_rows() -> wm_rows_t {
    let struct_size = size_of::<wm_rows_t>();
    wm_rows_t { struct_size, first_row: 7, row_count: 7, address: ptr::null_mut(), stride: 7, len: 7 }
}

#[test]
fn gathers_and_scatters_have_the_results_of_rust() {
    for case in cases() {
        let expected = case.through_rust();
        let row_len = case.row_len();
        let row = |index: i64| {
            let start = usize::try_from(index).unwrap() * row_len;
            expected[start..start + row_len].to_vec()
        };
        let gathered: Vec<u8> = INDICES.iter().flat_map(|index| row(*index)).collect();
        on_each(local(RANKS), |communicator, number| {
            let tensor = create(communicator, case);
            // Each rank writes its own rows, at their address.
            let mut own = no_rows();
            // SAFETY: the pointer is valid, and the structure has the size in its first field.
            ok(unsafe { wm_tensor_local(tensor, &raw mut own) });
            let partition = if case.given {
                Partition::given(&GIVEN).unwrap()
            } else {
                Partition::even(ROWS, RANKS).unwrap()
            };
            let range = partition.range(wholemem::Rank(number));
            assert_eq!(own.row_count, range.end - range.start, "{case:?}");
            if own.row_count > 0 {
                assert_eq!((own.first_row, own.stride), (range.start, row_len as u64));
                let bytes = case.rows(own.first_row, own.row_count);
                assert_eq!(own.len, bytes.len() as u64);
                // SAFETY: the rows of this rank are mapped at the address, and no other rank accesses them before the barrier.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), own.address.cast(), bytes.len()) };
            }
            ok(wm_communicator_barrier(communicator));
            let added = case.rows(20, INDICES.len() as u64);
            let (indices, count) = (INDICES.as_ptr(), INDICES.len());
            // SAFETY: the arrays have as many elements as the call says.
            ok(unsafe { wm_tensor_scatter_add(tensor, indices, count, added.as_ptr().cast(), added.len()) });
            ok(wm_communicator_barrier(communicator));

            let mut seen = vec![0; gathered.len()];
            // SAFETY: the arrays have as many elements as the call says.
            ok(unsafe { wm_tensor_gather(tensor, indices, count, seen.as_mut_ptr().cast(), seen.len()) });
            assert_eq!(seen, gathered, "{case:?}");
            let mut all = vec![0; expected.len()];
            // SAFETY: the array has as many bytes as the call says.
            ok(unsafe { wm_tensor_read_rows(tensor, 0, all.as_mut_ptr().cast(), all.len()) });
            assert_eq!(all, expected, "{case:?}");
            gather_on_a_stream(tensor, case, &gathered);
            ok(wm_tensor_destroy(tensor));
        });
    }
}

/// Gathers with indices of four bytes to rows at a stride.
fn gather_on_a_stream(tensor: wm_tensor_t, case: Case, expected: &[u8]) {
    let (row_len, stride) = (case.row_len(), case.row_len() + 8);
    let indices = INDICES.map(|index| index as i32);
    let indices = wm_indices_t {
        struct_size: size_of::<wm_indices_t>(),
        address: indices.as_ptr().cast(),
        count: INDICES.len() as u64,
        index_type: WM_INDEX_I32,
        skip_bad: 0,
    };
    // The elements are aligned, and the bytes between the rows are not written.
    let mut rows = vec![u64::from_ne_bytes([0xaa; 8]); stride * INDICES.len() / 8];
    let output = wm_row_buffer_t {
        struct_size: size_of::<wm_row_buffer_t>(),
        address: rows.as_mut_ptr().cast(),
        stride: stride as u64,
        dtype: case.dtype,
        convert: 0,
    };
    // SAFETY: the memory is valid until the work has run, which it has on the host when the call returns.
    ok(unsafe { wm_tensor_gather_on(tensor, ptr::null_mut(), &raw const indices, &raw const output) });
    ok(wm_tensor_check(tensor));
    let bytes: Vec<u8> = rows.iter().flat_map(|word| word.to_ne_bytes()).collect();
    for (n, row) in expected.chunks(row_len).enumerate() {
        assert_eq!(&bytes[n * stride..n * stride + row_len], row, "{case:?}");
        let end = bytes.len().min((n + 1) * stride);
        assert!(bytes[n * stride + row_len..end].iter().all(|byte| *byte == 0xaa), "{case:?}");
    }
}

#[test]
fn elements_are_converted_and_bad_indices_are_reported_or_skipped() {
    let case =
        Case { dtype: WM_DTYPE_F32, kind: WM_KIND_CONTINUOUS, location: WM_LOCATION_DEVICE, given: false };
    on_each(local(RANKS), |communicator, number| {
        let tensor = create(communicator, case);
        if number == 0 {
            let bytes = case.rows(0, ROWS);
            // SAFETY: the array has as many bytes as the call says.
            ok(unsafe { wm_tensor_write_rows(tensor, 0, bytes.as_ptr().cast(), bytes.len()) });
        }
        ok(wm_communicator_barrier(communicator));
        let given = [3_i64, -1, 99];
        let mut rows = [1.0_f64; 3 * COLUMNS as usize];
        let mut indices = wm_indices_t {
            struct_size: size_of::<wm_indices_t>(),
            address: given.as_ptr().cast(),
            count: 3,
            index_type: WM_INDEX_I64,
            skip_bad: 1,
        };
        let mut output = wm_row_buffer_t {
            struct_size: size_of::<wm_row_buffer_t>(),
            address: rows.as_mut_ptr().cast(),
            stride: 0,
            dtype: WM_DTYPE_F64,
            convert: 0,
        };
        let gather = |indices: &wm_indices_t, output: &wm_row_buffer_t| {
            // SAFETY: the memory is valid until the work has run, which it has on the host when the call returns.
            unsafe { wm_tensor_gather_on(tensor, ptr::null_mut(), indices, output) }
        };
        fails(gather(&indices, &output), WM_ERROR_TYPES_DIFFER);
        output.convert = 1;
        ok(gather(&indices, &output));
        assert_eq!(rows, [3., 4., 5., 6., 0., 0., 0., 0., 3., 4., 5., 6.]);
        ok(wm_tensor_check(tensor));
        indices.skip_bad = 0;
        ok(gather(&indices, &output));
        let text = fails(wm_tensor_check(tensor), WM_ERROR_BAD_INDEX);
        assert!(text.contains("position 1"), "{text}");
        ok(wm_tensor_check(tensor));
        indices.index_type = 2;
        fails(gather(&indices, &output), WM_ERROR_INVALID_ARGUMENT);
        indices.index_type = WM_INDEX_I64;
        indices.count = u64::MAX / 4;
        fails(gather(&indices, &output), WM_ERROR_INVALID_ARGUMENT);

        // Two scatters of one row, in the fixed order: the last rank remains.
        let (one, own) = ([50_i64], [f64::from(number); COLUMNS as usize]);
        let indices = wm_indices_t { address: one.as_ptr().cast(), count: 1, skip_bad: 0, ..indices };
        let input = wm_row_buffer_t { address: own.as_ptr().cast_mut().cast(), ..output };
        // SAFETY: the memory is valid until the work has run.
        let status = unsafe {
            wm_tensor_scatter_on(
                tensor,
                ptr::null_mut(),
                &raw const indices,
                &raw const input,
                WM_ORDER_FIXED,
            )
        };
        ok(status);
        // SAFETY: the communicator's own stream is used on the host.
        ok(unsafe { wm_communicator_barrier_on(communicator, ptr::null_mut()) });
        let mut seen = [0.0_f32; COLUMNS as usize];
        // SAFETY: the array has as many bytes as the call says.
        ok(unsafe { wm_tensor_read_rows(tensor, 50, seen.as_mut_ptr().cast(), size_of_val(&seen)) });
        assert_eq!(seen, [2.0; COLUMNS as usize]);
        ok(wm_tensor_destroy(tensor));
    });
}

#[test]
fn views_memories_and_references_have_the_addresses_of_the_table() {
    on_each(local(2), |communicator, _| {
        let spec = wm_memory_spec_t {
            struct_size: size_of::<wm_memory_spec_t>(),
            rows: 10,
            row_len: 16,
            kind: WM_KIND_CONTINUOUS,
            location: WM_LOCATION_DEVICE,
            equal_addresses: 0,
            rows_of_each_count: 0,
            rows_of_each: ptr::null(),
        };
        let mut memory = wm_memory_t { value: 0 };
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_memory_create(communicator, &raw const spec, &raw mut memory) });
        let mut tensor = wm_tensor_t { value: 0 };
        // SAFETY: the shape has one number.
        ok(unsafe { wm_tensor_of_memory(memory, WM_DTYPE_F32, &4, 1, &raw mut tensor) });
        let (mut rows, mut part) = (wm_tensor_t { value: 0 }, wm_tensor_t { value: 0 });
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_tensor_rows(tensor, 2, 9, &raw mut rows) });
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_tensor_columns(rows, 1, 3, &raw mut part) });
        let mut shape = [0; 2];
        // SAFETY: the array has two numbers.
        ok(unsafe { wm_tensor_shape(part, shape.as_mut_ptr(), 2) });
        assert_eq!(shape, [7, 2]);
        // SAFETY: the array has one number.
        fails(unsafe { wm_tensor_shape(part, shape.as_mut_ptr(), 1) }, WM_ERROR_INVALID_ARGUMENT);

        let mut all = no_rows();
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        ok(unsafe { wm_tensor_all_rows(tensor, &raw mut all) });
        let mut of_memory = std::mem::MaybeUninit::<wm_global_ref_t>::zeroed();
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_memory_global_ref(memory, of_memory.as_mut_ptr()) });
        // SAFETY: the call has written the structure.
        let of_memory = unsafe { of_memory.assume_init() };
        assert_eq!((of_memory.base, of_memory.rows, of_memory.stride), (all.address.addr() as u64, 10, 16));
        let mut of_part = std::mem::MaybeUninit::<wm_element_ref_t>::zeroed();
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_tensor_element_ref(part, of_part.as_mut_ptr()) });
        // SAFETY: the call has written the structure.
        let of_part = unsafe { of_part.assume_init() };
        assert_eq!((of_part.rows.base, of_part.row_len), (of_memory.base + 2 * 16 + 4, 8));

        let (mut first, mut count, mut address, mut len) = (0, 0, ptr::null_mut(), 0);
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_memory_rows_of(memory, 1, &raw mut first, &raw mut count) });
        assert_eq!((first, count), (5, 5));
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_memory_address_of(memory, 1, &raw mut address, &raw mut len) });
        assert_eq!((address.addr() as u64, len), (of_memory.base + 5 * 16, 5 * 16));
        // The tensor keeps the memory mapped.
        ok(wm_memory_destroy(memory));
        let mut own = no_rows();
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        ok(unsafe { wm_tensor_rows_of(part, 1, &raw mut own) });
        assert_eq!((own.first_row, own.row_count, own.stride), (3, 4, 16));
        let mut like = wm_tensor_t { value: 0 };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_tensor_create_like(part, &raw mut like) });
        [tensor, rows, part, like].into_iter().for_each(|tensor| ok(wm_tensor_destroy(tensor)));
    });
}

#[test]
fn saved_tensors_and_raw_files_are_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let raw = folder.path().join("raw.bin");
    let case =
        Case { dtype: WM_DTYPE_F32, kind: WM_KIND_CHUNKED, location: WM_LOCATION_DEVICE, given: false };
    std::fs::write(&raw, case.rows(0, ROWS)).unwrap();
    let path = |path: &std::path::Path| CString::new(path.to_str().unwrap()).unwrap();
    let (raw, saved) = (path(&raw), path(&folder.path().join("saved")));
    on_each(local(RANKS), |communicator, _| {
        let row_shape = [COLUMNS];
        let options = wm_load_options_t {
            struct_size: size_of::<wm_load_options_t>(),
            kind: WM_KIND_CHUNKED,
            location: WM_LOCATION_DEVICE,
            rows_of_each: GIVEN.as_ptr(),
            rows_of_each_count: RANKS,
            raw_dtype: WM_DTYPE_F32,
            raw_row_shape: row_shape.as_ptr(),
            raw_row_dimensions: 1,
            is_raw: 1,
            name: ptr::null(),
        };
        let (mut tensor, mut again) = (wm_tensor_t { value: 0 }, wm_tensor_t { value: 0 });
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_tensor_load(communicator, raw.as_ptr(), &raw const options, &raw mut tensor) });
        // SAFETY: the text ends with a NUL.
        ok(unsafe { wm_tensor_save(tensor, saved.as_ptr(), 0) });
        // SAFETY: the text ends with a NUL.
        let text = fails(unsafe { wm_tensor_save(tensor, saved.as_ptr(), 0) }, WM_ERROR_FILE);
        assert!(text.contains("hint:"), "{text}");
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_tensor_load(communicator, saved.as_ptr(), ptr::null(), &raw mut again) });
        let expected = case.rows(0, ROWS);
        let mut seen = vec![0; expected.len()];
        // SAFETY: the array has as many bytes as the call says.
        ok(unsafe { wm_tensor_read_rows(again, 0, seen.as_mut_ptr().cast(), seen.len()) });
        assert_eq!(seen, expected);
        ok(wm_tensor_destroy(tensor));
        ok(wm_tensor_destroy(again));
    });
}
