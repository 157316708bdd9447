//! The same on a GPU, whose ranks all share it if there is but one.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use wholemem_testkit::cuda;

use super::case::cases;
use super::hard_cases;

#[test]
fn the_hard_partitions_agree_with_a_naive_loop() {
    let Some(backend) = cuda::backend() else { return };
    for case in hard_cases() {
        case.world_on(&backend).all();
    }
}

#[test]
fn chance_cases_agree_with_a_naive_loop() {
    let Some(backend) = cuda::backend() else { return };
    TestRunner::new(ProptestConfig::default())
        .run(&cases(), |case| {
            case.world_on(&backend).all();
            Ok(())
        })
        .unwrap();
}
