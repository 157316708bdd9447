//! Tests of a table of more than 4 GiB. The host test runs only with `WHOLEMEM_EXHAUSTIVE=1` and enough memory.

use wholemem::{Communicator, Dtype, Error, Indices, Kind, Order, RowBuffer, TensorSpec, WholeTensor};
use wholemem_hal::{Backend, Device, HostConfig, PinnedBuffer};
use wholemem_os::meminfo;
use wholemem_testkit::{cuda, exhaustive, skipped};

const ROWS: u64 = 2100;
const ROW_LEN: usize = (2 << 20) + 4;

/// The tested rows: those next to the ends of the table, to 4 GiB, and to the boundary between the ranks.
const TESTED_ROWS: [i32; 8] = [0, 1, 1049, 1050, 2047, 2048, 2098, 2099];

#[test]
fn rows_beyond_four_gibibytes_are_gathered_and_scattered() {
    if !exhaustive() {
        return skipped("a table of 4.4 GB needs WHOLEMEM_EXHAUSTIVE=1");
    }
    let (needed, available) = (8 << 30, meminfo::available().unwrap());
    if available < needed {
        return skipped(&format!("{needed} bytes of memory are needed, but {available} are available"));
    }
    let backend = Backend::host(HostConfig::virtual_devices(2)).unwrap();
    check_large_table(&[backend.device(0).unwrap(), backend.device(1).unwrap()]);
}

#[test]
fn gpu_rows_beyond_four_gibibytes_are_gathered_and_scattered() {
    let Some(backend) = cuda::backend() else { return };
    let device = backend.device(0).unwrap();
    check_large_table(&[device.clone(), device]);
}

fn check_large_table(devices: &[Device]) {
    let groups = Communicator::local(devices).unwrap();
    for kind in [Kind::Continuous, Kind::Chunked] {
        let spec = TensorSpec { kind, ..TensorSpec::new(Dtype::U8, &[ROWS, ROW_LEN as u64]) };
        let tensors = Communicator::on_each(&groups, |group| WholeTensor::create(group, &spec)).unwrap();
        let (device, stream) = (groups[0].device(), groups[0].device().stream().unwrap());
        let indices = PinnedBuffer::create(device, TESTED_ROWS.len() * 4).unwrap();
        let bytes: Vec<u8> = TESTED_ROWS.iter().flat_map(|row| row.to_ne_bytes()).collect();
        indices.bytes().unwrap().write_at(0, &bytes).unwrap();
        let rows = PinnedBuffer::create(device, TESTED_ROWS.len() * ROW_LEN).unwrap();
        for (at, row) in TESTED_ROWS.iter().enumerate() {
            let mark = row.to_ne_bytes().repeat(ROW_LEN / 4);
            rows.bytes().unwrap().write_at(at * ROW_LEN, &mark).unwrap();
        }
        let (indices, row_buffer) = (Indices::i32(indices.all()), RowBuffer::new(rows.all(), Dtype::U8));
        tensors[0].scatter_on_sync(&stream, &indices, &row_buffer, Order::Any).unwrap();
        rows.bytes().unwrap().fill(0).unwrap();
        tensors[0].gather_on_sync(&stream, &indices, &row_buffer).unwrap();
        for (at, row) in TESTED_ROWS.iter().enumerate() {
            let mut seen = vec![0; ROW_LEN];
            rows.bytes().unwrap().read_at(at * ROW_LEN, &mut seen).unwrap();
            assert!(seen == row.to_ne_bytes().repeat(ROW_LEN / 4), "{kind}, row {row}, gathered");
            // The second rank reads the row with a copy instead of a gather.
            let other = groups[1].device().stream().unwrap();
            tensors[1].read_rows_on(&other, u64::try_from(*row).unwrap(), &mut seen).unwrap();
            assert!(seen == row.to_ne_bytes().repeat(ROW_LEN / 4), "{kind}, row {row}, read");
        }
        // The scatter must not have changed other rows.
        let mut seen = vec![1; 2 * ROW_LEN];
        tensors[1].read_rows_on(&groups[1].device().stream().unwrap(), 1051, &mut seen).unwrap();
        assert!(seen.iter().all(|byte| *byte == 0), "{kind}");
        assert!(matches!(tensors[1].rows(0..ROWS + 1), Err(Error::OutOfRange { .. })));
    }
}
