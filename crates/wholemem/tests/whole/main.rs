//! Whole memory where it takes more than one call: repeated in graphs, among processes, and beyond four gibibytes.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod graphs;
mod large;
mod processes;
