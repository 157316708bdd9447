//! Windows, collective calls and graphs through C, compared with a naive reduction.

use std::ffi::c_void;
use std::ptr;

use wholemem::{Dtype, ReduceOp, combine_naive};
use wholemem_capi::collective::*;
use wholemem_capi::communicator::*;
use wholemem_capi::dtype::*;
use wholemem_capi::graph::*;
use wholemem_capi::status::*;
use wholemem_capi::symmetric::*;

use super::support::{fails, local, ok, on_each};

const RANKS: u32 = 3;

fn symmetric_of(communicator: wm_communicator_t) -> wm_symmetric_memory_t {
    let mut symmetric = wm_symmetric_memory_t { value: 0 };
    let options = wm_symmetric_options_t {
        struct_size: size_of::<wm_symmetric_options_t>(),
        lanes: 2,
        use_cuda_malloc: 0,
        window_space: 1 << 40,
        staging_len: 0,
        packets_len: 0,
        timeout_ns: 0,
    };
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_symmetric_memory_create(communicator, &raw const options, &raw mut symmetric) });
    symmetric
}

/// Creates a window, and returns it with the address of a rank's part.
fn window_of(symmetric: wm_symmetric_memory_t, len: u64, rank: u32) -> (wm_window_t, *mut c_void) {
    let (mut window, mut address, mut seen) = (wm_window_t { value: 0 }, ptr::null_mut(), 0);
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_window_create(symmetric, len, &raw mut window) });
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_window_address_of(window, rank, &raw mut address, &raw mut seen) });
    assert!(seen >= len && !address.is_null());
    (window, address)
}

fn staged(symmetric: wm_symmetric_memory_t) -> u64 {
    let mut count = u64::MAX;
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_symmetric_memory_staged_calls(symmetric, 0, &raw mut count) });
    count
}

fn values(rank: u32, count: usize) -> Vec<f32> {
    (0..count).map(|n| n as f32 * 0.37 + rank as f32 * 1.1).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

#[test]
fn reductions_have_the_bits_of_the_naive_reduction_in_windows_and_elsewhere() {
    for count in [1, 1000, 100_000] {
        let inputs: Vec<_> = (0..RANKS).map(|rank| bytes_of(&values(rank, count))).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        on_each(local(RANKS), |communicator, rank| {
            let symmetric = symmetric_of(communicator);
            let own = values(rank, count);
            let (window, in_window) = window_of(symmetric, 4 * count as u64, rank);
            for (number, op) in [
                (WM_REDUCE_SUM, ReduceOp::Sum),
                (WM_REDUCE_AVG, ReduceOp::Avg),
                (WM_REDUCE_MAX, ReduceOp::Max),
            ] {
                let expected = combine_naive(&inputs, Dtype::F32, op);
                let mut output = vec![0.0_f32; count];
                let (from, to) = (own.as_ptr().cast(), output.as_mut_ptr().cast());
                let before = staged(symmetric);
                // SAFETY: both arrays have `count` elements, and the work has run when the call returns.
                ok(unsafe {
                    wm_all_reduce(symmetric, 1, ptr::null_mut(), from, to, count as u64, WM_DTYPE_F32, number)
                });
                assert_eq!(bytes_of(&output), expected, "{op} of {count}");

                // SAFETY: the window has `count` elements, and no other rank accesses this part now.
                unsafe { ptr::copy_nonoverlapping(own.as_ptr(), in_window.cast(), count) };
                let (null, count64) = (ptr::null_mut(), count as u64);
                // SAFETY: the window has `count` elements.
                ok(unsafe {
                    wm_all_reduce(symmetric, 0, null, in_window, in_window, count64, WM_DTYPE_F32, number)
                });
                assert_eq!(staged(symmetric), before, "a call in a window is not staged");
                // SAFETY: the window has `count` elements, which no rank writes now.
                let seen = unsafe { std::slice::from_raw_parts(in_window.cast::<f32>(), count) };
                assert_eq!(bytes_of(seen), expected, "{op} of {count} in a window");

                let mut on_host = own.clone();
                let at = on_host.as_mut_ptr().cast();
                // SAFETY: the array has `count` elements.
                ok(unsafe { wm_all_reduce_host(symmetric, 0, at, count, WM_DTYPE_F32, number) });
                assert_eq!(bytes_of(&on_host), expected, "{op} of {count} on the host");
            }
            ok(wm_window_deregister(window));
            ok(wm_symmetric_memory_destroy(symmetric));
        });
    }
}

#[test]
fn gathers_and_broadcasts_copy_the_elements_of_every_rank() {
    on_each(local(RANKS), |communicator, rank| {
        let symmetric = symmetric_of(communicator);
        let (own, mut all) = ([rank as i32 * 10, 7], [0_i32; 2 * RANKS as usize]);
        let expected = [0, 7, 10, 7, 20, 7];
        let null = ptr::null_mut();
        let (from, to) = (own.as_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: the arrays have 2 elements, and 2 of each rank; the work has run when the call returns.
        ok(unsafe { wm_all_gather(symmetric, 0, null, from, to, 2, WM_DTYPE_I32) });
        assert_eq!(all, expected);
        all = [0; 2 * RANKS as usize];
        // SAFETY: the arrays have 2 elements, and 2 of each rank.
        ok(unsafe { wm_all_gather_host(symmetric, 0, from, all.as_mut_ptr().cast(), 2, WM_DTYPE_I32) });
        assert_eq!(all, expected);

        let mut value = [rank as i16; 5];
        let at = value.as_mut_ptr().cast();
        // SAFETY: the array has 5 elements.
        ok(unsafe { wm_broadcast(symmetric, 0, null, 1, at, at, 5, WM_DTYPE_I16) });
        assert_eq!(value, [1; 5]);
        value = [rank as i16; 5];
        // SAFETY: the array has 5 elements.
        ok(unsafe { wm_broadcast_host(symmetric, 0, 2, value.as_mut_ptr().cast(), 5, WM_DTYPE_I16) });
        assert_eq!(value, [2; 5]);
        // SAFETY: on the host, the stream is ignored.
        ok(unsafe { wm_barrier(symmetric, 0, null) });
        ok(wm_symmetric_memory_check(symmetric, 0));

        // SAFETY: the array has 5 elements.
        let status =
            unsafe { wm_all_reduce_host(symmetric, 0, value.as_mut_ptr().cast(), 5, WM_DTYPE_F32, 7) };
        fails(status, WM_ERROR_OP_NOT_FOR_TYPE);
        // SAFETY: the array has 5 elements.
        let status = unsafe { wm_broadcast(symmetric, 0, null, RANKS, at, at, 5, WM_DTYPE_I16) };
        fails(status, WM_ERROR_NO_SUCH_RANK);
        ok(wm_symmetric_memory_destroy(symmetric));
    });
}

#[test]
fn ranks_that_make_different_calls_get_a_status() {
    on_each(local(2), |communicator, rank| {
        let symmetric = symmetric_of(communicator);
        let mut values = [1.0_f32; 8];
        let op = if rank == 0 { WM_REDUCE_SUM } else { WM_REDUCE_MAX };
        // SAFETY: the array has 8 elements.
        let status =
            unsafe { wm_all_reduce_host(symmetric, 0, values.as_mut_ptr().cast(), 8, WM_DTYPE_F32, op) };
        let text = fails(status, WM_ERROR_RANKS_DISAGREE);
        assert!(text.contains("hint: make the same calls"), "{text}");
        ok(wm_symmetric_memory_destroy(symmetric));
    });
}

#[test]
fn existing_memory_is_registered_and_every_part_has_an_address() {
    on_each(local(2), |communicator, rank| {
        let symmetric = symmetric_of(communicator);
        let (existing, address) = window_of(symmetric, 1 << 20, rank);
        let mut window = wm_window_t { value: 0 };
        // SAFETY: the memory of the window stays valid until the new window is freed on all ranks.
        ok(unsafe { wm_window_register(symmetric, address, 1 << 20, &raw mut window) });
        let mut parts = [ptr::null_mut(); 2];
        for (peer, part) in (0..).zip(&mut parts) {
            let mut len = 0;
            // SAFETY: the pointers are valid.
            ok(unsafe { wm_window_address_of(window, peer, part, &raw mut len) });
            assert_eq!(len, 1 << 20);
        }
        assert_eq!(parts[rank as usize], address);
        // SAFETY: the part of the other rank is mapped, and only this rank writes its first byte.
        unsafe { parts[1 - rank as usize].cast::<u8>().write(40 + rank as u8) };
        ok(wm_communicator_barrier(communicator));
        // SAFETY: the own part is mapped, and no rank writes it now.
        assert_eq!(unsafe { address.cast::<u8>().read() }, 41 - rank as u8);

        let mut window_ref = wm_window_ref_t { base: 0, stride: 0, table: 0 };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_window_ref(existing, &raw mut window_ref) });
        assert_eq!(window_ref.base + u64::from(rank) * window_ref.stride, address.addr() as u64);
        let mut lane = wm_lane_ref_t { words: [0; 14] };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_symmetric_memory_lane_ref(symmetric, 1, &raw mut lane) });
        assert_ne!(lane.words[0], 0);
        ok(wm_window_deregister(window));
        // SAFETY: the function checks the address.
        let status =
            unsafe { wm_window_adopt(symmetric, ptr::without_provenance_mut(4096), 4096, &raw mut window) };
        assert_ne!(status, WM_OK, "nothing is mapped there");
        ok(wm_window_destroy(existing));
        ok(wm_symmetric_memory_destroy(symmetric));
    });
}

/// What the captured function needs.
struct Work {
    symmetric: wm_symmetric_memory_t,
    address: *mut c_void,
}

unsafe extern "C" fn reduce(data: *mut c_void, stream: *mut c_void) -> wm_status_t {
    // SAFETY: the test passes a pointer to `Work`.
    let work = unsafe { &*data.cast::<Work>() };
    let (at, sum) = (work.address, WM_REDUCE_SUM);
    // SAFETY: the window has 4 elements.
    unsafe { wm_all_reduce(work.symmetric, 0, stream, at, at, 4, WM_DTYPE_F32, sum) }
}

unsafe extern "C" fn fail(data: *mut c_void, stream: *mut c_void) -> wm_status_t {
    // SAFETY: the test passes a pointer to `Work`.
    let work = unsafe { &*data.cast::<Work>() };
    // SAFETY: the call is refused.
    unsafe { wm_all_reduce(work.symmetric, 0, stream, work.address, work.address, 4, 99, 0) }
}

unsafe extern "C" fn refuse(_data: *mut c_void, _stream: *mut c_void) -> wm_status_t {
    4711
}

#[test]
fn graphs_run_captured_work_and_return_the_errors_of_the_captured_function() {
    on_each(local(2), |communicator, rank| {
        let symmetric = symmetric_of(communicator);
        let (window, address) = window_of(symmetric, 16, rank);
        let mut work = Work { symmetric, address };
        let (data, null) = ((&raw mut work).cast(), ptr::null_mut());
        let mut graph = wm_graph_t { value: 0 };
        // SAFETY: the functions accept the data.
        ok(unsafe { wm_graph_capture(communicator, null, Some(reduce), data, &raw mut graph) });
        // SAFETY: the own part has 4 elements, which no rank accesses now.
        unsafe { address.cast::<[f32; 4]>().write([1.0; 4]) };
        for _ in 0..3 {
            // SAFETY: on the host, the stream is ignored.
            ok(unsafe { wm_graph_launch(graph, null) });
        }
        // SAFETY: on the host, the stream is ignored.
        ok(unsafe { wm_stream_synchronize(communicator, null, u64::MAX) });
        // SAFETY: the own part has 4 elements, which no rank writes now.
        assert_eq!(unsafe { address.cast::<[f32; 4]>().read() }, [8.0; 4]);

        let mut other = wm_graph_t { value: 0 };
        // SAFETY: the functions accept the data.
        let status = unsafe { wm_graph_capture(communicator, null, Some(fail), data, &raw mut other) };
        assert_eq!(fails(status, WM_ERROR_INVALID_ARGUMENT), "there is no element type 99");
        // SAFETY: the functions accept the data.
        let status = unsafe { wm_graph_capture(communicator, null, Some(refuse), data, &raw mut other) };
        assert_eq!(fails(status, 4711), "a function of the program returned an error");
        // SAFETY: the function checks the pointer.
        let status = unsafe { wm_graph_capture(communicator, null, None, data, &raw mut other) };
        assert_eq!(fails(status, WM_ERROR_NULL_POINTER), "the pointer `work` is null");
        assert_eq!(other.value, 0);

        let mut recording = wm_capture_recording_t { value: 0 };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_capture_recording_start(symmetric, &raw mut recording) });
        let mut second = recording;
        // SAFETY: the pointer is valid.
        let status = unsafe { wm_capture_recording_start(symmetric, &raw mut second) };
        fails(status, WM_ERROR_RECORDING);
        let mut count = 7;
        for _ in 0..2 {
            // SAFETY: the pointer is valid.
            ok(unsafe { wm_capture_recording_finish(recording, &raw mut count) });
            assert_eq!(count, 0);
        }
        ok(wm_capture_recording_destroy(recording));
        ok(wm_graph_destroy(graph));
        ok(wm_window_deregister(window));
        ok(wm_symmetric_memory_destroy(symmetric));
    });
}
