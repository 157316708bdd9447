//! Typed calls on slices of host memory, against a naive model: on streams that run inline, and on streams that run late,
//! as those of GPUs do.

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

use case::{Case, cases};
use half::{bf16, f16};
use proptest::prelude::*;
use value::Value;
use wholemem::{Element, Kind, Location};
use wholemem_hal::{Backend, HostConfig};
use wholemem_testkit::Deferred;

/// Runs every call on one of the element types.
fn play(case: &Case, backend: &Backend) {
    fn of<T: Value + Element + PartialEq + Debug>(case: &Case, backend: &Backend) {
        case.play::<T>(backend);
    }
    let types: [fn(&Case, &Backend); 13] = [
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
    fn calls_in_place_agree_with_a_naive_model(case in cases()) {
        play(&case, &Backend::host(devices()).unwrap());
    }

    #[test]
    fn staged_calls_agree_with_a_naive_model(case in cases()) {
        play(&case, &Deferred::backend(devices(), case.seed).unwrap());
    }
}

/// Every element type over partitions with empty ranks, whatever chance comes to.
#[test]
fn every_element_type_agrees_with_a_naive_model() {
    for element_type in 0..13 {
        for (rows_of_each, kind, location) in [
            (vec![0, 5, 0, 0, 7, 1, 0], Kind::Continuous, Location::Device),
            (vec![0, 5, 0, 0, 7, 1, 0], Kind::Chunked, Location::Host),
            (vec![0, 0], Kind::Continuous, Location::Host),
        ] {
            let case = Case {
                rows_of_each,
                width: 3,
                kind,
                location,
                element_type,
                view: element_type % 2 == 1,
                seed: 7,
            };
            play(&case, &Backend::host(devices()).unwrap());
            play(&case, &Deferred::backend(devices(), 7).unwrap());
        }
    }
}
