//! The C interface on the CUDA backend, with the fake driver: tables, windows and streams of other code.

use std::ptr;

use wholemem_capi::communicator::*;
use wholemem_capi::device::*;
use wholemem_capi::dtype::*;
use wholemem_capi::status::*;
use wholemem_capi::symmetric::*;
use wholemem_capi::tensor::*;
use wholemem_capi::{collective, rows};
use wholemem_hal::{Backend, BackendKind};
use wholemem_testkit::{FakeCuda, test_name};

use super::support::{fails, last_error, ok};

#[test]
fn tables_windows_and_streams_work_on_the_cuda_backend() {
    if std::env::var_os("WHOLEMEM_CAPI_ON_FAKE").is_none() {
        let Some(fake) = FakeCuda::install() else { return };
        let settings = [("WHOLEMEM_CAPI_ON_FAKE", "1"), ("WHOLEMEM_FAKE_CUDA_SKIP_COLLECTIVES", "1")];
        assert_eq!(fake.rerun(&[test_name!()], &settings), 1);
        return;
    }
    let (mut backend, mut device) = (wm_backend_t { value: 0 }, wm_device_t { value: 0 });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_backend_open(WM_BACKEND_CUDA, 0, &raw mut backend) });
    let mut count = 0;
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_backend_device_count(backend, &raw mut count) });
    assert!(count > 0);
    // SAFETY: the pointer is valid.
    fails(unsafe { wm_device_open(backend, count, &raw mut device) }, WM_ERROR_NO_SUCH_DEVICE);
    assert!(last_error().contains("CUDA_VISIBLE_DEVICES"), "{}", last_error());
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_device_open(backend, 0, &raw mut device) });
    let devices = [device; 2];
    let mut communicators = [wm_communicator_t { value: 0 }; 2];
    // SAFETY: the arrays have 2 elements.
    ok(unsafe { wm_communicator_create_local(devices.as_ptr(), 2, ptr::null(), communicators.as_mut_ptr()) });
    super::support::on_each(communicators.to_vec(), work);
}

fn work(communicator: wm_communicator_t, rank: u32) {
    // A stream as the program has it: here one of the library, by the handle of the driver.
    let own = Backend::open(BackendKind::Cuda).unwrap().device(0).unwrap().stream().unwrap();
    let stream = ptr::with_exposed_provenance_mut(usize::try_from(own.handle()).unwrap());
    let shape = [100, 4];
    let spec = wm_tensor_spec_t {
        struct_size: size_of::<wm_tensor_spec_t>(),
        shape: shape.as_ptr(),
        dimensions: 2,
        dtype: WM_DTYPE_F32,
        kind: 0,
        location: 0,
        equal_addresses: 0,
        rows_of_each_count: 0,
        rows_of_each: ptr::null(),
    };
    let mut tensor = wm_tensor_t { value: 0 };
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_tensor_create(communicator, &raw const spec, &raw mut tensor) });
    let values = [rank as f32; 8];
    // SAFETY: the array has 32 bytes.
    ok(unsafe { rows::wm_tensor_write_rows(tensor, u64::from(rank) * 50, values.as_ptr().cast(), 32) });
    // SAFETY: the stream is one of the device, and exists.
    ok(unsafe { wm_communicator_barrier_on(communicator, stream) });
    let mut seen = [7.0_f32; 8];
    let peer = 1 - rank;
    // SAFETY: the array has 32 bytes.
    ok(unsafe { rows::wm_tensor_read_rows(tensor, u64::from(peer) * 50, seen.as_mut_ptr().cast(), 32) });
    assert_eq!(seen, [peer as f32; 8]);

    let mut symmetric = wm_symmetric_memory_t { value: 0 };
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_symmetric_memory_create(communicator, ptr::null(), &raw mut symmetric) });
    let (mut window, mut address, mut len) = (wm_window_t { value: 0 }, ptr::null_mut(), 0);
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_window_create(symmetric, 1 << 20, &raw mut window) });
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_window_address_of(window, rank, &raw mut address, &raw mut len) });
    let (dtype, op) = (WM_DTYPE_F32, WM_REDUCE_SUM);
    // SAFETY: the window has the elements; the stream is one of the device, and exists.
    ok(unsafe { collective::wm_all_reduce(symmetric, 0, stream, address, address, 1000, dtype, op) });
    // SAFETY: the stream is one of the device, and exists.
    ok(unsafe { wm_stream_synchronize(communicator, stream, 60_000_000_000) });
    let mut staged = 7;
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_symmetric_memory_staged_calls(symmetric, 0, &raw mut staged) });
    assert_eq!(staged, 0);
    ok(wm_stream_forget(communicator, stream));
    drop(own);
    ok(wm_window_deregister(window));
    ok(wm_symmetric_memory_destroy(symmetric));
    ok(wm_tensor_destroy(tensor));
}
