//! Process file descriptors (pidfd), which detect the exit of a process and never refer to another process.
//!
//! Guarantees: a [`PidFd`] refers to one process forever, even if its process id is reused. It can be sent to other
//! processes in a [`packet`](crate::packet), where it reports the exit too, which a socket does not if a forked child
//! keeps it open.
//!
//! A pidfd does not reap a child and does not return its exit status. A process has exited when its last thread has,
//! whether it is reaped or not; freeing its memory may take hundreds of milliseconds before that.
//!
//! ```
//! use std::process::{Command, Stdio};
//! use wholemem_os::{Deadline, PidFd};
//!
//! // `cat` waits for the end of its input.
//! let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
//! let process = PidFd::open(child.id())?;
//! assert!(!process.has_exited()?);
//!
//! process.kill()?;
//! assert!(process.wait_exit(Deadline::NEVER)?);
//! # child.wait().unwrap();
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use crate::call::call;
use crate::{Deadline, Errno, Error, Result};

pub use rustix::process::Signal;

/// A file descriptor that refers to a process (pidfd).
#[doc(alias = "pidfd_open")]
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens a pidfd of the process with the given id. Unless the process is a child of the caller, its id may have
    /// been reused: prefer [`PacketSocket::peer_pidfd`](crate::PacketSocket::peer_pidfd), or let the process send its
    /// own pidfd.
    pub fn open(pid: u32) -> Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let fd = call("pidfd_open", || {
            rustix::process::pidfd_open(pid.ok_or(Errno::INVAL)?, PidfdFlags::empty())
        })?;
        Ok(Self(fd))
    }

    /// Opens a pidfd of this process, so that other processes can watch it.
    pub fn of_self() -> Result<Self> {
        Self::open(std::process::id())
    }

    /// Converts a received descriptor to a [`PidFd`], after checking that it is a pidfd.
    #[doc(alias = "P_PIDFD")]
    pub fn adopt(fd: OwnedFd) -> Result<Self> {
        // `waitid` accepts only a pidfd, whereas `pidfd_send_signal` would also accept a directory of `/proc`, which
        // polls as exited. With WNOHANG and WNOWAIT, `waitid` neither waits nor reaps.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match call("waitid", || rustix::process::waitid(WaitId::PidFd(fd.as_fd()), options)) {
            // ECHILD means that the descriptor refers to a process that is not a child of this one.
            Ok(_) | Err(Error::Call { errno: Errno::CHILD, .. }) => Ok(Self(fd)),
            Err(Error::Call { errno: Errno::BADF, .. }) => {
                Err(Error::WrongDescriptor { expected: "a pidfd" })
            }
            Err(error) => Err(error),
        }
    }

    /// Wraps a descriptor that the kernel returned as a pidfd.
    pub(crate) fn from_kernel(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Returns the user id of the process, or `None` if the process has exited or `/proc` does not show it.
    #[must_use]
    pub fn uid(&self) -> Option<u32> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd())).ok()?;
        let pid: u32 = field(&info, "Pid:")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let uid = field(&status, "Uid:");
        // The user id is that of the right process if the process has not exited yet, since its process id is not
        // reused before.
        self.has_exited().is_ok_and(|has_exited| !has_exited).then_some(uid).flatten()
    }

    /// Waits until the process has exited. Returns `false` if the deadline passes first.
    pub fn wait_exit(&self, deadline: Deadline) -> Result<bool> {
        loop {
            let timeout = deadline.timeout();
            let mut watched = [PollFd::new(&self.0, PollFlags::IN)];
            match call("poll", || poll(&mut watched, timeout.as_ref())) {
                Ok(0) if deadline.has_passed() => return Ok(false),
                Ok(0) | Err(Error::Call { errno: Errno::INTR, .. }) => {}
                Ok(_) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns whether the process has exited.
    pub fn has_exited(&self) -> Result<bool> {
        self.wait_exit(Deadline::NOW)
    }

    /// Kills the process with `SIGKILL`. It is not an error if the process has exited already.
    #[doc(alias = "SIGKILL")]
    pub fn kill(&self) -> Result<()> {
        match self.signal(Signal::KILL) {
            Err(Error::Call { errno: Errno::SRCH, .. }) => Ok(()),
            outcome => outcome,
        }
    }

    /// Sends a signal to the process.
    #[doc(alias = "pidfd_send_signal")]
    pub fn signal(&self, signal: Signal) -> Result<()> {
        call("pidfd_send_signal", || rustix::process::pidfd_send_signal(&self.0, signal))
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<PidFd> for OwnedFd {
    fn from(pidfd: PidFd) -> Self {
        pidfd.0
    }
}

/// Returns the first number of a named field in the text of a `/proc` file.
fn field(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// Has the kernel kill this process when its parent dies, so that this process does not become an orphan.
///
/// `parent_pid` is the parent's process id from before the fork. If this process has another parent by now, the
/// original one is dead: no death signal is set, and the error is [`Error::Closed`].
///
/// For the kernel, the parent is the *thread* that forked: do not use this function if that thread may end before its
/// process. Children of this process do not inherit the setting, and a change of the user id clears it.
///
/// ```no_run
/// use wholemem_os::{Error, pidfd};
///
/// # let parent_pid = 1;
/// // In a child that received its parent's process id:
/// match pidfd::die_with_parent(parent_pid) {
///     Err(Error::Closed) => std::process::exit(1),
///     outcome => outcome?,
/// }
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "PR_SET_PDEATHSIG")]
pub fn die_with_parent(parent_pid: u32) -> Result<()> {
    call("prctl", || rustix::process::set_parent_process_death_signal(Some(Signal::KILL)))?;
    // If the parent dies after the first call, the kernel kills this process. If the parent died before, the parent
    // process id has changed.
    if Pid::as_raw(rustix::process::getppid()).cast_unsigned() == parent_pid {
        return Ok(());
    }
    call("prctl", || rustix::process::set_parent_process_death_signal(None))?;
    Err(Error::Closed)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::Duration;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;
    use crate::fork::child;

    fn test_deadline() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn a_running_process_has_not_exited() {
        let own = PidFd::of_self().expect("own process");
        assert_eq!(own.has_exited(), Ok(false));
        assert_eq!(own.wait_exit(Deadline::after(Duration::from_millis(1))), Ok(false));
    }

    #[test]
    fn the_user_id_is_known_until_the_process_exits() {
        assert_eq!(PidFd::of_self().unwrap().uid(), Some(rustix::process::getuid().as_raw()));
        let child = child::fork(child::sleep);
        let process = PidFd::open(child.id()).expect("the child");
        assert_eq!(process.uid(), Some(rustix::process::getuid().as_raw()));
        process.kill().expect("kill");
        child.wait();
        assert_eq!(process.uid(), None);
    }

    #[test]
    fn killing_an_exited_process_is_not_an_error() {
        let child = child::fork(child::sleep);
        let process = PidFd::open(child.id()).expect("the child");
        assert_eq!(process.has_exited(), Ok(false));
        process.kill().expect("kill");
        assert_eq!(process.wait_exit(test_deadline()), Ok(true));
        assert_eq!(child.wait(), child::ExitStatus::Killed(libc::SIGKILL));

        assert_eq!(process.has_exited(), Ok(true), "a reaped process is still reported as exited");
        assert_eq!(process.kill(), Ok(()));
        let error = Error::Call { call: "pidfd_send_signal", errno: Errno::SRCH };
        assert_eq!(process.signal(Signal::TERM), Err(error));
    }

    #[test]
    fn the_process_receives_the_signal_that_was_sent() {
        let child = child::fork(child::sleep);
        PidFd::open(child.id()).expect("the child").signal(Signal::USR1).expect("signal");
        assert_eq!(child.wait(), child::ExitStatus::Killed(libc::SIGUSR1));
    }

    #[test]
    fn a_process_id_without_a_process_is_refused() {
        let error = |errno| Some(Error::Call { call: "pidfd_open", errno });
        assert_eq!(PidFd::open(0).err(), error(Errno::INVAL));
        assert_eq!(PidFd::open(u32::MAX).err(), error(Errno::INVAL));
        // The id is above the largest process id of Linux.
        assert_eq!(PidFd::open((1 << 22) + 1).err(), error(Errno::SRCH));
    }

    #[test]
    fn adopt_accepts_pidfds_only() {
        let wrong = || Some(Error::WrongDescriptor { expected: "a pidfd" });
        let (pipe, _writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        assert_eq!(PidFd::adopt(pipe).err(), wrong());
        let folder = File::open("/proc/self").expect("a directory");
        assert_eq!(PidFd::adopt(folder.into()).err(), wrong());

        // `adopt` accepts pidfds of this process, of a child that has exited, and of a child that was reaped.
        let own = PidFd::adopt(PidFd::of_self().expect("own process").into()).expect("own process");
        assert_eq!(own.has_exited(), Ok(false));
        let child = child::fork(|| 7);
        let process = PidFd::open(child.id()).expect("the child");
        assert_eq!(process.wait_exit(test_deadline()), Ok(true));
        let process = PidFd::adopt(process.into()).expect("a zombie");
        assert_eq!(child.wait(), child::ExitStatus::Exited(7), "adopt does not reap");
        let process = PidFd::adopt(process.into()).expect("a reaped process");
        assert_eq!(process.has_exited(), Ok(true));
    }

    #[test]
    fn a_child_is_killed_when_its_parent_dies() {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let parent = child::fork(|| {
            let parent = std::process::id();
            let child = child::fork(|| {
                if die_with_parent(parent).is_err() {
                    return 1;
                }
                let _ = rustix::io::write(&writer, &std::process::id().to_le_bytes());
                child::sleep()
            });
            std::mem::forget(child);
            child::sleep()
        });
        let mut pid = [0; 4];
        assert_eq!(rustix::io::read(&reader, &mut pid), Ok(4));
        let process = PidFd::open(u32::from_le_bytes(pid)).expect("the grandchild");
        assert_eq!(process.has_exited(), Ok(false));
        drop(parent);
        assert_eq!(process.wait_exit(test_deadline()), Ok(true));
    }

    #[test]
    fn die_with_parent_is_refused_if_the_parent_has_changed() {
        let child = child::fork(|| {
            // The child passes its own process id as that of its parent, as if its parent had died before the call.
            let refused = die_with_parent(std::process::id()) == Err(Error::Closed);
            let unset = rustix::process::parent_process_death_signal() == Ok(None);
            if refused && unset { 0 } else { 1 }
        });
        assert_eq!(child.wait(), child::ExitStatus::Exited(0));
    }
}
