//! Carries out what the machine decides: responses, memory, descriptors for the keeper, connections.
//!
//! An action that is complete at once, or that fails, has a [`FollowUp`] for the event loop. The executor does not call the
//! machine.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use wholemem_os::{PidFd, memfd};

use super::accept::Acceptor;
use super::admission::Admission;
use super::clients::{Clients, Ending};
use super::keeper_link::{KeeperLink, Parking};
use super::memory_table::{Closing, MemoryTable};
use super::workers::{Done, Job, Workers};
use crate::id::{AllocationId, ClientId};
use crate::keeper::{DescriptorTable, Key};
use crate::protocol::{Answer, Response};
use crate::server::machine::{HOST, Input, Output, Requester};
use crate::{Refusal, Result};

/// What follows from an action.
#[derive(Debug)]
pub(super) enum FollowUp {
    /// The machine is told.
    Step(Input<'static>),
    /// A connection ends.
    End(ClientId, Ending),
    /// A client is told that its request is refused, and its connection ends.
    Reject { client: ClientId, request: u64, refusal: Refusal, ending: Ending },
}

/// An allocation that is to be tried again, and why it failed.
#[derive(Debug)]
pub(super) struct Retry {
    requester: Requester,
    job: Job,
    reason: String,
}

/// What actions are carried out on.
pub(super) struct Executor<'a> {
    pub(super) memory: MemoryTable,
    pub(super) clients: Clients,
    pub(super) keeper: KeeperLink<'a>,
    pub(super) workers: Workers,
    pub(super) admission: Admission,
    /// Allocations that failed, and are tried again when the keeper has freed what was released before.
    pub(super) retries: BTreeMap<AllocationId, Retry>,
}

impl Executor<'_> {
    /// Carries out an action. `offered` is the descriptor that came with the request that caused it.
    pub(super) fn perform(&mut self, output: Output, offered: &mut Option<OwnedFd>) -> Option<FollowUp> {
        match output {
            Output::Respond { client, response, share } => {
                let shared = share.map(|share| self.memory.share(share)).transpose();
                match shared {
                    Ok(fd) => self.clients.send(client, &response, fd.flatten().into_iter().collect()),
                    Err(refusal) => self.clients.refuse(client, response.id, refusal),
                }
            }
            Output::Admit { client, request } => {
                let Self { memory, clients, keeper, admission, .. } = self;
                return admission.admit(client, request, clients, memory, keeper);
            }
            Output::Allocate { allocation, len, place, requester } => {
                self.keeper.send_released();
                self.workers.add(requester, Job::Allocate { allocation, len, place, is_retry: false });
            }
            Output::Promote { allocation, user } => self.workers.promote(allocation, user),
            Output::Import { allocation, len, place, requester } => {
                self.workers.add(requester, Job::Check { allocation, len, place, fd: offered.take() });
            }
            Output::CloseForWriting { allocation, at_once, requester } => {
                match self.memory.close(allocation, at_once) {
                    Closing::Done(outcome) => {
                        return Some(FollowUp::Step(Input::ClosedForWriting { allocation, outcome }));
                    }
                    Closing::Later(fd) => self.workers.add(requester, Job::Close { allocation, fd }),
                }
            }
            Output::Reclaim { allocation } => {
                if let Err(error) = self.memory.discard(allocation) {
                    tracing::warn!(%allocation, %error, "memory is free only when the keeper has closed it");
                }
                self.release(allocation);
            }
            Output::Release { allocation } => self.release(allocation),
            Output::Disconnect { client } => return Some(FollowUp::End(client, Ending::Disconnected)),
            Output::Watch { client, prefix } => {
                if let Err(refusal) = self.clients.watch(client, prefix) {
                    let ending = Ending::Disconnected;
                    return Some(FollowUp::Reject { client, request: 0, refusal, ending });
                }
            }
            Output::Notify(event) => self.clients.notify(event),
        }
        None
    }

    fn release(&mut self, allocation: AllocationId) {
        self.memory.remove(allocation);
        self.keeper.release(allocation);
    }

    /// A worker has finished a job.
    pub(super) fn finished(&mut self, done: Done) -> Option<FollowUp> {
        let input = match done {
            Done::Closed { allocation, outcome } => {
                if outcome.is_ok() {
                    self.memory.closed(allocation);
                }
                Input::ClosedForWriting { allocation, outcome }
            }
            Done::Failed { allocation, requester, retry: job, reason } => {
                self.retries.insert(allocation, Retry { requester, job, reason });
                let waited = self.keeper.after_releases(Parking::Retry(allocation))?;
                return self.parked(waited);
            }
            Done::Allocated { allocation, outcome: Err(reason), .. } => {
                Input::Allocated { allocation, outcome: Err(reason) }
            }
            Done::Allocated { allocation, place, outcome: Ok(fd) } => {
                let shared = memfd::share_fd(fd.as_fd());
                let added =
                    shared.and_then(|shared| self.memory.add(allocation, fd, place == HOST).map(|()| shared));
                match added {
                    Ok(shared) => {
                        let fds = vec![(Key::Allocation(allocation), shared)];
                        let parked = self.keeper.park(Parking::Memory(allocation), fds)?;
                        return self.parked(parked);
                    }
                    Err(error) => Input::Allocated { allocation, outcome: Err(error.to_string()) },
                }
            }
        };
        Some(FollowUp::Step(input))
    }

    /// The keeper has parked something, or there is no keeper to wait for.
    pub(super) fn parked(&mut self, what: Parking) -> Option<FollowUp> {
        match what {
            Parking::Memory(allocation) => {
                Some(FollowUp::Step(Input::Allocated { allocation, outcome: Ok(()) }))
            }
            Parking::Retry(allocation) => {
                if let Some(Retry { requester, job, .. }) = self.retries.remove(&allocation) {
                    self.workers.add(requester, job);
                }
                None
            }
            Parking::Client(client) => self.admission.welcome(client, &mut self.clients),
            Parking::Process { client, request: id } => {
                self.clients.send(client, &Response { id, answer: Answer::Done }, Vec::new());
                None
            }
        }
    }

    /// The keeper has not parked something in time.
    pub(super) fn not_parked(&mut self, what: Parking) -> FollowUp {
        match what {
            Parking::Memory(allocation) | Parking::Retry(allocation) => {
                let failed = self.retries.remove(&allocation).map(|retry| retry.reason);
                let reason = failed
                    .unwrap_or_else(|| "the keeper does not take it: has it descriptors left?".to_owned());
                FollowUp::Step(Input::Allocated { allocation, outcome: Err(reason) })
            }
            Parking::Client(client) => FollowUp::End(client, Ending::Gone),
            Parking::Process { client, .. } => FollowUp::End(client, Ending::Disconnected),
        }
    }

    /// A client passes its page of pins on to a child of its process: the keeper forgets the process.
    pub(super) fn await_child(&mut self, client: ClientId, request: u64) -> Option<FollowUp> {
        let fds = self.clients.await_child(client);
        self.keeper.unpark(&[Key::Process(client)]);
        self.park_process(client, request, fds)
    }

    /// A child claims a page of pins with the secret that is in it: the keeper gets the child's process.
    pub(super) fn claim(
        &mut self,
        client: ClientId,
        request: u64,
        page: ClientId,
        secret: u64,
    ) -> Option<FollowUp> {
        let claimed = match self.memory.secret(page) == Some(secret) {
            true => self.clients.claim(client, page),
            false => Err(Refusal::malformed("a claim with a wrong secret")),
        };
        self.park_process(client, request, claimed)
    }

    /// Gives descriptors of a process to the keeper. The client is answered when they are parked.
    fn park_process(
        &mut self,
        client: ClientId,
        request: u64,
        fds: Result<Vec<(Key, OwnedFd)>, Refusal>,
    ) -> Option<FollowUp> {
        match fds {
            Ok(fds) => {
                let parked = self.keeper.park(Parking::Process { client, request }, fds)?;
                self.parked(parked)
            }
            Err(refusal) => Some(FollowUp::Reject { client, request, refusal, ending: Ending::Disconnected }),
        }
    }

    /// Starts another keeper, and gives it everything that it has to keep.
    pub(super) fn start_keeper(&mut self, acceptor: &Acceptor) {
        let kept = self.everything(acceptor);
        self.keeper.start(kept, self.clients.poller());
    }

    fn everything(&self, acceptor: &Acceptor) -> Result<DescriptorTable> {
        let mut kept = DescriptorTable::default();
        self.admission.keep(&mut kept)?;
        acceptor.keep(&mut kept)?;
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

#[cfg(test)]
mod tests {
    use std::process::Child;
    use std::sync::Arc;
    use std::time::Instant;

    use wholemem_os::{Deadline, Memfd, PacketSocket};

    use super::super::headroom::{Headroom, tests::Machine};
    use super::super::index_memory::IndexMemory;
    use super::*;
    use crate::index::Geometry;
    use crate::keeper::{Role, ToKeeper, ToServer};
    use crate::protocol::frame::{MessageAssembler, decode};
    use crate::server::budget::tests::unlimited;
    use crate::server::machine::SharedAllocation;

    const LEN: usize = 64 << 10;

    fn no_launch(_: Role, _: OwnedFd) -> std::io::Result<Child> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// An executor and the keeper's end of its socket.
    fn executor() -> (Executor<'static>, PacketSocket) {
        let (socket, keeper) = PacketSocket::pair().unwrap();
        keeper.send(&[0], &[], Deadline::NEVER).unwrap();
        let (index, _) = IndexMemory::create(Geometry { slots: 8, allocations: 4 }, 0, &socket).unwrap();
        keeper.recv_with_fds(&mut [0; 100], 1, Deadline::NEVER).unwrap();
        let headroom = Arc::new(Headroom::new(Machine::with(1 << 30)));
        let mut clients = Clients::new(0, unlimited()).unwrap();
        let workers = Workers::start(None, &headroom).unwrap();
        let keeper_link = KeeperLink::new(socket, &no_launch, clients.poller()).unwrap();
        let admission = Admission::new(index, vec![[7; 16]], headroom);
        let memory = MemoryTable::default();
        let retries = BTreeMap::new();
        (Executor { memory, clients, keeper: keeper_link, workers, admission, retries }, keeper)
    }

    /// A client that has connected, and its end of the socket.
    fn connected(executor: &mut Executor<'_>) -> (ClientId, PacketSocket) {
        let (here, there) = PacketSocket::pair().unwrap();
        executor.clients.accept(here).unwrap();
        (executor.clients.iter().last().unwrap().0, there)
    }

    fn perform(executor: &mut Executor<'_>, output: Output) -> Option<FollowUp> {
        executor.perform(output, &mut None)
    }

    /// The next message to the keeper, with how many descriptors it has.
    fn told(executor: &mut Executor<'_>, keeper: &PacketSocket) -> (ToKeeper, usize) {
        let Executor { keeper: link, clients, .. } = executor;
        assert!(link.flush(clients.poller()));
        let mut packet = [0; 200];
        let (len, fds) = keeper.recv_with_fds(&mut packet, 8, Deadline::NEVER).unwrap();
        (postcard::from_bytes(&packet[..len]).unwrap(), fds.len())
    }

    fn response(client: &PacketSocket) -> (Response, usize) {
        let mut packet = [0; 500];
        let (len, fds) = client.recv_with_fds(&mut packet, 8, Deadline::NEVER).unwrap();
        let mut assembler = MessageAssembler::default();
        let message = assembler.push(&packet[..len]).unwrap().unwrap();
        (decode::<Response>(&message).unwrap().0, fds.len())
    }

    /// Adds memory as a worker has allocated it, with a keeper that parks it.
    fn add_memory(executor: &mut Executor<'_>, keeper: &PacketSocket) -> AllocationId {
        let allocation = AllocationId::new(1, 2);
        let fd = Memfd::create("test", LEN).unwrap().into_fd();
        assert!(executor.finished(Done::Allocated { allocation, place: HOST, outcome: Ok(fd) }).is_none());
        let keys = vec![Key::Allocation(allocation).encode()];
        assert_eq!(told(executor, keeper), (ToKeeper::Park(keys), 1));
        allocation
    }

    #[test]
    fn memory_is_reported_when_the_keeper_has_it_and_released_in_both() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory(&mut executor, &keeper);
        let follow_up = executor.parked(Parking::Memory(allocation));
        let Some(FollowUp::Step(Input::Allocated { outcome: Ok(()), .. })) = follow_up else {
            panic!("{follow_up:?}")
        };
        assert!(perform(&mut executor, Output::Release { allocation }).is_none());
        assert!(executor.keeper.timeout(Instant::now()).is_some(), "the keeper is told a little later");
        executor.keeper.send_released();
        let keys = vec![Key::Allocation(allocation).encode()];
        assert_eq!(told(&mut executor, &keeper), (ToKeeper::Unpark(keys), 0));
        assert_eq!(executor.memory.fds().count(), 0);
    }

    #[test]
    fn an_allocation_that_fails_is_tried_again_when_the_keeper_has_freed_what_was_released() {
        let (mut executor, keeper) = executor();
        let released = add_memory(&mut executor, &keeper);
        executor.parked(Parking::Memory(released));
        assert!(perform(&mut executor, Output::Release { allocation: released }).is_none());
        let (allocation, requester) = (AllocationId::new(3, 0), Requester::User(7));
        let retry = Job::Allocate { allocation, len: 4096, place: HOST, is_retry: true };
        let failed = |retry| Done::Failed { allocation, requester, retry, reason: "none left".to_owned() };
        assert!(executor.finished(failed(retry)).is_none());
        // The keeper frees the memory before it answers.
        let keys = vec![Key::Allocation(released).encode()];
        assert_eq!(told(&mut executor, &keeper), (ToKeeper::Unpark(keys), 0));
        assert_eq!(told(&mut executor, &keeper), (ToKeeper::Park(Vec::new()), 0));
        let answer = postcard::to_allocvec(&ToServer::Parked(Vec::new())).unwrap();
        keeper.send(&answer, &[], Deadline::NEVER).unwrap();
        assert_eq!(executor.keeper.receive(&mut [0; 100]).parked, [Parking::Retry(allocation)]);
        assert!(executor.parked(Parking::Retry(allocation)).is_none() && executor.retries.is_empty());
        let done = loop {
            if let Some(done) = executor.workers.done().pop() {
                break done;
            }
            std::thread::yield_now();
        };
        assert!(matches!(done, Done::Allocated { outcome: Ok(_), .. }), "{done:?}");
        // If the keeper does not answer, the client is told why the first attempt has failed.
        let retry = Job::Allocate { allocation, len: 4096, place: HOST, is_retry: true };
        assert!(executor.finished(failed(retry)).is_none());
        let FollowUp::Step(Input::Allocated { outcome: Err(reason), .. }) =
            executor.not_parked(Parking::Retry(allocation))
        else {
            panic!("an error")
        };
        assert_eq!((reason.as_str(), executor.retries.len()), ("none left", 0));
    }

    #[test]
    fn memory_that_the_keeper_does_not_take_or_that_was_not_allocated_is_an_error() {
        let (mut executor, _keeper) = executor();
        let allocation = AllocationId::new(1, 2);
        let failed = executor.not_parked(Parking::Memory(allocation));
        let FollowUp::Step(Input::Allocated { outcome: Err(reason), .. }) = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(reason, "the keeper does not take it: has it descriptors left?");
        let outcome = Err("none left".to_owned());
        let failed = executor.finished(Done::Allocated { allocation, place: HOST, outcome });
        let Some(FollowUp::Step(Input::Allocated { outcome: Err(reason), .. })) = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(reason, "none left");
    }

    #[test]
    fn short_memory_of_a_trusted_client_is_closed_at_once_and_other_memory_by_a_worker() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory(&mut executor, &keeper);
        let requester = Requester::User(7);
        let close = |at_once| Output::CloseForWriting { allocation, at_once, requester };
        assert!(perform(&mut executor, close(false)).is_none(), "a worker has it");
        let follow_up = perform(&mut executor, close(true));
        let Some(FollowUp::Step(Input::ClosedForWriting { outcome: Ok(()), .. })) = follow_up else {
            panic!("{follow_up:?}")
        };
    }

    #[test]
    fn a_response_carries_a_descriptor_if_memory_is_shared() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory(&mut executor, &keeper);
        let (client, there) = connected(&mut executor);
        let done = || Response { id: 9, answer: Answer::Done };
        for (share, count) in [(None, 0), (Some(SharedAllocation { allocation, is_writable: false }), 1)] {
            let output = Output::Respond { client, response: done(), share };
            assert!(perform(&mut executor, output).is_none());
            assert_eq!(response(&there), (done(), count));
        }
    }

    #[test]
    fn a_client_is_welcome_when_the_keeper_has_its_descriptors() {
        let (mut executor, keeper) = executor();
        let (client, there) = connected(&mut executor);
        assert!(perform(&mut executor, Output::Admit { client, request: 5 }).is_none());
        let (ToKeeper::Park(keys), count) = told(&mut executor, &keeper) else { panic!("parked") };
        assert_eq!((keys[0], count), (Key::Pins(client).encode(), keys.len()));
        assert!(executor.parked(Parking::Client(client)).is_none());
        let (Response { id, answer }, fds) = response(&there);
        let Answer::Welcome { devices, .. } = answer else { panic!("{answer:?}") };
        assert_eq!((id, fds, devices), (5, 2, vec![[7; 16]]));
        let refused = perform(&mut executor, Output::Admit { client, request: 6 });
        let Some(FollowUp::Reject { refusal, ending: Ending::Gone, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(refusal, Refusal::malformed("a second hello"));
    }

    #[test]
    fn a_page_is_claimed_with_its_secret_only() {
        let (mut executor, _keeper) = executor();
        let (client, _there) = connected(&mut executor);
        let refused = executor.claim(client, 3, ClientId(77), 1);
        let Some(FollowUp::Reject { request: 3, refusal, ending: Ending::Disconnected, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(refusal, Refusal::malformed("a claim with a wrong secret"));
    }
}
