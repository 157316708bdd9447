//! Tests of registered memory: calls on it need no staging copy, and its owner is kept until every rank has unmapped it.

use std::sync::Arc;

use wholemem::{Algorithm, Dtype, Error, Rank, ReduceOp, SymmetricMemory, SymmetricSpec, Window};
use wholemem_hal::{
    Attempt, Backend, BackendKind, CudaMallocBuffer, Error as HalError, Graph, Mapping, PinnedBuffer,
    Reservation, Rights, Span, Stream,
};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Ranks, cuda, test_name};

use super::harness::{Guarded, host, on_ranks};

/// The kinds of memory that ranks register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryKind {
    /// One allocation, mapped by this process.
    Mapped,
    /// Several allocations at adjacent addresses, as expandable segments are.
    Segments,
    CudaMalloc,
}

impl MemoryKind {
    const ALL: [Self; 3] = [Self::Mapped, Self::Segments, Self::CudaMalloc];

    pub(crate) fn of(backend: &Backend) -> impl Iterator<Item = Self> + use<> {
        let is_host = backend.kind() == BackendKind::Host;
        Self::ALL.into_iter().filter(move |kind| !is_host || *kind != Self::CudaMalloc)
    }

    /// Creates at least `len` bytes on the device of a rank.
    pub(crate) fn create(self, symmetric: &SymmetricMemory, len: usize) -> Span {
        let device = symmetric.group().device();
        let granule = device.granularity().unwrap().minimum;
        match self {
            Self::Mapped => {
                device.allocate(granule.round_up(len).unwrap()).unwrap().map(Rights::ReadWrite).unwrap().all()
            }
            Self::Segments => {
                let count = len.div_ceil(granule.len()).max(2);
                let whole = Reservation::create(device.backend(), count * granule.len()).unwrap();
                let grants = [wholemem_hal::Grant { device: device.id(), rights: Rights::ReadWrite }];
                let map = |index: usize| {
                    let memory = device.allocate(granule.len()).unwrap();
                    Mapping::create(&whole, index * granule.len(), &memory, &grants).unwrap().all()
                };
                Span::join(&(0..count).map(map).collect::<Vec<_>>()).unwrap()
            }
            Self::CudaMalloc => CudaMallocBuffer::create(device, len).unwrap().all(),
        }
    }
}

/// Reduces registered memory at several offsets, and checks the sums, the memory around them, and that nothing was staged.
fn check_in_place(symmetric: &SymmetricMemory, kinds: [MemoryKind; 3], context: &str) {
    let (group, staged) = (symmetric.group(), symmetric.staged_calls());
    let (own, stream) = (group.rank().index(), group.device().stream().unwrap());
    let granule = group.device().granularity().unwrap().minimum.len();
    // The block and the offset of the tensor in it differ between the ranks. With segments, the tensor is in two of them.
    let (skip, len) = (granule - 1024 * (1 + own), 6000);
    let block = kinds[own % kinds.len()].create(symmetric, 2 * granule);
    let tensor = block.part(skip, len).unwrap();
    let window = symmetric.window_register_span(&tensor).unwrap();
    assert_eq!((window.len(), window.local().unwrap().address()), (len, tensor.address()), "{context}");
    // The parts of two ranks are always at equal distances, so that kernels need no table of addresses.
    assert!(group.size() > 2 || window.window_ref().table == 0);
    for (round, (from, to, count)) in
        [(0, 0, 1500), (0, 3000, 700), (4, 4, 3), (16, 2048, 100)].into_iter().enumerate()
    {
        let bytes = count * 4;
        let is_in_place = from == to;
        let value = |rank: usize| (round as u32 + 1) * (rank as u32 + 1);
        let content: Vec<u8> = (0..count).flat_map(|_| value(own).to_ne_bytes()).collect();
        let output = Guarded::new(&stream, tensor.clone(), to, bytes);
        if is_in_place {
            output.write(&content);
        } else {
            output.write(&[]);
            stream.write(&tensor.part(from, bytes).unwrap(), &content).unwrap();
        }
        stream.synchronize(Deadline::NEVER).unwrap();
        let (input, result) = (tensor.part(from, bytes).unwrap(), tensor.part(to, bytes).unwrap());
        symmetric.all_reduce(&stream, &input, &result, Dtype::U32, ReduceOp::Sum).unwrap();
        let mut seen = vec![0; bytes];
        stream.read(&result, &mut seen).unwrap();
        let expected = (0..group.size() as usize).map(value).sum::<u32>().to_ne_bytes().repeat(count);
        assert!(seen == expected, "{context}, round {round}: {:?}", &seen[..4]);
        if is_in_place {
            assert_eq!(output.read(|| context.to_owned()), expected);
        }
        symmetric.check().unwrap();
        group.bootstrap().barrier().unwrap();
    }
    let part = 600;
    stream.fill(&tensor, 1 + own as u8).unwrap();
    let all = tensor.part(part, part * group.size() as usize).unwrap();
    symmetric.all_gather(&stream, &tensor.part(0, part).unwrap(), &all).unwrap();
    let mut seen = vec![0; all.len()];
    stream.read(&all, &mut seen).unwrap();
    let gathered: Vec<u8> = (0..group.size() as u8).flat_map(|rank| vec![1 + rank; part]).collect();
    assert!(seen == gathered, "{context}");
    let copied = tensor.part(4, 100).unwrap();
    symmetric.broadcast(&stream, Rank(group.size() - 1), &copied, &copied).unwrap();
    stream.read(&copied, &mut seen[..100]).unwrap();
    assert_eq!(seen[..100], [group.size() as u8; 100], "{context}");
    assert_eq!(symmetric.staged_calls(), staged, "{context}");
    symmetric.check().unwrap();
    group.bootstrap().barrier().unwrap();
}

fn check_all_kinds(backend: &Backend, ranks: u32) {
    for algorithm in [None, Some(Algorithm::Packets), Some(Algorithm::OneShot), Some(Algorithm::TwoShot)] {
        for kind in MemoryKind::of(backend) {
            on_ranks(backend, ranks, algorithm, |symmetric| {
                check_in_place(symmetric, [kind; 3], &format!("{kind:?}, {algorithm:?}"));
            });
        }
    }
}

#[test]
fn calls_on_registered_memory_are_in_place() {
    (1..4).for_each(|ranks| check_all_kinds(&host(), ranks));
}

#[test]
fn gpu_calls_on_registered_memory_are_in_place() {
    if let Some(backend) = cuda::backend() {
        check_all_kinds(&backend, 3);
    }
}

#[test]
fn ranks_register_different_kinds_of_memory() {
    let [mapped, segments, _] = MemoryKind::ALL;
    on_ranks(&host(), 3, None, |symmetric| {
        check_in_place(symmetric, [mapped, segments, mapped], "mixed kinds");
    });
}

#[test]
fn gpu_ranks_register_different_kinds_of_memory() {
    if let Some(backend) = cuda::backend() {
        on_ranks(&backend, 3, None, |symmetric| check_in_place(symmetric, MemoryKind::ALL, "mixed kinds"));
    }
}

/// Registers memory of every kind in processes, several times, and checks that nothing is left.
fn check_in_processes(rank: &wholemem_testkit::Rank, backend: &Backend) {
    let group = super::peer_failures::join(rank, &[0, 1], backend);
    let symmetric = SymmetricMemory::create(&group, &super::harness::spec(backend, 2, None)).unwrap();
    let mut before = None;
    for round in 0..4 {
        for kind in MemoryKind::of(backend) {
            check_in_place(&symmetric, [kind; 3], &format!("{kind:?} of processes"));
        }
        let [mapped, segments, plain] = MemoryKind::ALL;
        let other = if backend.kind() == BackendKind::Host { segments } else { plain };
        check_in_place(&symmetric, [mapped, other, mapped], "mixed kinds of processes");
        // Creates two more windows, because a rank reports the windows that it has dropped when it creates the next window.
        for _ in 0..2 {
            drop(symmetric.mem_alloc(1).unwrap());
        }
        group.bootstrap().barrier().unwrap();
        // The first rounds are not compared, because they create resources that later rounds reuse, such as streams.
        if round > 0 && backend.kind() == BackendKind::Host {
            let census = Census::take();
            census.assert_same_as(before.get_or_insert_with(|| census.clone()), "after another round");
        }
        group.bootstrap().barrier().unwrap();
    }
}

#[test]
fn processes_reduce_registered_memory_in_place() {
    Ranks::of(2).run(test_name!(), |rank| check_in_processes(rank, &host()));
}

#[test]
fn gpu_processes_reduce_registered_memory_in_place() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(2).run(test_name!(), |rank| check_in_processes(rank, &cuda::backend().unwrap()));
}

/// Creates memory of a rank and registers it. Returns the owner of the memory too, of which the memory holds a reference.
fn register_owned(symmetric: &SymmetricMemory) -> (Window, Arc<()>, Span) {
    let owner = Arc::new(());
    let memory = MemoryKind::Mapped.create(symmetric, 4096).with_owner(Arc::<()>::clone(&owner));
    (symmetric.window_register_span(&memory).unwrap(), owner, memory)
}

#[test]
fn the_owner_of_registered_memory_is_kept_until_every_rank_has_dropped_the_window() {
    on_ranks(&host(), 2, None, |symmetric| {
        let rank = symmetric.group().rank();
        let (window, owner, memory) = register_owned(symmetric);
        drop(memory);
        let exchange = || drop(symmetric.mem_alloc(1).unwrap());
        let is_kept = || Arc::strong_count(&owner) > 1;
        let kept = window.clone();
        drop(window);
        exchange();
        assert!(is_kept(), "a clone of the window exists");
        let (mut kept, mut of_rank_0) = (Some(kept), false);
        if rank == Rank(0) {
            of_rank_0 = true;
            kept = None;
        }
        exchange();
        assert!(is_kept(), "rank 1 has not dropped the window ({of_rank_0})");
        drop(kept);
        assert!(is_kept(), "the ranks have not told each other");
        exchange();
        // In one process the other rank's window may hold the memory until that rank has dropped it, which it has now.
        symmetric.group().bootstrap().barrier().unwrap();
        assert!(!is_kept(), "every rank has dropped the window");
    });
}

#[test]
fn a_graph_keeps_registered_memory_after_the_window_was_dropped() {
    on_ranks(&host(), 2, None, |symmetric| {
        let stream = symmetric.group().device().stream().unwrap();
        let (window, owner, memory) = register_owned(symmetric);
        let sum = memory.part(0, 400).unwrap();
        let graph = stream.capture(|stream| {
            symmetric.all_reduce(stream, &sum, &sum, Dtype::U32, ReduceOp::Sum).unwrap();
            Ok(())
        });
        let graph = graph.unwrap();
        drop((window, memory));
        for _ in 0..2 {
            drop(symmetric.mem_alloc(1).unwrap());
            assert!(Arc::strong_count(&owner) > 1, "the graph uses the memory");
        }
        stream.write(&sum, &1_u32.to_ne_bytes().repeat(100)).unwrap();
        symmetric.group().bootstrap().barrier().unwrap();
        graph.launch(&stream).unwrap();
        let mut seen = vec![0; 400];
        stream.read(&sum, &mut seen).unwrap();
        assert_eq!(seen, 2_u32.to_ne_bytes().repeat(100));
        assert_eq!(symmetric.staged_calls(), 0);
        symmetric.group().bootstrap().barrier().unwrap();
        drop((graph, sum, stream));
        symmetric.group().bootstrap().barrier().unwrap();
        for _ in 0..2 {
            drop(symmetric.mem_alloc(1).unwrap());
        }
        symmetric.group().bootstrap().barrier().unwrap();
        assert_eq!(Arc::strong_count(&owner), 1);
    });
}

#[test]
fn memory_is_kept_while_a_graph_of_another_process_has_mapped_it() {
    Ranks::of(2).run(test_name!(), |rank| {
        let backend = host();
        let group = super::peer_failures::join(rank, &[0, 1], &backend);
        let symmetric = SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap();
        let stream = group.device().stream().unwrap();
        let (window, owner, memory) = register_owned(&symmetric);
        let captured = stream.capture(|stream| {
            symmetric.all_reduce(stream, &memory, &memory, Dtype::U32, ReduceOp::Sum).unwrap();
            Ok(())
        });
        let mut graph = Some(captured.unwrap());
        if rank.id() == 0 {
            graph = None;
        }
        drop((window, memory));
        for _ in 0..3 {
            drop(symmetric.mem_alloc(1).unwrap());
            assert!(Arc::strong_count(&owner) > 1, "the graph of rank 1 has mapped the memory");
        }
        group.bootstrap().barrier().unwrap();
        drop((graph, stream));
        drop(symmetric.mem_alloc(1).unwrap());
        assert_eq!(Arc::strong_count(&owner), 1);
        group.bootstrap().barrier().unwrap();
    });
}

#[test]
fn only_bytes_that_every_rank_has_are_in_place() {
    on_ranks(&host(), 2, None, |symmetric| {
        let rank = symmetric.group().rank().index();
        let stream = symmetric.group().device().stream().unwrap();
        let memory = MemoryKind::Mapped.create(symmetric, 8192);
        let window = symmetric.window_register_span(&memory.part(0, [8192, 4096][rank]).unwrap()).unwrap();
        assert_eq!([0, 1].map(|rank| window.len_of(Rank(rank))), [8192, 4096]);
        let reduce = |from: usize, to: usize| {
            let (from, to) = (memory.part(from, 64).unwrap(), memory.part(to, 64).unwrap());
            symmetric.all_reduce(&stream, &from, &to, Dtype::U8, ReduceOp::Sum).unwrap();
            symmetric.staged_calls()
        };
        assert_eq!([reduce(0, 0), reduce(4032, 4032), reduce(4096, 4096), reduce(5000, 0)], [0, 0, 1, 2]);
        drop(window);
        assert_eq!(reduce(0, 0), 3, "the registration has ended");
        let nothing = memory.part(0, 0).unwrap();
        assert_eq!(symmetric.window_register_span(&nothing).unwrap_err(), Error::EmptyWindow);
        let of_one = if rank == 0 { &memory } else { &nothing };
        let window = symmetric.window_register_span(of_one).unwrap();
        assert_eq!([0, 1].map(|rank| window.len_of(Rank(rank)) > 0), [true, false]);
        assert_eq!(reduce(0, 0), 4);
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

#[test]
fn an_all_gather_in_place_is_not_staged_although_offsets_differ() {
    on_ranks(&host(), 3, None, |symmetric| {
        let (own, stream) = (symmetric.group().rank().index(), symmetric.group().device().stream().unwrap());
        let memory = MemoryKind::Mapped.create(symmetric, 8192);
        let _window = symmetric.window_register_span(&memory).unwrap();
        let all = memory.part(100, 300).unwrap();
        let mine = all.part(100 * own, 100).unwrap();
        stream.fill(&mine, 1 + own as u8).unwrap();
        symmetric.all_gather(&stream, &mine, &all).unwrap();
        let mut seen = vec![0; 300];
        stream.read(&all, &mut seen).unwrap();
        assert_eq!(seen, [[1; 100], [2; 100], [3; 100]].concat());
        assert_eq!(symmetric.staged_calls(), 0);
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

#[test]
fn memory_in_a_window_of_new_memory_is_found_by_its_address() {
    on_ranks(&host(), 2, None, |symmetric| {
        let stream = symmetric.group().device().stream().unwrap();
        let window = symmetric.mem_alloc(4096).unwrap();
        let own = window.local().unwrap();
        symmetric.all_reduce(&stream, own, own, Dtype::U8, ReduceOp::Sum).unwrap();
        assert_eq!(symmetric.staged_calls(), 0);
        let private = Guarded::buffer(symmetric, 64);
        symmetric.all_reduce(&stream, &private, &private, Dtype::U8, ReduceOp::Sum).unwrap();
        assert_eq!(symmetric.staged_calls(), 1);
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

#[test]
fn memory_that_cannot_be_shared_is_an_error_on_all_ranks() {
    Ranks::of(2).run(test_name!(), |rank| {
        let group = super::peer_failures::join(rank, &[0, 1], &host());
        let symmetric = SymmetricMemory::create(&group, &SymmetricSpec::default()).unwrap();
        let mut before = None;
        for _ in 0..3 {
            let memory = MemoryKind::Segments.create(&symmetric, 1000);
            let pinned = PinnedBuffer::create(group.device(), 1000).unwrap().all();
            let given = if group.rank() == Rank(1) { &pinned } else { &memory };
            let error = symmetric.window_register_span(given).unwrap_err();
            let Error::OnRank { rank: Rank(1), reason, .. } = &error else { panic!("{error:?}") };
            assert!(reason.contains("not a mapping of this backend"), "{reason}");
            drop(symmetric.window_register_span(&memory).unwrap());
            drop((memory, pinned));
            for _ in 0..2 {
                drop(symmetric.mem_alloc(1).unwrap());
            }
            group.bootstrap().barrier().unwrap();
            let census = Census::take();
            census.assert_same_as(before.get_or_insert_with(|| census.clone()), "after another round");
            group.bootstrap().barrier().unwrap();
        }
    });
}

/// Captures an all-reduce from `from` to `to`, twice: out of place and in place.
fn capture(symmetric: &SymmetricMemory, stream: &Stream, from: &Span, to: &Span) -> Graph {
    let captured = stream.capture(|stream| {
        symmetric.all_reduce(stream, from, to, Dtype::U32, ReduceOp::Sum).unwrap();
        symmetric.all_reduce(stream, to, to, Dtype::U32, ReduceOp::Sum).unwrap();
        Ok(())
    });
    captured.unwrap()
}

/// Launches a graph of [`capture`] on two ranks and checks the result.
fn check_graph(
    symmetric: &SymmetricMemory,
    stream: &Stream,
    graph: &Graph,
    from: &Span,
    to: &Span,
    round: u32,
) {
    let count = from.len() / 4;
    let own = symmetric.group().rank().0;
    stream.write(from, &(round + own).to_ne_bytes().repeat(count)).unwrap();
    stream.synchronize(Deadline::NEVER).unwrap();
    symmetric.group().bootstrap().barrier().unwrap();
    graph.launch(stream).unwrap();
    let mut seen = vec![0; to.len()];
    stream.read(to, &mut seen).unwrap();
    symmetric.check().unwrap();
    let expected = (2 * (2 * round + 1)).to_ne_bytes().repeat(count);
    assert!(seen == expected, "round {round}: {:?}", &seen[..4]);
    symmetric.group().bootstrap().barrier().unwrap();
}

fn check_recorded_captures(backend: &Backend) {
    for algorithm in [None, Some(Algorithm::Packets), Some(Algorithm::OneShot), Some(Algorithm::TwoShot)] {
        for kind in MemoryKind::of(backend) {
            on_ranks(backend, 2, algorithm, |symmetric| {
                let stream = symmetric.group().device().stream().unwrap();
                let own = symmetric.group().rank().index();
                let block = kind.create(symmetric, 1 << 20);
                let (from, to) = (block.part(4096 * own, 4000).unwrap(), block.part(100_000, 4000).unwrap());
                let recording = symmetric.record_captures().unwrap();
                assert_eq!(symmetric.record_captures().unwrap_err(), Error::Recording);
                let graph = capture(symmetric, &stream, &from, &to);
                // Calls that are not captured are not recorded.
                let private = Guarded::buffer(symmetric, 64);
                symmetric.all_reduce(&stream, &private, &private, Dtype::U8, ReduceOp::Sum).unwrap();
                assert_eq!(symmetric.staged_calls(), 1);
                let early = HalError::Capturing { attempt: Attempt::LaunchGraph };
                assert_eq!(graph.launch(&stream), Err(early), "the other ranks' memory is not known");
                let windows = recording.finish().unwrap();
                assert_eq!(windows.len(), 3, "the call in place has one buffer");
                drop(windows);
                for round in 0..3 {
                    check_graph(symmetric, &stream, &graph, &from, &to, round);
                }
                assert_eq!(symmetric.staged_calls(), 1, "{kind:?}, {algorithm:?}");
                // After the recording, captured calls are staged again.
                let staged = capture(symmetric, &stream, &from, &to);
                check_graph(symmetric, &stream, &staged, &from, &to, 7);
                assert_eq!(symmetric.staged_calls(), 3);
            });
        }
    }
}

#[test]
fn captured_calls_on_recorded_memory_are_in_place() {
    check_recorded_captures(&host());
}

#[test]
fn gpu_captured_calls_on_recorded_memory_are_in_place() {
    if let Some(backend) = cuda::backend() {
        check_recorded_captures(&backend);
    }
}

/// Records the captures of processes. The memory of the graph is kept by the graph, and released after it.
fn check_recorded_in_processes(rank: &wholemem_testkit::Rank, backend: &Backend) {
    let group = super::peer_failures::join(rank, &[0, 1], backend);
    let symmetric = SymmetricMemory::create(&group, &super::harness::spec(backend, 2, None)).unwrap();
    let mut before = None;
    for round in 0..4 {
        for kind in MemoryKind::of(backend) {
            let stream = group.device().stream().unwrap();
            let owner = Arc::new(());
            let block = kind.create(&symmetric, 1 << 20).with_owner(Arc::<()>::clone(&owner));
            let skip = 64 * (1 + group.rank().index());
            let (from, to) = (block.part(skip, 4000).unwrap(), block.part(100_000 + skip, 4000).unwrap());
            let recording = symmetric.record_captures().unwrap();
            let graph = capture(&symmetric, &stream, &from, &to);
            drop(recording.finish().unwrap());
            drop(block);
            check_graph(&symmetric, &stream, &graph, &from, &to, round);
            drop((graph, from, to, stream));
            assert!(Arc::strong_count(&owner) > 1, "the other rank may still have mapped the memory");
            for _ in 0..3 {
                group.bootstrap().barrier().unwrap();
                while backend.collect() > 0 {
                    std::thread::yield_now();
                }
                drop(symmetric.mem_alloc(1).unwrap());
            }
            if backend.kind() == BackendKind::Host {
                assert_eq!(Arc::strong_count(&owner), 1);
            }
        }
        group.bootstrap().barrier().unwrap();
        if round > 0 && backend.kind() == BackendKind::Host {
            let census = Census::take();
            census.assert_same_as(before.get_or_insert_with(|| census.clone()), "after another round");
        }
        group.bootstrap().barrier().unwrap();
    }
    assert_eq!(symmetric.staged_calls(), 0);
}

#[test]
fn recorded_memory_of_processes_is_kept_by_its_graph() {
    Ranks::of(2).run(test_name!(), |rank| check_recorded_in_processes(rank, &host()));
}

#[test]
fn gpu_recorded_memory_of_processes_is_kept_by_its_graph() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(2).run(test_name!(), |rank| check_recorded_in_processes(rank, &cuda::backend().unwrap()));
}

#[test]
fn different_captures_of_ranks_are_an_error_and_abort_the_group() {
    // Rank 1 captures another number of calls, or calls of another length.
    for (calls, len) in [([1, 2], [64, 64]), ([1, 0], [64, 64]), ([1, 1], [64, 128])] {
        on_ranks(&host(), 2, None, |symmetric| {
            let rank = symmetric.group().rank().index();
            let stream = symmetric.group().device().stream().unwrap();
            let memory = MemoryKind::Mapped.create(symmetric, 8192);
            let part = memory.part(0, len[rank]).unwrap();
            let recording = symmetric.record_captures().unwrap();
            let captured = stream.capture(|stream| {
                for _ in 0..calls[rank] {
                    symmetric.all_reduce(stream, &part, &part, Dtype::U8, ReduceOp::Sum).unwrap();
                }
                Ok(())
            });
            let error = recording.finish().unwrap_err();
            assert_eq!(error, Error::RanksDisagree { rank: Rank(1) });
            assert!(symmetric.group().bootstrap().check().is_err(), "the group is aborted");
            drop(captured);
        });
    }
}

#[test]
fn recorded_and_registered_buffers_that_are_too_short_are_rejected() {
    on_ranks(&host(), 2, None, |symmetric| {
        let rank = symmetric.group().rank();
        let stream = symmetric.group().device().stream().unwrap();
        let memory = MemoryKind::Mapped.create(symmetric, 8192);
        let (from, to) = (memory.part(0, 64).unwrap(), memory.part(4096, 60).unwrap());
        let reduce = |stream: &Stream| symmetric.all_reduce(stream, &from, &to, Dtype::U8, ReduceOp::Sum);
        let recording = symmetric.record_captures().unwrap();
        let graph = stream.capture(|stream| {
            let short = Error::NoPart { rank, offset: 0, len: 64, available: 60 };
            assert_eq!(reduce(stream), Err(short));
            Ok(())
        });
        assert_eq!(recording.finish().unwrap().len(), 2);
        drop(graph);
        let window = symmetric.window_register_span(&memory).unwrap();
        let short = Error::NoPart { rank: Rank(0), offset: 4096, len: 64, available: 60 };
        assert_eq!(reduce(&stream), Err(short));
        drop(window);
        let short = Error::TooShort { items: "elements", count: 64, needed: 64, len: 60 };
        assert_eq!(reduce(&stream), Err(short));
        symmetric.check().unwrap();
        symmetric.group().bootstrap().barrier().unwrap();
    });
}

#[test]
fn a_recording_that_is_not_finished_aborts_the_group_if_memory_was_recorded() {
    on_ranks(&host(), 1, None, |symmetric| {
        let stream = symmetric.group().device().stream().unwrap();
        let memory = MemoryKind::Mapped.create(symmetric, 8192);
        drop(symmetric.record_captures().unwrap());
        symmetric.check().unwrap();
        let recording = symmetric.record_captures().unwrap();
        let graph = capture(symmetric, &stream, &memory, &memory);
        drop(recording);
        let aborted = wholemem_comm::Error::Aborted { by: Rank(0) };
        assert_eq!(symmetric.group().bootstrap().check(), Err(aborted));
        drop(graph);
    });
}
