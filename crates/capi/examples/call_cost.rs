//! Measures what a call through C costs more than the same call through Rust: `cargo run --release -p wholemem-capi --example
//! call_cost`.
//!
//! The functions of C are those of the shared library, which cargo builds next to this program, so that the cost of loading
//! thread-local values and of calls between libraries is included. Both calls alternate in short runs, and the smallest time of each is
//! printed: other programs on the machine only add to it.
//!
//! A call of C describes its memory by addresses, so it builds the operands of the work each time. A program in Rust that uses other
//! memory in each call does so too; one that uses the same memory can keep its operands.

#![allow(unsafe_code, reason = "it calls the functions of the shared library")]
#![expect(clippy::print_stdout, reason = "the output is the result")]

use std::ffi::c_void;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::Instant;
use std::{env, error, ptr};

use libloading::{Library, Symbol};
use wholemem::{
    Backend, Communicator, Dtype, HostConfig, Indices, PinnedBuffer, RowBuffer, TensorSpec, WholeTensor,
};
use wholemem_capi::communicator::{wm_communicator_options_t, wm_communicator_t};
use wholemem_capi::device::{WM_BACKEND_HOST, wm_backend_kind_t, wm_backend_t, wm_device_t};
use wholemem_capi::dtype::WM_DTYPE_F32;
use wholemem_capi::rows::{WM_INDEX_I64, wm_indices_t, wm_row_buffer_t};
use wholemem_capi::status::{WM_OK, wm_status_t};
use wholemem_capi::tensor::{wm_tensor_spec_t, wm_tensor_t};

type BoxError = Box<dyn error::Error>;

/// The number of calls in a run, and the number of runs.
const CALLS: u32 = 10_000;
const RUNS: u32 = 300;

/// Returns the smallest times of a call of each function in nanoseconds, from alternating runs.
fn measure(mut rust: impl FnMut(), mut c: impl FnMut()) -> (f64, f64) {
    let mut best = (f64::MAX, f64::MAX);
    for _ in 0..RUNS {
        best.0 = best.0.min(time(&mut rust));
        best.1 = best.1.min(time(&mut c));
    }
    best
}

fn time(call: &mut impl FnMut()) -> f64 {
    let begin = Instant::now();
    (0..CALLS).for_each(|_| call());
    begin.elapsed().as_secs_f64() * 1e9 / f64::from(CALLS)
}

fn report(name: &str, (rust, c): (f64, f64)) {
    println!("{name:<28} {rust:>8.1} {c:>8.1} {:>8.1}", c - rust);
}

fn check(status: wm_status_t) {
    assert_eq!(status, WM_OK, "a call of the library failed");
}

/// Returns the shared library next to this program.
fn library() -> Result<PathBuf, BoxError> {
    let program = env::current_exe()?;
    let mut folders = program.ancestors().skip(1).take(3);
    let found = folders.find_map(|folder| {
        let path = folder.join("libwholemem_capi.so");
        path.exists().then_some(path)
    });
    found.ok_or_else(|| "build the library first: cargo build --release -p wholemem-capi".into())
}

fn main() -> Result<(), BoxError> {
    // SAFETY: the initialisers of the library are those of the Rust standard library, which any program runs.
    let library = unsafe { Library::new(library()?) }?;
    let (communicator, tensor) = create_through_c(&library)?;
    let device = Backend::host(HostConfig::virtual_devices(1))?.device(0)?;
    let comm = Communicator::local(std::slice::from_ref(&device))?.remove(0);
    let table = WholeTensor::create(&comm, &TensorSpec::new(Dtype::F32, &[1000, 4]))?;
    println!("{:<28} {:>8} {:>8} {:>8}", "nanoseconds for a call of", "Rust", "C", "more");

    // SAFETY: the types are those of the functions in the header.
    let rank: Symbol<'_, unsafe extern "C" fn(wm_communicator_t, *mut u32) -> wm_status_t> =
        unsafe { library.get(b"wm_communicator_rank") }?;
    let mut number = 0;
    let times = measure(
        || {
            black_box(black_box(&comm).rank());
        },
        // SAFETY: the pointer is valid.
        || check(unsafe { rank(black_box(communicator), black_box(&raw mut number)) }),
    );
    report("the rank of a communicator", times);

    // SAFETY: the types are those of the functions in the header.
    let test: Symbol<'_, unsafe extern "C" fn(wm_tensor_t) -> wm_status_t> =
        unsafe { library.get(b"wm_tensor_check") }?;
    let times = measure(
        || black_box(&table).check().expect("no index was bad"),
        // SAFETY: the function accepts any handle.
        || check(unsafe { test(black_box(tensor)) }),
    );
    report("the check of a tensor", times);

    let indices = PinnedBuffer::create(&device, 8)?;
    let rows = PinnedBuffer::create(&device, 16)?;
    let stream = device.stream()?;
    let (from, to) = (indices.all(), rows.all());
    let operands = || (Indices::i64(from.clone()), RowBuffer::new(to.clone(), Dtype::F32));
    let kept = operands();
    // SAFETY: the types are those of the functions in the header.
    let gather: Symbol<'_, GatherOn> = unsafe { library.get(b"wm_tensor_gather_on") }?;
    let (index, mut row) = ([7_i64], [0.0_f32; 4]);
    let indices = wm_indices_t {
        struct_size: size_of::<wm_indices_t>(),
        address: index.as_ptr().cast(),
        count: 1,
        index_type: WM_INDEX_I64,
        skip_bad: 0,
    };
    let output = wm_row_buffer_t {
        struct_size: size_of::<wm_row_buffer_t>(),
        address: row.as_mut_ptr().cast(),
        stride: 0,
        dtype: WM_DTYPE_F32,
        convert: 0,
    };
    let rust = |(indices, rows): &(Indices, RowBuffer)| {
        table.gather_on(&stream, black_box(indices), black_box(rows)).expect("the operands are valid");
    };
    let c = || {
        let (indices, output) = (black_box(&raw const indices), &raw const output);
        // SAFETY: the memory is valid until the work has run, which it has on the host when the call returns.
        check(unsafe { gather(tensor, ptr::null_mut(), indices, output) });
    };
    report("a gather of one row", measure(|| rust(&operands()), c));
    report("with operands that are kept", measure(|| rust(&kept), c));
    Ok(())
}

type GatherOn = unsafe extern "C" fn(
    wm_tensor_t,
    *mut c_void,
    *const wm_indices_t,
    *const wm_row_buffer_t,
) -> wm_status_t;

/// Creates a communicator of one rank and a tensor of 1000 rows through the shared library.
fn create_through_c(library: &Library) -> Result<(wm_communicator_t, wm_tensor_t), BoxError> {
    type OpenBackend = unsafe extern "C" fn(wm_backend_kind_t, u32, *mut wm_backend_t) -> wm_status_t;
    type OpenDevice = unsafe extern "C" fn(wm_backend_t, u32, *mut wm_device_t) -> wm_status_t;
    type CreateLocal = unsafe extern "C" fn(
        *const wm_device_t,
        u32,
        *const wm_communicator_options_t,
        *mut wm_communicator_t,
    ) -> wm_status_t;
    type CreateTensor =
        unsafe extern "C" fn(wm_communicator_t, *const wm_tensor_spec_t, *mut wm_tensor_t) -> wm_status_t;
    // SAFETY: the types are those of the functions in the header.
    let open_backend: Symbol<'_, OpenBackend> = unsafe { library.get(b"wm_backend_open") }?;
    // SAFETY: as the header declares it.
    let open_device: Symbol<'_, OpenDevice> = unsafe { library.get(b"wm_device_open") }?;
    // SAFETY: as the header declares it.
    let create_local: Symbol<'_, CreateLocal> = unsafe { library.get(b"wm_communicator_create_local") }?;
    // SAFETY: as the header declares it.
    let create_tensor: Symbol<'_, CreateTensor> = unsafe { library.get(b"wm_tensor_create") }?;

    let (mut backend, mut device) = (wm_backend_t { value: 0 }, wm_device_t { value: 0 });
    let (mut communicator, mut tensor) = (wm_communicator_t { value: 0 }, wm_tensor_t { value: 0 });
    // SAFETY: the pointer is valid.
    check(unsafe { open_backend(WM_BACKEND_HOST, 1, &raw mut backend) });
    // SAFETY: the pointer is valid.
    check(unsafe { open_device(backend, 0, &raw mut device) });
    // SAFETY: the pointers are to one element.
    check(unsafe { create_local(&raw const device, 1, ptr::null(), &raw mut communicator) });
    let shape = [1000, 4];
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
    // SAFETY: the pointers are valid.
    check(unsafe { create_tensor(communicator, &raw const spec, &raw mut tensor) });
    Ok((communicator, tensor))
}
