//! Communicators: ranks that are threads and processes, splits, exchanges of bytes, deaths and timeouts.

use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use wholemem_capi::argument::WM_TIMEOUT_INFINITE;
use wholemem_capi::collective::wm_all_reduce_host;
use wholemem_capi::communicator::*;
use wholemem_capi::device::*;
use wholemem_capi::dtype::*;
use wholemem_capi::last_error::*;
use wholemem_capi::status::*;
use wholemem_capi::symmetric::*;
use wholemem_testkit::{Rank as Process, Ranks, in_forked_child, test_name};

use super::support::{fails, local, ok, on_each};

fn rank_and_size(communicator: wm_communicator_t) -> (u32, u32) {
    let (mut rank, mut size) = (u32::MAX, 0);
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_communicator_rank(communicator, &raw mut rank) });
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_communicator_size(communicator, &raw mut size) });
    (rank, size)
}

#[test]
fn threads_exchange_bytes_and_split_their_group() {
    on_each(local(4), |communicator, number| {
        assert_eq!(rank_and_size(communicator), (number, 4));
        let (own, mut all) = ([number, number * 10], [0_u32; 8]);
        // SAFETY: the arrays have 8 bytes, and 8 bytes for each of 4 ranks.
        ok(unsafe {
            wm_communicator_all_gather(communicator, own.as_ptr().cast(), 8, all.as_mut_ptr().cast())
        });
        assert_eq!(all, [0, 0, 1, 10, 2, 20, 3, 30]);
        let mut value = number;
        // SAFETY: the pointer is to 4 bytes.
        ok(unsafe { wm_communicator_broadcast(communicator, 2, (&raw mut value).cast(), 4) });
        assert_eq!(value, 2);
        let (sent, mut received) = ([0, 1, 2, 3].map(|to| number * 10 + to), [0_u32; 4]);
        // SAFETY: the arrays have 4 bytes for each of 4 ranks.
        ok(unsafe {
            wm_communicator_all_to_all(communicator, sent.as_ptr().cast(), 4, received.as_mut_ptr().cast())
        });
        assert_eq!(received, [0, 1, 2, 3].map(|from| from * 10 + number));

        let mut part = wm_communicator_t { value: 7 };
        let color = if number == 3 { WM_NO_COLOR } else { 5 };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_communicator_split(communicator, color, 9 - number, &raw mut part) });
        if number == 3 {
            assert_eq!(part.value, 0);
        } else {
            assert_eq!(rank_and_size(part), (2 - number, 3));
            ok(wm_communicator_barrier(part));
            ok(wm_communicator_destroy(part));
        }
        ok(wm_communicator_barrier(communicator));
        let mut len_differs = vec![0_u8; 16 * 4];
        let len = if number == 1 { 16 } else { 8 };
        let bytes = len_differs.clone();
        // SAFETY: both arrays have space for 16 bytes of each rank.
        let status = unsafe {
            wm_communicator_all_gather(
                communicator,
                bytes.as_ptr().cast(),
                len,
                len_differs.as_mut_ptr().cast(),
            )
        };
        fails(status, WM_ERROR_RANKS_DISAGREE);
    });
}

/// Joins a group of processes on the host backend, with a timeout in nanoseconds.
fn join(process: &Process, timeout_ns: u64) -> wm_communicator_t {
    let mut id = wm_unique_id_t { text: [0; WM_UNIQUE_ID_SIZE] };
    if process.id() == 0 {
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_unique_id_create(&raw mut id) });
        let bytes = id.text.map(|byte| byte.to_ne_bytes()[0]);
        (1..process.count()).for_each(|rank| process.send(rank, &bytes, &[]));
    } else {
        let (bytes, _) = process.recv(0);
        id.text.iter_mut().zip(bytes).for_each(|(to, byte)| *to = std::ffi::c_char::from_ne_bytes([byte]));
    }
    let (mut backend, mut device) = (wm_backend_t { value: 0 }, wm_device_t { value: 0 });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_backend_open(WM_BACKEND_HOST, 0, &raw mut backend) });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_device_open(backend, 0, &raw mut device) });
    let options =
        wm_communicator_options_t { struct_size: size_of::<wm_communicator_options_t>(), timeout_ns };
    let mut communicator = wm_communicator_t { value: 0 };
    let (rank, size) = (process.id().try_into().unwrap(), process.count().try_into().unwrap());
    // SAFETY: the pointers are valid.
    ok(unsafe {
        wm_communicator_create(&raw const id, rank, size, device, &raw const options, &raw mut communicator)
    });
    communicator
}

fn error_info() -> wm_error_info_t {
    let mut info = wm_error_info_t {
        struct_size: size_of::<wm_error_info_t>(),
        status: 0,
        rank: 0,
        message: ptr::null(),
        hint: ptr::null(),
        missing_ranks: ptr::null(),
        missing_count: 0,
        position: 0,
    };
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    assert_eq!(unsafe { wm_last_error_info(&raw mut info) }, WM_OK);
    info
}

#[test]
fn the_death_of_a_process_is_a_status_with_its_rank() {
    Ranks::of(3).killed(1).run(test_name!(), |process| {
        let communicator = join(process, 60_000_000_000);
        ok(wm_communicator_barrier(communicator));
        match process.id() {
            1 => process.wait_to_be_killed(),
            0 => process.kill(1),
            _ => {}
        }
        fails(wm_communicator_barrier(communicator), WM_ERROR_PEER_LOST);
        let info = error_info();
        assert_eq!((info.status, info.rank), (WM_ERROR_PEER_LOST, 1));
        assert!(!info.hint.is_null());
        fails(wm_communicator_check(communicator), WM_ERROR_PEER_LOST);
        ok(wm_communicator_destroy(communicator));
    });
}

#[test]
fn a_missing_rank_is_reported_when_the_timeout_expires() {
    Ranks::of(2).run(test_name!(), |process| {
        let communicator = join(process, 1_000_000_000);
        let mut timeout = 0;
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_communicator_timeout(communicator, &raw mut timeout) });
        assert_eq!(timeout, 1_000_000_000);
        if process.id() == 0 {
            fails(wm_communicator_barrier(communicator), WM_ERROR_TIMEOUT);
            let info = error_info();
            // SAFETY: the array has as many ranks, and is valid until the next call of this thread.
            let missing = unsafe { std::slice::from_raw_parts(info.missing_ranks, info.missing_count) };
            assert_eq!(missing, [1]);
        }
        process.barrier();
        ok(wm_communicator_destroy(communicator));
    });
}

#[test]
fn an_abort_ends_a_call_of_another_thread_and_destroying_ends_the_membership() {
    let [first, second] = local(2)[..] else { unreachable!() };
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| (wm_communicator_barrier(first), error_info().rank));
        ok(wm_communicator_abort(second));
        assert_eq!(waiting.join().unwrap(), (WM_ERROR_ABORTED, 1));
    });
    ok(wm_communicator_destroy(first));
    ok(wm_communicator_destroy(second));

    let [first, second] = local(2)[..] else { unreachable!() };
    ok(wm_communicator_destroy(second));
    fails(wm_communicator_barrier(first), WM_ERROR_PEER_LEFT);
    ok(wm_communicator_destroy(first));
}

#[test]
fn ranks_with_an_infinite_timeout_make_every_kind_of_call() {
    let (mut backend, mut device) = (wm_backend_t { value: 0 }, wm_device_t { value: 0 });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_backend_open(WM_BACKEND_HOST, 0, &raw mut backend) });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_device_open(backend, 0, &raw mut device) });
    let options = wm_communicator_options_t {
        struct_size: size_of::<wm_communicator_options_t>(),
        timeout_ns: WM_TIMEOUT_INFINITE,
    };
    let (devices, mut communicators) = ([device; 2], [wm_communicator_t { value: 0 }; 2]);
    // SAFETY: the arrays have 2 elements.
    ok(unsafe {
        wm_communicator_create_local(devices.as_ptr(), 2, &raw const options, communicators.as_mut_ptr())
    });
    on_each(communicators.to_vec(), |communicator, number| {
        let mut timeout = 0;
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_communicator_timeout(communicator, &raw mut timeout) });
        assert_eq!(timeout, WM_TIMEOUT_INFINITE);
        ok(wm_communicator_barrier(communicator));
        let mut part = wm_communicator_t { value: 0 };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_communicator_split(communicator, 0, 0, &raw mut part) });
        let mut symmetric = wm_symmetric_memory_t { value: 0 };
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_symmetric_memory_create(part, ptr::null(), &raw mut symmetric) });
        let mut sum = number + 1;
        let at = (&raw mut sum).cast();
        // SAFETY: the pointer is to one element.
        ok(unsafe { wm_all_reduce_host(symmetric, 0, at, 1, WM_DTYPE_U32, WM_REDUCE_SUM) });
        assert_eq!(sum, 3);
        ok(wm_symmetric_memory_destroy(symmetric));
        ok(wm_communicator_destroy(part));
    });
}

#[test]
fn a_forked_child_gets_a_status_and_can_create_objects_of_its_own() {
    let [communicator] = local(1)[..] else { unreachable!() };
    in_forked_child(|| {
        fails(wm_communicator_barrier(communicator), WM_ERROR_FORKED);
        let [own] = local(1)[..] else { unreachable!() };
        ok(wm_communicator_barrier(own));
        ok(wm_communicator_destroy(own));
        // The membership belongs to the parent, which does not notice.
        ok(wm_communicator_destroy(communicator));
    });
    ok(wm_communicator_barrier(communicator));
    ok(wm_communicator_destroy(communicator));
}

#[test]
fn processes_exchange_file_descriptors() {
    Ranks::of(2).run(test_name!(), |process| {
        let communicator = join(process, 60_000_000_000);
        let file = tempfile::tempfile().unwrap();
        let own = if process.id() == 0 { file.as_raw_fd() } else { -1 };
        let mut all = [7; 2];
        // SAFETY: the descriptor is open, and the array has space for one descriptor of each rank.
        ok(unsafe { wm_communicator_all_gather_fd(communicator, own, all.as_mut_ptr()) });
        assert_eq!(all[1], -1);
        // SAFETY: the call has returned a new descriptor, which belongs to the caller.
        let mut received = std::fs::File::from(unsafe { OwnedFd::from_raw_fd(all[0]) });
        if process.id() == 1 {
            received.write_all(b"hello").unwrap();
        }
        ok(wm_communicator_barrier(communicator));
        if process.id() == 0 {
            let mut text = String::new();
            received.rewind().unwrap();
            received.read_to_string(&mut text).unwrap();
            assert_eq!(text, "hello");
        }
        ok(wm_communicator_destroy(communicator));
    });
}

#[test]
fn the_devices_of_a_communicator_are_those_that_were_passed() {
    on_each(local(2), |communicator, number| {
        let mut device = wm_device_t { value: 0 };
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_communicator_device(communicator, &raw mut device) });
        let mut info = wm_device_info_t {
            struct_size: size_of::<wm_device_info_t>(),
            backend: 0,
            number: 7,
            memory_len: 0,
            compute: 7,
            numa_node: 0,
            uuid: [0; 16],
            name: [1; WM_DEVICE_NAME_SIZE],
        };
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        ok(unsafe { wm_device_info(device, &raw mut info) });
        assert_eq!((info.backend, info.number, info.compute), (WM_BACKEND_HOST, number, 0));
        assert!(info.memory_len > 0 && info.name.contains(&0) && info.name[0] != 0);
        let mut available = 0;
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_device_available(device, &raw mut available) });
        assert!(available > 0);
        ok(wm_device_destroy(device));
    });
}
