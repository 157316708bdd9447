//! Compares gathers and all-reduces through C with the same calls through Rust, on a GPU if there is one: `cargo run --release -p
//! wholemem-capi --example device_cost`.
//!
//! A run enqueues calls and waits for the stream. Runs of both alternate, and the smallest time of each is printed: other programs on the
//! machine only add to it.

#![allow(unsafe_code, reason = "it calls the functions of the C interface")]
#![expect(clippy::print_stdout, reason = "the output is the result")]

use std::ffi::c_void;
use std::time::Instant;
use std::{error, ptr, thread};

use wholemem::prelude::*;
use wholemem_capi::argument::WM_TIMEOUT_INFINITE;
use wholemem_capi::collective::wm_all_reduce;
use wholemem_capi::communicator::{wm_communicator_create_local, wm_communicator_t, wm_stream_synchronize};
use wholemem_capi::device::{WM_BACKEND_AUTO, wm_backend_open, wm_backend_t, wm_device_open, wm_device_t};
use wholemem_capi::dtype::{WM_DTYPE_F32, WM_REDUCE_SUM};
use wholemem_capi::rows::{WM_INDEX_I64, wm_indices_t, wm_row_buffer_t, wm_tensor_gather_on};
use wholemem_capi::status::{WM_OK, wm_status_t};
use wholemem_capi::symmetric::{
    wm_symmetric_memory_create, wm_symmetric_memory_t, wm_window_address_of, wm_window_create, wm_window_t,
};
use wholemem_capi::tensor::{wm_tensor_create, wm_tensor_spec_t, wm_tensor_t};
use wholemem_hal::{BackendKind, Mapping, Rights};

type BoxError = Box<dyn error::Error + Send + Sync>;

/// The number of runs of each.
const RUNS: usize = 41;

/// The number of ranks of an all-reduce, which share a device.
const RANKS: u32 = 2;

fn main() -> Result<(), BoxError> {
    let backend = Backend::auto()?;
    let device = backend.device(0)?;
    let on_gpu = backend.kind() == BackendKind::Cuda;
    println!("{:<36} {:>10} {:>10} {:>9}", "microseconds for a call of", "Rust", "C", "C / Rust");
    let (rows, count) = if on_gpu { (1 << 22, 1 << 20) } else { (1 << 14, 1 << 10) };
    for row_len in [64, 512] {
        gather(&device, rows, count, row_len)?;
    }
    for len in [64 << 10, 4 << 20] {
        all_reduce(&device, len)?;
    }
    Ok(())
}

/// Returns the smallest times of alternating runs in microseconds for a call.
fn alternate(calls: u32, mut rust: impl FnMut(), mut c: impl FnMut()) -> [f64; 2] {
    let time = |work: &mut dyn FnMut()| {
        let begin = Instant::now();
        work();
        begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
    };
    let mut best = [f64::MAX; 2];
    for _ in 0..RUNS {
        best[0] = best[0].min(time(&mut rust));
        best[1] = best[1].min(time(&mut c));
    }
    best
}

fn report(name: &str, [rust, c]: [f64; 2]) {
    println!("{name:<36} {rust:>10.2} {c:>10.2} {:>9.4}", c / rust);
}

fn check(status: wm_status_t) {
    assert_eq!(status, WM_OK, "a call of the library failed");
}

/// Maps new memory of a device.
fn memory(device: &Device, len: usize) -> Result<Mapping, BoxError> {
    Ok(device.allocate(len.next_multiple_of(2 << 20))?.map(Rights::ReadWrite)?)
}

fn pointer(span: &Span) -> *mut c_void {
    ptr::with_exposed_provenance_mut(usize::try_from(span.address()).unwrap_or_default())
}

/// Creates communicators of ranks on device 0 through C.
fn local_through_c(ranks: u32) -> Vec<wm_communicator_t> {
    let (mut backend, mut device) = (wm_backend_t { value: 0 }, wm_device_t { value: 0 });
    let mut communicators = vec![wm_communicator_t { value: 0 }; ranks as usize];
    // SAFETY: the pointer is valid.
    check(unsafe { wm_backend_open(WM_BACKEND_AUTO, 0, &raw mut backend) });
    // SAFETY: the pointer is valid.
    check(unsafe { wm_device_open(backend, 0, &raw mut device) });
    let devices = vec![device; ranks as usize];
    // SAFETY: both arrays have an element for each rank.
    check(unsafe {
        wm_communicator_create_local(devices.as_ptr(), ranks, ptr::null(), communicators.as_mut_ptr())
    });
    communicators
}

fn gather(device: &Device, rows: u64, count: usize, row_len: usize) -> Result<(), BoxError> {
    const CALLS: u32 = 20;
    let comm = Communicator::local(std::slice::from_ref(device))?.remove(0);
    let shape = [rows, row_len as u64 / 4];
    let table = WholeTensor::create(&comm, &TensorSpec::new(Dtype::F32, &shape))?;
    let stream = device.stream()?;
    let (indices, output) = (memory(device, 8 * count)?, memory(device, row_len * count)?);
    let (indices, output) = (indices.span(0, 8 * count)?, output.span(0, row_len * count)?);
    let random = |position: u64| position.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let values: Vec<u8> = (0..count as u64).flat_map(|at| (random(at) % rows).to_le_bytes()).collect();
    stream.write(&indices, &values)?;

    let communicator = local_through_c(1)[0];
    let mut c_table = wm_tensor_t { value: 0 };
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
    check(unsafe { wm_tensor_create(communicator, &raw const spec, &raw mut c_table) });
    let c_indices = wm_indices_t {
        struct_size: size_of::<wm_indices_t>(),
        address: pointer(&indices),
        count: count as u64,
        index_type: WM_INDEX_I64,
        skip_bad: 0,
    };
    let c_output = wm_row_buffer_t {
        struct_size: size_of::<wm_row_buffer_t>(),
        address: pointer(&output),
        stride: 0,
        dtype: WM_DTYPE_F32,
        convert: 0,
    };
    let (from, to) = (Indices::i64(indices), RowBuffer::new(output, Dtype::F32));
    let times = alternate(
        CALLS,
        || {
            (0..CALLS).for_each(|_| table.gather_on(&stream, &from, &to).expect("the operands are valid"));
            stream.synchronize(Deadline::NEVER).expect("the work ends");
        },
        || {
            for _ in 0..CALLS {
                // SAFETY: the memory outlives the work, for which this function waits.
                check(unsafe {
                    wm_tensor_gather_on(c_table, ptr::null_mut(), &raw const c_indices, &raw const c_output)
                });
            }
            // SAFETY: the null stream always exists.
            check(unsafe { wm_stream_synchronize(communicator, ptr::null_mut(), WM_TIMEOUT_INFINITE) });
        },
    );
    report(&format!("a gather of {count} rows of {row_len} B"), times);
    Ok(())
}

fn all_reduce(device: &Device, len: usize) -> Result<(), BoxError> {
    let comms = Communicator::local(&vec![device.clone(); RANKS as usize])?;
    let c_comms = local_through_c(RANKS);
    thread::scope(|scope| {
        let ranks: Vec<_> = comms
            .iter()
            .zip(c_comms)
            .map(|(comm, communicator)| scope.spawn(move || all_reduce_of_rank(comm, communicator, len)))
            .collect();
        for (rank, times) in ranks.into_iter().enumerate() {
            let times = times.join().map_err(|_| "a rank panicked")??;
            if rank == 0 {
                report(&format!("an all-reduce of {len} B, {RANKS} ranks"), times);
            }
        }
        Ok(())
    })
}

fn all_reduce_of_rank(
    comm: &Communicator,
    communicator: wm_communicator_t,
    len: usize,
) -> Result<[f64; 2], BoxError> {
    const CALLS: u32 = 50;
    let symmetric = SymmetricMemory::create(comm, &SymmetricSpec::default())?;
    let window = symmetric.mem_alloc(len)?;
    let stream = comm.device().stream()?;

    let (mut c_symmetric, mut c_window) = (wm_symmetric_memory_t { value: 0 }, wm_window_t { value: 0 });
    // SAFETY: the pointer is valid.
    check(unsafe { wm_symmetric_memory_create(communicator, ptr::null(), &raw mut c_symmetric) });
    // SAFETY: the pointer is valid.
    check(unsafe { wm_window_create(c_symmetric, len as u64, &raw mut c_window) });
    let (mut address, mut part_len) = (ptr::null_mut(), 0);
    // SAFETY: the pointers are valid.
    check(unsafe { wm_window_address_of(c_window, comm.rank().0, &raw mut address, &raw mut part_len) });
    Ok(alternate(
        CALLS,
        || {
            for _ in 0..CALLS {
                let reduced = symmetric.all_reduce(&stream, &window, &window, Dtype::F32, ReduceOp::Sum);
                reduced.expect("the ranks agree");
            }
            stream.synchronize(Deadline::NEVER).expect("the work ends");
        },
        || {
            for _ in 0..CALLS {
                // SAFETY: the window outlives the work, for which this function waits.
                check(unsafe {
                    wm_all_reduce(
                        c_symmetric,
                        0,
                        ptr::null_mut(),
                        address,
                        address,
                        len as u64 / 4,
                        WM_DTYPE_F32,
                        WM_REDUCE_SUM,
                    )
                });
            }
            // SAFETY: the null stream always exists.
            check(unsafe { wm_stream_synchronize(communicator, ptr::null_mut(), WM_TIMEOUT_INFINITE) });
        },
    ))
}
