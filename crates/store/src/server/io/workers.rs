//! Threads for calls that take long: allocating memory, checking memory of a client, and closing memory for writing.
//!
//! Jobs wait in a queue that is fair per user: users take turns, and each user's jobs are done in their order. Arenas take
//! turns as one more user, since requests of all users may wait for them. Preallocated memory comes last, until a
//! request waits for it ([`Workers::promote`]).
//!
//! A job that has begun is not interrupted: a user waits for at most one job of each other user, but such a job may
//! take as long as allocating the whole quota.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use wholemem_hal::{Allocation, AllocationSpec, Backend, HandleKind, Mapping, Reservation, Rights};
use wholemem_os::{Deadline, Errno, Error as OsError, Memfd, PacketSocket, memfd};

use super::headroom::{Headroom, Purpose};
use crate::Result;
use crate::id::AllocationId;
use crate::protocol::{Refusal, describe_error};
use crate::server::fair_queue::FairQueue;
use crate::server::machine::Requester;

const THREADS: usize = 2;

/// A call that takes long.
#[derive(Debug)]
pub(super) enum Job {
    /// Memory that cannot be had at the first attempt may be had at the second, when released memory has been freed.
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

/// A job that is finished.
#[derive(Debug)]
pub(super) enum Done {
    Allocated {
        allocation: AllocationId,
        place: u32,
        outcome: Result<OwnedFd, String>,
    },
    Closed {
        allocation: AllocationId,
        outcome: Result<(), Refusal>,
    },
    /// The first attempt to allocate memory for a request has failed: the job for the second one, and the reason.
    Failed {
        allocation: AllocationId,
        requester: Requester,
        retry: Job,
        reason: String,
    },
}

impl Job {
    fn allocation(&self) -> AllocationId {
        match self {
            Self::Allocate { allocation, .. }
            | Self::Check { allocation, .. }
            | Self::Close { allocation, .. } => *allocation,
        }
    }
}

/// Jobs that no thread has begun.
#[derive(Debug, Default)]
struct Jobs {
    requested: FairQueue<Requester, Job>,
    /// Memory that is preallocated. The machine bounds how many pieces there are.
    prealloc_limit: VecDeque<Job>,
    is_closed: bool,
}

impl Jobs {
    fn push(&mut self, requester: Requester, job: Job) {
        match requester {
            Requester::Server => self.prealloc_limit.push_back(job),
            Requester::User(_) | Requester::Everyone => self.requested.push(requester, job),
        }
    }

    /// The next job, and on whose behalf it is done.
    fn pop(&mut self) -> Option<(Requester, Job)> {
        self.requested.pop().or_else(|| Some((Requester::Server, self.prealloc_limit.pop_front()?)))
    }

    fn promote(&mut self, allocation: AllocationId, user: u32) {
        let at = self.prealloc_limit.iter().position(|job| job.allocation() == allocation);
        if let Some(job) = at.and_then(|at| self.prealloc_limit.remove(at)) {
            self.requested.push(Requester::User(user), job);
        }
    }
}

/// The jobs, as the threads share them.
#[derive(Debug, Default)]
struct JobQueue {
    jobs: Mutex<Jobs>,
    /// Notified when a job was added, or when the queue was closed.
    changed: Condvar,
}

impl JobQueue {
    fn lock(&self) -> MutexGuard<'_, Jobs> {
        // No code that can panic runs under the lock, and a queue is consistent between calls.
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next job. `None` when the queue is closed.
    fn wait(&self) -> Option<(Requester, Job)> {
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

/// The threads, and the jobs that they have finished.
#[derive(Debug)]
pub(super) struct Workers {
    queue: Arc<JobQueue>,
    done: Receiver<Done>,
    /// Readable when a job is finished.
    wakeup: PacketSocket,
}

impl Workers {
    /// Starts the threads. Memory of devices is allocated by a backend, if there is one.
    pub(super) fn start(devices: Option<&Backend>, headroom: &Arc<Headroom>) -> Result<Self> {
        let (report, done) = channel();
        let (wakeup, waker) = PacketSocket::pair()?;
        let (queue, waker) = (Arc::new(JobQueue::default()), Arc::new(waker));
        // Closes the queue also where a thread cannot be started.
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

    /// Adds a job behind the others of its requester.
    pub(super) fn add(&self, requester: Requester, job: Job) {
        self.queue.lock().push(requester, job);
        self.queue.changed.notify_one();
    }

    /// Moves a job that preallocates memory to a user, because a request of that user waits for it. A job that has begun stays.
    pub(super) fn promote(&self, allocation: AllocationId, user: u32) {
        self.queue.lock().promote(allocation, user);
    }

    pub(super) fn wakeup(&self) -> &PacketSocket {
        &self.wakeup
    }

    /// The jobs that were finished since the last call.
    pub(super) fn done(&self) -> Vec<Done> {
        while self.wakeup.recv(&mut [0; 8], Deadline::NOW).is_ok() {}
        self.done.try_iter().collect()
    }
}

/// The threads end with this. Jobs that no thread has begun are dropped.
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
    report: &Sender<Done>,
    waker: &PacketSocket,
) {
    while let Some((requester, job)) = queue.wait() {
        let done = match job {
            Job::Allocate { allocation, len, place, is_retry } => {
                let is_ahead = requester == Requester::Server;
                let purpose = if is_ahead { Purpose::Ahead } else { Purpose::Objects };
                match allocate(devices, headroom, purpose, len, place) {
                    Err(reason) if !is_retry && !is_ahead => {
                        let retry = Job::Allocate { allocation, len, place, is_retry: true };
                        Done::Failed { allocation, requester, retry, reason }
                    }
                    outcome => Done::Allocated { allocation, place, outcome },
                }
            }
            Job::Check { allocation, len, place, fd } => {
                Done::Allocated { allocation, place, outcome: check(devices, len, place, fd) }
            }
            Job::Close { allocation, fd } => Done::Closed { allocation, outcome: close(fd.as_fd()) },
        };
        if report.send(done).is_err() {
            return;
        }
        // If the socket is full, the event loop is woken by what is in it.
        let _ = waker.send(&[1], &[], Deadline::NOW);
    }
}

/// Closes memory for writing.
pub(super) fn close(fd: BorrowedFd<'_>) -> Result<(), Refusal> {
    memfd::close_for_writing(fd).map_err(|error| match error {
        OsError::Call { errno: Errno::BUSY, .. } => Refusal::StillMapped,
        error => refused(fd, &error),
    })
}

/// The refusal for memory that cannot be closed for writing or opened again.
pub(super) fn refused(fd: BorrowedFd<'_>, error: &OsError) -> Refusal {
    match memfd::len_of(fd) {
        Ok(len) => Refusal::of_memory(len as u64, error),
        // The descriptor is not memory.
        Err(unknown) => Refusal::malformed(&format!("{error}; its length cannot be read: {unknown}")),
    }
}

fn allocate(
    devices: Option<&Backend>,
    headroom: &Headroom,
    purpose: Purpose,
    len: u64,
    place: u32,
) -> Result<OwnedFd, String> {
    let len = usize::try_from(len).map_err(|_| "there are not so many addresses".to_owned())?;
    let Some(device) = place.checked_sub(1) else {
        // If there is too little memory, the kernel kills instead of refusing.
        let _claim = headroom.claim_in_turn(len, purpose).map_err(|shortage| shortage.to_string())?;
        let memory = Memfd::create_large("wholemem-object", len).map_err(|error| describe_error(&error))?;
        return Ok(memory.into_fd());
    };
    let on_device = || {
        let device = devices.map(|backend| backend.device(device)).transpose()?;
        let Some(device) = device else { return Ok(None) };
        let memory = Allocation::create(device.backend(), &AllocationSpec::new(&device, len))?;
        Ok(memory.export(HandleKind::Fd, Rights::ReadWrite)?.into_fd())
    };
    let made: Result<_, wholemem_hal::Error> = on_device();
    made.map_err(|error| error.to_string())?.ok_or_else(|| "the server has no devices".to_owned())
}

/// Checks that a descriptor is memory of a place and exactly this long. Host memory is closed for writing.
fn check(devices: Option<&Backend>, len: u64, place: u32, fd: Option<OwnedFd>) -> Result<OwnedFd, String> {
    let fd = fd.ok_or("no descriptor came along")?;
    let len = usize::try_from(len).map_err(|_| "there are not so many addresses".to_owned())?;
    let Some(device) = place.checked_sub(1) else {
        let memory = Memfd::import(fd, len).map_err(|error| error.to_string())?;
        close(memory.as_fd()).map_err(|refusal| refusal.to_string())?;
        return Ok(memory.into_fd());
    };
    let again = || memfd::share_fd(fd.as_fd()).map_err(|error| error.to_string());
    let (first, second) = (again()?, again()?);
    // No device accesses it, and so no context of the driver is needed.
    let map = |memory: &Allocation| -> wholemem_hal::Result<()> {
        let reservation = Reservation::create(memory.device().backend(), memory.len())?;
        Mapping::create(&reservation, 0, memory, &[]).map(drop)
    };
    let on_device = || {
        let Some(backend) = devices else { return Ok(Err("the server has no devices")) };
        let device = backend.device(device)?;
        let memory = Allocation::import(&device, first.into(), len)?;
        if memory.properties()?.device.is_some_and(|found| found != device.id()) {
            return Ok(Err("it is on another device"));
        }
        // The driver does not report its length, but maps no more than there is.
        map(&memory)?;
        let more = len.saturating_add(memory.granularity().minimum.len());
        let longer = Allocation::import(&device, second.into(), more).and_then(|longer| map(&longer));
        Ok(if longer.is_ok() { Err("it is longer than was said") } else { Ok(()) })
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

    use super::super::headroom::tests::Machine;
    use super::*;

    fn wait(workers: &Workers) -> Done {
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

    fn make(slot: usize) -> Job {
        Job::Allocate { allocation: AllocationId::new(slot, 0), len: 1, place: 0, is_retry: true }
    }

    fn slots(jobs: &mut Jobs) -> Vec<usize> {
        std::iter::from_fn(|| jobs.pop()).map(|(_, job)| job.allocation().slot()).collect()
    }

    #[test]
    fn jobs_of_one_user_do_not_delay_those_of_another() {
        let mut jobs = Jobs::default();
        jobs.push(Requester::Server, make(0));
        (100..104).for_each(|slot| jobs.push(Requester::User(1), make(slot)));
        jobs.push(Requester::User(2), make(200));
        jobs.push(Requester::Everyone, make(300));
        jobs.push(Requester::User(2), make(201));
        assert_eq!(slots(&mut jobs), [100, 200, 300, 101, 201, 102, 103, 0]);
    }

    #[test]
    fn memory_made_ahead_takes_the_turn_of_the_user_who_waits_for_it() {
        let mut jobs = Jobs::default();
        (0..3).for_each(|slot| jobs.push(Requester::Server, make(slot)));
        (100..104).for_each(|slot| jobs.push(Requester::User(1), make(slot)));
        jobs.promote(AllocationId::new(1, 0), 2);
        jobs.promote(AllocationId::new(77, 0), 2);
        assert_eq!(slots(&mut jobs), [100, 1, 101, 102, 103, 0, 2]);
    }

    #[test]
    fn threads_end_with_the_workers() {
        let workers = Workers::start(None, &headroom()).unwrap();
        let queue = Arc::downgrade(&workers.queue);
        drop(workers);
        // Each thread holds the queue until it returns.
        while queue.upgrade().is_some() {
            thread::yield_now();
        }
    }

    #[test]
    fn memory_is_made_elsewhere_and_closed_when_nobody_maps_it() {
        let devices = Backend::host(HostConfig::virtual_devices(1)).unwrap();
        let workers = Workers::start(Some(&devices), &headroom()).unwrap();
        for place in [0, 1] {
            let allocation = AllocationId::new(place as usize, 0);
            workers.add(
                Requester::User(1),
                Job::Allocate { allocation, len: 128 << 10, place, is_retry: false },
            );
            let Done::Allocated { outcome: Ok(fd), .. } = wait(&workers) else { panic!("memory") };
            let memory = Memfd::import(fd, 128 << 10).unwrap();
            let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
            for (map, expected) in [(Some(map), Err(Refusal::StillMapped)), (None, Ok(()))] {
                workers.add(Requester::User(1), Job::Close { allocation, fd: memory.share_fd().unwrap() });
                let Done::Closed { outcome, .. } = wait(&workers) else { panic!("closed") };
                assert_eq!(outcome, expected);
                drop(map);
            }
        }
    }

    #[test]
    fn memory_that_is_not_there_is_an_answer() {
        let workers = Workers::start(None, &headroom()).unwrap();
        let allocation = AllocationId::new(0, 0);
        for (len, place, reason) in [(1 << 60, 0, "only "), (4096, 1, "the server has no devices")] {
            workers.add(Requester::User(1), Job::Allocate { allocation, len, place, is_retry: true });
            let Done::Allocated { outcome: Err(said), .. } = wait(&workers) else { panic!("no memory") };
            assert!(said.starts_with(reason), "{said}");
        }
    }

    #[test]
    fn memory_made_ahead_leaves_what_requests_may_take() {
        let workers = Workers::start(None, &Arc::new(Headroom::new(Machine::with(40 << 20)))).unwrap();
        let allocation = AllocationId::new(0, 0);
        let job = || Job::Allocate { allocation, len: 16 << 20, place: 0, is_retry: true };
        workers.add(Requester::Server, job());
        let Done::Allocated { outcome: Err(said), .. } = wait(&workers) else { panic!("memory made ahead") };
        assert_eq!(said, "only 40 MiB are available on this machine, and 30 MiB stay free");
        for requester in [Requester::User(1), Requester::Everyone] {
            workers.add(requester, job());
            assert!(matches!(wait(&workers), Done::Allocated { outcome: Ok(_), .. }));
        }
    }

    #[test]
    fn short_memory_is_looked_at_too() {
        let workers = Workers::start(None, &Arc::new(Headroom::new(Machine::with(9 << 20)))).unwrap();
        let allocation = AllocationId::new(0, 0);
        workers.add(Requester::User(1), Job::Allocate { allocation, len: 2 << 20, place: 0, is_retry: true });
        let Done::Allocated { outcome: Err(said), .. } = wait(&workers) else { panic!("no memory") };
        assert_eq!(said, "only 9 MiB are available on this machine, and 8 MiB stay free");
    }
}
