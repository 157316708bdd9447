//! Runs the tests of the CUDA backend on the fake driver, so that they also run on machines without a GPU.

use wholemem_testkit::FakeCuda;

const DEVICES: &str = "WHOLEMEM_FAKE_CUDA_DEVICES";
const VERSION: &str = "WHOLEMEM_FAKE_CUDA_VERSION";

#[test]
fn the_suite_passes_on_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["suite::"], &[]);
    assert!(passed >= 34, "{passed} tests ran");
}

#[test]
fn the_suite_passes_with_one_gpu_and_the_oldest_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["suite::"], &[(DEVICES, "1"), (VERSION, "12040")]);
    assert!(passed >= 34, "{passed} tests ran");
}

#[test]
fn the_gpu_tests_pass_on_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["gpu::"], &[]);
    assert!(passed >= 14, "{passed} tests ran");
}
