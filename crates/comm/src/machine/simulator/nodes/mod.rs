//! Seeded simulators of groups on several nodes, with links that delay messages, are reset, cut in one or both directions
//! and healed, and with slow and stopped nodes. They run the state machines of [`assembly`](crate::machine::assembly),
//! [`link_monitor`](crate::machine::link_monitor), [`converge`](crate::machine::converge) and
//! [`group_state`](crate::machine::group_state).
//!
//! | module | description |
//! |---|---|
//! | [`network`] | connections, and what happens to them |
//! | [`joining`] | ranks that join |
//! | [`running`] | a group that performs a collective |

mod joining;
mod network;
mod running;
mod running_tests;
