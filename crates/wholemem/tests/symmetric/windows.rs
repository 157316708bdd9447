//! Tests of creating, registering and releasing windows, and of invalid arguments of collective calls.

use std::time::Duration;

use wholemem::{
    Algorithm, Bootstrap, Communicator, Dtype, Error, Rank, ReduceOp, SymmetricMemory, SymmetricSpec,
};
use wholemem_comm::Error as CommError;
use wholemem_hal::{Backend, CudaMallocBuffer, Rights, Span};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Ranks, cuda, test_name};

use super::harness::{Guarded, groups, host, on_ranks};

/// Checks that every rank can write to every rank's part of a window: each rank writes its number at its own offset.
fn check_all_parts_are_accessible(symmetric: &SymmetricMemory, window: &wholemem::Window) {
    let group = symmetric.group();
    let (own, stream) = (group.rank().0, group.device().stream().unwrap());
    for rank in (0..group.size()).map(Rank) {
        if window.len_of(rank) > group.size() as usize {
            stream.write(&window.part_of(rank, own as usize, 1).unwrap(), &[own as u8 + 1]).unwrap();
        }
    }
    symmetric.barrier(&stream).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    if window.len() > group.size() as usize {
        let mut seen = vec![0; group.size() as usize];
        stream.read(&window.local().unwrap().part(0, seen.len()).unwrap(), &mut seen).unwrap();
        let expected: Vec<_> = (0..group.size()).map(|rank| rank as u8 + 1).collect();
        assert_eq!(seen, expected);
    }
    symmetric.barrier(&stream).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
}

fn check_windows_of_all_lengths(backend: &Backend) {
    on_ranks(backend, 3, None, |symmetric| {
        let group = symmetric.group();
        let granule = group.device().granularity().unwrap().minimum.len();
        for len in [1, 100, granule / 2, granule / 2 + 1, granule, 3 * granule + 1] {
            let window = symmetric.mem_alloc(len).unwrap();
            assert_eq!((window.len(), window.len_of(Rank(2))), (len, len));
            check_all_parts_are_accessible(symmetric, &window);
            let fresh = symmetric.mem_alloc(len).unwrap();
            let mut zeros = vec![1; len];
            group.device().stream().unwrap().read(fresh.local().unwrap(), &mut zeros).unwrap();
            assert!(zeros.iter().all(|byte| *byte == 0));
            // Without a table of addresses, the parts of the window are at equal distances.
            let reference = window.window_ref();
            if reference.table == 0 {
                let at = reference.base + u64::from(group.rank().0) * reference.stride;
                assert_eq!(window.local().unwrap().address(), at);
            }
            symmetric.window_unregister(window).unwrap();
        }
        // The ranks' parts of this window have different lengths, and rank 1 has no bytes.
        let own = group.rank().index();
        let window = symmetric.mem_alloc([2 * granule, 0, 10][own]).unwrap();
        assert_eq!([0, 1, 2].map(|rank| window.len_of(Rank(rank))), [2 * granule, 0, 10]);
        assert_eq!(window.is_empty(), own == 1);
        assert_eq!(window.local().map(Span::len), [Some(2 * granule), None, Some(10)][own]);
        check_all_parts_are_accessible(symmetric, &window);
        let beyond = Error::NoPart { rank: Rank(2), offset: 5, len: 6, available: 5 };
        assert_eq!(window.part_of(Rank(2), 5, 6).unwrap_err(), beyond);
    });
}

#[test]
fn windows_of_all_lengths_are_created_and_released() {
    check_windows_of_all_lengths(&host());
}

#[test]
fn gpu_windows_of_all_lengths_are_created_and_released() {
    if let Some(backend) = cuda::backend() {
        check_windows_of_all_lengths(&backend);
    }
}

/// Checks windows of host memory, which devices read, write and reduce in place.
fn check_host_windows(backend: &Backend) {
    for algorithm in Algorithm::ALL {
        on_ranks(backend, 3, Some(algorithm), |symmetric| {
            const COUNT: usize = 3000;
            let group = symmetric.group();
            let stream = group.device().stream().unwrap();
            assert_eq!(symmetric.mem_alloc_on_host(0).unwrap_err(), Error::EmptyWindow);
            let uneven = symmetric.mem_alloc_on_host([7, 0, 5000][group.rank().index()]).unwrap();
            assert_eq!([0, 1, 2].map(|rank| uneven.len_of(Rank(rank))), [7, 0, 5000]);
            check_all_parts_are_accessible(symmetric, &uneven);
            let [from, to] = [(); 2].map(|()| symmetric.mem_alloc_on_host(COUNT * 4).unwrap());
            let mut seen = vec![1; COUNT * 4];
            stream.read(to.local().unwrap(), &mut seen).unwrap();
            assert!(seen.iter().all(|byte| *byte == 0));
            for round in 0..5_u32 {
                let bytes = |value: u32| value.to_ne_bytes().repeat(COUNT);
                stream.write(from.local().unwrap(), &bytes(round + group.rank().0)).unwrap();
                let buffers = (from.range(0..COUNT * 4), to.range(0..COUNT * 4));
                symmetric.all_reduce(&stream, buffers.0, buffers.1, Dtype::U32, ReduceOp::Sum).unwrap();
                stream.read(to.local().unwrap(), &mut seen).unwrap();
                let expected = bytes(3 * round + 3);
                let wrong =
                    seen.chunks(4).zip(expected.chunks(4)).position(|(seen, expected)| seen != expected);
                let first_wrong = wrong.map(|at| (at, &seen[at * 4..at * 4 + 4]));
                assert_eq!(
                    first_wrong,
                    None,
                    "{algorithm}, round {round}, {expected:?}",
                    expected = &expected[..4]
                );
            }
            symmetric.check().unwrap();
            group.bootstrap().barrier().unwrap();
        });
    }
}

#[test]
fn windows_of_host_memory_are_accessible_to_all_ranks() {
    check_host_windows(&host());
}

#[test]
fn gpu_windows_of_host_memory_are_accessible_to_all_ranks() {
    if let Some(backend) = cuda::backend() {
        check_host_windows(&backend);
    }
}

fn check_registered_memory(backend: &Backend) {
    on_ranks(backend, 2, None, |symmetric| {
        let device = symmetric.group().device();
        let stream = device.stream().unwrap();
        let granule = device.granularity().unwrap().minimum.len();
        let memory = device.allocate(granule).unwrap();
        let map = memory.map(Rights::ReadWrite).unwrap();
        stream.write(&map.span(9, 5).unwrap(), b"there").unwrap();
        let window = symmetric.window_register(&memory).unwrap();
        let mut seen = [0; 5];
        stream.read(&window.local().unwrap().part(9, 5).unwrap(), &mut seen).unwrap();
        assert_eq!(&seen, b"there");
        check_all_parts_are_accessible(symmetric, &window);
        drop((window, memory));

        // Registers a part of memory that is mapped already, at another offset on each rank.
        let skip = 256 * (1 + symmetric.group().rank().index());
        let registered = symmetric.window_register_mapped(map.address() + skip as u64, 1000);
        let Ok(window) = registered else {
            // Registering mapped memory is supported by CUDA only, which can return the allocation of an address.
            assert!(device.backend().kind() == wholemem_hal::BackendKind::Host, "{registered:?}");
            return;
        };
        check_all_parts_are_accessible(symmetric, &window);
        let output = Guarded::buffer(symmetric, 1000);
        stream.fill(window.local().unwrap(), 1).unwrap();
        symmetric.barrier(&stream).unwrap();
        symmetric.all_reduce(&stream, window.range(0..1000), &output, Dtype::U8, ReduceOp::Sum).unwrap();
        let mut seen = vec![0; 1000];
        stream.read(&output, &mut seen).unwrap();
        assert_eq!(seen, vec![2; 1000]);
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

/// Registers `cudaMalloc` memory as a window, and checks that all ranks can access it and reduce it.
fn check_cuda_malloc_window(symmetric: &SymmetricMemory) {
    let device = symmetric.group().device();
    let buffer = CudaMallocBuffer::create(device, 5000).unwrap();
    let window = symmetric.window_register_cuda_malloc(&buffer).unwrap();
    assert_eq!((window.len(), window.local().unwrap().address()), (5000, buffer.address()));
    check_all_parts_are_accessible(symmetric, &window);
    let (stream, output) = (device.stream().unwrap(), Guarded::buffer(symmetric, 5000));
    stream.fill(window.local().unwrap(), 1).unwrap();
    symmetric.barrier(&stream).unwrap();
    symmetric.all_reduce(&stream, window.range(0..5000), &output, Dtype::U8, ReduceOp::Sum).unwrap();
    let mut seen = vec![0; 5000];
    stream.read(&output, &mut seen).unwrap();
    assert_eq!(seen, vec![symmetric.group().size() as u8; 5000]);
    symmetric.check().unwrap();
    symmetric.window_unregister(window).unwrap();
}

#[test]
fn gpu_cuda_malloc_memory_is_registered() {
    if let Some(backend) = cuda::backend() {
        on_ranks(&backend, 3, None, check_cuda_malloc_window);
    }
}

#[test]
fn gpu_cuda_malloc_memory_of_processes_is_registered() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(2).run(test_name!(), |rank| {
        let group = super::peer_failures::join(rank, &[0, 1], &cuda::backend().unwrap());
        check_cuda_malloc_window(&SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap());
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn the_host_backend_rejects_cuda_malloc_buffers() {
    let device = host().device(0).unwrap();
    assert!(matches!(CudaMallocBuffer::create(&device, 64), Err(wholemem_hal::Error::Unsupported { .. })));
}

#[test]
fn existing_memory_is_registered() {
    check_registered_memory(&host());
}

#[test]
fn gpu_existing_memory_is_registered() {
    if let Some(backend) = cuda::backend() {
        check_registered_memory(&backend);
    }
}

#[test]
fn invalid_arguments_are_rejected_without_waiting() {
    let backend = host();
    let all = groups(&backend, 2);
    let others = Communicator::on_each(&groups(&backend, 2), |group| {
        SymmetricMemory::create(group, &SymmetricSpec::default())?.mem_alloc(64)
    });
    let others = others.unwrap();
    Communicator::on_each(&all, |group| {
        let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
        let stream = group.device().stream()?;
        let buffer = Guarded::buffer(&symmetric, 64);
        let part = |at, len| buffer.part(at, len).unwrap();
        let reduce = |from: &Span, to: &Span, dtype, op| {
            symmetric.all_reduce(&stream, from, to, dtype, op).unwrap_err()
        };
        let (sum, f32) = (ReduceOp::Sum, Dtype::F32);
        let op = ReduceOp::Xor;
        assert_eq!(reduce(&buffer, &buffer, f32, op), Error::OpNotForType { op, dtype: f32 });
        let address = buffer.address() + 2;
        let misaligned = Error::Misaligned { items: "elements", address, stride: 4, align: 4 };
        assert_eq!(reduce(&part(2, 16), &part(32, 16), f32, sum), misaligned);
        let short = Error::TooShort { items: "elements", count: 4, needed: 16, len: 12 };
        assert_eq!(reduce(&part(0, 16), &part(32, 12), f32, sum), short);
        let overlap = Error::Overlap { input: buffer.address(), output: buffer.address() + 8, len: 16 };
        assert_eq!(reduce(&part(0, 16), &part(8, 16), f32, sum), overlap);
        let foreign = &others[group.rank().index()];
        assert_eq!(symmetric.all_reduce(&stream, foreign, &buffer, f32, sum), Err(Error::ForeignWindow));
        let window = symmetric.mem_alloc(16 + 16 * group.rank().index())?;
        let none = Error::NoPart { rank: Rank(0), offset: 0, len: 32, available: 16 };
        assert_eq!(symmetric.all_reduce(&stream, window.range(0..32), &buffer, f32, sum), Err(none));
        assert_eq!(symmetric.lane(1).unwrap_err(), Error::NoSuchLane { index: 1, lanes: 1 });
        let no_rank = wholemem_comm::Error::NoSuchRank { rank: Rank(2), size: 2 };
        assert_eq!(symmetric.broadcast(&stream, Rank(2), &buffer, &buffer), Err(Error::Comm(no_rank)));
        assert_eq!(symmetric.mem_alloc(0).unwrap_err(), Error::EmptyWindow);
        // The lane remains usable after the rejected calls.
        symmetric.all_reduce(&stream, &buffer, &buffer, f32, sum)
    })
    .unwrap();
}

#[test]
fn a_failed_allocation_fails_all_ranks_and_leaks_nothing() {
    Ranks::of(2).run(test_name!(), |rank| {
        let group = super::peer_failures::join(rank, &[0, 1], &host());
        let symmetric = SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap();
        let mut before = None;
        for _ in 0..3 {
            // Rank 1 requests all memory of the machine, which is more than is available.
            let all = group.device().info().memory_len;
            let len = if group.rank() == Rank(1) { all } else { 1 << 20 };
            let error = symmetric.mem_alloc(len).unwrap_err();
            assert!(matches!(error, Error::OnRank { rank: Rank(1), .. }), "{error}");
            check_all_parts_are_accessible(&symmetric, &symmetric.mem_alloc(1 << 20).unwrap());
            group.bootstrap().barrier().unwrap();
            let census = Census::take();
            census.assert_same_as(before.get_or_insert_with(|| census.clone()), "after another round");
            group.bootstrap().barrier().unwrap();
        }
    });
}

#[test]
fn calls_of_different_lanes_do_not_wait_for_each_other() {
    let backend = host();
    let spec = SymmetricSpec { lanes: 2, ..SymmetricSpec::default() };
    Communicator::on_each(&groups(&backend, 2), |group| {
        let symmetric = SymmetricMemory::create(group, &spec)?;
        // The two ranks use the two lanes in opposite orders. With a single lane, the calls would deadlock.
        let order = if group.rank() == Rank(0) { [0, 1] } else { [1, 0] };
        std::thread::scope(|scope| {
            for lane in order {
                let lane = symmetric.lane(lane).unwrap();
                let buffer = Guarded::buffer(&symmetric, 4);
                scope.spawn(move || {
                    let stream = group.device().stream().unwrap();
                    stream.write(&buffer, &1_u32.to_ne_bytes()).unwrap();
                    lane.all_reduce(&stream, &buffer, &buffer, Dtype::U32, ReduceOp::Sum).unwrap();
                    let mut seen = [0; 4];
                    stream.read(&buffer, &mut seen).unwrap();
                    assert_eq!(u32::from_ne_bytes(seen), 2);
                });
            }
        });
        Ok(())
    })
    .unwrap();
}

#[test]
fn calls_of_several_threads_and_graphs_are_serialized() {
    const CALLS: usize = 300;
    on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        // Calls of the two ranks' threads pair in any order, so all threads of a rank have the same input. Two threads of each
        // rank replay a graph.
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let stream = group.device().stream().unwrap();
                    let [input, output] = [(); 2].map(|()| Guarded::buffer(symmetric, 400));
                    let bytes = |value: u32| value.to_ne_bytes().repeat(100);
                    stream.write(&input, &bytes(group.rank().0 + 1)).unwrap();
                    let call = |stream: &wholemem_hal::Stream| {
                        symmetric.all_reduce(stream, &input, &output, Dtype::U32, ReduceOp::Sum).unwrap();
                    };
                    let graph = (thread % 2 == 0).then(|| {
                        let captured = stream.capture(|stream| {
                            call(stream);
                            Ok(())
                        });
                        captured.unwrap()
                    });
                    for _ in 0..CALLS {
                        stream.fill(&output, 0xEE).unwrap();
                        match &graph {
                            Some(graph) => graph.launch(&stream).unwrap(),
                            None => call(&stream),
                        }
                        let mut seen = vec![0; 400];
                        stream.read(&output, &mut seen).unwrap();
                        assert!(seen == bytes(3), "thread {thread}: {:?}", &seen[..4]);
                    }
                });
            }
        });
        symmetric.check().unwrap();
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn different_options_of_ranks_are_an_error_on_all_ranks() {
    let backend = host();
    for rank in [Rank(1), Rank(2)] {
        let outcomes = Communicator::on_each(&groups(&backend, 3), |group| {
            let lanes = if group.rank() == rank { 2 } else { 1 };
            let spec = SymmetricSpec { lanes, ..SymmetricSpec::default() };
            Ok(SymmetricMemory::create(group, &spec).unwrap_err())
        });
        assert_eq!(outcomes.unwrap(), vec![Error::RanksDisagree { rank }; 3]);
    }
}

/// With `vmm: false`, windows have memory of `cudaMalloc`, unless the part of a rank is empty.
#[test]
fn gpu_windows_of_cuda_malloc_memory_are_zeroed_and_shared() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(2).run(test_name!(), |rank| {
        let group = super::peer_failures::join(rank, &[0, 1], &cuda::backend().unwrap());
        let spec = SymmetricSpec { vmm: false, ..SymmetricSpec::default() };
        let symmetric = SymmetricMemory::create(&group, &spec).unwrap();
        let stream = group.device().stream().unwrap();
        let own = group.rank();
        for len in [1 << 20, 3 << 20] {
            let window = symmetric.mem_alloc(len).unwrap();
            let mut seen = [1; 8];
            stream.read(&window.part_of(own, len - 8, 8).unwrap(), &mut seen).unwrap();
            assert_eq!(seen, [0; 8]);
            let peer = Rank(1 - own.0);
            stream.write(&window.part_of(peer, 0, 8).unwrap(), &[own.0 as u8 + 1; 8]).unwrap();
            symmetric.barrier(&stream).unwrap();
            stream.read(&window.part_of(own, 0, 8).unwrap(), &mut seen).unwrap();
            assert_eq!(seen, [peer.0 as u8 + 1; 8]);
            symmetric.barrier(&stream).unwrap();
            stream.synchronize(Deadline::NEVER).unwrap();
            symmetric.window_unregister(window).unwrap();
        }
        let window = symmetric.mem_alloc(own.0 as usize * 100).unwrap();
        assert_eq!([0, 1].map(|rank| window.len_of(Rank(rank))), [0, 100]);
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn the_default_timeout_of_collective_calls_is_that_of_the_group() {
    let device = host().device(0).unwrap();
    let timeout = Duration::from_secs(3);
    let run = |mut bootstrap: Bootstrap| {
        bootstrap.set_timeout(timeout);
        let group = Communicator::create(bootstrap, &device).unwrap();
        let symmetric = SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap();
        let stream = group.device().stream().unwrap();
        // Rank 1 stays in the group, but does not call.
        let outcome = (group.rank() == Rank(0)).then(|| symmetric.barrier(&stream));
        (group, outcome)
    };
    let run = &run;
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let ranks = Bootstrap::local(2).unwrap().into_iter();
        let threads: Vec<_> = ranks.map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let error = CommError::Timeout { missing: vec![Rank(1)], timeout, joining: false };
    assert_eq!(outcomes[0].1, Some(Err(Error::Comm(error))));
}
