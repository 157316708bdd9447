//! The server: a state machine that decides, and an event loop that does its I/O.
//!
//! ```text
//!                 io/                                              machine/
//!   clients ----> Clients -----> EventLoop --- step(now, Input) --> Server
//!                    ^               |                                |  Creation   Sealing
//!                    |               |                                |       \     /
//!                    |               |                                |     StoreState
//!                    |               v                                |   ObjectTable  MemoryPool
//!                    +----------- Executor <------ Vec<Output> -------+   Sessions     Retirement
//!                                 |  |   |                                RequestHistory
//!                     MemoryTable-+  |   +-Admission                      WaitingRequests
//!                          Workers --+-- KeeperLink ----> keeper          Outputs
//! ```
//!
//! The machine ([`machine`]) owns what is known of objects, memory and clients, and does no I/O. Its parts:
//!
//! | part | what it owns |
//! |---|---|
//! | `Server` | the parts below; passes each input to one of them |
//! | `Creation` | requests that wait for memory: `PendingMemory` |
//! | `Sealing` | drafts whose memory is being closed for writing |
//! | `StoreState` | the parts below, and the operations that change several of them |
//! | `ObjectTable` | the index, its free slots, the names, the members of packs, the counts of objects |
//! | `MemoryPool` | `Ledger` (quota, allocations, arenas) and `Prealloc` (memory that is allocated before it is needed) |
//! | `Sessions` | users, accounts, protocol versions and drafts of clients |
//! | `RequestHistory` | which object each request has created, for requests that are repeated |
//! | `Retirement` | deleted objects, and the search for their pins: `PinScan` |
//! | `WaitingRequests` | requests for a name or for room that are answered later |
//! | `Outputs` | what the current step has decided |
//!
//! The I/O side ([`io`]) owns descriptors, maps and threads:
//!
//! | part | what it owns |
//! |---|---|
//! | `EventLoop` | the machine, the parts below, and the order of one turn |
//! | `Executor` | the parts with which outputs are carried out |
//! | `Clients` | `Connection`s, `Poller`, `Budget`, `Watchers`, `MessageSlots` |
//! | `MemoryTable` | the descriptors and maps of allocations, and the clients' pages of pins |
//! | `Workers` | threads that allocate memory, check it and close it for writing |
//! | `KeeperLink` | the connection to the keeper, and what is being parked there |
//! | `Admission` | what a client is given at its hello, and whether there is memory for it |
//! | `Acceptor` | the listening socket, and when connections are accepted |
//! | `HeapTrim` | when free heap memory is returned to the system |
//!
//! Used by both: [`budget`] charges memory and descriptors to clients, [`fair_queue`] takes turns between users.
//!
//! # How a request is processed
//!
//! A put of a small object, which brings its bytes along:
//!
//! 1. `Poller` reports the client's socket. `EventLoop::serve` has `Clients` read it: `Connection` assembles the packets and
//!    decodes the request.
//! 2. `EventLoop` passes `Input::Request` to `Server::step`. `Sessions` checks that the client has sent its hello and that the
//!    request is not a repeated one. `Server` dispatches it to `Creation::create`.
//! 3. `Creation` validates it (`Plan`), carves a region from an arena (`MemoryPool`), copies the bytes there
//!    ([`ServerMemory`], which is the `MemoryTable`), and enters the object by `StoreState::insert`.
//! 4. `ObjectTable` fills a record of the index, commits it by one store, and gives the object its name. The object that had
//!    the name before is passed to `Retirement`. `WaitingRequests` answers clients that waited for the name.
//! 5. The step continues with a bounded amount of left-over work: pins are searched for, requests that waited are resumed,
//!    memory is preallocated or released.
//! 6. `Executor` carries out the outputs in order: events to watchers, the response to the client, descriptors of freed
//!    memory closed here and in the keeper.
//!
//! A get does not reach the server once the object's memory is mapped: the client reads the index. A large object takes more
//! steps. `Output::Allocate` has a worker allocate its memory, and `Input::Allocated` continues the request when the
//! keeper has parked it. A seal has the memory closed for writing (`Output::CloseForWriting`), and is answered after
//! `Input::ClosedForWriting`. A delete marks the object; its memory is freed by the pass over the pins that finds none.
//!
//! # Guarantees
//!
//! An operation is committed by one store into the index, and answered after that. No sealed object is lost while the keeper
//! or the server lives. The server never waits for a client, and the work of one turn is bounded.

mod budget;
mod fair_queue;
mod io;
mod machine;

pub(crate) use io::run;
pub(crate) use machine::{Settings, Terms};

/// What the entry points for fuzzing call.
#[cfg(feature = "test-hooks")]
pub(crate) use {
    budget::{Budget, Limits},
    machine::{Input, Now, Output, PinPosition, Server, ServerMemory, Survivors},
};
