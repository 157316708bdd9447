//! Tests of collective calls over symmetric memory: bitwise results, synchronization rules, failures of ranks, and windows.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a test fails by panic, and its numbers are small"
)]

mod agreement;
mod bitwise_results;
mod call_order;
mod differing_calls;
mod driver_calls;
mod harness;
mod peer_failures;
mod random_elements;
mod random_registrations;
mod random_sequences;
mod registered;
mod registered_on_fake_driver;
mod slices;
mod synchronization_rules;
mod windows;
