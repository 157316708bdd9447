//! Tests of gather and scatter on GPUs. If there is one GPU, all ranks share it.

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use wholemem_testkit::cuda;

use super::case::cases;
use super::fixed_cases;

#[test]
fn fixed_cases_match_a_naive_loop() {
    let Some(backend) = cuda::backend() else { return };
    for case in fixed_cases() {
        case.model_on(&backend).all();
    }
}

#[test]
fn random_cases_match_a_naive_loop() {
    let Some(backend) = cuda::backend() else { return };
    TestRunner::new(ProptestConfig::default())
        .run(&cases(), |case| {
            case.model_on(&backend).all();
            Ok(())
        })
        .unwrap();
}
