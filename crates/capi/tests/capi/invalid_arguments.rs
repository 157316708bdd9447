//! Handles, pointers, numbers and structures that are invalid are statuses.

use std::ffi::CStr;
use std::ptr;

use wholemem_capi::communicator::*;
use wholemem_capi::device::*;
use wholemem_capi::last_error::*;
use wholemem_capi::rows::*;
use wholemem_capi::status::*;
use wholemem_capi::symmetric::*;
use wholemem_capi::tensor::*;
use wholemem_capi::version::*;

use super::support::{fails, last_error, local, ok, on_each};

#[test]
fn handles_of_another_kind_and_freed_handles_are_refused() {
    let [communicator] = local(1)[..] else { unreachable!() };
    let tensor = wm_tensor_t { value: communicator.value };
    let text = fails(wm_tensor_check(tensor), WM_ERROR_INVALID_HANDLE);
    assert!(text.ends_with("is of a communicator, not of a tensor"), "{text}");
    let text = fails(wm_tensor_destroy(wm_tensor_t { value: 0 }), WM_ERROR_INVALID_HANDLE);
    assert_eq!(text, "the handle of a tensor is zero");
    ok(wm_communicator_barrier(communicator));
    ok(wm_communicator_destroy(communicator));
    let text = fails(wm_communicator_destroy(communicator), WM_ERROR_INVALID_HANDLE);
    assert!(text.ends_with("was freed, or is of another process"), "{text}");
    fails(wm_communicator_barrier(communicator), WM_ERROR_INVALID_HANDLE);
}

#[test]
fn null_and_misaligned_pointers_are_refused() {
    on_each(local(1), |communicator, _| {
        // SAFETY: the function checks the pointer.
        let status = unsafe { wm_communicator_rank(communicator, ptr::null_mut()) };
        assert_eq!(fails(status, WM_ERROR_NULL_POINTER), "the pointer `rank` is null");
        let mut space = [0_u32; 2];
        let misaligned = space.as_mut_ptr().wrapping_byte_add(1);
        // SAFETY: the function checks the pointer.
        let status = unsafe { wm_communicator_rank(communicator, misaligned) };
        assert_eq!(fails(status, WM_ERROR_NULL_POINTER), "the pointer `rank` is not aligned to 4 bytes");
        assert_eq!(space, [0; 2]);
        // SAFETY: the function checks the pointers.
        let status = unsafe { wm_tensor_create(communicator, ptr::null(), &mut wm_tensor_t { value: 0 }) };
        fails(status, WM_ERROR_NULL_POINTER);
        // SAFETY: no bytes are accessed.
        ok(unsafe { wm_communicator_all_gather(communicator, ptr::null(), 0, ptr::null_mut()) });
        // SAFETY: the function checks the pointers.
        let status = unsafe { wm_communicator_all_gather(communicator, ptr::null(), 1, ptr::null_mut()) };
        assert_eq!(fails(status, WM_ERROR_NULL_POINTER), "the pointer `bytes` is null");
    });
}

#[test]
fn numbers_that_do_not_exist_are_refused() {
    let mut backend = wm_backend_t { value: 0 };
    // SAFETY: the pointer is valid.
    let status = unsafe { wm_backend_open(3, 0, &raw mut backend) };
    assert_eq!(fails(status, WM_ERROR_INVALID_ARGUMENT), "there is no kind of backend 3");
    // SAFETY: the pointer is valid.
    fails(unsafe { wm_backend_open(WM_BACKEND_CUDA, 2, &raw mut backend) }, WM_ERROR_INVALID_ARGUMENT);
    assert_eq!(backend.value, 0, "a call that fails writes no output");
    on_each(local(1), |communicator, _| {
        let shape = [10, 2];
        let mut spec = spec(&shape);
        let mut tensor = wm_tensor_t { value: 0 };
        for set in [
            |spec: &mut wm_tensor_spec_t| spec.dtype = 99,
            |spec: &mut wm_tensor_spec_t| spec.kind = 2,
            |spec: &mut wm_tensor_spec_t| spec.location = 2,
            |spec: &mut wm_tensor_spec_t| spec.equal_addresses = 2,
        ] {
            let mut wrong = spec;
            set(&mut wrong);
            // SAFETY: the pointers are valid.
            let status = unsafe { wm_tensor_create(communicator, &raw const wrong, &raw mut tensor) };
            fails(status, WM_ERROR_INVALID_ARGUMENT);
        }
        spec.dimensions = 0;
        // SAFETY: the pointers are valid.
        let status = unsafe { wm_tensor_create(communicator, &raw const spec, &raw mut tensor) };
        fails(status, WM_ERROR_NO_DIMENSIONS);
    });
}

fn spec(shape: &[u64]) -> wm_tensor_spec_t {
    wm_tensor_spec_t {
        struct_size: size_of::<wm_tensor_spec_t>(),
        shape: shape.as_ptr(),
        dimensions: shape.len().try_into().unwrap(),
        dtype: wholemem_capi::dtype::WM_DTYPE_I32,
        kind: 0,
        location: 0,
        equal_addresses: 0,
        rows_of_each_count: 0,
        rows_of_each: ptr::null(),
    }
}

/// A later version of a structure, with another field.
#[repr(C)]
struct Later<T> {
    known: T,
    field: u64,
}

#[test]
fn structures_of_other_versions_are_accepted_if_their_new_fields_are_zero() {
    on_each(local(1), |communicator, _| {
        let shape = [10, 2];
        let mut tensor = wm_tensor_t { value: 0 };
        let mut later = Later { known: spec(&shape), field: 0 };
        later.known.struct_size = size_of_val(&later);
        // SAFETY: the pointers are valid, and the structure has the size in its first field.
        ok(unsafe { wm_tensor_create(communicator, (&raw const later).cast(), &raw mut tensor) });
        later.field = 1;
        // SAFETY: the pointers are valid, and the structure has the size in its first field.
        let status = unsafe { wm_tensor_create(communicator, (&raw const later).cast(), &raw mut tensor) };
        let text = fails(status, WM_ERROR_INVALID_ARGUMENT);
        assert!(text.contains("`spec` has options that this version of the library does not have"), "{text}");
        later.known.struct_size = 8;
        // SAFETY: the pointers are valid.
        let status = unsafe { wm_tensor_create(communicator, (&raw const later).cast(), &raw mut tensor) };
        assert!(fails(status, WM_ERROR_INVALID_ARGUMENT).contains("hint: zero the structure"));

        // An output of a later version: the library writes only what it knows.
        let zeroed = wm_tensor_info_t {
            struct_size: size_of::<Later<wm_tensor_info_t>>(),
            row_count: 0,
            row_len: 0,
            stride: 0,
            dimensions: 0,
            dtype: 0,
            kind: 0,
            location: 0,
        };
        let mut info = Later { known: zeroed, field: 7 };
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        ok(unsafe { wm_tensor_info(tensor, (&raw mut info).cast()) });
        assert_eq!((info.known.row_count, info.known.row_len, info.field), (10, 8, 7));
        assert_eq!(info.known.struct_size, size_of_val(&info), "the size belongs to the caller");
        ok(wm_tensor_destroy(tensor));
    });
}

#[test]
fn the_last_error_has_the_values_of_the_error() {
    on_each(local(1), |communicator, _| {
        let shape = [10, 2];
        let (spec, mut tensor) = (spec(&shape), wm_tensor_t { value: 0 });
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_tensor_create(communicator, &raw const spec, &raw mut tensor) });
        let (indices, mut rows) = ([3_i64, 10, 11], [7_i32; 6]);
        // SAFETY: the arrays have as many elements as the call says.
        let status = unsafe { wm_tensor_gather(tensor, indices.as_ptr(), 3, rows.as_mut_ptr().cast(), 24) };
        fails(status, WM_ERROR_BAD_INDEX);
        assert_eq!(rows, [0; 6]);
        let info = info();
        assert_eq!((info.status, info.position, info.rank), (WM_ERROR_BAD_INDEX, 1, WM_NO_RANK));
        assert!(info.hint.is_null() && info.missing_ranks.is_null() && info.missing_count == 0);
        // SAFETY: the text is valid until the next call of this thread.
        let message = unsafe { CStr::from_ptr(info.message) };
        assert_eq!(
            message.to_str().unwrap(),
            "index 10 at position 1 is out of range: valid indices are 0..10"
        );
        ok(wm_tensor_destroy(tensor));
        assert_eq!((last_error().as_str(), self::info().status), ("", WM_OK));
    });
}

fn info() -> wm_error_info_t {
    let mut info = wm_error_info_t {
        struct_size: size_of::<wm_error_info_t>(),
        status: 7,
        rank: 7,
        message: ptr::null(),
        hint: ptr::null(),
        missing_ranks: ptr::null(),
        missing_count: 7,
        position: 7,
    };
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    assert_eq!(unsafe { wm_last_error_info(&raw mut info) }, WM_OK);
    info
}

#[test]
fn a_library_of_another_version_is_refused() {
    ok(wm_check_version(WM_ABI_MAJOR << 16 | WM_ABI_MINOR));
    ok(wm_check_version(WM_ABI_MAJOR << 16));
    fails(wm_check_version(WM_ABI_MAJOR << 16 | (WM_ABI_MINOR + 1)), WM_ERROR_VERSION_MISMATCH);
    let text = fails(wm_check_version((WM_ABI_MAJOR + 1) << 16), WM_ERROR_VERSION_MISMATCH);
    assert!(text.contains("hint: install the library and the header of the same version"), "{text}");
    let version = env!("CARGO_PKG_VERSION").split('.').map(|part| part.parse::<u32>().unwrap());
    assert_eq!(wm_version(), version.fold(0, |number, part| number * 1000 + part));
}

#[test]
fn a_window_of_no_bytes_and_a_lane_that_does_not_exist_are_refused() {
    on_each(local(1), |communicator, _| {
        let mut symmetric = wm_symmetric_memory_t { value: 0 };
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_symmetric_memory_create(communicator, ptr::null(), &raw mut symmetric) });
        let mut window = wm_window_t { value: 0 };
        // SAFETY: the pointer is valid.
        fails(unsafe { wm_window_create(symmetric, 0, &raw mut window) }, WM_ERROR_EMPTY_WINDOW);
        fails(wm_symmetric_memory_check(symmetric, 1), WM_ERROR_NO_SUCH_LANE);
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_window_create(symmetric, 4096, &raw mut window) });
        let (mut address, mut len) = (ptr::null_mut(), 0);
        // SAFETY: the pointers are valid.
        let status = unsafe { wm_window_address_of(window, 1, &raw mut address, &raw mut len) };
        fails(status, WM_ERROR_NO_SUCH_RANK);
        ok(wm_window_deregister(window));
        fails(wm_window_destroy(window), WM_ERROR_INVALID_HANDLE);
        ok(wm_symmetric_memory_destroy(symmetric));
    });
}

#[test]
fn a_handle_that_is_freed_while_threads_use_it_gives_results_or_a_status() {
    on_each(local(1), |communicator, _| {
        let shape = [10, 2];
        for _ in 0..50 {
            let (spec, mut tensor) = (spec(&shape), wm_tensor_t { value: 0 });
            // SAFETY: the pointers are valid.
            ok(unsafe { wm_tensor_create(communicator, &raw const spec, &raw mut tensor) });
            let begun = std::sync::Barrier::new(4);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| {
                        begun.wait();
                        loop {
                            let (indices, mut rows) = ([3_i64, 9], [7_i32; 4]);
                            // SAFETY: the arrays have as many elements as the call says.
                            let status = unsafe {
                                wm_tensor_gather(tensor, indices.as_ptr(), 2, rows.as_mut_ptr().cast(), 16)
                            };
                            if status != WM_OK {
                                fails(status, WM_ERROR_INVALID_HANDLE);
                                return;
                            }
                            assert_eq!(rows, [0; 4]);
                        }
                    });
                }
                begun.wait();
                ok(wm_tensor_destroy(tensor));
            });
        }
    });
}
