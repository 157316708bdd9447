//! Windows: made, registered, dropped, of different lengths, and whatever is asked of them that makes no sense.

use wholemem::{Algorithm, Communicator, Dtype, Error, Rank, ReduceOp, SymmetricMemory, SymmetricSpec};
use wholemem_hal::{Backend, CudaMallocBuffer, Rights, Span};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Ranks, cuda, test_name};

use super::world::{Guarded, groups, host, on_ranks};

/// Each rank writes its number into every rank's part, behind the numbers of the ranks before it.
fn everybody_reaches_everybody(symmetric: &SymmetricMemory, window: &wholemem::Window) {
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

fn windows_come_and_go(backend: &Backend) {
    on_ranks(backend, 3, None, |symmetric| {
        let group = symmetric.group();
        let granule = group.device().granularity().unwrap().minimum.len();
        for len in [1, 100, granule / 2, granule / 2 + 1, granule, 3 * granule + 1] {
            let window = symmetric.mem_alloc(len).unwrap();
            assert_eq!((window.len(), window.len_of(Rank(2))), (len, len));
            everybody_reaches_everybody(symmetric, &window);
            let fresh = symmetric.mem_alloc(len).unwrap();
            let mut zeros = vec![1; len];
            group.device().stream().unwrap().read(fresh.local().unwrap(), &mut zeros).unwrap();
            assert!(zeros.iter().all(|byte| *byte == 0));
            // The parts are in even steps, or the window says where they are.
            let reference = window.window_ref();
            if reference.table == 0 {
                let at = reference.base + u64::from(group.rank().0) * reference.stride;
                assert_eq!(window.local().unwrap().address(), at);
            }
            symmetric.window_unregister(window).unwrap();
        }
        // Lengths that differ, and a rank that has nothing.
        let own = group.rank().index();
        let window = symmetric.mem_alloc([2 * granule, 0, 10][own]).unwrap();
        assert_eq!([0, 1, 2].map(|rank| window.len_of(Rank(rank))), [2 * granule, 0, 10]);
        assert_eq!(window.is_empty(), own == 1);
        assert_eq!(window.local().map(Span::len), [Some(2 * granule), None, Some(10)][own]);
        everybody_reaches_everybody(symmetric, &window);
        let beyond = Error::NoPart { rank: Rank(2), offset: 5, len: 6, available: 10 };
        assert_eq!(window.part_of(Rank(2), 5, 6).unwrap_err(), beyond);
    });
}

#[test]
fn windows_of_all_lengths_come_and_go() {
    windows_come_and_go(&host());
}

#[test]
fn gpu_windows_of_all_lengths_come_and_go() {
    if let Some(backend) = cuda::backend() {
        windows_come_and_go(&backend);
    }
}

/// Windows of the machine's memory, read and written by devices and, through a map of their own, reduced where they are.
fn windows_are_of_the_machine(backend: &Backend) {
    for algorithm in Algorithm::ALL {
        on_ranks(backend, 3, Some(algorithm), |symmetric| {
            const COUNT: usize = 3000;
            let group = symmetric.group();
            let stream = group.device().stream().unwrap();
            assert_eq!(symmetric.mem_alloc_on_host(0).unwrap_err(), Error::EmptyWindow);
            let uneven = symmetric.mem_alloc_on_host([7, 0, 5000][group.rank().index()]).unwrap();
            assert_eq!([0, 1, 2].map(|rank| uneven.len_of(Rank(rank))), [7, 0, 5000]);
            everybody_reaches_everybody(symmetric, &uneven);
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
                let what = wrong.map(|at| (at, &seen[at * 4..at * 4 + 4]));
                assert_eq!(what, None, "{algorithm}, round {round}, {expected:?}", expected = &expected[..4]);
            }
            symmetric.check().unwrap();
            group.bootstrap().barrier().unwrap();
        });
    }
}

#[test]
fn windows_of_the_machines_memory_are_reached_by_all() {
    windows_are_of_the_machine(&host());
}

#[test]
fn gpu_windows_of_the_machines_memory_are_reached_by_all() {
    if let Some(backend) = cuda::backend() {
        windows_are_of_the_machine(&backend);
    }
}

fn memory_is_registered(backend: &Backend) {
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
        everybody_reaches_everybody(symmetric, &window);
        drop((window, memory));

        // A piece of what something else has mapped, which begins elsewhere on each rank.
        let skip = 256 * (1 + symmetric.group().rank().index());
        let adopted = symmetric.window_register_mapped(map.address() + skip as u64, 1000);
        let Ok(window) = adopted else {
            // Only memory of CUDA's knows what it is made of.
            assert!(device.backend().kind() == wholemem_hal::BackendKind::Host, "{adopted:?}");
            return;
        };
        assert_ne!(window.window_ref().table, 0, "their steps are not even");
        everybody_reaches_everybody(symmetric, &window);
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

/// Buffers of the older kind, of ranks in one process and in several.
fn plain_memory_is_registered(symmetric: &SymmetricMemory) {
    let device = symmetric.group().device();
    let buffer = CudaMallocBuffer::create(device, 5000).unwrap();
    let window = symmetric.window_register_cuda_malloc(&buffer).unwrap();
    assert_eq!((window.len(), window.local().unwrap().address()), (5000, buffer.address()));
    everybody_reaches_everybody(symmetric, &window);
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
fn gpu_plain_memory_becomes_a_window() {
    if let Some(backend) = cuda::backend() {
        on_ranks(&backend, 3, None, plain_memory_is_registered);
    }
}

#[test]
fn gpu_plain_memory_of_processes_becomes_a_window() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(2).run(test_name!(), |rank| {
        let group = super::deaths::join(rank, &[0, 1], &cuda::backend().unwrap());
        plain_memory_is_registered(&SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap());
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn plain_memory_that_there_is_not_is_refused() {
    let device = host().device(0).unwrap();
    assert!(matches!(CudaMallocBuffer::create(&device, 64), Err(wholemem_hal::Error::Unsupported { .. })));
}

#[test]
fn memory_that_is_there_becomes_a_window() {
    memory_is_registered(&host());
}

#[test]
fn gpu_memory_that_is_there_becomes_a_window() {
    if let Some(backend) = cuda::backend() {
        memory_is_registered(&backend);
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_nothing_is_waited_for() {
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
        // And after all that it works.
        symmetric.all_reduce(&stream, &buffer, &buffer, f32, sum)
    })
    .unwrap();
}

#[test]
fn a_rank_without_memory_is_everybodys_error_and_nothing_is_left() {
    Ranks::of(2).run(test_name!(), |rank| {
        let group = super::deaths::join(rank, &[0, 1], &host());
        let symmetric = SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap();
        let mut before = None;
        for _ in 0..3 {
            // All that the machine has, of which some is taken.
            let all = group.device().info().memory_len;
            let len = if group.rank() == Rank(1) { all } else { 1 << 20 };
            let error = symmetric.mem_alloc(len).unwrap_err();
            assert!(matches!(error, Error::OnRank { rank: Rank(1), .. }), "{error}");
            everybody_reaches_everybody(&symmetric, &symmetric.mem_alloc(1 << 20).unwrap());
            group.bootstrap().barrier().unwrap();
            let census = Census::take();
            census.assert_same_as(before.get_or_insert_with(|| census.clone()), "after another round");
            group.bootstrap().barrier().unwrap();
        }
    });
}

#[test]
fn lanes_do_not_wait_for_each_other() {
    let backend = host();
    let spec = SymmetricSpec { lanes: 2, ..SymmetricSpec::default() };
    Communicator::on_each(&groups(&backend, 2), |group| {
        let symmetric = SymmetricMemory::create(group, &spec)?;
        // One rank begins with the one lane, the other with the other: on one lane they would wait for ever.
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
fn calls_of_several_threads_and_graphs_come_one_after_the_other() {
    const CALLS: usize = 300;
    on_ranks(&host(), 2, None, |symmetric| {
        let group = symmetric.group();
        // Threads of two ranks meet as it comes, so all bring the same along. Two of them repeat what they have recorded.
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
                        let recorded = stream.capture(|stream| {
                            call(stream);
                            Ok(())
                        });
                        recorded.unwrap()
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
fn ranks_that_want_something_else_are_told() {
    let backend = host();
    for rank in [Rank(1), Rank(2)] {
        let outcomes = Communicator::on_each(&groups(&backend, 3), |group| {
            let lanes = if group.rank() == rank { 2 } else { 1 };
            let spec = SymmetricSpec { lanes, ..SymmetricSpec::default() };
            Ok(SymmetricMemory::create(group, &spec).unwrap_err())
        });
        assert_eq!(outcomes.unwrap(), vec![Error::Differs { rank }; 3]);
    }
}
