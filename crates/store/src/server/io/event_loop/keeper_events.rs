//! What the server's loop does about its keeper: descriptors that wait to be parked, and a keeper that has died.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use wholemem_os::{PidFd, memfd};

use super::super::clients::Ending;
use super::super::keeper_link::Parking;
use super::{EventLoop, RETRY};
use crate::id::ClientId;
use crate::keeper::{Kept, Key};
use crate::protocol::{Answer, Response};
use crate::server::machine::Input;
use crate::{Refusal, Result};

impl EventLoop<'_> {
    /// Has the keeper know of a process, or that there is none, before the client that asked for it is told.
    pub(super) fn park_process(
        &mut self,
        client: ClientId,
        request: u64,
        fds: Result<Vec<(Key, OwnedFd)>, Refusal>,
    ) {
        match fds {
            Ok(fds) => {
                if let Some(parked) = self.keeper.park(Parking::Process { client, request }, fds) {
                    self.parked(parked);
                }
            }
            Err(refusal) => {
                let refusal = refusal.for_protocol(self.server.protocol(client));
                self.clients.refuse(client, request, refusal);
                self.end(client, Ending::Dismissed);
            }
        }
    }

    /// The keeper has what it was given.
    pub(super) fn parked(&mut self, what: Parking) {
        match what {
            Parking::Memory(allocation) => self.step(Input::Allocated { allocation, outcome: Ok(()) }),
            Parking::Client(client) => self.welcome(client),
            Parking::Process { client, request: id } => {
                self.clients.say(client, &Response { id, answer: Answer::Done }, Vec::new());
            }
        }
    }

    /// The keeper has not taken something in time.
    pub(super) fn give_up_parking(&mut self, what: Parking) {
        match what {
            Parking::Memory(allocation) => {
                let outcome = Err("the keeper does not take it: has it descriptors left?".to_owned());
                self.step(Input::Allocated { allocation, outcome });
            }
            Parking::Client(client) => self.end(client, Ending::Gone),
            Parking::Process { client, .. } => self.end(client, Ending::Dismissed),
        }
    }

    pub(super) fn hear_keeper(&mut self) {
        let said = self.keeper.hear(&mut self.packet);
        said.parked.into_iter().for_each(|parked| self.parked(parked));
        self.is_stopping |= said.stop;
        if said.is_lost {
            self.lose_keeper();
        }
    }

    /// The keeper is dead. Until there is another, the memory lives and dies with this process.
    pub(super) fn lose_keeper(&mut self) {
        tracing::warn!("the keeper is dead: unprotected until another one runs");
        let parked = self.keeper.lose(&mut self.clients.poller);
        parked.into_iter().for_each(|parked| self.parked(parked));
        self.start_keeper();
    }

    pub(super) fn start_keeper(&mut self) {
        let kept = self.everything();
        let started = kept.and_then(|kept| self.keeper.start(&kept, &mut self.clients.poller));
        if let Err(error) = started {
            tracing::error!(%error, "cannot start a keeper");
            self.retry_at = Some(Instant::now() + RETRY);
        }
    }

    /// Everything a keeper has to have.
    fn everything(&self) -> Result<Kept> {
        let mut kept = Kept::default();
        kept.insert(Key::Index, self.index.share_fd()?);
        self.acceptor.keep(&mut kept)?;
        kept.insert(Key::Server, PidFd::of_self()?.into());
        for (allocation, fd) in self.memory.fds() {
            kept.insert(Key::Allocation(allocation), memfd::share_fd(fd.as_fd())?);
        }
        for (client, connection) in self.clients.iter() {
            for (key, fd) in connection.park(client)? {
                kept.insert(key, fd);
            }
        }
        Ok(kept)
    }
}
