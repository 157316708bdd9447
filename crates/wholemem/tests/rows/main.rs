//! Tests that compare gather and scatter with a naive loop, for every kind of memory, partition, type and stride.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "a test fails by panic, and its numbers are small"
)]

mod case;
mod gpu;
mod naive;

use case::{RowCase, cases};
use proptest::prelude::*;
use wholemem::{Communicator, Dtype, IndexType, Kind, Location, OnBadIndex, Order};

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.min(4096) / 4, ..ProptestConfig::default() })]

    #[test]
    fn gathers_match_a_naive_loop(case in cases()) {
        let model = case.model();
        Communicator::on_each(&model.groups, |group| { model.gather(group); Ok(()) }).unwrap();
    }

    #[test]
    fn scatters_match_a_naive_loop(case in cases()) {
        case.model().scatter();
    }

    #[test]
    fn scatters_in_a_fixed_order_match_a_naive_loop(case in cases()) {
        case.model().scatter_fixed();
    }

    #[test]
    fn additions_match_a_naive_loop(case in cases()) {
        let mut model = case.model();
        model.add(Order::Any);
        model.add(Order::Fixed);
    }
}

/// Tests edge cases of gather and scatter in addition to the random cases.
#[test]
fn fixed_cases_match_a_naive_loop() {
    for case in fixed_cases() {
        case.model().all();
    }
}

fn fixed_cases() -> Vec<RowCase> {
    let partitions: [(&[u64], u64); 8] = [
        (&[0], 25),
        (&[1], 1),
        (&[0, 1, 0], 3),
        (&[0, 0, 0], 3),
        (&[1; 17], 25),
        (&[0, 5, 0, 0, 7, 1, 0, 2, 9, 0, 0, 3, 1, 1, 0, 0, 4], 12),
        (&[3000, 1, 2000], 100),
        (&[2, 1], (2 << 20) + 4),
    ];
    let places = [
        (Kind::Continuous, Location::Device),
        (Kind::Chunked, Location::Device),
        (Kind::Chunked, Location::Host),
    ];
    let case = |(rows_of_each, elements): (&[u64], u64), (kind, location)| RowCase {
        rows_of_each: rows_of_each.to_vec(),
        elements,
        kind,
        location,
        dtype: Dtype::U8,
        dense: Dtype::U8,
        index: IndexType::I32,
        gap: 3,
        count: if elements > 1000 { 3 } else { 40 },
        on_bad: OnBadIndex::Note,
        bad_at: None,
        large_granule: true,
        view: None,
        seed: 7,
    };
    partitions.into_iter().flat_map(|partition| places.map(|place| case(partition, place))).collect()
}
