//! The I/O of the store server: one thread that waits for events, passes them to the state machine, and carries out its outputs.
//!
//! | module | contents |
//! |---|---|
//! | [`event_loop`], [`poller`] | the event loop, and its event sources |
//! | [`startup`], [`index_memory`] | starts a server from the descriptors of the keeper |
//! | [`executor`] | carries out outputs |
//! | [`accept`], [`admission`] | how a client connects and is admitted |
//! | [`clients`], [`connection`], [`packet_queue`], [`message_slots`] | connections, and messages in both directions |
//! | [`request_times`] | the number of answered requests, and how long the answers took |
//! | [`watchers`] | events, and the clients that watch names |
//! | [`keeper_link`] | the connection to the keeper |
//! | [`memory_table`] | descriptors and maps of memory, and pin pages |
//! | [`workers`], [`headroom`] | threads that allocate memory, and how much may be allocated |
//! | [`heap_trim`] | when free heap memory is returned to the system |

mod accept;
mod admission;
mod clients;
mod connection;
mod event_loop;
mod executor;
mod headroom;
mod heap_trim;
mod index_memory;
mod keeper_link;
mod memory_table;
mod message_slots;
mod packet_queue;
mod poller;
mod request_times;
mod startup;
mod watchers;
mod workers;

pub(crate) use event_loop::run;
