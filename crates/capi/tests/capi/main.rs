//! Tests of the C interface: the exported functions as C calls them, programs in C, and the committed list of the interface.

#![allow(unsafe_code, reason = "the tests call the functions of the C interface")]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "a test fails by panic, and its numbers are small"
)]

mod c_programs;
mod collectives;
mod fake_driver;
mod interface_list;
mod invalid_arguments;
mod ranks;
mod rows;
mod statuses;
mod support;
