//! The same tests over the fake driver, so that they run where there is no GPU.

use wholemem_testkit::FakeCuda;

const DEVICES: &str = "WHOLEMEM_FAKE_CUDA_DEVICES";
const VERSION: &str = "WHOLEMEM_FAKE_CUDA_VERSION";

#[test]
fn the_suite_holds_over_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["suite::"], &[]);
    assert!(passed >= 34, "{passed} tests ran");
}

#[test]
fn the_suite_holds_with_one_gpu_and_the_oldest_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["suite::"], &[(DEVICES, "1"), (VERSION, "12040")]);
    assert!(passed >= 34, "{passed} tests ran");
}

#[test]
fn what_a_gpu_shows_is_shown_by_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["gpu::"], &[]);
    assert!(passed >= 14, "{passed} tests ran");
}
