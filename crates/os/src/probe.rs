//! Tests which kernel features work, by using each feature once.
//!
//! Kernel versions do not suffice: containers, security policies and emulated kernels refuse features. So every
//! feature that wholemem needs has a small experiment here, which helps a user to find out why something does not
//! work.
//!
//! Each experiment releases what it allocates, with one exception: the test of robust locks starts a thread that dies
//! with a lock, and leaks about a hundred bytes. Another experiment forks.
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
use crate::robust::{LockState, RobustLock};
use crate::vm::{self, Protection};
use crate::{Deadline, Errno, Error, ForkEpoch, Memfd, PacketSocket, PidFd, Result, SharedMap, futex, numa};

/// The result of testing one kernel feature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// The machine-readable name of the kernel feature.
    pub name: &'static str,
    /// `Ok` if the kernel feature works, or the error of its test.
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

/// The length of the address range that the test reserves: as many bytes as the largest machines have memory.
const LARGE_RESERVATION: usize = 1 << 40;

/// Tests every kernel feature that wholemem uses.
#[must_use]
pub fn all() -> Vec<Probe> {
    EXPERIMENTS.iter().map(|&(name, experiment)| Probe { name, outcome: experiment() }).collect()
}

/// Returns an error if a kernel feature did not have its expected effect, since a call may succeed and have no
/// effect.
fn expect(held: bool, subject: &'static str) -> Result<()> {
    if held { Ok(()) } else { Err(Error::UnknownFormat { subject }) }
}

/// Tests that memory can be created that cannot be made executable: an optional feature since Linux 6.3.
fn noexec_seal() -> Result<()> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::NOEXEC_SEAL;
    let file = call("memfd_create", || rustix::fs::memfd_create("wholemem-probe", flags))?;
    let seals = call("fcntl", || rustix::fs::fcntl_get_seals(&file))?;
    expect(seals.contains(SealFlags::EXEC), "seal against execution")
}

/// Tests that a descriptor which is sent through a socket refers to the same file at the receiver.
fn fd_passing() -> Result<()> {
    let memory = Memfd::create("wholemem-probe", vm::page_size())?;
    let (here, there) = PacketSocket::pair()?;
    here.send(b"x", &[memory.as_fd()], Deadline::NOW)?;
    let (_, received) = there.recv_with_fds(&mut [0; 8], 1, Deadline::NOW)?;
    let sent = call("fstat", || rustix::fs::fstat(&memory))?;
    let [received] = &received[..] else {
        return Err(Error::FdsTruncated { capacity: 1 });
    };
    let received = call("fstat", || rustix::fs::fstat(received))?;
    if (sent.st_dev, sent.st_ino) == (received.st_dev, received.st_ino) {
        Ok(())
    } else {
        Err(Error::WrongDescriptor { expected: "the one that was sent" })
    }
}

/// Tests that a futex wait ends at its deadline.
fn futex_wait() -> Result<()> {
    let word = AtomicU32::new(0);
    let soon = Deadline::after(Duration::from_millis(1));
    loop {
        let late = soon.has_passed();
        match futex::wait(&word, 0, soon) {
            Err(Error::TimedOut) => return Ok(()),
            // A futex wait may end spuriously, but not if its deadline had passed before it began.
            Ok(()) => expect(!late, "end of a wait")?,
            Err(error) => return Err(error),
        }
    }
}

/// Tests that a robust lock reports the end of the thread that held it.
fn robust_lock() -> Result<()> {
    const WORDS: usize = RobustLock::SIZE.div_ceil(size_of::<AtomicU64>());
    let memory: Arc<[AtomicU64; WORDS]> = Arc::new([const { AtomicU64::new(0) }; WORDS]);
    let address = NonNull::from(&*memory).cast();
    // SAFETY: the words in `memory` are aligned for a lock, large enough, not used otherwise, and live as long as
    // `memory`.
    let lock = unsafe { RobustLock::create_at(address, Arc::<[AtomicU64; WORDS]>::clone(&memory)) }?;
    let (lock, held) = std::thread::scope(|scope| {
        let holder =
            std::thread::Builder::new().spawn_scoped(scope, || lock.try_lock().map(std::mem::forget));
        let holder =
            call("clone", || holder.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN)))?;
        Ok((&lock, holder.join().unwrap_or(Err(Error::OwnerDied))))
    })?;
    held?;
    // SAFETY: the guard that the thread forgot has one reference to `memory`, and nothing uses the guard after its thread has ended.
    unsafe { Arc::decrement_strong_count(Arc::as_ptr(&memory)) };
    expect(lock.state() == LockState::Died, "state of a lock whose owner died")
}

/// Tests that a pidfd can refer to a process.
fn pidfd() -> Result<()> {
    expect(!PidFd::of_self()?.has_exited()?, "exit state of this process")
}

/// Tests that a socket returns a pidfd of its peer, as it does since Linux 6.5. On older kernels wholemem uses the
/// process id.
fn peer_pidfd() -> Result<()> {
    let (here, _there) = PacketSocket::pair()?;
    let mut fd: libc::c_int = -1;
    let mut len: libc::socklen_t = 4;
    call_libc("getsockopt", || {
        let (socket, option) = (here.as_fd().as_raw_fd(), libc::SO_PEERPIDFD);
        let to = (&raw mut fd).cast();
        // SAFETY: `to` points to `fd`, which has `len` writable bytes, the size of an int.
        let code = unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, option, to, &raw mut len) };
        code.into()
    })?;
    // SAFETY: `getsockopt` has just created `fd`, and no other code owns it.
    let peer = PidFd::adopt(unsafe { OwnedFd::from_raw_fd(fd) })?;
    expect(!peer.has_exited()?, "exit state of a peer")
}

/// Tests that a forked child detects that it was forked.
fn fork_handler() -> Result<()> {
    let epoch = ForkEpoch::current()?;
    let child = call_libc("fork", || {
        // SAFETY: the child only reads an atomic and exits; it acquires no lock that another thread could hold.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: `_exit` ends the child at once, without running exit handlers.
            unsafe { libc::_exit(epoch.is_current().into()) }
        }
        pid.into()
    })?;
    let child = i32::try_from(child).ok().and_then(Pid::from_raw);
    let child = child.expect("`fork` returns a process id in the parent");
    // `waitpid` does not run through `call`, since fault injection does not apply to calls that only release.
    let reaped = rustix::io::retry_on_intr(|| rustix::process::waitpid(Some(child), WaitOptions::empty()));
    let status = reaped.map_err(|errno| Error::Call { call: "waitpid", errno })?;
    let code = status.and_then(|(_, status)| status.exit_status());
    expect(code == Some(0) && epoch.is_current(), "epoch of a forked child")
}

/// Tests that memory is allocated on the NUMA node to which it is bound.
fn numa_bind() -> Result<()> {
    let nodes = numa::nodes()?;
    let node = nodes.iter().find(|node| node.memory_bytes > 0);
    let node = node.ok_or(Error::UnknownFormat { subject: "NUMA nodes" })?.id;
    let memory = Memfd::create_near("wholemem-probe", vm::page_size(), Some(node))?;
    let map = SharedMap::create(&memory, Protection::ReadWrite)?;
    map.bytes().write_at(0, &[1])?;
    expect(numa::node_of_page(map.address())? == Some(node), "node of a page")
}

/// Tests that a large range of addresses can be reserved without memory.
fn address_space() -> Result<()> {
    let at = vm::reserve(LARGE_RESERVATION, vm::page_size(), None)?;
    // SAFETY: the range was reserved above, and no other code has its address.
    unsafe { vm::release(at, LARGE_RESERVATION) }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_experiment_has_a_unique_name() {
        let names: HashSet<_> = EXPERIMENTS.iter().map(|(name, _)| name).collect();
        assert_eq!(names.len(), EXPERIMENTS.len());
    }

    #[test]
    fn every_required_feature_works_here() {
        for Probe { name, outcome } in all() {
            let optional = match name {
                "noexec-seal" => Some(Error::Call { call: "memfd_create", errno: Errno::INVAL }),
                "peer-pidfd" => Some(Error::Call { call: "getsockopt", errno: Errno::NOPROTOOPT }),
                _ => None,
            };
            assert!(outcome.is_ok() || outcome.clone().err() == optional, "{name}: {outcome:?}");
        }
    }

    #[test]
    fn a_call_without_effect_counts_as_failed() {
        let error = Error::UnknownFormat { subject: "node of a page" };
        assert_eq!(expect(false, "node of a page"), Err(error));
        assert_eq!(expect(true, "node of a page"), Ok(()));
    }

    #[cfg(feature = "test-hooks")]
    #[test]
    fn an_experiment_reports_the_call_that_failed() {
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
                // The error of a `munmap` that fails in a destructor is not returned.
                if (name, call) != ("numa-bind", "munmap") {
                    let reason = Error::Call { call, errno: Errno::NOMEM };
                    assert_eq!(outcome, Err(reason), "{name}, call {nth}");
                }
            }
        }
    }
}
