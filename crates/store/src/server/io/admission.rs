//! Admits clients: a client that has sent its hello message gets the index and a pin page (in which it marks objects in use),
//! after the keeper process has the client's descriptors.
//!
//! ```text
//!   hello --> admit --> keeper parks socket, process, pins --> welcome --> the server reads requests
//! ```

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use super::clients::{Clients, EndReason};
use super::connection::{ClientConnection, admission_refusal};
use super::executor::FollowUp;
use super::headroom::{Headroom, MemoryPurpose, bookkeeping};
use super::index_memory::IndexMemory;
use super::keeper_link::{KeeperLink, ParkAction};
use super::memory_table::MemoryTable;
use crate::id::ClientId;
use crate::keeper::{DescriptorKey, DescriptorTable};
use crate::protocol::{Answer, Request, Response};
use crate::{Refusal, Result};

/// The data for admitting a client: the index and the device UUIDs, which every client receives, and the headroom (the memory
/// that the server may still allocate).
#[derive(Debug)]
pub(super) struct Admission {
    index: IndexMemory,
    /// The UUIDs of the devices in whose memory the store can create objects.
    devices: Vec<[u8; 16]>,
    headroom: Arc<Headroom>,
}

impl Admission {
    pub(super) fn new(index: IndexMemory, devices: Vec<[u8; 16]>, headroom: Arc<Headroom>) -> Self {
        Self { index, devices, headroom }
    }

    /// Adds the descriptor of the index to the table of descriptors that a new keeper process receives.
    pub(super) fn add_descriptors(&self, descriptors: &mut DescriptorTable) -> Result<()> {
        descriptors.insert(DescriptorKey::Index, self.index.share_fd()?);
        Ok(())
    }

    /// Refuses a request if too little system memory is available for the records that the request would add to the server and
    /// the index.
    pub(super) fn check_memory(&self, request: &Request) -> Result<(), Refusal> {
        let needed = bookkeeping(request);
        if needed > 0
            && let Err(shortage) = self.headroom.claim(needed, MemoryPurpose::Bookkeeping)
        {
            return Err(shortage.refusal(needed));
        }
        Ok(())
    }

    /// Starts to admit a client that has sent a valid hello message: creates its pin page (in which the client marks objects in
    /// use), and sends the client's descriptors to the keeper process. A client that has closed its connection meanwhile is not
    /// admitted, because an admission is the most expensive request that a client can make without a quota.
    pub(super) fn admit(
        &self,
        client: ClientId,
        request: u64,
        clients: &mut Clients,
        memory: &mut MemoryTable,
        keeper: &mut KeeperLink<'_>,
    ) -> Option<FollowUp> {
        if clients.get(client).is_some_and(ClientConnection::has_peer_closed) {
            return Some(FollowUp::End(client, EndReason::Closed));
        }
        let admitted = match clients.admit(client, request, &self.headroom) {
            Ok(Ok(())) => prepare(client, clients, memory),
            Ok(Err(refusal)) => Err(refusal),
            Err(error) => Err(admission_refusal(&error)),
        };
        match admitted {
            Ok(fds) => {
                keeper.park(ParkAction::Client(client), fds)?;
                // No keeper process runs, so the client is admitted without waiting.
                self.welcome(client, clients)
            }
            Err(refusal) => Some(FollowUp::Reject { client, request, refusal, ending: EndReason::Left }),
        }
    }

    /// Answers the hello message of a client whose descriptors the keeper process holds.
    pub(super) fn welcome(&self, client: ClientId, clients: &mut Clients) -> Option<FollowUp> {
        let id = clients.open(client)?;
        self.answer_hello(client, id, clients)
    }

    /// Answers a hello message of an admitted client. A client sends the message again if the server that has admitted it died
    /// before it answered.
    pub(super) fn answer_hello(&self, client: ClientId, id: u64, clients: &mut Clients) -> Option<FollowUp> {
        let admitted = clients.get(client).and_then(|connection| connection.admitted.as_ref())?;
        let Ok(pins) = admitted.pins.share_fd() else {
            return Some(FollowUp::End(client, EndReason::Left));
        };
        let (index_len, devices) = (self.index.len(), self.devices.clone());
        let answer = Answer::Welcome { client, index_len, devices };
        clients.send(client, &Response { id, answer }, vec![self.index.reader(), Rc::new(pins)]);
        None
    }
}

/// Maps the pin page of a client that is being admitted, in which the client marks objects in use. Returns the client's
/// descriptors for the keeper process.
fn prepare(
    client: ClientId,
    clients: &Clients,
    memory: &mut MemoryTable,
) -> Result<Vec<(DescriptorKey, OwnedFd)>, Refusal> {
    let Some(connection) = clients.get(client) else { return Ok(Vec::new()) };
    let fds = connection.park(client).and_then(|fds| {
        if let Some(admitted) = &connection.admitted {
            memory.add_pins(client, &admitted.pins)?;
        }
        Ok(fds)
    });
    fds.map_err(|error| admission_refusal(&error))
}
