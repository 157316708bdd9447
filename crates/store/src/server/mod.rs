//! The store server: a state machine that makes all decisions, and an event loop that does its I/O.
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
//! The state machine ([`machine`]) owns all knowledge of objects, memory and clients, and does no I/O. Its parts:
//!
//! | part | contents |
//! |---|---|
//! | `Server` | the parts below; dispatches each input to one of them |
//! | `Creation` | requests that wait for memory: `PendingMemory` |
//! | `Sealing` | drafts whose memory is being sealed against writes |
//! | `StoreState` | the parts below, and the operations that change several of them |
//! | `ObjectTable` | the index, its free slots, the names, the members of packs, the counts of objects |
//! | `MemoryPool` | `Ledger` (quota, allocations, arenas) and `Prealloc` (memory that is allocated before it is needed) |
//! | `Sessions` | users, accounts, protocol versions and drafts of clients |
//! | `RequestHistory` | the object that each request has created, for requests that are sent again |
//! | `Retirement` | deleted objects, and the scan for their pins: `PinScan` |
//! | `WaitingRequests` | requests for a name or for free space that are answered later |
//! | `Outputs` | the actions that the current step has decided on |
//!
//! The I/O side ([`io`]) owns descriptors, maps and threads:
//!
//! | part | contents |
//! |---|---|
//! | `EventLoop` | the state machine, the parts below, and the order of one iteration |
//! | `Executor` | carries out the outputs of the state machine |
//! | `Clients` | `ClientConnection`s, `Poller`, `Budget`, `EventWatchers`, `MessageSlots` |
//! | `MemoryTable` | the descriptors and maps of allocations, and the clients' pin pages |
//! | `Workers` | threads that allocate memory, check adopted memory and seal memory against writes (`F_SEAL_WRITE`) |
//! | `KeeperLink` | the connection to the keeper, and the descriptors that are being parked there |
//! | `Admission` | the resources of a client that is admitted: its descriptors and its pin page |
//! | `ClientAcceptor` | the listening socket, and the rate at which connections are accepted |
//! | `HeapTrim` | when free heap memory is returned to the system |
//!
//! Used by both: [`budget`] charges memory and descriptors to clients, [`fair_queue`] schedules users round-robin.
//!
//! # How a request is processed
//!
//! A put of a small object, whose bytes are sent with the request:
//!
//! 1. `Poller` reports the client's socket. `EventLoop::serve` has `Clients` read it: `ClientConnection` assembles the packets and
//!    decodes the request.
//! 2. `EventLoop` passes `Input::Request` to `Server::step`. `Sessions` checks that the client has sent its hello and that the
//!    request was not received before. `Server` dispatches it to `Creation::create`.
//! 3. `Creation` validates it (`CreatePlan`), carves a region from an arena (`MemoryPool`), copies the bytes there
//!    ([`ServerMemory`], which is the `MemoryTable`), and enters the object by `StoreState::insert`.
//! 4. `ObjectTable` writes a record of the index, commits it by one store, and assigns the name. The object that had the name
//!    before is passed to `Retirement`. `WaitingRequests` answers clients that waited for the name.
//! 5. The step continues with a bounded amount of pending work: it scans pins, resumes waiting requests, and allocates or
//!    releases preallocated memory.
//! 6. `Executor` carries out the outputs in order: it sends events to watchers and the response to the client, and closes the
//!    descriptors of freed memory here and in the keeper.
//!
//! A get does not reach the server once the object's memory is mapped: the client reads the index. A large object takes more
//! steps. `Output::Allocate` starts the allocation of its memory on a worker, and `Input::Allocated` continues the request when
//! the keeper has parked the descriptor. A seal first seals the memory against writes (`Output::CloseForWriting`), and is
//! answered after `Input::ClosedForWriting`. A delete marks the object; its memory is freed when a pass over all pins finds none
//! of it.
//!
//! # Guarantees
//!
//! An operation is committed by one store to the index, and answered after that. No sealed object is lost while the keeper or the
//! server lives. The server never waits for a client, and the work of one iteration is bounded.

mod budget;
mod fair_queue;
mod io;
mod machine;

pub(crate) use io::run;
pub(crate) use machine::{AllocationPolicy, ServerSettings};

/// The types that the entry points for fuzzing use.
#[cfg(feature = "test-hooks")]
pub(crate) use {
    budget::{Budget, BudgetLimits},
    machine::{InheritedState, Input, Output, PinPosition, Server, ServerMemory, StepTime},
};
