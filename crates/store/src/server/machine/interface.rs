//! The inputs and outputs of the server's state machine, through which the state machine and the I/O side communicate.

use std::time::Duration;

use super::ledger::AllocationPolicy;
use super::pin_scan::PinPosition;
use crate::id::{AllocationId, ClientId};
use crate::protocol::frame::Payload;
use crate::protocol::{Change, NamedValue, Refusal, Request, Response, Status};
use crate::server::budget::{Account, Charge};

/// The settings of a store server: quotas, devices and user.
#[derive(Debug, Clone)]
pub(crate) struct ServerSettings {
    pub(crate) host: AllocationPolicy,
    pub(crate) device: AllocationPolicy,
    /// The UUIDs of the devices in whose memory the store can create objects.
    pub(crate) devices: Vec<[u8; 16]>,
    /// The user that the server runs as. Clients of this user may delete every object.
    pub(crate) user: u32,
    /// The maximum number of bytes of host memory that the server preallocates.
    pub(crate) prealloc_limit: u64,
}

impl ServerSettings {
    /// Sets the quota of host memory for objects. At most half of the quota is preallocated, and less if little of it or of the
    /// machine's memory is free.
    pub(crate) fn set_host_quota(&mut self, quota: u64) {
        self.host.quota = quota;
        self.prealloc_limit = quota / 2;
    }
}

/// The memory that a step of the state machine accesses besides the index: arenas and the clients' pin pages.
pub(crate) trait ServerMemory {
    /// Copies the bytes of a small object to an arena. Returns true on success.
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool;
    /// Reads the clients' pins in the order of client ids, starting at a position, until `work` is used up or, depending on the
    /// implementation, the end of a page is reached. `visit` returns the work that a pin of a client took. Returns the position
    /// to continue at; `None` after the last page.
    fn read_pins(
        &self,
        from: PinPosition,
        work: &mut usize,
        visit: &mut dyn FnMut(ClientId, u64) -> usize,
    ) -> Option<PinPosition>;
    /// Removes the pin page of a client that has left, and returns the pins that the client had set.
    fn take_pins(&mut self, client: ClientId) -> Vec<u64>;
}

/// The time at which a step of the state machine runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepTime {
    /// The time since an arbitrary start, which never decreases.
    pub(crate) elapsed: Duration,
    /// The time in milliseconds since the Unix epoch, for the creation times of objects.
    pub(crate) unix: u64,
}

/// An input of the server's state machine.
#[derive(Debug)]
pub(crate) enum Input<'a> {
    /// A client has connected. The next input is its first request, the hello message.
    Joined { client: ClientId, account: Account },
    /// A client has sent a request.
    Request {
        client: ClientId,
        request: Request,
        payload: Payload<'a>,
        /// The charge of the request's payload, if the payload has memory of its own.
        charge: Option<Charge>,
    },
    /// A client has disconnected or its process has exited, and the client uses no object any more.
    Left { client: ClientId },
    /// The memory of an [`Output::Allocate`] or [`Output::Import`] is ready and the keeper process has its descriptor, or the
    /// memory is not available for the given reason.
    Allocated { allocation: AllocationId, outcome: Result<(), String> },
    /// The memory of an [`Output::CloseForWriting`] is sealed against writes, or cannot be sealed, for example because it is
    /// still mapped for writing.
    ClosedForWriting { allocation: AllocationId, outcome: Result<(), Refusal> },
    /// Only time has passed; there is no other event.
    Tick,
}

/// An action that the state machine has decided on, and that the I/O side carries out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Send a response to a client, with the descriptor of an allocation if `share` is set.
    Respond { client: ClientId, response: Response, share: Option<SharedAllocation> },
    /// Admit a client whose hello message is valid: send the client the index and a pin page.
    Admit { client: ClientId, request: u64, is_repeated: bool },
    /// Allocate memory, send its descriptor to the keeper process, and report [`Input::Allocated`].
    Allocate { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// Raise the priority of a preallocation to that of this user's requests, because a request of the user waits for the memory.
    Promote { allocation: AllocationId, user: u32 },
    /// Check the memory that was sent with a request, send its descriptor to the keeper process, and report [`Input::Allocated`].
    Import { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// Seal memory against writes (`F_SEAL_WRITE`), and report [`Input::ClosedForWriting`]. If `at_once` is true, the event loop
    /// seals the memory instead of a worker thread: the memory is short and its writer is trusted.
    CloseForWriting { allocation: AllocationId, at_once: bool, requester: Requester },
    /// Release memory: close its descriptors in the server and in the keeper process.
    Release { allocation: AllocationId },
    /// Release memory like [`Output::Release`], but first return its pages to the kernel, because a failed allocation is tried
    /// again next.
    Reclaim { allocation: AllocationId },
    /// Close the connection of a client.
    Disconnect { client: ClientId },
    /// Send a client the events of names with this prefix.
    Watch { client: ClientId, prefix: String, start: WatchStart },
    /// Answer a request for statistics: with this status and these values, and with those of the I/O side.
    Report { client: ClientId, request: u64, status: Status, values: Vec<NamedValue> },
    /// Send the events of a change to the clients that watch the names of the changed objects.
    Notify(Change),
}

/// Where a watch of a client starts, and the form of its events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchStart {
    /// The events from now on, in the form of protocol 5.
    NameEvents,
    /// The events behind a revision, or from now on. The I/O side answers the request.
    After { request: u64, revision: Option<u64> },
}

/// The requester of a worker thread's job, which allocates or seals memory. Workers serve requesters round-robin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Requester {
    /// A user, for a request of one of the user's clients.
    User(u32),
    /// All users together, for an arena that any user's objects may share.
    Everyone,
    /// The server itself, for memory that it preallocates while it is idle.
    Server,
}

/// An allocation whose descriptor is sent with a response, and whether the descriptor is writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedAllocation {
    pub(crate) allocation: AllocationId,
    pub(crate) is_writable: bool,
}
