//! What the machine itself can do: the calls beneath this crate, made directly, for benchmarks to measure against.
//!
//! Each function makes the same system calls in the same order as the safe types do, with nothing around them. They
//! are safe functions, since they own what they make, and are hidden because nobody should build on them.

pub mod host;
