//! Tests which functions of the CUDA driver a call makes when it is repeated: each costs time on a GPU, and almost none on the fake
//! driver, so benchmarks without a GPU do not show an additional one.

#![allow(unsafe_code, reason = "a test wraps a stream as another library's")]

use std::sync::Arc;

use wholemem::{
    Buffer, Dtype, Indices, Order, Rank, ReduceOp, RowBuffer, SymmetricMemory, TensorSpec, WholeTensor,
};
use wholemem_hal::{CudaMallocBuffer, Device, Rights, Span, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{FakeDriver, cuda, test_name};

use super::registered_on_fake_driver::{create, on_fake_driver};

/// The number of operations after which a stream records an event, so that it can release the operands of finished work.
const BATCH: usize = 64;

const PROGRAMMATIC_LAUNCH: [&str; 3] = ["cuCtxPushCurrent", "cuLaunchKernelEx", "cuCtxPopCurrent"];
const LAUNCH: [&str; 3] = ["cuCtxPushCurrent", "cuLaunchKernel", "cuCtxPopCurrent"];
const CAPTURE_QUERY: [&str; 3] = ["cuCtxPushCurrent", "cuStreamGetCaptureInfo", "cuCtxPopCurrent"];
const EVENT: [&str; 3] = ["cuCtxPushCurrent", "cuEventRecord", "cuCtxPopCurrent"];
/// A query of the id of registered memory, on a thread without a current context.
const MEMORY_ID: [&str; 4] =
    ["cuPointerGetAttribute", "cuCtxPushCurrent", "cuPointerGetAttribute", "cuCtxPopCurrent"];

/// Checks that each of many repeated calls makes the driver calls `expected`, with an event after each batch.
fn check_calls(name: &str, stream: &Stream, expected: &[&str], call: impl Fn() -> wholemem::Result<()>) {
    (0..BATCH).for_each(|_| call().unwrap());
    stream.synchronize(Deadline::NEVER).unwrap();
    let driver = FakeDriver::of_process();
    for number in 1..=BATCH {
        let made = driver.calls_of(|| call().unwrap());
        let event: &[&str] = if number == BATCH { &EVENT } else { &[] };
        assert_eq!(made, [expected, event].concat(), "{name}, call {number}");
    }
}

/// Returns memory that only this rank has mapped.
fn own_memory(device: &Device, len: usize) -> Span {
    let granule = device.granularity().unwrap().minimum.len();
    let map = device.allocate(len.next_multiple_of(granule)).unwrap().map(Rights::ReadWrite).unwrap();
    map.span(0, len).unwrap()
}

/// Checks all collective calls on `input` and an output, which has a part of the input's length for each rank.
fn check_collectives(
    symmetric: &SymmetricMemory,
    stream: &Stream,
    expected: &[&str],
    (name, input, output, parts): (&str, &Buffer<'_>, &Buffer<'_>, &Buffer<'_>),
) {
    let check = |call: &str, made: &dyn Fn() -> wholemem::Result<()>| {
        check_calls(&format!("{call}, {name}"), stream, expected, made);
    };
    let (from, to, all) = (|| input.clone(), || output.clone(), || parts.clone());
    check("all_reduce", &|| symmetric.all_reduce(stream, from(), to(), Dtype::F32, ReduceOp::Sum));
    check("all_gather", &|| symmetric.all_gather(stream, from(), all()));
    check("broadcast", &|| symmetric.broadcast(stream, Rank(0), from(), to()));
}

fn check_all_memory(symmetric: &SymmetricMemory, stream: &Stream, query: &[&str]) {
    let device = symmetric.group().device();
    let ranks = symmetric.group().size() as usize;
    let expected = [query, &PROGRAMMATIC_LAUNCH[..]].concat();
    // Packets, one-shot and two-shot.
    for len in [1 << 10, 1 << 20, 16 << 20] {
        let windows = [len, len, len * ranks].map(|len| symmetric.mem_alloc(len).unwrap());
        let [input, output, parts] = windows.each_ref().map(Buffer::from);
        check_collectives(symmetric, stream, &expected, ("window", &input, &output, &parts));

        let private = [len, len, len * ranks].map(|len| own_memory(device, len));
        let [input, output, parts] = private.each_ref().map(Buffer::from);
        check_collectives(symmetric, stream, &expected, ("private memory", &input, &output, &parts));

        // The id of the memory is queried for the input and for the output.
        let buffers = [len, len, len * ranks].map(|len| CudaMallocBuffer::create(device, len).unwrap().all());
        let _windows = buffers.each_ref().map(|buffer| symmetric.window_register_span(buffer).unwrap());
        let [input, output, parts] = buffers.each_ref().map(Buffer::from);
        let queried = [&MEMORY_ID[..], &MEMORY_ID, &expected].concat();
        check_collectives(symmetric, stream, &queried, ("registered memory", &input, &output, &parts));
        let once = [&MEMORY_ID[..], &expected].concat();
        check_calls("all_reduce in place, registered memory", stream, &once, || {
            symmetric.all_reduce(stream, &buffers[0], &buffers[0], Dtype::F32, ReduceOp::Sum)
        });
    }
    check_calls("barrier", stream, &expected, || symmetric.barrier(stream));
}

#[test]
fn a_repeated_collective_call_makes_one_launch() {
    for ranks in [1, 2] {
        on_fake_driver(ranks, test_name!(), |process| {
            let symmetric = create(process, &cuda::backend().unwrap());
            check_all_memory(&symmetric, &symmetric.group().device().stream().unwrap(), &[]);
            symmetric.group().bootstrap().barrier().unwrap();
        });
    }
}

#[test]
fn a_repeated_collective_call_on_a_stream_of_another_library_makes_one_query_and_one_launch() {
    on_fake_driver(2, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let device = symmetric.group().device();
        let owner = device.stream().unwrap();
        // SAFETY: `owner` is a stream of the device, and is dropped last.
        let stream = unsafe { Stream::from_foreign_static(device, owner.handle()) };
        check_all_memory(&symmetric, &stream, &CAPTURE_QUERY);
        symmetric.group().bootstrap().barrier().unwrap();
        drop(stream);
    });
}

#[test]
fn a_repeated_gather_or_scatter_makes_one_launch() {
    const ROWS: usize = 100;
    on_fake_driver(2, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let device = symmetric.group().device();
        let table = WholeTensor::create(symmetric.group(), &TensorSpec::of::<f32>(&[10_000, 16])).unwrap();
        let owner = device.stream().unwrap();
        // SAFETY: `owner` is a stream of the device, and is dropped last.
        let foreign = unsafe { Stream::from_foreign_static(device, owner.handle()) };
        let indices = Indices::i64(own_memory(device, ROWS * 8));
        for (dtype, len) in [(Dtype::F32, 4), (Dtype::F16, 2)] {
            let rows = RowBuffer::new(own_memory(device, ROWS * 16 * len), dtype);
            let rows = if dtype == Dtype::F32 { rows } else { rows.converted() };
            for (stream, query) in [(&device.stream().unwrap(), &[][..]), (&foreign, &CAPTURE_QUERY)] {
                let expected = [query, &LAUNCH].concat();
                let check = |name: &str, call: &dyn Fn() -> wholemem::Result<()>| {
                    check_calls(&format!("{name} of {dtype}"), stream, &expected, call);
                };
                check("gather", &|| table.gather_on(stream, &indices, &rows));
                check("scatter", &|| table.scatter_on(stream, &indices, &rows, Order::Any));
                if dtype == Dtype::F32 {
                    check("scatter_add", &|| table.scatter_add_on(stream, &indices, &rows, Order::Any));
                }
            }
        }
        symmetric.group().bootstrap().barrier().unwrap();
        drop((foreign, Arc::new(owner)));
    });
}
