//! Tests of a store with real processes: a keeper, a server and clients, which are killed, stopped and attacked.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod adopt;
mod attacks;
mod environments;
mod gpu;
mod kills;
mod load;
mod memory_limits;
mod misuse;
mod objects;
mod overload;
mod raw_protocol;
mod restarts;
mod statistics;
mod test_store;
mod versions;
mod watches;
