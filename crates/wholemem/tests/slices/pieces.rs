//! Tests of typed calls on slices that are longer than a staging buffer.

use wholemem::{Communicator, Error, TensorSpec, WholeTensor};
use wholemem_hal::{Backend, HostConfig};
use wholemem_testkit::Deferred;

/// The length of a row in bytes: five rows fit in a staging buffer, six do not.
const WIDTH: usize = 3 << 20;

fn table(backend: &Backend, rows: u64, width: usize) -> WholeTensor {
    let comms = Communicator::local(&[backend.device(0).unwrap()]).unwrap();
    WholeTensor::create(&comms[0], &TensorSpec::of::<u8>(&[rows, width as u64])).unwrap()
}

fn row(number: usize, width: usize) -> Vec<u8> {
    (0..width).map(|at| (number * 31 + at % 251) as u8).collect()
}

fn backends() -> [Backend; 2] {
    let config = HostConfig::default;
    [Backend::host(config()).unwrap(), Deferred::backend(config(), 3).unwrap()]
}

#[test]
fn long_slices_are_copied_in_pieces() {
    for backend in backends() {
        let table = table(&backend, 12, WIDTH);
        let order = [11_i64, 3, 4, 0, 1, 2, 10, 9, 8, 7, 6, 5];
        let rows: Vec<u8> = order.iter().flat_map(|index| row(*index as usize, WIDTH)).collect();
        table.scatter(&order, &rows).unwrap();
        let all: Vec<u8> = (0..12).flat_map(|number| row(number, WIDTH)).collect();
        assert!(table.read_rows::<u8>(0..12).unwrap() == all, "scattered");
        assert!(table.gather::<u8>(&order).unwrap() == rows, "gathered");
        table.scatter_add(&order, &rows).unwrap();
        let twice: Vec<u8> = all.iter().map(|byte| byte.wrapping_mul(2)).collect();
        assert!(table.read_rows::<u8>(0..12).unwrap() == twice, "added");
    }
}

#[test]
fn the_first_bad_index_is_reported_and_all_other_rows_are_copied() {
    for backend in backends() {
        let table = table(&backend, 12, WIDTH);
        // The bad indices are in the second and in the third of the pieces into which the slice is divided.
        let order = [0_i64, 1, 2, 3, 4, 5, 12, 7, 8, 9, -5, 11];
        let bad = Err(Error::BadIndex { position: 6, index: Some(12), rows: Some(12) });
        let rows: Vec<u8> = (0..12).flat_map(|number| row(number, WIDTH)).collect();
        assert_eq!(table.scatter(&order, &rows), bad);
        let mut expected = rows;
        for number in [6, 10] {
            expected[number * WIDTH..][..WIDTH].fill(0);
        }
        assert!(table.read_rows::<u8>(0..12).unwrap() == expected, "scattered");
        let mut seen = vec![9; expected.len()];
        assert_eq!(table.gather_into(&order, &mut seen), bad);
        assert!(seen == expected, "gathered");
    }
}

#[test]
fn a_row_may_be_longer_than_a_staging_buffer() {
    for backend in backends() {
        let width = (16 << 20) + 5;
        let table = table(&backend, 2, width);
        let rows = [row(1, width), row(0, width)].concat();
        table.scatter(&[1, 0], &rows).unwrap();
        assert!(table.gather::<u8>(&[1, 0]).unwrap() == rows);
    }
}
