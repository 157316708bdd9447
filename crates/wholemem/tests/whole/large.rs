//! A table of more than four gibibytes, for whole runs on machines that have the memory.

use wholemem::{Communicator, Dtype, Error, Indices, Kind, Order, RowBuffer, TensorSpec, WholeTensor};
use wholemem_hal::{Backend, Device, HostConfig, PinnedBuffer};
use wholemem_os::meminfo;
use wholemem_testkit::{cuda, exhaustive, skipped};

const ROWS: u64 = 2100;
const ROW_LEN: usize = (2 << 20) + 4;

/// Rows around every boundary: of the table, of four gibibytes, and between the ranks.
const PLACES: [i32; 8] = [0, 1, 1049, 1050, 2047, 2048, 2098, 2099];

#[test]
fn rows_beyond_four_gibibytes_are_gathered_and_scattered() {
    if !exhaustive() {
        return skipped("a table of 4.4 GB is for whole runs: WHOLEMEM_EXHAUSTIVE=1");
    }
    let (needed, available) = (8 << 30, meminfo::available().unwrap());
    if available < needed {
        return skipped(&format!("{needed} bytes of memory are needed, and {available} are available"));
    }
    let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
    reach_beyond(&[backend.device(0).unwrap(), backend.device(1).unwrap()]);
}

#[test]
fn gpu_rows_beyond_four_gibibytes_are_gathered_and_scattered() {
    let Some(backend) = cuda::backend() else { return };
    let device = backend.device(0).unwrap();
    reach_beyond(&[device.clone(), device]);
}

fn reach_beyond(devices: &[Device]) {
    let groups = Communicator::local(devices).unwrap();
    for kind in [Kind::Continuous, Kind::Chunked] {
        let spec = TensorSpec { kind, ..TensorSpec::new(Dtype::U8, &[ROWS, ROW_LEN as u64]) };
        let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
        let (device, stream) = (groups[0].device(), groups[0].device().stream().unwrap());
        let indices = PinnedBuffer::create(device, PLACES.len() * 4).unwrap();
        let bytes: Vec<u8> = PLACES.iter().flat_map(|place| place.to_ne_bytes()).collect();
        indices.bytes().unwrap().write_at(0, &bytes).unwrap();
        let rows = PinnedBuffer::create(device, PLACES.len() * ROW_LEN).unwrap();
        for (at, place) in PLACES.iter().enumerate() {
            let mark = place.to_ne_bytes().repeat(ROW_LEN / 4);
            rows.bytes().unwrap().write_at(at * ROW_LEN, &mark).unwrap();
        }
        let (indices, dense) = (Indices::i32(indices.all()), RowBuffer::new(rows.all(), Dtype::U8));
        tensors[0].scatter_on_sync(&stream, &indices, &dense, Order::Any).unwrap();
        rows.bytes().unwrap().fill(0).unwrap();
        tensors[0].gather_on_sync(&stream, &indices, &dense).unwrap();
        for (at, place) in PLACES.iter().enumerate() {
            let mut seen = vec![0; ROW_LEN];
            rows.bytes().unwrap().read_at(at * ROW_LEN, &mut seen).unwrap();
            assert!(seen == place.to_ne_bytes().repeat(ROW_LEN / 4), "{kind}, row {place}, gathered");
            // The other rank reads them by another way.
            let other = groups[1].device().stream().unwrap();
            tensors[1].read_rows_on(&other, u64::try_from(*place).unwrap(), &mut seen).unwrap();
            assert!(seen == place.to_ne_bytes().repeat(ROW_LEN / 4), "{kind}, row {place}, read");
        }
        // Nothing around them was touched.
        let mut seen = vec![1; 2 * ROW_LEN];
        tensors[1].read_rows_on(&groups[1].device().stream().unwrap(), 1051, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 0), "{kind}");
        assert!(matches!(tensors[1].rows(0..ROWS + 1), Err(Error::OutOfRange { .. })));
    }
}
