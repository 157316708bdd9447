//! Tests of registered memory with the fake CUDA driver: every way of sharing, freed memory, and failing driver calls. Kernels of
//! collective calls do nothing, so the tests check which memory is accessed, and how often calls are staged.

#![allow(unsafe_code, reason = "a test frees memory that is registered")]

use std::sync::Arc;

use wholemem::{Communicator, Dtype, Error, Rank, ReduceOp, SymmetricMemory, SymmetricSpec, Window};
use wholemem_hal::{
    Backend, CudaMallocBuffer, Error as HalError, Grant, Mapping, PinnedBuffer, Reservation, Rights, Span,
    Stream,
};
use wholemem_os::Deadline;
use wholemem_testkit::{FakeCuda, FakeDriver, Rank as Process, Ranks, cuda, test_name};

use super::peer_failures::join;

/// Runs `body` in `count` rank processes on the fake CUDA driver.
pub(crate) fn on_fake_driver(count: usize, test: &str, body: impl FnOnce(&Process)) {
    if Ranks::is_rank() {
        return Ranks::of(count).run(test, body);
    }
    let Some(fake) = FakeCuda::install() else { return };
    fake.ranks(count).env("WHOLEMEM_FAKE_CUDA_SKIP_KERNELS", "1").run(test, body);
}

pub(crate) fn create(process: &Process, backend: &Backend) -> SymmetricMemory {
    let members: Vec<_> = (0..process.count()).collect();
    let group = join(process, &members, backend);
    SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap()
}

/// Reduces a span in place. Returns the number of calls that were staged so far.
fn reduce(symmetric: &SymmetricMemory, span: &Span) -> u64 {
    let stream = symmetric.group().device().stream().unwrap();
    symmetric.all_reduce(&stream, span, span, Dtype::U8, ReduceOp::Sum).unwrap();
    symmetric.staged_calls()
}

/// Checks that every rank's part of a window is the memory that this rank registered, and that the table has the addresses of all
/// parts.
fn check_memory(symmetric: &SymmetricMemory, window: &Window, own: &Span) {
    let group = symmetric.group();
    let (rank, stream) = (group.rank(), group.device().stream().unwrap());
    stream.fill(own, 1 + rank.0 as u8).unwrap();
    let mut seen = vec![0; own.len()];
    stream.read(own, &mut seen).unwrap();
    group.bootstrap().barrier().unwrap();
    for peer in (0..group.size()).map(Rank) {
        let part = window.part_of(peer, 0, window.len_of(peer)).unwrap();
        let mut seen = vec![0; part.len()];
        stream.read(&part, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 1 + peer.0 as u8), "{peer}: {:?}", &seen[..8]);
    }
    group.bootstrap().barrier().unwrap();
    assert_eq!(window.local().unwrap().address(), own.address());
}

/// Tells the other ranks which windows this rank has dropped.
fn exchange(symmetric: &SymmetricMemory) {
    drop(symmetric.mem_alloc(1).unwrap());
}

#[test]
fn tensors_of_one_block_are_shared_through_one_ipc_handle() {
    on_fake_driver(2, test_name!(), |process| {
        let backend = cuda::backend().unwrap();
        let symmetric = create(process, &backend);
        let buffers = || FakeDriver::of_process().resources().buffers;
        let before = buffers();
        let block = CudaMallocBuffer::create(symmetric.group().device(), 1 << 20).unwrap().all();
        // The offset of the first tensor differs between the ranks.
        let tensors =
            [block.part(1000 * (1 + process.id()), 5000).unwrap(), block.part(1 << 19, 70_000).unwrap()];
        let windows = tensors.each_ref().map(|tensor| symmetric.window_register_span(tensor).unwrap());
        assert_eq!(buffers() - before, 2, "the own block, and that of the other rank once");
        for (window, tensor) in windows.iter().zip(&tensors) {
            check_memory(&symmetric, window, tensor);
            assert_eq!(reduce(&symmetric, tensor), 0);
            assert_eq!(reduce(&symmetric, &tensor.part(64, 128).unwrap()), 0);
        }
        let [first, second] = windows;
        drop(first);
        assert_eq!(buffers() - before, 2, "the second tensor is in the block");
        drop(second);
        assert_eq!(reduce(&symmetric, &tensors[0]), 1, "the registration has ended");
        // Waits until the work of the calls has run, which releases the operands of the calls.
        while backend.collect() > 0 {
            std::thread::yield_now();
        }
        for _ in 0..2 {
            exchange(&symmetric);
        }
        symmetric.group().bootstrap().barrier().unwrap();
        assert_eq!(buffers() - before, 1, "the block of the other rank is closed");
    });
}

#[test]
fn freed_memory_is_noticed_when_its_address_is_used_again() {
    on_fake_driver(2, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let device = symmetric.group().device();
        let granule = device.granularity().unwrap().minimum.len();
        let whole = Reservation::create(device.backend(), granule).unwrap();
        let grants = [Grant { device: device.id(), rights: Rights::ReadWrite }];
        let map = || Mapping::create(&whole, 0, &device.allocate(granule).unwrap(), &grants).unwrap();
        let first = map();
        // The raw span does not keep the memory alive: it is like memory of another library, which frees the memory although it
        // is registered.
        let freed = raw_span(device, first.address(), 4096);
        let window = symmetric.window_register_span(&freed).unwrap();
        assert_eq!(reduce(&symmetric, &freed), 0);
        let stream = device.stream().unwrap();
        let call = |stream: &Stream| {
            symmetric.all_reduce(stream, &freed, &freed, Dtype::U8, ReduceOp::Sum).unwrap();
            Ok(())
        };
        let graph = stream.capture(call).unwrap();
        graph.launch(&stream).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        drop(first);
        let gone = HalError::Freed { address: freed.address() };
        assert_eq!(graph.launch(&stream), Err(gone.clone()));
        device.stream().unwrap().synchronize(Deadline::NEVER).unwrap();
        let second = map();
        assert_eq!(second.address(), freed.address(), "the address is used again");
        assert_eq!(reduce(&symmetric, &freed), 1, "the memory is other memory now");
        assert_eq!(graph.launch(&stream), Err(gone));
        let again = symmetric.window_register_span(&freed).unwrap();
        check_memory(&symmetric, &again, &freed);
        assert_eq!(reduce(&symmetric, &freed), 1);
        drop((window, again, second));
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

/// Returns a span that does not keep its memory alive, like memory that another library owns and frees.
fn raw_span(device: &wholemem_hal::Device, address: u64, len: usize) -> Span {
    // SAFETY: kernels do nothing on the fake driver, and the test copies from the memory only while it is mapped.
    unsafe { Span::foreign(device, address, len, Rights::ReadWrite, Arc::new(())) }
}

#[test]
fn tensors_in_segments_that_grow_are_registered() {
    on_fake_driver(2, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let device = symmetric.group().device();
        let granule = device.granularity().unwrap().minimum.len();
        let whole = Reservation::create(device.backend(), 4 * granule).unwrap();
        let grants = [Grant { device: device.id(), rights: Rights::ReadWrite }];
        let map = |at: usize| {
            Mapping::create(&whole, at * granule, &device.allocate(granule).unwrap(), &grants).unwrap().all()
        };
        let mut segments = vec![map(0)];
        let first = segments[0].part(100, 500).unwrap();
        let mut windows = vec![symmetric.window_register_span(&first).unwrap()];
        for grown in 1..4 {
            segments.push(map(grown));
            let tensor = Span::join(&segments).unwrap().part(grown * granule - 300, 600).unwrap();
            windows.push(symmetric.window_register_span(&tensor).unwrap());
            check_memory(&symmetric, &windows[grown], &tensor);
            assert_eq!((reduce(&symmetric, &tensor), reduce(&symmetric, &first)), (0, 0));
        }
        let outside = segments[3].part(1000, 64).unwrap();
        assert_eq!(reduce(&symmetric, &outside), 1);
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

#[test]
fn ranks_of_one_process_use_the_pointer() {
    on_fake_driver(1, test_name!(), |_| {
        let backend = cuda::backend().unwrap();
        super::harness::on_ranks(&backend, 2, None, |symmetric| {
            let buffer = CudaMallocBuffer::create(symmetric.group().device(), 5000).unwrap().all();
            let window = symmetric.window_register_span(&buffer).unwrap();
            check_memory(symmetric, &window, &buffer);
            assert_eq!(reduce(symmetric, &buffer), 0);
            // There are only the buffers of the two ranks: no rank has opened a CUDA IPC handle, because a process cannot open
            // its own handles.
            assert_eq!(FakeDriver::of_process().resources().buffers, 2);
            symmetric.group().bootstrap().barrier().unwrap();
        });
    });
}

#[test]
fn memory_that_cannot_be_shared_is_an_error_on_all_ranks() {
    on_fake_driver(2, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let device = symmetric.group().device();
        let shared = CudaMallocBuffer::create(device, 4096).unwrap().all();
        let pinned = PinnedBuffer::create(device, 4096).unwrap().all();
        let given = if process.id() == 0 { &pinned } else { &shared };
        let Error::OnRank { rank: Rank(0), reason, .. } = symmetric.window_register_span(given).unwrap_err()
        else {
            panic!("another error")
        };
        assert!(reason.contains("`cuMemGetAddressRange` returned CUDA_ERROR_NOT_FOUND"), "{reason}");
        let unmapped = raw_span(device, 0x1000, 64);
        let given = if process.id() == 1 { &unmapped } else { &shared };
        let error = symmetric.window_register_span(given).unwrap_err();
        assert!(matches!(error, Error::OnRank { rank: Rank(1), .. }), "{error}");
        assert_eq!(reduce(&symmetric, &shared), 1);
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

/// Registers memory of one kind on two ranks, repeatedly: each time another driver call of rank 1 fails. Rank 0 repeats the
/// registration as often.
fn check_failing_calls(
    test: &str,
    at_least: u64,
    memory: impl Fn(&wholemem_hal::Device) -> wholemem_hal::Result<Span>,
) {
    on_fake_driver(2, test, |process| {
        let backend = cuda::backend().unwrap();
        let symmetric = create(process, &backend);
        let own = memory(symmetric.group().device()).unwrap();
        let driver = (process.id() == 1).then(FakeDriver::of_process);
        // Makes the nth driver call of rank 1 fail. Returns the name of the function that failed.
        let register = |nth| {
            driver.iter().for_each(|driver| driver.arm(nth));
            let window = symmetric.window_register_span(&own);
            let fired = driver.as_ref().and_then(FakeDriver::fired);
            driver.iter().for_each(|driver| driver.arm(0));
            let outcome = window.map(drop);
            // Waits until the other rank knows that this rank has dropped the window, and until the memory is released.
            exchange(&symmetric);
            while backend.collect() > 0 {
                std::thread::yield_now();
            }
            (fired, outcome)
        };
        // After the first call, a page for address tables and the heap of small windows stay allocated, so resources are counted
        // from then on.
        assert_eq!(register(0), (None, Ok(())));
        let before = driver.as_ref().map(FakeDriver::resources);
        let mut failures = 0;
        for nth in 1.. {
            let (fired, outcome) = register(nth);
            assert_eq!(driver.as_ref().map(FakeDriver::resources), before, "call {nth}, {fired:?}");
            if let Err(error) = &outcome {
                assert!(matches!(error, Error::OnRank { rank: Rank(1), .. }), "{error}");
                assert_eq!(symmetric.staged_calls(), 0);
                failures += 1;
            }
            // Rank 1 tells rank 0 whether the last registration had an nth driver call, which failed; otherwise the test ends.
            let is_last = if process.id() == 1 {
                process.send(0, &[u8::from(fired.is_none())], &[]);
                fired.is_none()
            } else {
                process.recv(1).0 == [1]
            };
            if is_last {
                assert_eq!(outcome, Ok(()));
                assert!(
                    nth > at_least && failures > 3,
                    "a registration makes {nth} driver calls, {failures} failures"
                );
                return;
            }
        }
    });
}

#[test]
fn registering_cuda_malloc_memory_fails_cleanly() {
    check_failing_calls(test_name!(), 10, |device| Ok(CudaMallocBuffer::create(device, 5000)?.all()));
}

#[test]
fn registering_virtual_memory_fails_cleanly() {
    check_failing_calls(test_name!(), 10, |device| {
        Ok(device.allocate(device.granularity()?.minimum.len())?.map(Rights::ReadWrite)?.all())
    });
}

#[test]
fn recorded_captures_are_not_staged_and_refused_before_their_end_or_after_a_free() {
    on_fake_driver(2, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let device = symmetric.group().device();
        let stream = device.stream().unwrap();
        let granule = device.granularity().unwrap().minimum.len();
        let mapped = device.allocate(granule).unwrap().map(Rights::ReadWrite).unwrap();
        let plain = CudaMallocBuffer::create(device, 1 << 20).unwrap().all();
        let memory = [
            raw_span(device, mapped.address() + 512, 4096),
            plain.part(64 * (1 + process.id()), 4096).unwrap(),
        ];
        let recording = symmetric.record_captures().unwrap();
        let graph = stream.capture(|stream| {
            for _ in 0..3 {
                symmetric.all_reduce(stream, &memory[0], &memory[1], Dtype::U8, ReduceOp::Sum).unwrap();
            }
            Ok(())
        });
        let graph = graph.unwrap();
        assert_eq!(
            graph.launch(&stream),
            Err(HalError::Capturing { attempt: wholemem_hal::Attempt::LaunchGraph })
        );
        assert_eq!((recording.finish().unwrap().len(), symmetric.staged_calls()), (6, 0));
        graph.launch(&stream).unwrap();
        stream.synchronize(Deadline::NEVER).unwrap();
        let address = mapped.address();
        drop(mapped);
        assert_eq!(graph.launch(&stream), Err(HalError::Freed { address }));
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

#[test]
fn ranks_of_one_process_on_two_gpus_share_virtual_memory_but_not_cuda_malloc_memory() {
    on_fake_driver(1, test_name!(), |_| {
        let backend = cuda::backend().unwrap();
        let groups = Communicator::local(&[backend.device(0).unwrap(), backend.device(1).unwrap()]).unwrap();
        Communicator::on_each(&groups, |group| {
            let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
            let granule = group.device().granularity()?.minimum.len();
            let mapped = group.device().allocate(granule)?.map(Rights::ReadWrite)?.all();
            let window = symmetric.window_register_span(&mapped)?;
            check_memory(&symmetric, &window, &mapped);
            assert_eq!(reduce(&symmetric, &mapped), 0);
            let plain = CudaMallocBuffer::create(group.device(), 4096)?.all();
            let error = symmetric.window_register_span(&plain).unwrap_err();
            let Error::OnRank { rank: Rank(0), reason, .. } = &error else { panic!("{error}") };
            assert_eq!(
                reason,
                "cannot access 4 KiB: cuda:0 was granted no access to the memory, but needs read and write access"
            );
            group.bootstrap().barrier()?;
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn slices_of_every_length_end_with_a_piece_that_is_shorter_than_the_others() {
    on_fake_driver(1, test_name!(), |process| {
        let symmetric = create(process, &cuda::backend().unwrap());
        let mut calls = 0;
        let mut made = |symmetric: &SymmetricMemory| {
            symmetric.staged_calls() - std::mem::replace(&mut calls, symmetric.staged_calls())
        };
        for (len, pieces) in [(0, 1), (1, 1), (1 << 20, 2), ((1 << 20) + 1, 2)] {
            symmetric.all_reduce_slice(&mut vec![0_u8; len], ReduceOp::Sum).unwrap();
            assert_eq!(made(&symmetric), pieces, "all_reduce of {len} bytes");
            symmetric.all_gather_slice(&vec![0_u8; len / 2]).unwrap();
            assert_eq!(made(&symmetric), pieces, "all_gather of {len} bytes");
        }
    });
}
