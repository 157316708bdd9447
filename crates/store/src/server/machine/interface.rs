//! What goes into the machine and what comes out of it: the types that the machine and the I/O side share.

use std::time::Duration;

use super::ledger::Terms;
use super::pin_scan::PinPosition;
use crate::id::{AllocationId, ClientId};
use crate::protocol::frame::Payload;
use crate::protocol::{Event, Refusal, Request, Response};
use crate::server::budget::{Account, Charge};

/// The limits of a server and the user it runs as.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) host: Terms,
    pub(crate) device: Terms,
    /// The devices whose memory it hands out.
    pub(crate) devices: Vec<[u8; 16]>,
    /// The user that the server runs as. Its clients may delete every object.
    pub(crate) user: u32,
    /// How many bytes of host memory may be preallocated.
    pub(crate) ahead: u64,
}

impl Settings {
    /// Sets the quota of host memory. At most an eighth of it is preallocated.
    pub(crate) fn limit_host(&mut self, quota: u64) {
        self.host.quota = quota;
        self.ahead = quota / 8;
    }
}

/// The memory that a step may access, besides the index: arenas and the clients' pages of pins.
pub(crate) trait ServerMemory {
    /// Copies the bytes of a small object into an arena. Returns whether that succeeded.
    fn write(&mut self, allocation: AllocationId, offset: u64, bytes: &[u8]) -> bool;
    /// Reads pins in the order of their clients' ids, starting at a position, until the work is used up or a page has been
    /// read. `visit` returns how much work a pin was. Returns where to continue; `None` after the last page.
    fn read_pins(
        &self,
        from: PinPosition,
        work: &mut usize,
        visit: &mut dyn FnMut(u64) -> usize,
    ) -> Option<PinPosition>;
    /// Removes the page of pins of a client that has left, and returns the pins that were set in it.
    fn take_pins(&mut self, client: ClientId) -> Vec<u64>;
}

/// The time of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    /// The time since an arbitrary moment of this process. It never decreases.
    pub(crate) elapsed: Duration,
    /// Milliseconds of the Unix epoch, for the creation time of objects.
    pub(crate) unix: u64,
}

/// An event that the machine is told about.
#[derive(Debug)]
pub(crate) enum Input<'a> {
    /// A client has connected and its first request follows.
    Joined { client: ClientId, account: Account },
    /// A client has sent a request.
    Request {
        client: ClientId,
        request: Request,
        payload: Payload<'a>,
        /// For the payload, if it has memory of its own.
        charge: Option<Charge>,
    },
    /// A client has disconnected or exited, and holds nothing any more.
    Left { client: ClientId },
    /// Memory that was to be allocated or imported is ready and parked with the keeper, or the reason why it is not.
    Allocated { allocation: AllocationId, outcome: Result<(), String> },
    /// Memory that was to be closed for writing is closed, or is still mapped for writing.
    ClosedForWriting { allocation: AllocationId, outcome: Result<(), Refusal> },
    /// Time has passed.
    Tick,
}

/// An action that the machine has decided on and that the I/O side carries out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Send a response, with a descriptor of an allocation if there is a `share`.
    Respond { client: ClientId, response: Response, share: Option<Share> },
    /// Admit a client whose hello is valid: give it the index and a page of pins.
    Admit { client: ClientId, request: u64 },
    /// Allocate memory, park it with the keeper, and report [`Input::Allocated`].
    Allocate { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// A request of this user waits for memory that is being preallocated: allocate it as a request of that user.
    Promote { allocation: AllocationId, user: u32 },
    /// Check the memory that came with the request, park it with the keeper, and report [`Input::Allocated`].
    Import { allocation: AllocationId, len: u64, place: u32, requester: Requester },
    /// Make memory unwritable and report [`Input::ClosedForWriting`]. With `at_once`, the memory is short and its writer is
    /// trusted, so that the event loop does it itself instead of a worker.
    CloseForWriting { allocation: AllocationId, at_once: bool, requester: Requester },
    /// Close this memory, here and in the keeper.
    Release { allocation: AllocationId },
    /// As [`Output::Release`], and return its pages to the system first, because other memory is allocated from them next.
    Reclaim { allocation: AllocationId },
    /// Disconnect a client.
    Disconnect { client: ClientId },
    /// Send a client the events of objects whose names begin with this prefix, from now on.
    Watch { client: ClientId, prefix: String },
    /// Send an event to the clients that watch for it.
    Notify(Event),
}

/// On whose behalf memory is allocated or closed for writing. Workers take turns between requesters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Requester {
    /// A user, for a request of one of its clients.
    User(u32),
    /// All users: an arena, for which requests of several users may wait.
    Everyone,
    /// The server, for memory that it preallocates when there is nothing else to do.
    Server,
}

/// A descriptor of an allocation that is sent with a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) allocation: AllocationId,
    pub(crate) is_writable: bool,
}
