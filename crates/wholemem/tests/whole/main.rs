//! Tests of whole memory with graphs, with ranks that are processes, beyond 4 GiB, and on NUMA nodes.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod graphs;
mod large;
mod numa;
mod processes;
