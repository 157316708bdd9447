//! Collectives through symmetric memory: every bit, every rule of synchronization, every way to fail.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a test fails by panic, and its numbers are small"
)]

mod bits;
mod deaths;
mod orders;
mod rules;
mod slices;
mod values;
mod windows;
mod world;
