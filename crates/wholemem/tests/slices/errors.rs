//! Tests of the errors for invalid arguments of typed calls. The errors contain the values of the arguments, and no memory is
//! accessed.

use std::time::Duration;

use half::f16;
use wholemem::{Bootstrap, Communicator, Dtype, Error, Location, Rank, ReduceOp, TensorSpec, WholeTensor};
use wholemem_hal::{Backend, HostConfig};
use wholemem_os::Deadline;
use wholemem_testkit::Deferred;

fn backends() -> [Backend; 2] {
    let config = || HostConfig::virtual_devices(2);
    [Backend::host(config()).unwrap(), Deferred::backend(config(), 5).unwrap()]
}

/// Creates a table on one rank.
fn table(backend: &Backend, spec: &TensorSpec) -> WholeTensor {
    let comms = Communicator::local(&[backend.device(0).unwrap()]).unwrap();
    WholeTensor::create(&comms[0], spec).unwrap()
}

#[test]
fn another_element_type_is_rejected() {
    for backend in backends() {
        let table = table(&backend, &TensorSpec::of::<f32>(&[10, 4]));
        let differ = |rows| Error::TypesDiffer { table: Dtype::F32, rows };
        assert_eq!(table.gather::<f64>(&[0]).unwrap_err(), differ(Dtype::F64));
        assert_eq!(table.gather::<u32>(&[]).unwrap_err(), differ(Dtype::U32), "also without rows");
        assert_eq!(table.gather_into(&[0], &mut [0_i32; 4]).unwrap_err(), differ(Dtype::I32));
        assert_eq!(
            table.scatter(&[0], &[0_u8; 16]).unwrap_err(),
            differ(Dtype::U8),
            "also with the same number of bytes"
        );
        assert_eq!(table.scatter_add(&[0], &[f16::ONE; 4]).unwrap_err(), differ(Dtype::F16));
        assert_eq!(table.read_rows::<i8>(0..1).unwrap_err(), differ(Dtype::I8));
        assert_eq!(table.read_rows_into(0, &mut [[0_f32; 2]; 2]).unwrap_err(), differ(Dtype::Complex64));
        assert_eq!(table.write_rows(0, &[0_i64; 4]).unwrap_err(), differ(Dtype::I64));
        assert_eq!(table.fill_local(1_u64).unwrap_err(), differ(Dtype::U64));
        let message = "the table has elements of type f32 and the rows of type f64: request a conversion, or pass rows of f32";
        assert_eq!(differ(Dtype::F64).to_string(), message);
    }
}

#[test]
fn types_that_are_not_numbers_are_copied_as_their_storage_type() {
    for backend in backends() {
        let table = table(&backend, &TensorSpec::new(Dtype::Bool, &[10, 4]));
        table.scatter(&[3], &[1_u8, 0, 1, 1]).unwrap();
        assert_eq!(table.gather::<u8>(&[3]).unwrap(), [1, 0, 1, 1]);
        assert_eq!(table.read_rows::<u8>(3..4).unwrap(), [1, 0, 1, 1]);
        let unsupported = Error::OpNotForType { op: ReduceOp::Sum, dtype: Dtype::Bool };
        assert_eq!(table.scatter_add(&[3], &[1_u8; 4]).unwrap_err(), unsupported);
        assert_eq!(table.scatter_add::<u8>(&[], &[]).unwrap_err(), unsupported, "also without rows");
    }
}

#[test]
fn a_slice_of_another_length_than_the_rows_is_rejected() {
    for backend in backends() {
        let table = table(&backend, &TensorSpec::of::<i16>(&[10, 4]));
        let differs = |rows, expected, given| Error::CountDiffers { rows, expected, given };
        for given in [0, 7, 9, 12] {
            let error = differs(2, 8, given);
            assert_eq!(table.gather_into(&[0, 1], &mut vec![5_i16; given]), Err(error.clone()));
            assert_eq!(table.scatter(&[0, 1], &vec![5_i16; given]), Err(error.clone()));
            assert_eq!(table.scatter_add(&[0, 1], &vec![5_i16; given]), Err(error));
        }
        assert_eq!(table.scatter(&[], &[5_i16]), Err(differs(0, 0, 1)));
        for given in [1, 3, 5, 41] {
            let partial = Err(Error::PartialRow { given, row: 4 });
            assert_eq!(table.write_rows(0, &vec![5_i16; given]), partial);
            assert_eq!(table.read_rows_into(0, &mut vec![5_i16; given]), partial);
        }
        assert_eq!(table.read_rows::<i16>(0..10).unwrap(), [0; 40], "nothing was written");
        let message = "2 rows have 8 elements, but the slice has 9";
        assert_eq!((differs(2, 8, 9).to_string(), differs(2, 8, 9).code()), (message.to_owned(), 1031));
        let partial = Error::PartialRow { given: 41, row: 4 };
        assert_eq!(
            (&*partial.to_string(), partial.code()),
            ("41 elements are not a whole number of rows of 4 elements", 1032)
        );
    }
}

#[test]
fn rows_outside_the_tensor_are_rejected() {
    for backend in backends() {
        let table = table(&backend, &TensorSpec::of::<u8>(&[10, 4])).rows(2..8).unwrap();
        let out_of_range = |start, end| Error::OutOfRange { dimension: "rows", start, end, count: 6 };
        assert_eq!(table.read_rows::<u8>(0..7).unwrap_err(), out_of_range(0, 7));
        #[expect(clippy::reversed_empty_ranges, reason = "the test passes a reversed range")]
        let reversed = table.read_rows::<u8>(5..4);
        assert_eq!(reversed.unwrap_err(), out_of_range(5, 4));
        assert_eq!(table.read_rows::<u8>(0..u64::MAX).unwrap_err(), out_of_range(0, u64::MAX));
        assert_eq!(table.read_rows_into(5, &mut [0_u8; 8]).unwrap_err(), out_of_range(5, 7));
        assert_eq!(table.write_rows(6, &[0_u8; 4]).unwrap_err(), out_of_range(6, 7));
        assert_eq!(table.write_rows(u64::MAX, &[0_u8; 4]).unwrap_err(), out_of_range(u64::MAX, u64::MAX));
        table.write_rows::<u8>(6, &[]).unwrap();
        for index in [-1, 6, i64::MIN, i64::MAX] {
            let bad = Error::BadIndex { position: 1, index: Some(index), rows: Some(6) };
            assert_eq!(table.gather::<u8>(&[0, index, 6]).unwrap_err(), bad);
            assert_eq!(table.scatter(&[0, index], &[7_u8; 8]).unwrap_err(), bad);
            assert_eq!(table.scatter_add(&[0, index], &[1_u8; 8]).unwrap_err(), bad);
            assert_eq!(table.gather::<u8>(&[0]).unwrap(), [8; 4], "the valid row is written");
        }
        assert_eq!(table.check(), Ok(()), "no error is reported twice");
    }
}

/// Tests that all ranks fail if one rank passes invalid arguments: adding to host memory is collective, and the other ranks
/// must not wait for that rank.
#[test]
fn invalid_arguments_of_one_rank_fail_a_collective_call_on_all_ranks() {
    for backend in backends() {
        let devices = [backend.device(0).unwrap(), backend.device(1).unwrap()];
        let comms = Communicator::local(&devices).unwrap();
        let spec = TensorSpec { location: Location::Host, ..TensorSpec::of::<i32>(&[10, 4]) };
        let tables = Communicator::on_each(&comms, |comm| WholeTensor::create(comm, &spec)).unwrap();
        let add = |given: usize| {
            Communicator::on_each(&comms, |comm| {
                let table = &tables[comm.rank().index()];
                let count = if comm.rank() == Rank(1) { given } else { 4 };
                Ok(table.scatter_add(&[3], &vec![1_i32; count]))
            })
            .unwrap()
        };
        let reason = "1 rows have 4 elements, but the slice has 5".to_owned();
        let error = Error::OnRank { rank: Rank(1), code: 1031, reason, hint: None };
        assert_eq!(add(5), [Err(error.clone()), Err(error)]);
        assert_eq!(add(4), [Ok(()), Ok(())], "the group remains usable");
        let none = Communicator::on_each(&comms, |comm| {
            let table = &tables[comm.rank().index()];
            if comm.rank() == Rank(0) {
                table.scatter_add::<i32>(&[], &[])
            } else {
                table.scatter_add(&[3], &[1_i32; 4])
            }
        });
        none.unwrap();
        assert_eq!(tables[0].gather::<i32>(&[3]).unwrap(), [3; 4]);
    }
}

/// Tests a function, as a user would write it, that returns the errors of all crates with `?`.
#[test]
fn errors_of_all_crates_convert_to_the_error_of_this_crate() {
    fn fails(which: u8) -> wholemem::Result<()> {
        match which {
            0 => drop(Backend::host(HostConfig::default())?.device(99)?),
            1 => drop(Bootstrap::local(1)?[0].broadcast(Rank(5), b"")?),
            _ => drop(wholemem_os::Memfd::create("none", 0)?),
        }
        Ok(())
    }
    assert!(matches!(fails(0), Err(Error::Hal(wholemem_hal::Error::NoSuchDevice { .. }))));
    let no_rank = wholemem_comm::Error::NoSuchRank { rank: Rank(5), size: 1 };
    assert_eq!(fails(1), Err(Error::Comm(no_rank)));
    let error = fails(2).unwrap_err();
    assert_eq!(error, Error::Os(wholemem_os::Error::ZeroLength));
    assert_eq!((error.code(), error.to_string()), (1030, "cannot use 0 bytes of memory".to_owned()));
}

/// Tests that a bad index in a call that does not wait is reported by the next call, which then does nothing.
#[test]
fn a_bad_index_of_an_earlier_call_is_reported_once() {
    use wholemem::{Indices, RowBuffer};
    use wholemem_hal::PinnedBuffer;
    for backend in backends() {
        let table = table(&backend, &TensorSpec::of::<u8>(&[10, 8]));
        let device = table.group().device();
        let stream = device.stream().unwrap();
        let (indices, rows) =
            (PinnedBuffer::create(device, 8).unwrap(), PinnedBuffer::create(device, 8).unwrap());
        indices.bytes().unwrap().write_at(0, &77_i64.to_ne_bytes()).unwrap();
        table
            .gather_on(&stream, &Indices::i64(indices.all()), &RowBuffer::new(rows.all(), Dtype::U8))
            .unwrap();
        stream.synchronize(Deadline::after(Duration::from_secs(60))).unwrap();
        let bad = Err(Error::BadIndex { position: 0, index: Some(77), rows: Some(10) });
        assert_eq!(table.scatter(&[1], &[3_u8; 8]), bad);
        assert_eq!(table.gather::<u8>(&[1]).unwrap(), [0; 8], "nothing was scattered");
    }
}
