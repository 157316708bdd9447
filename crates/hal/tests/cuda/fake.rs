//! The same tests over the fake driver, so that they run where there is no GPU.

use wholemem_testkit::FakeCuda;

#[test]
fn the_suite_holds_over_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["suite::"]);
    assert!(passed >= 30, "{passed} tests ran");
}

#[test]
fn what_a_gpu_shows_is_shown_by_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    let passed = fake.rerun(&["gpu::"]);
    assert!(passed >= 12, "{passed} tests ran");
}
