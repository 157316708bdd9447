//! Tests of ranks that are processes: shared memory, equal addresses on request, and independent release of memory.

use std::time::Duration;

use wholemem::{
    Bootstrap, Communicator, Dtype, Error, Indices, Kind, Location, MemorySpec, Order, Rank, RowBuffer,
    TensorSpec, WholeMemory, WholeTensor,
};
use wholemem_comm::UniqueId;
use wholemem_hal::{Backend, HostConfig, PinnedBuffer};
use wholemem_os::Deadline;
use wholemem_testkit::{Census, Ranks, cuda, test_name};

/// Joins the group of all rank processes of a test, with a device of the host backend.
fn join(rank: &wholemem_testkit::Rank) -> Communicator {
    join_on(rank, &Backend::host(HostConfig::default()).unwrap())
}

/// Joins the group of all rank processes of a test. The devices of a backend are assigned to ranks round-robin.
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

/// Scatters some rows on every rank, gathers rows of all ranks, and checks them.
fn exchange(group: &Communicator, kind: Kind, location: Location, order: Order) {
    const ROWS: u64 = 10_000;
    let (device, own) = (group.device(), u64::from(group.rank().0));
    let spec = TensorSpec { kind, location, ..TensorSpec::new(Dtype::I32, &[ROWS, 25]) };
    let tensor = WholeTensor::create(group, &spec).unwrap();
    let stream = device.stream().unwrap();
    let count = ROWS / u64::from(group.size());
    let rank_of = |row: u64| row % u64::from(group.size());
    let own_rows: Vec<_> =
        (0..ROWS).filter(|row| rank_of(*row) == own).take(usize::try_from(count).unwrap()).collect();
    let numbers = PinnedBuffer::create(device, own_rows.len() * 8).unwrap();
    let bytes: Vec<u8> = own_rows.iter().flat_map(|row| row.to_ne_bytes()).collect();
    numbers.bytes().unwrap().write_at(0, &bytes).unwrap();
    let rows = PinnedBuffer::create(device, own_rows.len() * 100).unwrap();
    let row = |number: u64| [i32::try_from(number).unwrap().to_ne_bytes(); 25].concat();
    let bytes: Vec<u8> = own_rows.iter().flat_map(|number| row(*number)).collect();
    rows.bytes().unwrap().write_at(0, &bytes).unwrap();
    let row_buffer = RowBuffer::new(rows.all(), Dtype::I32);
    tensor.scatter_on(&stream, &Indices::i64(numbers.all()), &row_buffer, order).unwrap();
    group.barrier_on(&stream).unwrap();

    let gathered_rows: Vec<i32> =
        (0..5000).map(|at| (at * 7919 + i32::try_from(own).unwrap()) % 9990).collect();
    let numbers = PinnedBuffer::create(device, gathered_rows.len() * 4).unwrap();
    let bytes: Vec<u8> = gathered_rows.iter().flat_map(|row| row.to_ne_bytes()).collect();
    numbers.bytes().unwrap().write_at(0, &bytes).unwrap();
    let out = PinnedBuffer::create(device, gathered_rows.len() * 100).unwrap();
    tensor
        .gather_on_sync(&stream, &Indices::i32(numbers.all()), &RowBuffer::new(out.all(), Dtype::I32))
        .unwrap();
    let mut seen = vec![0; out.len()];
    out.bytes().unwrap().read_at(0, &mut seen).unwrap();
    let expected: Vec<u8> =
        gathered_rows.iter().flat_map(|number| row(u64::try_from(*number).unwrap())).collect();
    assert!(seen == expected, "rank {} gathers wrong rows", group.rank());
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
            // Only later rounds are compared, because the first round creates resources that live as long as the process,
            // mostly threads.
            let census = Census::take();
            if let Some(before) = before.replace(census.clone()) {
                census.assert_same_as(&before, "after the second round");
            }
            // No rank may leave the group while another rank takes its census of resources, which would change.
            rank.barrier();
        }
    });
}

/// Tests processes that share a GPU. With MPS they run on the GPU concurrently; without MPS, in time slices.
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

/// Tests a memory of which one rank's part is longer than GPU memory: all ranks fail, and the group remains usable.
#[test]
fn gpu_a_failed_allocation_fails_all_ranks() {
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
                // Free memory is compared after the first round, which creates resources that the driver keeps.
                rank.barrier();
                let free = group.device().available().unwrap();
                assert_eq!(*before.get_or_insert(free), free, "device memory must not leak");
                rank.barrier();
            }
        }
    });
}

#[test]
fn addresses_are_equal_in_all_processes_on_request() {
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
                // All ranks must read the byte that rank 0 writes.
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
fn releasing_memory_does_not_wait_for_other_ranks() {
    const HOLDER: usize = 1;
    Ranks::of(3).killed(HOLDER).run(test_name!(), |rank| {
        let group = join(rank);
        let memory = WholeMemory::create(&group, &MemorySpec::new(1 << 20, 1)).unwrap();
        group.bootstrap().barrier().unwrap();
        if rank.id() == HOLDER {
            rank.wait_to_be_killed();
        }
        // Ranks 0 and 2 drop their memory and communicator while rank 1 still holds its own.
        drop((memory, group));
        rank.barrier_with(&[2 - rank.id()]);
        if rank.id() == 0 {
            rank.kill(HOLDER);
        }
    });
}
