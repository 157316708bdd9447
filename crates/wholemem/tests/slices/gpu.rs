//! Tests of typed calls on a GPU. Calls that launch no kernel are also tested on the fake driver.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use wholemem::{Communicator, Kind, TensorSpec, WholeTensor};
use wholemem_testkit::{FakeCuda, cuda};

use super::case::cases;
use super::run;

#[test]
fn typed_calls_match_the_model() {
    let Some(backend) = cuda::backend() else { return };
    TestRunner::new(ProptestConfig { cases: 64, ..ProptestConfig::default() })
        .run(&cases(), |case| {
            run(&case, &backend);
            Ok(())
        })
        .unwrap();
}

mod suite {
    use super::*;

    /// Tests device memory, which is not accessible to the CPU, so that every byte is staged.
    #[test]
    fn rows_in_device_memory_are_filled_written_and_read() {
        let Some(backend) = cuda::backend() else { return };
        let device = backend.device(0).unwrap();
        let comms = Communicator::local(&vec![device; 3]).unwrap();
        for kind in [Kind::Continuous, Kind::Chunked] {
            let rows_of_each = Some(vec![5, 0, 2]);
            let spec = TensorSpec { kind, rows_of_each, ..TensorSpec::of::<i16>(&[7, 3]) };
            let seen = Communicator::on_each(&comms, |comm| {
                let table = WholeTensor::create(comm, &spec)?;
                table.fill_local(comm.rank().0 as i16 + 1)?;
                comm.barrier()?;
                if comm.rank().0 == 1 {
                    table.columns(1..3)?.write_rows(4, &[-1_i16, -2, -3, -4])?;
                }
                comm.barrier()?;
                table.read_rows::<i16>(3..7)
            });
            let rows = [[1, 1, 1], [1, -1, -2], [3, -3, -4], [3, 3, 3]];
            assert_eq!(seen.unwrap(), [rows.as_flattened(); 3]);
        }
    }
}

#[test]
fn the_suite_passes_on_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["gpu::suite::"], &[]);
    assert_eq!(passed, 1);
}
