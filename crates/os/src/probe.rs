//! What this kernel can do, each thing found out by doing it.
//!
//! Versions and headers promise; containers, security policies and emulated kernels refuse. So every fact that wholemem
//! stands on has a small experiment here, for a person who wants to know why something does not work.
//!
//! What it keeps true: an experiment cleans up behind itself. What it will not do: be quick or unnoticed. One of them
//! forks, one starts a thread and, as a thread that dies with a lock must, leaves the hundred bytes of that lock behind.
//!
//! ```
//! use wholemem_os::probe;
//!
//! for probe in probe::all() {
//!     match probe.outcome {
//!         Ok(()) => println!("{}: yes", probe.name),
//!         Err(error) => println!("{}: no, {error}", probe.name),
//!     }
//! }
//! ```

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{Pid, WaitOptions};

use crate::call::{call, call_libc};
use crate::robust::{Owner, RobustLock};
use crate::vm::{self, Protection};
use crate::{Deadline, Errno, Error, ForkEpoch, Memfd, PacketSocket, PidFd, Result, SharedMap, futex, numa};

/// What came of trying something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// What was tried, for programs.
    pub name: &'static str,
    /// It worked, or why not.
    pub outcome: Result<()>,
}

type Experiment = fn() -> Result<()>;

const EXPERIMENTS: [(&str, Experiment); 9] = [
    ("noexec-seal", noexec_seal),
    ("fd-passing", fd_passing),
    ("futex-wait", futex_wait),
    ("robust-lock", robust_lock),
    ("pidfd", pidfd),
    ("peer-pidfd", peer_pidfd),
    ("fork-handler", fork_handler),
    ("numa-bind", numa_bind),
    ("address-space", address_space),
];

/// As many addresses as the largest machines have memory.
const MANY_ADDRESSES: usize = 1 << 40;

/// Tries everything.
#[must_use]
pub fn all() -> Vec<Probe> {
    EXPERIMENTS.iter().map(|&(name, experiment)| Probe { name, outcome: experiment() }).collect()
}

/// A call may answer well and do nothing.
fn expect(held: bool, what: &'static str) -> Result<()> {
    if held { Ok(()) } else { Err(Error::UnknownFormat { what }) }
}

/// Memory that cannot be made executable. Since Linux 6.3; wholemem does without before.
fn noexec_seal() -> Result<()> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let file = call("memfd_create", || rustix::fs::memfd_create("wholemem-probe", flags))?;
    let seals = call("fcntl", || rustix::fs::fcntl_get_seals(&file))?;
    expect(seals.contains(SealFlags::EXEC), "seal against execution")
}

/// A descriptor that goes through a socket is the same file on the other side.
fn fd_passing() -> Result<()> {
    let memory = Memfd::create("wholemem-probe", vm::page_size())?;
    let (here, there) = PacketSocket::pair()?;
    here.send(b"x", &[memory.as_fd()], Deadline::NOW)?;
    let (_, received) = there.recv_with_fds(&mut [0; 8], 1, Deadline::NOW)?;
    let sent = call("fstat", || rustix::fs::fstat(&memory))?;
    let [received] = &received[..] else {
        return Err(Error::FdsTruncated { room: 1 });
    };
    let received = call("fstat", || rustix::fs::fstat(received))?;
    if (sent.st_dev, sent.st_ino) == (received.st_dev, received.st_ino) {
        Ok(())
    } else {
        Err(Error::WrongDescriptor { expected: "the one that was sent" })
    }
}

/// A wait in the kernel ends when its time is over.
fn futex_wait() -> Result<()> {
    let word = AtomicU32::new(0);
    let soon = Deadline::after(Duration::from_millis(1));
    loop {
        let late = soon.has_passed();
        match futex::wait(&word, 0, soon) {
            Err(Error::TimedOut) => return Ok(()),
            // A wait may end for no reason, but not when its time was over before it began.
            Ok(()) => expect(!late, "end of a wait")?,
            Err(error) => return Err(error),
        }
    }
}

/// A lock tells that the thread which held it has ended.
fn robust_lock() -> Result<()> {
    const WORDS: usize = RobustLock::SIZE.div_ceil(size_of::<AtomicU64>());
    let memory: Arc<[AtomicU64; WORDS]> = Arc::new([const { AtomicU64::new(0) }; WORDS]);
    let place = NonNull::from(&*memory).cast();
    // SAFETY: the words are aligned for a lock, large enough, used by nothing else, and stay as long as `memory`.
    let lock = unsafe { RobustLock::create_at(place, memory) }?;
    let (lock, held) = std::thread::scope(|scope| {
        let holder = std::thread::Builder::new().spawn_scoped(scope, || lock.hold().map(std::mem::forget));
        let holder =
            call("clone", || holder.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok((&lock, holder.join().unwrap_or(Err(Error::OwnerDied))))
    })?;
    held?;
    expect(lock.look() == Owner::Died, "death of a lock's owner")
}

/// A process can be held by descriptor.
fn pidfd() -> Result<()> {
    expect(!PidFd::of_self()?.has_exited()?, "life of this process")
}

/// The process at the other end of a socket can be held by descriptor. Since Linux 6.5; before, wholemem goes by its
/// number.
fn peer_pidfd() -> Result<()> {
    let (here, _there) = PacketSocket::pair()?;
    let mut fd: libc::c_int = -1;
    let mut len: libc::socklen_t = 4;
    call_libc("getsockopt", || {
        let (socket, option) = (here.as_fd().as_raw_fd(), libc::SO_PEERPIDFD);
        let to = (&raw mut fd).cast();
        // SAFETY: `to` points to `len` writable bytes, an int's.
        let code = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, to, &raw mut len) };
        code.into()
    })?;
    // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
    let peer = PidFd::adopt(unsafe { OwnedFd::from_raw_fd(fd) })?;
    expect(!peer.has_exited()?, "life of a peer")
}

/// A forked child knows that it is one.
fn fork_handler() -> Result<()> {
    let epoch = ForkEpoch::current()?;
    let child = call_libc("fork", || {
        // SAFETY: the child reads an atomic and ends; it runs nothing that another thread's locks could stop.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(epoch.is_current().into()) }
        }
        pid.into()
    })?;
    let child = i32::try_from(child).ok().and_then(Pid::from_raw);
    let child = child.expect("`fork` answers the parent with a process id");
    // Not through `call`: what only gives back is never made to fail.
    let reaped = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), WaitOptions::empty()));
    let status = reaped.map_err(|errno| Error::Call { call: "waitpid", errno })?;
    let code = status.and_then(|(_, status)| status.exit_status());
    expect(code == Some(0) && epoch.is_current(), "epoch of a forked child")
}

/// Memory comes from the node it was tied to.
fn numa_bind() -> Result<()> {
    let nodes = numa::nodes()?;
    let node = nodes.iter().find(|node| node.memory_bytes > 0);
    let node = node.ok_or(Error::UnknownFormat { what: "NUMA nodes" })?.id;
    let memory = Memfd::create_near("wholemem-probe", vm::page_size(), Some(node))?;
    let map = SharedMap::create(&memory, Protection::ReadWrite)?;
    map.bytes().write_at(0, &[1])?;
    expect(numa::node_of_page(map.address())? == Some(node), "node of a page")
}

/// Addresses can be had in plenty, without memory behind them.
fn address_space() -> Result<()> {
    let at = vm::reserve(MANY_ADDRESSES, vm::page_size(), None)?;
    // SAFETY: the range was made in the line above, and nobody has seen it.
    unsafe { vm::release(at, MANY_ADDRESSES) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_experiment_has_a_name_of_its_own() {
        let names: HashSet<_> = EXPERIMENTS.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), EXPERIMENTS.len());
    }

    #[test]
    fn all_that_wholemem_cannot_do_without_works_here() {
        for Probe { name, outcome } in all() {
            let may_lack = match name {
                "noexec-seal" => Some(Error::Call { call: "memfd_create", errno: Errno::INVAL }),
                "peer-pidfd" => Some(Error::Call { call: "getsockopt", errno: Errno::NOPROTOOPT }),
                _ => None,
            };
            assert!(outcome.is_ok() || outcome.clone().err() == may_lack, "{name}: {outcome:?}");
        }
    }

    #[test]
    fn what_does_nothing_is_not_taken_for_working() {
        let error = Error::UnknownFormat { what: "node of a page" };
        assert_eq!(expect(false, "node of a page"), Err(error));
        assert_eq!(expect(true, "node of a page"), Ok(()));
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn whichever_call_fails_is_the_reason() {
        for (name, experiment) in EXPERIMENTS {
            if experiment().is_err() {
                continue;
            }
            for nth in 1.. {
                let armed = crate::fault::arm(nth, Errno::NOMEM);
                let outcome = experiment();
                let fired = armed.fired();
                drop(armed);
                let Some(call) = fired else {
                    assert_eq!(outcome, Ok(()), "{name}");
                    break;
                };
                // A map that is dropped has nobody to tell.
                if (name, call) != ("numa-bind", "munmap") {
                    let reason = Error::Call { call, errno: Errno::NOMEM };
                    assert_eq!(outcome, Err(reason), "{name}, call {nth}");
                }
            }
        }
    }
}
