//! Tests of whole memory with graphs, with ranks that are processes, and beyond 4 GiB.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod graphs;
mod large;
mod processes;
