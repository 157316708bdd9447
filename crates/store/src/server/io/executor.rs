//! Carries out the outputs of the server's state machine: sends responses, allocates and releases memory, sends descriptors to
//! the keeper process, and ends connections.
//!
//! An action that is complete at once, or that fails, returns a [`FollowUp`] for the event loop. The executor does not call the
//! state machine.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use wholemem_os::{PidFd, memfd};

use super::accept::ClientAcceptor;
use super::admission::Admission;
use super::clients::{Clients, EndReason};
use super::keeper_link::{KeeperLink, ParkAction, ReleaseDelay};
use super::memory_table::{CloseResult, MemoryTable};
use super::workers::{JobResult, WorkerJob, Workers};
use crate::id::{AllocationId, ClientId};
use crate::keeper::{DescriptorKey, DescriptorTable};
use crate::protocol::{Answer, Response, Statistics};
use crate::server::machine::{HOST, Input, Output, Requester};
use crate::{Refusal, Result};

/// The next action of the event loop, after the executor has carried out an output of the state machine.
#[derive(Debug)]
pub(super) enum FollowUp {
    /// Run a step of the state machine with this input.
    Step(Input<'static>),
    /// End a client's connection.
    End(ClientId, EndReason),
    /// Refuse a client's request, and end the connection.
    Reject { client: ClientId, request: u64, refusal: Refusal, ending: EndReason },
}

/// A failed allocation that is to be tried again, and the error of the first attempt.
#[derive(Debug)]
pub(super) struct RetryJob {
    requester: Requester,
    job: WorkerJob,
    reason: String,
}

/// Carries out outputs of the state machine, and owns the memory, connections and threads that the outputs act on.
pub(super) struct Executor<'a> {
    pub(super) memory: MemoryTable,
    pub(super) clients: Clients,
    pub(super) keeper: KeeperLink<'a>,
    pub(super) workers: Workers,
    pub(super) admission: Admission,
    /// Allocations that failed and are tried again when the keeper process has freed the memory that was released before.
    pub(super) retries: BTreeMap<AllocationId, RetryJob>,
    /// The time at which this server started, in milliseconds since the Unix epoch.
    pub(super) started: u64,
}

impl Executor<'_> {
    /// Carries out one output of the state machine. `offered` is the descriptor that was sent with the request.
    pub(super) fn perform(&mut self, output: Output, offered: &mut Option<OwnedFd>) -> Option<FollowUp> {
        match output {
            Output::Respond { client, response, share } => {
                let shared = share.map(|share| self.memory.share(share)).transpose();
                match shared {
                    Ok(fd) => self.clients.send(client, &response, fd.flatten().into_iter().collect()),
                    Err(refusal) => self.clients.refuse(client, response.id, refusal),
                }
            }
            Output::Admit { client, request, is_repeated } => {
                let Self { memory, clients, keeper, admission, .. } = self;
                if is_repeated && clients.get(client).is_some_and(|connection| connection.is_inherited) {
                    return admission.answer_hello(client, request, clients);
                }
                return admission.admit(client, request, clients, memory, keeper);
            }
            Output::Allocate { allocation, len, place, requester } => {
                self.keeper.send_released();
                self.workers.add(requester, WorkerJob::Allocate { allocation, len, place, is_retry: false });
            }
            Output::Promote { allocation, user } => self.workers.promote(allocation, user),
            Output::Import { allocation, len, place, requester } => {
                self.workers.add(requester, WorkerJob::Check { allocation, len, place, fd: offered.take() });
            }
            Output::CloseForWriting { allocation, at_once, requester } => {
                match self.memory.close(allocation, at_once) {
                    CloseResult::Done(outcome) => {
                        return Some(FollowUp::Step(Input::ClosedForWriting { allocation, outcome }));
                    }
                    CloseResult::ByWorker(fd) => {
                        self.workers.add(requester, WorkerJob::Close { allocation, fd })
                    }
                }
            }
            Output::Reclaim { allocation } => {
                if let Err(error) = self.memory.discard(allocation) {
                    tracing::warn!(%allocation, %error, "cannot discard memory: it is freed when the keeper closes it");
                }
                self.release(allocation);
            }
            Output::Release { allocation } => self.release(allocation),
            Output::Disconnect { client } => return Some(FollowUp::End(client, EndReason::Disconnected)),
            Output::Watch { client, prefix, start } => match self.clients.watch(client, prefix, start) {
                Ok(Some(response)) => self.clients.send(client, &response, Vec::new()),
                Ok(None) => {}
                Err(refusal) => {
                    let ending = EndReason::Disconnected;
                    return Some(FollowUp::Reject { client, request: 0, refusal, ending });
                }
            },
            Output::Report { client, request, status, mut values } => {
                let (of_clients, requests) = self.clients.statistics();
                values.extend(of_clients);
                let statistics = Statistics::new(status, std::process::id(), self.started, values, requests);
                let response = Response { id: request, answer: Answer::Statistics(Box::new(statistics)) };
                self.clients.send(client, &response, Vec::new());
            }
            Output::Notify(change) => self.clients.notify(change),
        }
        None
    }

    fn release(&mut self, allocation: AllocationId) {
        let delay = if self.memory.is_short(allocation) { ReleaseDelay::None } else { ReleaseDelay::Short };
        self.memory.remove(allocation);
        self.keeper.release(allocation, delay);
    }

    /// Processes the result of a worker thread's job.
    pub(super) fn finished(&mut self, done: JobResult) -> Option<FollowUp> {
        let input = match done {
            JobResult::Closed { allocation, outcome } => {
                if outcome.is_ok() {
                    self.memory.closed(allocation);
                }
                Input::ClosedForWriting { allocation, outcome }
            }
            JobResult::Failed { allocation, requester, retry: job, reason } => {
                self.retries.insert(allocation, RetryJob { requester, job, reason });
                let waited = self.keeper.after_releases(ParkAction::Retry(allocation))?;
                return self.parked(waited);
            }
            JobResult::Allocated { allocation, outcome: Err(reason), .. } => {
                Input::Allocated { allocation, outcome: Err(reason) }
            }
            JobResult::Allocated { allocation, place, outcome: Ok(fd) } => {
                let shared = memfd::share_fd(fd.as_fd());
                let added =
                    shared.and_then(|shared| self.memory.add(allocation, fd, place == HOST).map(|()| shared));
                match added {
                    Ok(shared) => {
                        let fds = vec![(DescriptorKey::Allocation(allocation), shared)];
                        let parked = self.keeper.park(ParkAction::Memory(allocation), fds)?;
                        return self.parked(parked);
                    }
                    Err(error) => Input::Allocated { allocation, outcome: Err(error.to_string()) },
                }
            }
        };
        Some(FollowUp::Step(input))
    }

    /// Continues an action that waited for the keeper process: the keeper has answered, or there is no keeper.
    pub(super) fn parked(&mut self, action: ParkAction) -> Option<FollowUp> {
        match action {
            ParkAction::Memory(allocation) => {
                Some(FollowUp::Step(Input::Allocated { allocation, outcome: Ok(()) }))
            }
            ParkAction::Retry(allocation) => {
                if let Some(RetryJob { requester, job, .. }) = self.retries.remove(&allocation) {
                    self.workers.add(requester, job);
                }
                None
            }
            ParkAction::Client(client) => self.admission.welcome(client, &mut self.clients),
            ParkAction::Process { client, request: id } => {
                self.clients.send(client, &Response { id, answer: Answer::Done }, Vec::new());
                None
            }
        }
    }

    /// Fails an action that waited for the keeper process, because the keeper has not answered before the timeout.
    pub(super) fn parking_failed(&mut self, action: ParkAction) -> FollowUp {
        match action {
            ParkAction::Memory(allocation) | ParkAction::Retry(allocation) => {
                let failed = self.retries.remove(&allocation).map(|retry| retry.reason);
                let reason = failed.unwrap_or_else(|| {
                    "the keeper did not accept the descriptor: it may have none left".to_owned()
                });
                FollowUp::Step(Input::Allocated { allocation, outcome: Err(reason) })
            }
            ParkAction::Client(client) => FollowUp::End(client, EndReason::Left),
            ParkAction::Process { client, .. } => FollowUp::End(client, EndReason::Disconnected),
        }
    }

    /// Reserves a client's pin page (in which it marks objects in use) for a forked child: the server stops watching the client's
    /// process, and the keeper process closes the descriptor of that process.
    pub(super) fn await_child(&mut self, client: ClientId, request: u64) -> Option<FollowUp> {
        let fds = self.clients.await_child(client);
        self.keeper.unpark(&[DescriptorKey::Process(client)]);
        self.park_process(client, request, fds)
    }

    /// Assigns a pin page (in which objects in use are marked) to a forked child that knows the page's secret, and sends the
    /// descriptor of the child's process to the keeper process.
    pub(super) fn claim(
        &mut self,
        client: ClientId,
        request: u64,
        page: ClientId,
        secret: u64,
    ) -> Option<FollowUp> {
        let claimed = match self.memory.secret(page) == Some(secret) {
            true => self.clients.claim(client, page),
            false => Err(Refusal::malformed("the secret of the claim is wrong")),
        };
        self.park_process(client, request, claimed)
    }

    /// Sends descriptors of a client to the keeper process, which holds them. The client gets the response to its request when
    /// the keeper has the descriptors.
    fn park_process(
        &mut self,
        client: ClientId,
        request: u64,
        fds: Result<Vec<(DescriptorKey, OwnedFd)>, Refusal>,
    ) -> Option<FollowUp> {
        match fds {
            Ok(fds) => {
                let parked = self.keeper.park(ParkAction::Process { client, request }, fds)?;
                self.parked(parked)
            }
            Err(refusal) => {
                Some(FollowUp::Reject { client, request, refusal, ending: EndReason::Disconnected })
            }
        }
    }

    /// Starts another keeper process, and hands all descriptors over to it.
    pub(super) fn start_keeper(&mut self, acceptor: &ClientAcceptor) {
        let descriptors = self.all_descriptors(acceptor);
        self.keeper.start(descriptors, self.clients.poller());
    }

    fn all_descriptors(&self, acceptor: &ClientAcceptor) -> Result<DescriptorTable> {
        let mut descriptors = DescriptorTable::default();
        self.admission.add_descriptors(&mut descriptors)?;
        acceptor.add_descriptors(&mut descriptors)?;
        descriptors.insert(DescriptorKey::Server, PidFd::of_self()?.into());
        for (allocation, fd) in self.memory.fds() {
            descriptors.insert(DescriptorKey::Allocation(allocation), memfd::share_fd(fd.as_fd())?);
        }
        for (client, connection) in self.clients.iter() {
            for (key, fd) in connection.park(client)? {
                descriptors.insert(key, fd);
            }
        }
        Ok(descriptors)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Child;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use wholemem_os::{Deadline, Memfd, PacketSocket};

    use super::super::headroom::{Headroom, tests::TestMachine};
    use super::super::index_memory::IndexMemory;
    use super::super::memory_table::MAX_SHORT_LEN;
    use super::*;
    use crate::index::Geometry;
    use crate::keeper::{ProcessRole, ToKeeper, ToServer};
    use crate::protocol::frame::{MessageAssembler, decode};
    use crate::server::budget::tests::unlimited;
    use crate::server::machine::SharedAllocation;

    /// How long a test waits for a message that the server sends to the keeper.
    const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

    fn no_launch(_: ProcessRole, _: OwnedFd) -> std::io::Result<Child> {
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// Creates an executor for a test. Returns the executor, and the keeper's end of the socket between them.
    fn executor() -> (Executor<'static>, PacketSocket) {
        let (socket, keeper) = PacketSocket::pair().unwrap();
        keeper.send(&[0], &[], Deadline::NEVER).unwrap();
        let (index, _) = IndexMemory::create(Geometry { slots: 8, allocations: 4 }, 0, &socket).unwrap();
        keeper.recv_with_fds(&mut [0; 100], 1, Deadline::NEVER).unwrap();
        let headroom = Arc::new(Headroom::new(TestMachine::with(1 << 30)));
        let mut clients = Clients::new(0, unlimited()).unwrap();
        let workers = Workers::start(None, &headroom).unwrap();
        let keeper_link = KeeperLink::new(socket, &no_launch, clients.poller()).unwrap();
        let admission = Admission::new(index, vec![[7; 16]], headroom);
        let memory = MemoryTable::default();
        let retries = BTreeMap::new();
        (Executor { memory, clients, keeper: keeper_link, workers, admission, retries, started: 0 }, keeper)
    }

    /// Adds a client that has just connected. Returns the client's id, and the client's end of the socket.
    fn connected(executor: &mut Executor<'_>) -> (ClientId, PacketSocket) {
        let (local, peer) = PacketSocket::pair().unwrap();
        executor.clients.accept(local).unwrap();
        (executor.clients.iter().last().unwrap().0, peer)
    }

    fn perform(executor: &mut Executor<'_>, output: Output) -> Option<FollowUp> {
        executor.perform(output, &mut None)
    }

    /// Receives the next message to the keeper. Returns the message, and the number of its descriptors.
    fn keeper_message(executor: &mut Executor<'_>, keeper: &PacketSocket) -> (ToKeeper, usize) {
        let Executor { keeper: link, clients, .. } = executor;
        assert!(link.flush(clients.poller()));
        let mut packet = [0; 200];
        let (len, fds) = keeper.recv_with_fds(&mut packet, 8, Deadline::after(ANSWER_TIMEOUT)).unwrap();
        (postcard::from_bytes(&packet[..len]).unwrap(), fds.len())
    }

    fn response(client: &PacketSocket) -> (Response, usize) {
        let mut packet = [0; 500];
        let (len, fds) = client.recv_with_fds(&mut packet, 8, Deadline::NEVER).unwrap();
        let mut assembler = MessageAssembler::default();
        let message = assembler.push(&packet[..len]).unwrap().unwrap();
        (decode::<Response>(&message).unwrap().0, fds.len())
    }

    /// Adds memory that a worker thread has allocated, and simulates the keeper that receives the memory's descriptor.
    fn add_memory(executor: &mut Executor<'_>, keeper: &PacketSocket) -> AllocationId {
        add_memory_of(executor, keeper, MAX_SHORT_LEN + 1)
    }

    fn add_memory_of(executor: &mut Executor<'_>, keeper: &PacketSocket, len: usize) -> AllocationId {
        let allocation = AllocationId::new(1, 2);
        let fd = Memfd::create_sparse("test", len).unwrap().into_fd();
        assert!(
            executor.finished(JobResult::Allocated { allocation, place: HOST, outcome: Ok(fd) }).is_none()
        );
        let keys = vec![DescriptorKey::Allocation(allocation).encode()];
        assert_eq!(keeper_message(executor, keeper), (ToKeeper::Park(keys), 1));
        allocation
    }

    #[test]
    fn memory_is_reported_when_parked_and_released_in_server_and_keeper() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory(&mut executor, &keeper);
        let follow_up = executor.parked(ParkAction::Memory(allocation));
        let Some(FollowUp::Step(Input::Allocated { outcome: Ok(()), .. })) = follow_up else {
            panic!("{follow_up:?}")
        };
        assert!(perform(&mut executor, Output::Release { allocation }).is_none());
        assert!(executor.keeper.timeout(Instant::now()).is_some(), "the keeper is notified after a delay");
        executor.keeper.send_released();
        let keys = vec![DescriptorKey::Allocation(allocation).encode()];
        assert_eq!(keeper_message(&mut executor, &keeper), (ToKeeper::Unpark(keys), 0));
        assert_eq!(executor.memory.fds().count(), 0);
    }

    #[test]
    fn short_memory_is_released_in_the_keeper_with_the_next_message() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory_of(&mut executor, &keeper, MAX_SHORT_LEN);
        executor.parked(ParkAction::Memory(allocation));
        assert!(perform(&mut executor, Output::Release { allocation }).is_none());
        let keys = vec![DescriptorKey::Allocation(allocation).encode()];
        assert_eq!(keeper_message(&mut executor, &keeper), (ToKeeper::Unpark(keys), 0));
    }

    #[test]
    fn a_failed_allocation_is_retried_when_the_keeper_has_freed_released_memory() {
        let (mut executor, keeper) = executor();
        let released = add_memory(&mut executor, &keeper);
        executor.parked(ParkAction::Memory(released));
        assert!(perform(&mut executor, Output::Release { allocation: released }).is_none());
        let (allocation, requester) = (AllocationId::new(3, 0), Requester::User(7));
        let retry = WorkerJob::Allocate { allocation, len: 4096, place: HOST, is_retry: true };
        let failed =
            |retry| JobResult::Failed { allocation, requester, retry, reason: "none left".to_owned() };
        assert!(executor.finished(failed(retry)).is_none());
        // The keeper receives the release of memory first, so it frees that memory before it answers.
        let keys = vec![DescriptorKey::Allocation(released).encode()];
        assert_eq!(keeper_message(&mut executor, &keeper), (ToKeeper::Unpark(keys), 0));
        assert_eq!(keeper_message(&mut executor, &keeper), (ToKeeper::Park(Vec::new()), 0));
        let answer = postcard::to_allocvec(&ToServer::Parked(Vec::new())).unwrap();
        keeper.send(&answer, &[], Deadline::NEVER).unwrap();
        assert_eq!(executor.keeper.receive(&mut [0; 100]).parked, [ParkAction::Retry(allocation)]);
        assert!(executor.parked(ParkAction::Retry(allocation)).is_none() && executor.retries.is_empty());
        let done = loop {
            if let Some(done) = executor.workers.done().pop() {
                break done;
            }
            std::thread::yield_now();
        };
        assert!(matches!(done, JobResult::Allocated { outcome: Ok(_), .. }), "{done:?}");
        // If the keeper does not answer, the client gets the error of the first attempt to allocate memory.
        let retry = WorkerJob::Allocate { allocation, len: 4096, place: HOST, is_retry: true };
        assert!(executor.finished(failed(retry)).is_none());
        let FollowUp::Step(Input::Allocated { outcome: Err(reason), .. }) =
            executor.parking_failed(ParkAction::Retry(allocation))
        else {
            panic!("expected an error")
        };
        assert_eq!((reason.as_str(), executor.retries.len()), ("none left", 0));
    }

    #[test]
    fn memory_that_is_not_parked_or_not_allocated_is_an_error() {
        let (mut executor, _keeper) = executor();
        let allocation = AllocationId::new(1, 2);
        let failed = executor.parking_failed(ParkAction::Memory(allocation));
        let FollowUp::Step(Input::Allocated { outcome: Err(reason), .. }) = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(reason, "the keeper did not accept the descriptor: it may have none left");
        let outcome = Err("none left".to_owned());
        let failed = executor.finished(JobResult::Allocated { allocation, place: HOST, outcome });
        let Some(FollowUp::Step(Input::Allocated { outcome: Err(reason), .. })) = failed else {
            panic!("{failed:?}")
        };
        assert_eq!(reason, "none left");
    }

    #[test]
    fn only_short_memory_of_a_trusted_client_is_sealed_without_a_worker() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory(&mut executor, &keeper);
        let requester = Requester::User(7);
        let close = |at_once| Output::CloseForWriting { allocation, at_once, requester };
        assert!(perform(&mut executor, close(false)).is_none(), "a worker seals it");
        let follow_up = perform(&mut executor, close(true));
        let Some(FollowUp::Step(Input::ClosedForWriting { outcome: Ok(()), .. })) = follow_up else {
            panic!("{follow_up:?}")
        };
    }

    #[test]
    fn a_response_carries_a_descriptor_if_memory_is_shared() {
        let (mut executor, keeper) = executor();
        let allocation = add_memory(&mut executor, &keeper);
        let (client, peer) = connected(&mut executor);
        let done = || Response { id: 9, answer: Answer::Done };
        for (share, count) in [(None, 0), (Some(SharedAllocation { allocation, is_writable: false }), 1)] {
            let output = Output::Respond { client, response: done(), share };
            assert!(perform(&mut executor, output).is_none());
            assert_eq!(response(&peer), (done(), count));
        }
    }

    #[test]
    fn a_client_is_welcomed_when_the_keeper_has_its_descriptors() {
        let (mut executor, keeper) = executor();
        let (client, peer) = connected(&mut executor);
        assert!(perform(&mut executor, Output::Admit { client, request: 5, is_repeated: false }).is_none());
        let (ToKeeper::Park(keys), count) = keeper_message(&mut executor, &keeper) else { panic!("parked") };
        assert_eq!((keys[0], count), (DescriptorKey::Pins(client).encode(), keys.len()));
        assert!(executor.parked(ParkAction::Client(client)).is_none());
        let (Response { id, answer }, fds) = response(&peer);
        let Answer::Welcome { devices, .. } = answer else { panic!("{answer:?}") };
        assert_eq!((id, fds, devices), (5, 2, vec![[7; 16]]));
        let refused = perform(&mut executor, Output::Admit { client, request: 6, is_repeated: false });
        let Some(FollowUp::Reject { refusal, ending: EndReason::Left, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(refusal, Refusal::malformed("a second hello"));
    }

    #[test]
    fn a_hello_that_is_sent_again_to_the_next_server_is_answered_each_time() {
        let (mut executor, _keeper) = executor();
        let (client, peer) = connected(&mut executor);
        let hello = |request, is_repeated| Output::Admit { client, request, is_repeated };
        assert!(perform(&mut executor, hello(5, false)).is_none());
        // The server dies after the keeper has the descriptors of the client, and before it answers.
        let mut parked = DescriptorTable::default();
        for (key, fd) in executor.clients.get(client).unwrap().park(client).unwrap() {
            parked.insert(key, fd);
        }
        let (mut next, _keeper) = self::executor();
        assert!(next.clients.take_over(client, &mut parked).unwrap().is_some());
        // If further servers die, the client may have sent the hello several times before one of them reads it.
        for _ in 0..2 {
            assert!(perform(&mut next, hello(5, true)).is_none());
            let (Response { id, answer }, fds) = response(&peer);
            assert!(matches!(answer, Answer::Welcome { client: welcomed, .. } if welcomed == client));
            assert_eq!((id, fds), (5, 2));
        }
        let refused = perform(&mut next, hello(6, false));
        let Some(FollowUp::Reject { refusal, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(refusal, Refusal::malformed("a second hello"));
    }

    #[test]
    fn a_client_that_has_closed_its_connection_is_not_admitted() {
        let (mut executor, keeper) = executor();
        let (client, peer) = connected(&mut executor);
        drop(peer);
        let follow_up = perform(&mut executor, Output::Admit { client, request: 5, is_repeated: false });
        assert!(matches!(follow_up, Some(FollowUp::End(ended, EndReason::Closed)) if ended == client));
        assert!(executor.clients.get(client).is_some_and(|connection| connection.admitted.is_none()));
        executor.keeper.send(&ToKeeper::Ready, Vec::new());
        assert_eq!(keeper_message(&mut executor, &keeper), (ToKeeper::Ready, 0), "nothing was parked");
    }

    #[test]
    fn a_page_is_claimed_with_its_secret_only() {
        let (mut executor, _keeper) = executor();
        let (client, _peer) = connected(&mut executor);
        let refused = executor.claim(client, 3, ClientId(77), 1);
        let Some(FollowUp::Reject { request: 3, refusal, ending: EndReason::Disconnected, .. }) = refused
        else {
            panic!("{refused:?}")
        };
        assert_eq!(refusal, Refusal::malformed("the secret of the claim is wrong"));
    }
}
