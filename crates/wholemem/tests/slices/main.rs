//! Tests that compare typed calls on slices of host memory with a naive model: on streams that run work inline, and on deferred
//! streams, which run work later, as those of GPUs do.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "a test fails by panic, and its numbers are small"
)]

mod case;
mod errors;
mod gpu;
mod pieces;
mod value;

use std::fmt::Debug;

use case::{SliceCase, cases};
use half::{bf16, f16};
use proptest::prelude::*;
use value::TestValue;
use wholemem::{Element, Kind, Location};
use wholemem_hal::{Backend, HostConfig};
use wholemem_testkit::Deferred;

/// Runs a test case with the element type that the case selects.
fn run(case: &SliceCase, backend: &Backend) {
    fn of<T: TestValue + Element + PartialEq + Debug>(case: &SliceCase, backend: &Backend) {
        case.run::<T>(backend);
    }
    let types: [fn(&SliceCase, &Backend); 13] = [
        of::<u8>,
        of::<i8>,
        of::<u16>,
        of::<i16>,
        of::<u32>,
        of::<i32>,
        of::<u64>,
        of::<i64>,
        of::<f16>,
        of::<bf16>,
        of::<f32>,
        of::<f64>,
        of::<[f32; 2]>,
    ];
    types[case.element_type % types.len()](case, backend);
}

fn devices() -> HostConfig {
    HostConfig::virtual_devices(3)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(4096) / 4, ..ProptestConfig::default() })]

    #[test]
    fn inline_calls_match_the_model(case in cases()) {
        run(&case, &Backend::host(devices()).unwrap());
    }

    #[test]
    fn staged_calls_match_the_model(case in cases()) {
        run(&case, &Deferred::backend(devices(), case.seed).unwrap());
    }
}

/// Tests every element type with partitions in which some ranks have no rows, independently of the random cases.
#[test]
fn every_element_type_matches_the_model() {
    for element_type in 0..13 {
        for (rows_of_each, kind, location) in [
            (vec![0, 5, 0, 0, 7, 1, 0], Kind::Continuous, Location::Device),
            (vec![0, 5, 0, 0, 7, 1, 0], Kind::Chunked, Location::Host),
            (vec![0, 0], Kind::Continuous, Location::Host),
        ] {
            let case = SliceCase {
                rows_of_each,
                width: 3,
                kind,
                location,
                element_type,
                view: element_type % 2 == 1,
                seed: 7,
            };
            run(&case, &Backend::host(devices()).unwrap());
            run(&case, &Deferred::backend(devices(), 7).unwrap());
        }
    }
}
