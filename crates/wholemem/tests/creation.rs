//! Tests of creating memory and tensors with ranks of one process: contents, views, and rejected arguments.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use wholemem::{
    Bootstrap, Communicator, Dtype, Error, Indices, Kind, Location, MemorySpec, Order, Rank, RowBuffer,
    TensorSpec, WholeMemory, WholeTensor,
};
use wholemem_hal::{Backend, Granule, HostConfig, PinnedBuffer};

const GRANULE: usize = 64 << 10;

/// Creates a group of ranks on one host backend, each rank with a device of its own.
fn local(ranks: u32) -> Vec<Communicator> {
    let granule = Granule::new(GRANULE).unwrap();
    let backend = Backend::host(HostConfig::virtual_devices(ranks as usize).granule(granule)).unwrap();
    let devices: Vec<_> = (0..ranks).map(|id| backend.device(id).unwrap()).collect();
    Communicator::local(&devices).unwrap()
}

/// Creates a group of ranks in one process, each rank with a backend of its own.
fn separate_backends(ranks: u32) -> Vec<Communicator> {
    let comms: Vec<_> = Bootstrap::local(ranks).unwrap();
    std::thread::scope(|scope| {
        let create = |comm| {
            let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
            Communicator::create(comm, &device).unwrap()
        };
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(move || create(comm))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn create(groups: &[Communicator], spec: &MemorySpec) -> Vec<WholeMemory> {
    Communicator::on_each(groups, |group| WholeMemory::create(group, spec)).unwrap()
}

fn read(memory: &WholeMemory, offset: usize, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; len];
    memory.read(&memory.group().device().stream().unwrap(), offset, &mut bytes).unwrap();
    bytes
}

#[test]
fn new_memory_is_zero_and_shared_by_all_ranks() {
    for groups in [local(3), separate_backends(3)] {
        for kind in [Kind::Continuous, Kind::Chunked] {
            for location in [Location::Device, Location::Host] {
                let len = 3 * GRANULE + 1000;
                let spec = MemorySpec { kind, location, ..MemorySpec::new(len as u64, 1) };
                let memories = create(&groups, &spec);
                assert!(memories.iter().all(|memory| read(memory, 0, len) == vec![0; len]));
                let stream = groups[1].device().stream().unwrap();
                // One write covers the memory of all ranks, across the boundaries between them.
                let text: Vec<u8> = (0..len).map(|at| (at % 251).to_le_bytes()[0]).collect();
                memories[1].write(&stream, 0, &text).unwrap();
                assert!(memories.iter().all(|memory| read(memory, 0, len) == text));
            }
        }
    }
}

#[test]
fn ranks_on_one_backend_share_mappings() {
    let groups = local(3);
    for kind in [Kind::Continuous, Kind::Chunked] {
        let memories = create(&groups, &MemorySpec { kind, ..MemorySpec::new(300_000, 1) });
        let addresses = |memory: &WholeMemory| [0, 1, 2].map(|rank| memory.address_of(Rank(rank)));
        assert!(memories.iter().all(|memory| addresses(memory) == addresses(&memories[0])));
    }
    let separate = separate_backends(2);
    let memories = create(&separate, &MemorySpec::new(300_000, 1));
    assert_ne!(
        memories[0].address_of(Rank(0)),
        memories[1].address_of(Rank(0)),
        "ranks on two backends have separate mappings"
    );
}

#[test]
fn equal_addresses_are_impossible_for_two_backends_in_one_process() {
    let spec = MemorySpec { equal_addresses: true, ..MemorySpec::new(300_000, 1) };
    let memories = create(&local(3), &spec);
    assert!(memories.iter().all(|memory| memory.address_of(Rank(2)) == memories[0].address_of(Rank(2))));

    let groups = separate_backends(2);
    let refused = Communicator::on_each(&groups, |group| {
        assert!(matches!(WholeMemory::create(group, &spec), Err(Error::NoCommonAddress { tried: 16, .. })));
        Ok(())
    });
    refused.unwrap();
    create(&groups, &MemorySpec::new(300_000, 1));
}

#[test]
fn local_rows_match_the_partition() {
    let groups = local(4);
    let rows_of_each = vec![10, 0, 1, 89];
    for kind in [Kind::Continuous, Kind::Chunked] {
        let spec = TensorSpec {
            kind,
            rows_of_each: Some(rows_of_each.clone()),
            ..TensorSpec::new(Dtype::F64, &[100, 3, 500])
        };
        let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
        let local: Vec<_> = tensors.iter().map(|tensor| tensor.local()).collect();
        assert!(local[1].is_none());
        let rows: Vec<_> = local.iter().flatten().map(|local| local.rows.clone()).collect();
        assert_eq!(rows, [0..10, 10..11, 11..100]);
        // Rows that rank 0 writes by their numbers are read by the owning rank through its local span.
        let stream = groups[0].device().stream().unwrap();
        tensors[0].write_rows_on(&stream, 10, &[7; 12_000]).unwrap();
        let own = local[2].clone().unwrap();
        let mut seen = vec![0; own.span.len()];
        groups[2].device().stream().unwrap().read(&own.span, &mut seen).unwrap();
        assert_eq!(seen, [7; 12_000]);
    }
}

#[test]
fn views_of_views_have_the_same_elements() {
    let groups = local(2);
    let spec = TensorSpec::new(Dtype::U8, &[6, 4, 2]);
    let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
    let stream = groups[0].device().stream().unwrap();
    let all: Vec<u8> = (0..48).collect();
    tensors[0].write_rows_on(&stream, 0, &all).unwrap();

    let part =
        tensors[1].rows(1..5).unwrap().columns(1..4).unwrap().rows(1..3).unwrap().columns(1..2).unwrap();
    assert_eq!(part.shape(), [2, 1, 2]);
    let mut seen = [0; 4];
    part.read_rows_on(&groups[1].device().stream().unwrap(), 0, &mut seen).unwrap();
    // The view of the views consists of rows 2 and 3, column 2.
    assert_eq!(seen, [20, 21, 28, 29]);
    part.write_rows_on(&stream, 1, &[98, 99]).unwrap();
    assert_eq!(read(tensors[1].memory(), 26, 5), [26, 27, 98, 99, 30]);
    let local = tensors[1].columns(1..2).unwrap().local().unwrap();
    assert_eq!((local.rows, local.stride, local.span.len()), (3..6, 8, 2 * 8 + 2));

    let out_of_range = |what, start, end, count| Error::OutOfRange { dimension: what, start, end, count };
    assert_eq!(part.rows(1..3).unwrap_err(), out_of_range("rows", 1, 3, 2));
    #[expect(clippy::reversed_empty_ranges, reason = "the test passes a reversed range")]
    let reversed = part.rows(2..1).unwrap_err();
    assert_eq!(reversed, out_of_range("rows", 2, 1, 2));
    assert_eq!(part.columns(0..2).unwrap_err(), out_of_range("columns", 0, 2, 1));
    assert_eq!(part.columns(0..0).unwrap_err(), Error::EmptyRow);
    assert_eq!(part.read_rows_on(&stream, 1, &mut [0; 4]).unwrap_err(), out_of_range("rows", 1, 3, 2));
    let partial_row = Error::TooShort { items: "rows", count: 2, needed: 4, len: 3 };
    assert_eq!(part.read_rows_on(&stream, 0, &mut [0; 3]).unwrap_err(), partial_row);
}

#[test]
fn row_ranges_are_copied_to_and_from_other_memory() {
    let groups = local(2);
    let spec = TensorSpec { kind: Kind::Chunked, ..TensorSpec::new(Dtype::U16, &[10, 4]) };
    let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
    let (device, stream) = (groups[0].device(), groups[0].device().stream().unwrap());
    let buffer = PinnedBuffer::create(device, 48).unwrap();
    let bytes: Vec<u8> = (0..48).collect();
    buffer.bytes().unwrap().write_at(0, &bytes).unwrap();
    // The copied rows, from row 2 to row 7, are on both ranks.
    tensors[0].copy_rows_in(&stream, 2, &buffer.all()).unwrap();
    let back = PinnedBuffer::create(device, 16).unwrap();
    tensors[0].copy_rows_out(&stream, 4, &back.all()).unwrap();
    stream.synchronize(wholemem_os::Deadline::NEVER).unwrap();
    let mut seen = [0; 16];
    back.bytes().unwrap().read_at(0, &mut seen).unwrap();
    assert_eq!(seen, bytes[16..32]);
}

#[test]
fn different_arguments_of_ranks_are_rejected_on_all_ranks() {
    let groups = local(3);
    let outcomes = Communicator::on_each(&groups, |group| {
        let spec = MemorySpec::new(if group.rank() == Rank(1) { 11 } else { 10 }, 8);
        Ok(WholeMemory::create(group, &spec).unwrap_err())
    });
    assert_eq!(outcomes.unwrap(), vec![Error::RanksDisagree { rank: Rank(1) }; 3]);

    // One rank passes another element type or shape with the same length of a row in bytes.
    for (dtype, shape) in [(Dtype::I32, &[10, 8][..]), (Dtype::F32, &[10, 4, 2]), (Dtype::F16, &[10, 16])] {
        let outcomes = Communicator::on_each(&groups, |group| {
            let differs = group.rank() == Rank(2);
            let (dtype, shape) = if differs { (dtype, shape) } else { (Dtype::F32, &[10, 8][..]) };
            Ok(WholeTensor::create(group, &TensorSpec::new(dtype, shape)).map(drop))
        });
        assert_eq!(outcomes.unwrap(), vec![Err(Error::RanksDisagree { rank: Rank(2) }); 3]);
    }

    // Two element types that have the same storage type are different arguments too.
    let outcomes = Communicator::on_each(&groups, |group| {
        let dtype = if group.rank() == Rank(2) { Dtype::Bool } else { Dtype::U8 };
        Ok(WholeTensor::create(group, &TensorSpec::new(dtype, &[10, 8])).map(drop))
    });
    assert_eq!(outcomes.unwrap(), vec![Err(Error::RanksDisagree { rank: Rank(2) }); 3]);

    let outcomes = Communicator::on_each(&groups, |group| {
        let shape: &[u64] = if group.rank() == Rank(2) { &[] } else { &[10, 8] };
        Ok(WholeTensor::create(group, &TensorSpec::new(Dtype::U8, shape)).unwrap_err())
    });
    let reason = "a tensor has at least one dimension: its rows".to_owned();
    let on_other_ranks = Error::OnRank { rank: Rank(2), code: 1007, reason, hint: None };
    assert_eq!(outcomes.unwrap(), [on_other_ranks.clone(), on_other_ranks, Error::NoDimensions]);

    let spec = MemorySpec { rows_of_each: Some(vec![5, 5]), ..MemorySpec::new(10, 8) };
    let outcomes = Communicator::on_each(&groups, |group| Ok(WholeMemory::create(group, &spec).unwrap_err()));
    assert_eq!(outcomes.unwrap(), vec![Error::RanksDiffer { given: 2, ranks: 3 }; 3]);
    create(&groups, &MemorySpec::new(10, 8));
}

#[test]
fn a_failed_allocation_names_the_rank_on_all_ranks() {
    let groups = local(3);
    // Rank 1 requests more memory than any machine has.
    let spec = MemorySpec { rows_of_each: Some(vec![1, 1 << 46, 1]), ..MemorySpec::new((1 << 46) + 2, 1) };
    for _ in 0..3 {
        let outcomes =
            Communicator::on_each(&groups, |group| Ok(WholeMemory::create(group, &spec).unwrap_err()))
                .unwrap();
        let Error::OnRank { rank: Rank(1), code: 105, reason, .. } = &outcomes[0] else {
            panic!("{:?}", outcomes[0])
        };
        assert!(reason.starts_with("cannot create 64 TiB on host:1: only "), "{reason}");
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]));
    }
    create(&groups, &MemorySpec::new(1000, 1));
}

#[test]
fn a_view_of_memory_must_fit_in_its_rows() {
    let groups = local(1);
    let memory = &create(&groups, &MemorySpec::new(10, 8))[0];
    let tensor = WholeTensor::of_memory(memory, Dtype::F32, &[2]).unwrap();
    assert_eq!(tensor.shape(), [10, 2]);
    let narrow = WholeTensor::of_memory(memory, Dtype::F32, &[]).unwrap();
    assert_eq!((narrow.row_len(), narrow.stride()), (4, 8));
    let error = WholeTensor::of_memory(memory, Dtype::F64, &[2]).unwrap_err();
    assert_eq!(error, Error::TooShort { items: "elements of a row", count: 2, needed: 16, len: 8 });
    assert_eq!(WholeTensor::of_memory(memory, Dtype::F64, &[0]).unwrap_err(), Error::EmptyRow);
}

/// Tests that rows of any length are copied as bytes, but conversion and addition require aligned elements.
#[test]
fn conversion_and_addition_of_misaligned_rows_are_rejected() {
    let groups = local(2);
    for kind in [Kind::Continuous, Kind::Chunked] {
        let memory = &create(&groups, &MemorySpec { kind, ..MemorySpec::new(10, 13) })[0];
        let tensor = WholeTensor::of_memory(memory, Dtype::F32, &[3]).unwrap();
        let (device, stream) = (groups[0].device(), groups[0].device().stream().unwrap());
        let indices = PinnedBuffer::create(device, 8).unwrap();
        indices.bytes().unwrap().write_at(0, &7_i64.to_ne_bytes()).unwrap();
        let indices = Indices::i64(indices.all());
        let rows = PinnedBuffer::create(device, 12).unwrap();
        let (same, half) =
            (RowBuffer::new(rows.all(), Dtype::F32), RowBuffer::new(rows.all(), Dtype::F16).converted());
        memory.write(&stream, 7 * 13, b"twelve bytes").unwrap();
        assert_eq!(tensor.gather_on_sync(&stream, &indices, &same), Ok(()));
        let mut seen = [0; 12];
        rows.bytes().unwrap().read_at(0, &mut seen).unwrap();
        assert_eq!(&seen, b"twelve bytes");

        let is_misaligned = |outcome| matches!(outcome, Err(Error::Misaligned { stride: 13, align: 4, .. }));
        assert!(is_misaligned(tensor.gather_on_sync(&stream, &indices, &half)));
        assert!(is_misaligned(tensor.scatter_on_sync(&stream, &indices, &half, Order::Any)));
        assert!(is_misaligned(tensor.scatter_add_on_sync(&stream, &indices, &same, Order::Any)));
    }
}

#[test]
fn a_bad_index_is_reported_once_by_the_next_call() {
    let groups = local(1);
    let spec = TensorSpec::new(Dtype::U8, &[10, 4]);
    let tensor = WholeTensor::create(&groups[0], &spec).unwrap();
    let (device, stream) = (groups[0].device(), groups[0].device().stream().unwrap());
    let numbers = PinnedBuffer::create(device, 32).unwrap();
    let indices = |values: [i64; 4]| {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        numbers.bytes().unwrap().write_at(0, &bytes).unwrap();
        Indices::i64(numbers.all())
    };
    let rows = PinnedBuffer::create(device, 16).unwrap();
    let row_buffer = RowBuffer::new(rows.all(), Dtype::U8);
    let bad = |index, rows| Err(Error::BadIndex { position: 1, index: Some(index), rows: Some(rows) });
    assert_eq!(
        tensor.gather_on(&stream, &indices([0, -1, 10, 3]), &row_buffer),
        Ok(()),
        "the call does not wait"
    );
    assert_eq!(
        tensor.gather_on(&stream, &indices([0, 1, 2, 3]), &row_buffer),
        bad(-1, 10),
        "the error of the previous call"
    );
    assert_eq!(tensor.check(), Ok(()), "the error is reported once");
    assert_eq!(tensor.scatter_on(&stream, &indices([0, i64::MIN, 2, 10]), &row_buffer, Order::Any), Ok(()));
    assert_eq!(
        tensor.rows(0..3).unwrap().check(),
        bad(i64::MIN, 10),
        "a view shares the record of the memory"
    );
    assert_eq!(tensor.gather_on_sync(&stream, &indices([0, 10, 2, 3]), &row_buffer), bad(10, 10));
    assert_eq!(tensor.gather_on_sync(&stream, &indices([9, 0, 9, 0]), &row_buffer), Ok(()));
    // An index that is valid for the tensor is bad for a view with fewer rows.
    assert_eq!(
        tensor.rows(0..9).unwrap().gather_on_sync(&stream, &indices([8, 9, 8, 0]), &row_buffer),
        bad(9, 9)
    );
}

#[test]
fn waiting_threads_get_only_their_own_bad_indices() {
    const THREADS: i64 = 4;
    const COUNT: i64 = 300;
    let groups = local(1);
    let group = &groups[0];
    let tensor = &WholeTensor::create(group, &TensorSpec::new(Dtype::U8, &[1000, 64])).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let (device, stream) = (group.device(), group.device().stream().unwrap());
                let is_bad = thread % 2 == 0;
                let number = |at: i64| if is_bad && at >= 7 + thread { -1 } else { at };
                let bytes: Vec<u8> = (0..COUNT).flat_map(|at| number(at).to_ne_bytes()).collect();
                let indices = PinnedBuffer::create(device, bytes.len()).unwrap();
                indices.bytes().unwrap().write_at(0, &bytes).unwrap();
                let indices = Indices::i64(indices.all());
                let rows = PinnedBuffer::create(device, bytes.len() * 8).unwrap();
                let row_buffer = RowBuffer::new(rows.all(), Dtype::U8);
                let position = u64::try_from(7 + thread).unwrap();
                let expected = if is_bad {
                    Err(Error::BadIndex { position, index: Some(-1), rows: Some(1000) })
                } else {
                    Ok(())
                };
                for _ in 0..500 {
                    assert_eq!(tensor.gather_on_sync(&stream, &indices, &row_buffer), expected);
                    assert_eq!(tensor.scatter_on_sync(&stream, &indices, &row_buffer, Order::Any), expected);
                }
            });
        }
    });
    assert_eq!(tensor.check(), Ok(()), "all errors were returned by the calls");
}

#[test]
fn memory_remains_while_one_rank_holds_it() {
    let groups = separate_backends(3);
    let mut memories = create(&groups, &MemorySpec::new(3 * GRANULE as u64, 1));
    let last = memories.pop().unwrap();
    let stream = groups[0].device().stream().unwrap();
    memories[0].write(&stream, 0, b"from rank 0").unwrap();
    // Dropping memory is not collective, and does not affect the other ranks.
    drop(memories);
    assert_eq!(read(&last, 0, 11), b"from rank 0");
}
