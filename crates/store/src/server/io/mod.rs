//! The I/O of the server: one thread that waits for events, tells the machine, and carries out what it decides.

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
mod outbox;
mod poller;
mod startup;
mod watchers;
mod workers;

pub(crate) use event_loop::run;
