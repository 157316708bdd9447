//! A store as processes: a keeper, a server and clients, which are killed, stopped and lied to.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

mod adopt;
mod attacks;
mod crowd;
mod gpu;
mod kills;
mod load;
mod memory_limits;
mod misuse;
mod objects;
mod places;
mod restarts;
mod served;
mod versions;
mod wire;
