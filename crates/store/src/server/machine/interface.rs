//! The inputs and outputs of the state machine, which the machine and the I/O side share.

use std::time::Duration;

use super::ledger::AllocationPolicy;
use super::pin_scan::PinPosition;
use crate::id::{AllocationId, ClientId};
use crate::protocol::frame::Payload;
use crate::protocol::{Event, Refusal, Request, Response};
use crate::server::budget::{Account, Charge};

/// The quotas, devices and user of a server.
#[derive(Debug, Clone)]
pub(crate) struct ServerSettings {
    pub(crate) host: AllocationPolicy,
    pub(crate) device: AllocationPolicy,
    /// The UUIDs of the devices whose memory the store offers.
    pub(crate) devices: Vec<[u8; 16]>,
    /// The user that the server runs as. Its clients may delete every object.
    pub(crate) user: u32,
    /// The limit of preallocated host memory, in bytes.
    pub(crate) prealloc_limit: u64,
}

impl ServerSettings {
    /// Sets the quota of host memory. At most an eighth of it is preallocated.
    pub(crate) fn set_host_quota(&mut self, quota: u64) {
        self.host.quota = quota;
        self.prealloc_limit = quota / 8;
    }
}

/// The memory that a step accesses besides the index: arenas and the clients' pin pages.
pub(crate) trait ServerMemory {
    /// Copies the bytes of a small object to an arena. Returns whether that succeeded.
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool;
    /// Reads pins in the order of their clients' ids, starting at a position, until the work is used up or the end of a page is
    /// reached. `visit` returns the work that a pin took. Returns the position to continue at; `None` after the last page.
    fn read_pins(
        &self,
        from: PinPosition,
        work: &mut usize,
        visit: &mut dyn FnMut(u64) -> usize,
    ) -> Option<PinPosition>;
    /// Removes the pin page of a client that has left, and returns its pins.
    fn take_pins(&mut self, client: ClientId) -> Vec<u64>;
}

/// The time of a step of the state machine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepTime {
    /// The time since an arbitrary start; never decreases.
    pub(crate) elapsed: Duration,
    /// Milliseconds since the Unix epoch, for the creation time of objects.
    pub(crate) unix: u64,
}

/// An input of the state machine.
#[derive(Debug)]
pub(crate) enum Input<'a> {
    /// A client has connected; its first request follows.
    Joined { client: ClientId, account: Account },
    /// A client has sent a request.
    Request {
        client: ClientId,
        request: Request,
        payload: Payload<'a>,
        /// The charge of the payload, if the payload has memory of its own.
        charge: Option<Charge>,
    },
    /// A client has disconnected or exited, and uses no object any more.
    Left { client: ClientId },
    /// Memory of an `Allocate` or `Import` is ready and parked with the keeper; or the reason for which it is not.
    Allocated { allocation: AllocationId, outcome: Result<(), String> },
    /// Memory of a `CloseForWriting` is sealed against writes; or is still mapped for writing.
    ClosedForWriting { allocation: AllocationId, outcome: Result<(), Refusal> },
    /// No event: only time has passed.
    Tick,
}

/// An action that the I/O side carries out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Send a response, with the descriptor of an allocation if `share` is set.
    Respond { client: ClientId, response: Response, share: Option<SharedAllocation> },
    /// Admit a client whose hello is valid: send it the index and a pin page.
    Admit { client: ClientId, request: u64 },
    /// Allocate memory, park it with the keeper, and report [`Input::Allocated`].
    Allocate { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// A request of this user waits for memory that is being preallocated: allocate it with the priority of that user's requests.
    Promote { allocation: AllocationId, user: u32 },
    /// Check the memory that was sent with the request, park it with the keeper, and report [`Input::Allocated`].
    Import { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// Seal memory against writes (`F_SEAL_WRITE`) and report [`Input::ClosedForWriting`]. With `at_once`, the event loop does it
    /// instead of a worker: the memory is short and its writer is trusted.
    CloseForWriting { allocation: AllocationId, at_once: bool, requester: Requester },
    /// Close the descriptor of this memory, here and in the keeper.
    Release { allocation: AllocationId },
    /// As [`Output::Release`], but first return its pages to the kernel, because an allocation that failed is tried again next.
    Reclaim { allocation: AllocationId },
    /// Close the connection of a client.
    Disconnect { client: ClientId },
    /// From now on, send a client the events of names with this prefix.
    Watch { client: ClientId, prefix: String },
    /// Send an event to the clients that watch its name.
    Notify(Event),
}

/// The user for whom memory is allocated or sealed. Workers serve requesters round-robin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Requester {
    /// A user, for a request of one of its clients.
    User(u32),
    /// All users, for an arena.
    Everyone,
    /// The server itself, for memory that it preallocates while it is idle.
    Server,
}

/// A descriptor of an allocation that is sent with a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedAllocation {
    pub(crate) allocation: AllocationId,
    pub(crate) is_writable: bool,
}
