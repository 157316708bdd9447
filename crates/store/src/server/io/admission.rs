//! Admits clients: a client that has sent its hello gets the index and a pin page, after the keeper has its descriptors.
//!
//! ```text
//!   hello --> admit --> keeper parks socket, process, pins --> welcome --> the server reads requests
//! ```

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use super::clients::{Clients, EndReason};
use super::connection::admission_refusal;
use super::executor::FollowUp;
use super::headroom::{Headroom, MemoryPurpose, bookkeeping};
use super::index_memory::IndexMemory;
use super::keeper_link::{KeeperLink, ParkAction};
use super::memory_table::MemoryTable;
use crate::id::ClientId;
use crate::keeper::{DescriptorKey, DescriptorTable};
use crate::protocol::{Answer, Request, Response};
use crate::{Refusal, Result};

/// The resources that every client gets when it is admitted.
#[derive(Debug)]
pub(super) struct Admission {
    index: IndexMemory,
    /// The UUIDs of the devices whose memory the store offers.
    devices: Vec<[u8; 16]>,
    headroom: Arc<Headroom>,
}

impl Admission {
    pub(super) fn new(index: IndexMemory, devices: Vec<[u8; 16]>, headroom: Arc<Headroom>) -> Self {
        Self { index, devices, headroom }
    }

    /// Adds the descriptor of the index for another keeper.
    pub(super) fn add_descriptors(&self, descriptors: &mut DescriptorTable) -> Result<()> {
        descriptors.insert(DescriptorKey::Index, self.index.share_fd()?);
        Ok(())
    }

    /// Refuses a request if the system has no memory for its bookkeeping.
    pub(super) fn check_memory(&self, request: &Request) -> Result<(), Refusal> {
        let needed = bookkeeping(request);
        if needed > 0
            && let Err(shortage) = self.headroom.claim(needed, MemoryPurpose::Bookkeeping)
        {
            return Err(shortage.refusal(needed));
        }
        Ok(())
    }

    /// A client has sent a valid hello: creates its pin page, and parks its descriptors with the keeper.
    pub(super) fn admit(
        &self,
        client: ClientId,
        request: u64,
        clients: &mut Clients,
        memory: &mut MemoryTable,
        keeper: &mut KeeperLink<'_>,
    ) -> Option<FollowUp> {
        let admitted = match clients.admit(client, request, &self.headroom) {
            Ok(Ok(())) => prepare(client, clients, memory),
            Ok(Err(refusal)) => Err(refusal),
            Err(error) => Err(admission_refusal(&error)),
        };
        match admitted {
            Ok(fds) => {
                keeper.park(ParkAction::Client(client), fds)?;
                // There is no keeper to wait for.
                self.welcome(client, clients)
            }
            Err(refusal) => Some(FollowUp::Reject { client, request, refusal, ending: EndReason::Left }),
        }
    }

    /// The keeper has the descriptors of a client: answers its hello.
    pub(super) fn welcome(&self, client: ClientId, clients: &mut Clients) -> Option<FollowUp> {
        let id = clients.open(client)?;
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

/// Maps the pin page of a client that is being admitted. Returns the descriptors for the keeper.
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
