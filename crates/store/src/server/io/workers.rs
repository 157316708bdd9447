//! Worker threads of the store server for slow calls: allocating memory, checking adopted memory, and sealing memory against
//! writes.
//!
//! Jobs wait in a queue that is fair per user: users are served round-robin, and the jobs of a user in order. Arenas count as one
//! more user, since requests of all users may wait for them. Preallocation has the lowest priority, until a request waits for it
//! ([`Workers::promote`]).
//!
//! A job is not interrupted: a user waits for at most one job of each other user, but such a job may take as long as allocating
//! the whole quota.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use wholemem_hal::{Allocation, AllocationSpec, Backend, HandleKind, Mapping, Reservation, Rights};
use wholemem_os::{Deadline, Errno, Error as OsError, Memfd, PacketSocket, memfd};

use super::headroom::{Headroom, MemoryPurpose};
use crate::Result;
use crate::id::AllocationId;
use crate::protocol::{Refusal, describe_error};
use crate::server::fair_queue::FairQueue;
use crate::server::machine::Requester;

const THREADS: usize = 2;

/// A slow call that a worker thread executes.
#[derive(Debug)]
pub(super) enum WorkerJob {
    /// Allocate memory. If the first attempt fails, the second one is made after released memory has been freed.
    Allocate {
        allocation: AllocationId,
        len: u64,
        place: u32,
        is_retry: bool,
    },
    Check {
        allocation: AllocationId,
        len: u64,
        place: u32,
        fd: Option<OwnedFd>,
    },
    Close {
        allocation: AllocationId,
        fd: OwnedFd,
    },
}

/// The result of a worker thread's job.
#[derive(Debug)]
pub(super) enum JobResult {
    Allocated {
        allocation: AllocationId,
        place: u32,
        outcome: Result<OwnedFd, String>,
    },
    Closed {
        allocation: AllocationId,
        outcome: Result<(), Refusal>,
    },
    /// The first attempt to allocate memory for a request has failed. Contains the job of the second attempt, and the error.
    Failed {
        allocation: AllocationId,
        requester: Requester,
        retry: WorkerJob,
        reason: String,
    },
}

impl WorkerJob {
    fn allocation(&self) -> AllocationId {
        match self {
            Self::Allocate { allocation, .. }
            | Self::Check { allocation, .. }
            | Self::Close { allocation, .. } => *allocation,
        }
    }
}

/// The queues of jobs that no worker thread has started.
#[derive(Debug, Default)]
struct JobQueues {
    requested: FairQueue<Requester, WorkerJob>,
    /// Jobs that preallocate memory. The state machine limits their number.
    preallocations: VecDeque<WorkerJob>,
    is_closed: bool,
}

impl JobQueues {
    fn push(&mut self, requester: Requester, job: WorkerJob) {
        match requester {
            Requester::Server => self.preallocations.push_back(job),
            Requester::User(_) | Requester::Everyone => self.requested.push(requester, job),
        }
    }

    /// Removes and returns the next job to execute, and its requester.
    fn pop(&mut self) -> Option<(Requester, WorkerJob)> {
        self.requested.pop().or_else(|| Some((Requester::Server, self.preallocations.pop_front()?)))
    }

    fn promote(&mut self, allocation: AllocationId, user: u32) {
        let at = self.preallocations.iter().position(|job| job.allocation() == allocation);
        if let Some(job) = at.and_then(|at| self.preallocations.remove(at)) {
            self.requested.push(Requester::User(user), job);
        }
    }
}

/// The job queue that the worker threads share.
#[derive(Debug, Default)]
struct JobQueue {
    jobs: Mutex<JobQueues>,
    /// Notified when a job was added, or when the queue was closed.
    changed: Condvar,
}

impl JobQueue {
    fn lock(&self) -> MutexGuard<'_, JobQueues> {
        // A poisoned lock is ignored: no code that can panic runs under the lock, and the queues are consistent between calls.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next job and returns it; returns `None` when the queue is closed.
    fn wait(&self) -> Option<(Requester, WorkerJob)> {
        let mut jobs = self.lock();
        loop {
            if jobs.is_closed {
                return None;
            }
            if let Some(job) = jobs.pop() {
                return Some(job);
            }
            jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// The worker threads of the store server, and the results of their jobs.
#[derive(Debug)]
pub(super) struct Workers {
    queue: Arc<JobQueue>,
    done: Receiver<JobResult>,
    /// A socket that becomes readable when a worker thread has finished a job.
    wakeup: PacketSocket,
}

impl Workers {
    /// Starts the worker threads. They allocate device memory through `devices`, if the server has any.
    pub(super) fn start(devices: Option<&Backend>, headroom: &Arc<Headroom>) -> Result<Self> {
        let (report, done) = channel();
        let (wakeup, waker) = PacketSocket::pair()?;
        let (queue, waker) = (Arc::new(JobQueue::default()), Arc::new(waker));
        // If a thread cannot be started, dropping `workers` closes the queue and stops the threads that were started.
        let workers = Self { queue: Arc::clone(&queue), done, wakeup };
        for _ in 0..THREADS {
            let (queue, waker, report) = (Arc::clone(&queue), Arc::clone(&waker), Sender::clone(&report));
            let (devices, headroom) = (devices.cloned(), Arc::clone(headroom));
            let work = move || work(&queue, devices.as_ref(), &headroom, &report, &waker);
            let spawned = thread::Builder::new().name("wm-store-worker".to_owned()).spawn(work);
            spawned.map_err(|source| crate::Error::Launch { source })?;
        }
        Ok(workers)
    }

    /// Adds a job to the queue, behind the other jobs of its requester.
    pub(super) fn add(&self, requester: Requester, job: WorkerJob) {
        self.queue.lock().push(requester, job);
        self.queue.changed.notify_one();
    }

    /// Moves a preallocation to the queue of a user, because a request of this user waits for the memory. Does nothing if the job
    /// has started.
    pub(super) fn promote(&self, allocation: AllocationId, user: u32) {
        self.queue.lock().promote(allocation, user);
    }

    pub(super) fn wakeup(&self) -> &PacketSocket {
        &self.wakeup
    }

    /// Returns the results of the jobs that were finished since the last call.
    pub(super) fn done(&self) -> Vec<JobResult> {
        while self.wakeup.recv(&mut [0; 8], Deadline::NOW).is_ok() {}
        self.done.try_iter().collect()
    }
}

/// Stops the worker threads. Jobs that have not started are dropped.
impl Drop for Workers {
    fn drop(&mut self) {
        self.queue.lock().is_closed = true;
        self.queue.changed.notify_all();
    }
}

fn work(
    queue: &JobQueue,
    devices: Option<&Backend>,
    headroom: &Headroom,
    report: &Sender<JobResult>,
    waker: &PacketSocket,
) {
    while let Some((requester, job)) = queue.wait() {
        let done = match job {
            WorkerJob::Allocate { allocation, len, place, is_retry } => {
                let is_prealloc = requester == Requester::Server;
                let purpose = if is_prealloc { MemoryPurpose::Prealloc } else { MemoryPurpose::Objects };
                match allocate(devices, headroom, purpose, len, place) {
                    Err(reason) if !is_retry && !is_prealloc => {
                        let retry = WorkerJob::Allocate { allocation, len, place, is_retry: true };
                        JobResult::Failed { allocation, requester, retry, reason }
                    }
                    outcome => JobResult::Allocated { allocation, place, outcome },
                }
            }
            WorkerJob::Check { allocation, len, place, fd } => {
                JobResult::Allocated { allocation, place, outcome: check(devices, len, place, fd) }
            }
            WorkerJob::Close { allocation, fd } => {
                JobResult::Closed { allocation, outcome: close(fd.as_fd()) }
            }
        };
        if report.send(done).is_err() {
            return;
        }
        // An error is ignored: if the socket is full, the event loop wakes up in any case.
        let _ = waker.send(&[1], &[], Deadline::NOW);
    }
}

/// Seals the memory of a descriptor against writes (`F_SEAL_WRITE`).
pub(super) fn close(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    memfd::seal_writes(fd).map_err(|error| match error {
        OsError::Call { errno: Errno::BUSY, .. } => Refusal::StillMapped,
        error => refused(fd, &error),
    })
}

/// Returns the refusal of memory that cannot be sealed against writes or reopened.
pub(super) fn refused(fd: BorrowedFd<'_>, error: &OsError) -> Refusal {
    match memfd::len_of(fd) {
        Ok(len) => Refusal::of_memory(len as u64, error),
        // The descriptor has no length, so it is not memory.
        Err(unknown) => Refusal::malformed(&format!("{error}; its length cannot be read: {unknown}")),
    }
}

fn allocate(
    devices: Option<&Backend>,
    headroom: &Headroom,
    purpose: MemoryPurpose,
    len: u64,
    place: u32,
) -> Result<OwnedFd, String> {
    let len = usize::try_from(len).map_err(|_| "the length exceeds the address space".to_owned())?;
    let Some(device) = place.checked_sub(1) else {
        // The memory is claimed first: if too little is available, the kernel kills a process instead of failing the allocation.
        let _claim = headroom.claim_waiting(len, purpose).map_err(|shortage| shortage.to_string())?;
        let memory = Memfd::create_large("wholemem-object", len).map_err(|error| describe_error(&error))?;
        return Ok(memory.into_fd());
    };
    let on_device = || {
        let device = devices.map(|backend| backend.device(device)).transpose()?;
        let Some(device) = device else { return Ok(None) };
        let memory = Allocation::create(device.backend(), &AllocationSpec::new(&device, len))?;
        Ok(memory.export(HandleKind::Fd, Rights::ReadWrite)?.into_fd())
    };
    let exported: Result<_, wholemem_hal::Error> = on_device();
    exported.map_err(|error| error.to_string())?.ok_or_else(|| "the server has no devices".to_owned())
}

/// Checks that a descriptor is memory of a place (the host or a device) and of exactly this length. Host memory is sealed against
/// writes.
fn check(devices: Option<&Backend>, len: u64, place: u32, fd: Option<OwnedFd>) -> Result<OwnedFd, String> {
    let fd = fd.ok_or("the request has no descriptor")?;
    let len = usize::try_from(len).map_err(|_| "the length exceeds the address space".to_owned())?;
    let Some(device) = place.checked_sub(1) else {
        let memory = Memfd::import(fd, len).map_err(|error| error.to_string())?;
        close(memory.as_fd()).map_err(|refusal| refusal.to_string())?;
        return Ok(memory.into_fd());
    };
    let duplicate = || memfd::share_fd(fd.as_fd()).map_err(|error| error.to_string());
    let (first, second) = (duplicate()?, duplicate()?);
    // The mapping grants no device access, so no CUDA context is needed.
    let map = |memory: &Allocation| -> wholemem_hal::Result<()> {
        let reservation = Reservation::create(memory.device().backend(), memory.len())?;
        Mapping::create(&reservation, 0, memory, &[]).map(drop)
    };
    let on_device = || {
        let Some(backend) = devices else { return Ok(Err("the server has no devices")) };
        let device = backend.device(device)?;
        let memory = Allocation::import(&device, first.into(), len)?;
        if memory.properties()?.device.is_some_and(|found| found != device.id()) {
            return Ok(Err("the memory is on another device"));
        }
        // The CUDA driver does not report the length of memory, but fails to map more than the memory has.
        map(&memory)?;
        let more = len.saturating_add(memory.granularity().minimum.len());
        let longer = Allocation::import(&device, second.into(), more).and_then(|longer| map(&longer));
        Ok(if longer.is_ok() { Err("the memory is longer than the request states") } else { Ok(()) })
    };
    let checked: wholemem_hal::Result<_> = on_device();
    checked.map_err(|error| error.to_string())??;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use wholemem_hal::HostConfig;
    use wholemem_os::SharedMap;
    use wholemem_os::meminfo::MemoryProbe;
    use wholemem_os::vm::Protection;

    use super::super::headroom::tests::TestMachine;
    use super::*;

    fn wait(workers: &Workers) -> JobResult {
        loop {
            poll(&mut [PollFd::new(workers.wakeup(), PollFlags::IN)], None).unwrap();
            if let Some(done) = workers.done().pop() {
                return done;
            }
        }
    }

    fn headroom() -> Arc<Headroom> {
        Arc::new(Headroom::new(MemoryProbe::open().unwrap()))
    }

    fn allocate_job(slot: usize) -> WorkerJob {
        WorkerJob::Allocate { allocation: AllocationId::new(slot, 0), len: 1, place: 0, is_retry: true }
    }

    fn slots(jobs: &mut JobQueues) -> Vec<usize> {
        std::iter::from_fn(|| jobs.pop()).map(|(_, job)| job.allocation().slot()).collect()
    }

    #[test]
    fn jobs_of_one_user_do_not_delay_those_of_another() {
        let mut jobs = JobQueues::default();
        jobs.push(Requester::Server, allocate_job(0));
        (100..104).for_each(|slot| jobs.push(Requester::User(1), allocate_job(slot)));
        jobs.push(Requester::User(2), allocate_job(200));
        jobs.push(Requester::Everyone, allocate_job(300));
        jobs.push(Requester::User(2), allocate_job(201));
        assert_eq!(slots(&mut jobs), [100, 200, 300, 101, 201, 102, 103, 0]);
    }

    #[test]
    fn a_promoted_preallocation_is_queued_for_its_user() {
        let mut jobs = JobQueues::default();
        (0..3).for_each(|slot| jobs.push(Requester::Server, allocate_job(slot)));
        (100..104).for_each(|slot| jobs.push(Requester::User(1), allocate_job(slot)));
        jobs.promote(AllocationId::new(1, 0), 2);
        jobs.promote(AllocationId::new(77, 0), 2);
        assert_eq!(slots(&mut jobs), [100, 1, 101, 102, 103, 0, 2]);
    }

    #[test]
    fn threads_stop_when_workers_is_dropped() {
        let workers = Workers::start(None, &headroom()).unwrap();
        let queue = Arc::downgrade(&workers.queue);
        drop(workers);
        // Waits until all worker threads have returned: each holds a reference to the queue until then.
        while queue.upgrade().is_some() {
            thread::yield_now();
        }
    }

    #[test]
    fn workers_allocate_memory_and_seal_it_when_it_is_unmapped() {
        let devices = Backend::host(HostConfig::virtual_devices(1)).unwrap();
        let workers = Workers::start(Some(&devices), &headroom()).unwrap();
        for place in [0, 1] {
            let allocation = AllocationId::new(place as usize, 0);
            workers.add(
                Requester::User(1),
                WorkerJob::Allocate { allocation, len: 128 << 10, place, is_retry: false },
            );
            let JobResult::Allocated { outcome: Ok(fd), .. } = wait(&workers) else { panic!("memory") };
            let memory = Memfd::import(fd, 128 << 10).unwrap();
            let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
            for (map, expected) in [(Some(map), Err(Refusal::StillMapped)), (None, Ok(()))] {
                workers
                    .add(Requester::User(1), WorkerJob::Close { allocation, fd: memory.share_fd().unwrap() });
                let JobResult::Closed { outcome, .. } = wait(&workers) else { panic!("closed") };
                assert_eq!(outcome, expected);
                drop(map);
            }
        }
    }

    #[test]
    fn a_failed_allocation_is_reported() {
        let workers = Workers::start(None, &headroom()).unwrap();
        let allocation = AllocationId::new(0, 0);
        for (len, place, prefix) in [(1 << 60, 0, "only "), (4096, 1, "the server has no devices")] {
            workers.add(Requester::User(1), WorkerJob::Allocate { allocation, len, place, is_retry: true });
            let JobResult::Allocated { outcome: Err(reason), .. } = wait(&workers) else {
                panic!("expected a failure")
            };
            assert!(reason.starts_with(prefix), "{reason}");
        }
    }

    #[test]
    fn preallocation_leaves_memory_for_requests() {
        let workers = Workers::start(None, &Arc::new(Headroom::new(TestMachine::with(40 << 20)))).unwrap();
        let allocation = AllocationId::new(0, 0);
        let job = || WorkerJob::Allocate { allocation, len: 16 << 20, place: 0, is_retry: true };
        workers.add(Requester::Server, job());
        let JobResult::Allocated { outcome: Err(reason), .. } = wait(&workers) else {
            panic!("expected a failure")
        };
        assert_eq!(reason, "only 40 MiB are available on this machine, of which 30 MiB are reserved");
        for requester in [Requester::User(1), Requester::Everyone] {
            workers.add(requester, job());
            assert!(matches!(wait(&workers), JobResult::Allocated { outcome: Ok(_), .. }));
        }
    }

    #[test]
    fn available_memory_is_checked_for_short_allocations_too() {
        let workers = Workers::start(None, &Arc::new(Headroom::new(TestMachine::with(9 << 20)))).unwrap();
        let allocation = AllocationId::new(0, 0);
        workers.add(
            Requester::User(1),
            WorkerJob::Allocate { allocation, len: 2 << 20, place: 0, is_retry: true },
        );
        let JobResult::Allocated { outcome: Err(reason), .. } = wait(&workers) else {
            panic!("expected a failure")
        };
        assert_eq!(reason, "only 9 MiB are available on this machine, of which 8 MiB are reserved");
    }
}
