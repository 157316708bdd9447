//! Ranks that are processes: one memory, equal addresses on request, and nobody waits for a rank that never frees.

use std::time::Duration;

use wholemem::{
    Bootstrap, Communicator, Dtype, Error, Indices, Kind, Location, MemorySpec, Order, Rank, RowBuffer,
    TensorSpec, WholeMemory, WholeTensor,
};
use wholemem_comm::UniqueId;
use wholemem_hal::{Backend, HostConfig, PinnedBuffer};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Ranks, cuda, test_name};

/// The group of all processes of a test.
fn join(rank: &wholemem_testkit::Rank) -> Communicator {
    join_on(rank, &Backend::host(HostConfig::default()).unwrap())
}

/// The same, whose devices are those of a backend in turn.
fn join_on(rank: &wholemem_testkit::Rank, backend: &Backend) -> Communicator {
    let id = if rank.id() == 0 {
        let id = UniqueId::create().unwrap();
        (1..rank.count()).for_each(|peer| rank.send(peer, id.to_string().as_bytes(), &[]));
        id
    } else {
        String::from_utf8(rank.recv(0).0).unwrap().parse().unwrap()
    };
    let [own, size] = [rank.id(), rank.count()].map(|number| u32::try_from(number).unwrap());
    let deadline = Deadline::after(Duration::from_secs(120));
    let comm = Bootstrap::create(&id, Rank(own), size, deadline).unwrap();
    let devices = u32::try_from(backend.devices().len()).unwrap();
    Communicator::create(comm, &backend.device(own % devices).unwrap()).unwrap()
}

/// Rows that every rank scatters, and every other one gathers.
fn exchange(group: &Communicator, kind: Kind, location: Location, order: Order) {
    const ROWS: u64 = 10_000;
    let (device, own) = (group.device(), u64::from(group.rank().0));
    let spec = TensorSpec { kind, location, ..TensorSpec::new(Dtype::I32, &[ROWS, 25]) };
    let tensor = WholeTensor::create(group, &spec).unwrap();
    let stream = device.stream().unwrap();
    let count = ROWS / u64::from(group.size());
    let rank_of = |row: u64| row % u64::from(group.size());
    let mine: Vec<_> =
        (0..ROWS).filter(|row| rank_of(*row) == own).take(usize::try_from(count).unwrap()).collect();
    let numbers = PinnedBuffer::create(device, mine.len() * 8).unwrap();
    let bytes: Vec<u8> = mine.iter().flat_map(|row| row.to_ne_bytes()).collect();
    numbers.bytes().unwrap().write_at(0, &bytes).unwrap();
    let rows = PinnedBuffer::create(device, mine.len() * 100).unwrap();
    let row = |number: u64| [i32::try_from(number).unwrap().to_ne_bytes(); 25].concat();
    let bytes: Vec<u8> = mine.iter().flat_map(|number| row(*number)).collect();
    rows.bytes().unwrap().write_at(0, &bytes).unwrap();
    let dense = RowBuffer::new(rows.all(), Dtype::I32);
    tensor.scatter_on(&stream, &Indices::i64(numbers.all()), &dense, order).unwrap();
    group.barrier_on(&stream).unwrap();

    let wanted: Vec<i32> = (0..5000).map(|at| (at * 7919 + i32::try_from(own).unwrap()) % 9990).collect();
    let numbers = PinnedBuffer::create(device, wanted.len() * 4).unwrap();
    let bytes: Vec<u8> = wanted.iter().flat_map(|row| row.to_ne_bytes()).collect();
    numbers.bytes().unwrap().write_at(0, &bytes).unwrap();
    let out = PinnedBuffer::create(device, wanted.len() * 100).unwrap();
    tensor
        .gather_on_sync(&stream, &Indices::i32(numbers.all()), &RowBuffer::new(out.all(), Dtype::I32))
        .unwrap();
    let mut seen = vec![0; out.len()];
    out.bytes().unwrap().read_at(0, &mut seen).unwrap();
    let expected: Vec<u8> = wanted.iter().flat_map(|number| row(u64::try_from(*number).unwrap())).collect();
    assert!(seen == expected, "rank {} sees other rows", group.rank());
    group.barrier_on(&stream).unwrap();
}

#[test]
fn processes_exchange_rows() {
    Ranks::of(3).run(test_name!(), |rank| {
        let group = join(rank);
        let mut before = None;
        for _ in 0..2 {
            for kind in [Kind::Continuous, Kind::Chunked] {
                for location in [Location::Device, Location::Host] {
                    exchange(&group, kind, location, Order::Any);
                    exchange(&group, kind, location, Order::Fixed);
                }
            }
            // The first round makes what stays for the life of the process: threads, mostly.
            let census = Census::take();
            if let Some(before) = before.replace(census.clone()) {
                census.assert_same_as(&before, "after the second round");
            }
            // Nobody leaves the group while others count.
            rank.barrier();
        }
    });
}

/// Under MPS the processes share a GPU at the same time; without it, they take turns.
#[test]
fn gpu_processes_exchange_rows() {
    for count in [1, 2, 4, 8] {
        if !Ranks::is_rank() && cuda::backend().is_none() {
            return;
        }
        Ranks::of(count).run(test_name!(), |rank| {
            let group = join_on(rank, &cuda::backend().unwrap());
            for kind in [Kind::Continuous, Kind::Chunked] {
                for location in [Location::Device, Location::Host] {
                    exchange(&group, kind, location, Order::Any);
                    exchange(&group, kind, location, Order::Fixed);
                }
            }
            rank.barrier();
        });
    }
}

/// A rank whose part no GPU holds: every rank hears of it, and the group goes on.
#[test]
fn gpu_memory_that_one_rank_has_not_is_everybodys_error() {
    if !Ranks::is_rank() && cuda::backend().is_none() {
        return;
    }
    Ranks::of(3).run(test_name!(), |rank| {
        let group = join_on(rank, &cuda::backend().unwrap());
        for kind in [Kind::Continuous, Kind::Chunked] {
            let mut before = None;
            for _ in 0..3 {
                let rows_of_each = Some(vec![1 << 20, 1 << 42, 1 << 20]);
                let spec = MemorySpec { kind, rows_of_each, ..MemorySpec::new((1 << 42) + (2 << 20), 1) };
                let error = WholeMemory::create(&group, &spec).unwrap_err();
                assert!(matches!(error, Error::OnRank { rank: Rank(1), .. }), "{error}");
                exchange(&group, kind, Location::Device, Order::Any);
                // The first round makes what the driver keeps.
                rank.barrier();
                let free = group.device().available().unwrap();
                assert_eq!(*before.get_or_insert(free), free, "memory is left");
                rank.barrier();
            }
        }
    });
}

#[test]
fn addresses_are_equal_in_all_processes_where_asked_for() {
    Ranks::of(3).run(test_name!(), |rank| {
        let group = join(rank);
        for kind in [Kind::Continuous, Kind::Chunked] {
            for len in [1, 300_000, 40 << 20] {
                let spec = MemorySpec { kind, equal_addresses: true, ..MemorySpec::new(len, 1) };
                let memory = WholeMemory::create(&group, &spec).unwrap();
                let addresses: Vec<u8> = (0..3)
                    .flat_map(|rank| memory.address_of(Rank(rank)).unwrap_or_default().to_ne_bytes())
                    .collect();
                let all = group.bootstrap().all_gather(&addresses).unwrap();
                assert!(all.iter().all(|other| *other == addresses), "{all:?}");
                // A pointer of rank 0, used by rank 2.
                let stream = group.device().stream().unwrap();
                if rank.id() == 0 {
                    memory.write(&stream, 0, b"x").unwrap();
                }
                group.barrier_on(&stream).unwrap();
                let mut seen = [0];
                memory.read(&stream, 0, &mut seen).unwrap();
                assert_eq!(&seen, b"x");
                group.barrier_on(&stream).unwrap();
            }
        }
    });
}

#[test]
fn nobody_waits_for_a_rank_that_never_frees() {
    const KEEPER: usize = 1;
    Ranks::of(3).killed(KEEPER).run(test_name!(), |rank| {
        let group = join(rank);
        let memory = WholeMemory::create(&group, &MemorySpec::new(1 << 20, 1)).unwrap();
        group.bootstrap().barrier().unwrap();
        if rank.id() == KEEPER {
            rank.wait_to_be_killed();
        }
        // Both end what they have, communicator and all, while the keeper keeps.
        drop((memory, group));
        rank.barrier_with(&[2 - rank.id()]);
        if rank.id() == 0 {
            rank.kill(KEEPER);
        }
    });
}
