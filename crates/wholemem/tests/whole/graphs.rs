//! Tests of the order in which gathers and scatters run: in captured graphs, on deferred streams, and with barriers.

use wholemem::{
    Communicator, Dtype, Error, Indices, Kind, Location, Order, RowBuffer, TensorSpec, WholeTensor,
};
use wholemem_hal::{Backend, BackendKind, HostConfig, PinnedBuffer, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{Deferred, cuda, seed};

const ROWS: u64 = 500;
const ROW_LEN: usize = 20;
const COUNT: usize = 64;

struct TwoRanks {
    groups: Vec<Communicator>,
    tensors: Vec<WholeTensor>,
}

fn two_ranks(backend: &Backend, kind: Kind) -> TwoRanks {
    // If there is one device, both ranks share it.
    let count = u32::try_from(backend.devices().len()).unwrap();
    let devices: Vec<_> = (0..2).map(|id| backend.device(id % count).unwrap()).collect();
    let groups = Communicator::local(&devices).unwrap();
    let spec = TensorSpec { kind, ..TensorSpec::new(Dtype::U8, &[ROWS, ROW_LEN as u64]) };
    let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
    let rows: Vec<u8> = (0..ROWS).flat_map(row).collect();
    tensors[0].write_rows_on(&groups[0].device().stream().unwrap(), 0, &rows).unwrap();
    TwoRanks { groups, tensors }
}

fn row(number: u64) -> [u8; ROW_LEN] {
    let mut row = [number.to_le_bytes()[0]; ROW_LEN];
    row[..8].copy_from_slice(&number.to_le_bytes());
    row
}

fn write_indices(buffer: &PinnedBuffer, values: impl Iterator<Item = u64>) -> Vec<u64> {
    let values: Vec<_> = values.collect();
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
    buffer.bytes().unwrap().write_at(0, &bytes).unwrap();
    values
}

fn read(buffer: &PinnedBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.bytes().unwrap().read_at(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn replayed_gathers_and_scatters_read_the_current_indices() {
    let inline = Backend::host(HostConfig::virtual_devices(2)).unwrap();
    let deferred = Deferred::backend(HostConfig::virtual_devices(2), seed()).unwrap();
    repeat_with_changing_indices(&[inline, deferred]);
}

#[test]
fn gpu_replayed_gathers_and_scatters_read_the_current_indices() {
    if let Some(backend) = cuda::backend() {
        repeat_with_changing_indices(&[backend]);
    }
}

fn repeat_with_changing_indices(backends: &[Backend]) {
    for backend in backends {
        for kind in [Kind::Continuous, Kind::Chunked] {
            let TwoRanks { groups, tensors } = two_ranks(backend, kind);
            let (device, tensor) = (groups[1].device(), &tensors[1]);
            let stream = device.stream().unwrap();
            let [from, to] = [(); 2].map(|()| PinnedBuffer::create(device, COUNT * 8).unwrap());
            let rows = PinnedBuffer::create(device, COUNT * ROW_LEN).unwrap();
            let row_buffer = RowBuffer::new(rows.all(), Dtype::U8);
            let graph = stream
                .capture(|stream| {
                    let captured =
                        tensor.gather_on(stream, &Indices::i64(from.all()), &row_buffer).and_then(|()| {
                            tensor.scatter_on(stream, &Indices::i64(to.all()), &row_buffer, Order::Any)
                        });
                    captured.map_err(|error| match error {
                        Error::Hal(error) => error,
                        other => panic!("{other}"),
                    })
                })
                .unwrap();
            let mut table: Vec<_> = (0..ROWS).map(row).collect();
            for round in 0..1000 {
                let sources = write_indices(&from, (0..COUNT as u64).map(|at| (at * 7 + round * 31) % ROWS));
                let targets = write_indices(&to, (0..COUNT as u64).map(|at| (at * 3 + round * 17) % ROWS));
                graph.launch(&stream).unwrap();
                stream.synchronize(Deadline::NEVER).unwrap();
                let gathered: Vec<_> =
                    sources.iter().map(|source| table[usize::try_from(*source).unwrap()]).collect();
                assert_eq!(read(&rows), gathered.concat(), "round {round}");
                for (target, row) in targets.iter().zip(gathered) {
                    table[usize::try_from(*target).unwrap()] = row;
                }
                tensor.check().unwrap();
            }
            let mut seen = vec![0; table.len() * ROW_LEN];
            tensors[0].read_rows_on(&groups[0].device().stream().unwrap(), 0, &mut seen).unwrap();
            assert_eq!(seen, table.concat());
            // `check` must also report a bad index that a replay of the graph has used.
            write_indices(&from, (0..COUNT as u64).map(|at| if at == 5 { ROWS } else { at }));
            graph.launch(&stream).unwrap();
            stream.synchronize(Deadline::NEVER).unwrap();
            // A GPU kernel records only the position of a bad index, not the index itself.
            let index = (backend.kind() == BackendKind::Host).then(|| i64::try_from(ROWS).unwrap());
            assert_eq!(tensor.check(), Err(Error::BadIndex { position: 5, index, rows: Some(ROWS) }));
        }
    }
}

/// Tests that a barrier waits for enqueued work: otherwise, on deferred streams (which run work late), the gather would see old
/// rows.
#[test]
fn a_gather_sees_the_scatters_before_a_barrier() {
    let backend = Deferred::backend(HostConfig::virtual_devices(2), seed()).unwrap();
    let TwoRanks { groups, tensors } = two_ranks(&backend, Kind::Continuous);
    Communicator::on_each(&groups, |group| {
        let (device, tensor) = (group.device(), &tensors[group.rank().index()]);
        let stream: Stream = device.stream()?;
        let (other, own) = (1 - u64::from(group.rank().0), u64::from(group.rank().0));
        let rows = PinnedBuffer::create(device, COUNT * ROW_LEN)?;
        let seen = PinnedBuffer::create(device, COUNT * ROW_LEN)?;
        let [to, from] = [PinnedBuffer::create(device, COUNT * 8)?, PinnedBuffer::create(device, COUNT * 8)?];
        write_indices(&to, (0..COUNT as u64).map(|at| own * 250 + at));
        write_indices(&from, (0..COUNT as u64).map(|at| other * 250 + at));
        for round in 1..20 {
            let mark = |rank: u64| u8::try_from(round * 2 + rank).unwrap();
            rows.bytes().unwrap().fill(mark(own)).unwrap();
            tensor.scatter_on(
                &stream,
                &Indices::i64(to.all()),
                &RowBuffer::new(rows.all(), Dtype::U8),
                Order::Any,
            )?;
            group.barrier_on(&stream)?;
            tensor.gather_on_sync(
                &stream,
                &Indices::i64(from.all()),
                &RowBuffer::new(seen.all(), Dtype::U8),
            )?;
            assert_eq!(read(&seen), [mark(other); COUNT * ROW_LEN], "round {round}");
            group.barrier_on(&stream)?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn enqueued_calls_do_not_wait_and_keep_their_memory() {
    let backend = Deferred::backend(HostConfig::virtual_devices(2), seed()).unwrap();
    let TwoRanks { groups, tensors } = two_ranks(&backend, Kind::Chunked);
    let device = groups[0].device();
    let stream = device.stream().unwrap();
    let index_buffer = PinnedBuffer::create(device, COUNT * 8).unwrap();
    write_indices(&index_buffer, (0..COUNT as u64).map(|at| at + 300));
    let rows = PinnedBuffer::create(device, COUNT * ROW_LEN).unwrap();
    let row_buffer = RowBuffer::new(rows.all(), Dtype::U8);
    tensors[0].gather_on(&stream, &Indices::i64(index_buffer.all()), &row_buffer).unwrap();
    assert_eq!(read(&rows), [0; COUNT * ROW_LEN], "the gather has not run");
    // The stream keeps the memory of its enqueued work alive.
    drop((tensors, groups));
    stream.synchronize(Deadline::NEVER).unwrap();
    assert_eq!(read(&rows), (300..300 + COUNT as u64).flat_map(row).collect::<Vec<_>>());
}

#[test]
fn collective_calls_cannot_be_captured() {
    let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
    let devices: Vec<_> = (0..2).map(|id| backend.device(id).unwrap()).collect();
    let groups = Communicator::local(&devices).unwrap();
    let spec = TensorSpec { location: Location::Host, ..TensorSpec::new(Dtype::U8, &[10, 4]) };
    let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
    let outcomes = Communicator::on_each(&groups, |group| {
        let (device, tensor) = (group.device(), &tensors[group.rank().index()]);
        let stream = device.stream()?;
        let indices = PinnedBuffer::create(device, 8)?;
        let rows = PinnedBuffer::create(device, 4)?;
        let add = |stream: &Stream| {
            let row_buffer = RowBuffer::new(rows.all(), Dtype::U8);
            tensor.scatter_add_on(stream, &Indices::i64(indices.all()), &row_buffer, Order::Any)
        };
        if group.rank().0 == 0 {
            return Ok(add(&stream));
        }
        let mut outcome = Ok(());
        stream.capture(|stream| {
            outcome = add(stream);
            Ok(())
        })?;
        Ok(outcome)
    });
    for outcome in outcomes.unwrap() {
        let error = outcome.unwrap_err();
        assert!(error.to_string().contains("while the stream is being captured"), "{error}");
    }
    Communicator::on_each(&groups, |group| Ok(group.bootstrap().barrier()?)).unwrap();
}
