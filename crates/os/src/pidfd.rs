//! Processes held by descriptor, so that their death is known and no newer process is mistaken for them.
//!
//! What it keeps true: a [`PidFd`] refers to one process for ever, whoever gets its number later; it can travel to
//! other processes in a [`packet`](crate::packet) and tells them of that death too, which a socket does not when
//! a forked child keeps it open.
//!
//! What it will not do: reap a child, or tell its exit status. A process has exited when its last thread has,
//! reaped or not; its memory may take hundreds of milliseconds more to go before that.
//!
//! ```
//! use std::process::{Command, Stdio};
//! use wholemem_os::{Deadline, PidFd};
//!
//! // Waits for an end of input that does not come.
//! let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
//! let watch = PidFd::open(child.id())?;
//! assert!(!watch.has_exited()?);
//!
//! watch.kill()?;
//! assert!(watch.wait_exit(Deadline::NEVER)?);
//! # child.wait().unwrap();
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use crate::call::call;
use crate::{Deadline, Errno, Error, Result};

pub use rustix::process::Signal;

/// A process, held by descriptor.
#[doc(alias = "pidfd_open")]
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Takes hold of the process with this number. If it is no child of ours, its number may have gone to another
    /// process meanwhile: prefer [`PacketSocket::peer_pidfd`](crate::PacketSocket::peer_pidfd), or let the
    /// process send its own.
    pub fn open(pid: u32) -> Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let fd = call("pidfd_open", || {
            rustix::process::pidfd_open(pid.ok_or(Errno::INVAL)?, PidfdFlags::empty())
        })?;
        Ok(Self(fd))
    }

    /// Takes hold of this process, to let others watch it.
    pub fn of_self() -> Result<Self> {
        Self::open(std::process::id())
    }

    /// Takes a descriptor that came from elsewhere, after looking that it is one of a process.
    #[doc(alias = "P_PIDFD")]
    pub fn adopt(fd: OwnedFd) -> Result<Self> {
        // `waitid` takes nothing but a pidfd. `pidfd_send_signal` would take a folder of `/proc` as well, which
        // polls as if it had exited. Nothing is waited for, and no child is reaped.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match call("waitid", || rustix::process::waitid(WaitId::PidFd(fd.as_fd()), options)) {
            // It is no child of ours, but it is a process.
            Ok(_) | Err(Error::Call { errno: Errno::CHILD, .. }) => Ok(Self(fd)),
            Err(Error::Call { errno: Errno::BADF, .. }) => {
                Err(Error::WrongDescriptor { expected: "a process" })
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a descriptor that the kernel says is one of a process.
    pub(crate) fn trust(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// The user that the process runs as; `None` where it has exited, or `/proc` does not show it.
    #[must_use]
    pub fn uid(&self) -> Option<u32> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd())).ok()?;
        let pid: u32 = field(&info, "Pid:")?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let uid = field(&status, "Uid:");
        // While the process lives, its number is no other's.
        self.has_exited().is_ok_and(|has_exited| !has_exited).then_some(uid).flatten()
    }

    /// Waits until the process has exited, and says whether it has: `false` means that the deadline came first.
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

    /// Whether the process has exited.
    pub fn has_exited(&self) -> Result<bool> {
        self.wait_exit(Deadline::NOW)
    }

    /// Kills the process at once. One that is gone already is no error.
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

/// The first number behind a name in a file of `/proc`.
fn field(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

/// Has the kernel kill this process when its parent dies, for children that must not be left behind.
///
/// `parent_pid` is the parent's number as it was before the fork. If the parent is already another, which means
/// that the one meant is dead, nothing is set and the answer is [`Error::Closed`].
///
/// The kernel takes "parent" to be the *thread* that forked: where that thread may end before its process, do not
/// use this. The setting is lost to this process's own children, and when it changes its user.
///
/// ```no_run
/// use wholemem_os::{Error, pidfd};
///
/// # let parent_pid = 1;
/// // In a child that was told its parent's number:
/// match pidfd::die_with_parent(parent_pid) {
///     Err(Error::Closed) => std::process::exit(1),
///     outcome => outcome?,
/// }
/// # Ok::<(), Error>(())
/// ```
#[doc(alias = "PR_SET_PDEATHSIG")]
pub fn die_with_parent(parent_pid: u32) -> Result<()> {
    call("prctl", || rustix::process::set_parent_process_death_signal(Some(Signal::KILL)))?;
    // A parent that dies from here on takes us along. One that died before has been replaced.
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

    fn patience() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn a_living_process_has_not_exited() {
        let own = PidFd::of_self().expect("own process");
        assert_eq!(own.has_exited(), Ok(false));
        assert_eq!(own.wait_exit(Deadline::after(Duration::from_millis(1))), Ok(false));
    }

    #[test]
    fn the_user_of_a_living_process_is_known() {
        assert_eq!(PidFd::of_self().unwrap().uid(), Some(rustix::process::getuid().as_raw()));
        let child = child::fork(child::sleep);
        let watch = PidFd::open(child.id()).expect("the child");
        assert_eq!(watch.uid(), Some(rustix::process::getuid().as_raw()));
        watch.kill().expect("kill");
        child.wait();
        assert_eq!(watch.uid(), None);
    }

    #[test]
    fn a_killed_process_exits_and_killing_it_again_is_no_error() {
        let child = child::fork(child::sleep);
        let watch = PidFd::open(child.id()).expect("the child");
        assert_eq!(watch.has_exited(), Ok(false));
        watch.kill().expect("kill");
        assert_eq!(watch.wait_exit(patience()), Ok(true));
        assert_eq!(child.wait(), child::Status::Killed(libc::SIGKILL));

        assert_eq!(watch.has_exited(), Ok(true), "it is reaped, and still known to be gone");
        assert_eq!(watch.kill(), Ok(()));
        let error = Error::Call { call: "pidfd_send_signal", errno: Errno::SRCH };
        assert_eq!(watch.signal(Signal::TERM), Err(error));
    }

    #[test]
    fn a_signal_arrives_as_it_was_sent() {
        let child = child::fork(child::sleep);
        PidFd::open(child.id()).expect("the child").signal(Signal::USR1).expect("signal");
        assert_eq!(child.wait(), child::Status::Killed(libc::SIGUSR1));
    }

    #[test]
    fn a_number_that_is_no_process_is_refused() {
        let error = |errno| Some(Error::Call { call: "pidfd_open", errno });
        assert_eq!(PidFd::open(0).err(), error(Errno::INVAL));
        assert_eq!(PidFd::open(u32::MAX).err(), error(Errno::INVAL));
        // Beyond the largest number that Linux ever gives.
        assert_eq!(PidFd::open((1 << 22) + 1).err(), error(Errno::SRCH));
    }

    #[test]
    fn adopt_takes_descriptors_of_processes_only() {
        let wrong = || Some(Error::WrongDescriptor { expected: "a process" });
        let (pipe, _writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        assert_eq!(PidFd::adopt(pipe).err(), wrong());
        let folder = File::open("/proc/self").expect("a folder");
        assert_eq!(PidFd::adopt(folder.into()).err(), wrong());

        // A stranger, a child, and a child that is gone.
        let own = PidFd::adopt(PidFd::of_self().expect("own process").into()).expect("own process");
        assert_eq!(own.has_exited(), Ok(false));
        let child = child::fork(|| 7);
        let watch = PidFd::open(child.id()).expect("the child");
        assert_eq!(watch.wait_exit(patience()), Ok(true));
        let watch = PidFd::adopt(watch.into()).expect("a zombie");
        assert_eq!(child.wait(), child::Status::Exited(7), "adopting it has not reaped it");
        let watch = PidFd::adopt(watch.into()).expect("a process of the past");
        assert_eq!(watch.has_exited(), Ok(true));
    }

    #[test]
    fn a_child_dies_with_its_parent() {
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
        let watch = PidFd::open(u32::from_le_bytes(pid)).expect("the grandchild");
        assert_eq!(watch.has_exited(), Ok(false));
        drop(parent);
        assert_eq!(watch.wait_exit(patience()), Ok(true));
    }

    #[test]
    fn a_child_whose_parent_is_already_another_is_told_and_nothing_is_set() {
        let child = child::fork(|| {
            // As if its parent had been this child itself, and had died before.
            let told = die_with_parent(std::process::id()) == Err(Error::Closed);
            let unset = rustix::process::parent_process_death_signal() == Ok(None);
            if told && unset { 0 } else { 1 }
        });
        assert_eq!(child.wait(), child::Status::Exited(0));
    }
}
