//! Sockets that systemd passes to a service that it starts (socket activation).
//!
//! systemd listens at a socket before the service runs, and passes the listening socket as descriptor 3. The variables
//! `LISTEN_PID` and `LISTEN_FDS` tell the process that it is meant, and how many descriptors there are.

use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::FdFlags;

use crate::call::call;
use crate::{Error, Result};

/// The number of the first descriptor that systemd passes.
const FIRST: RawFd = 3;

/// Takes the listening socket that systemd has passed to this process. Returns `None` if it has passed none, or if the
/// socket was taken before. The socket is closed in programs that this process starts, and does not block.
///
/// # Errors
/// [`Error::Protocol`] if several descriptors were passed; the error of `fcntl` if the descriptor does not exist.
#[doc(alias = "sd_listen_fds")]
pub fn take_listener() -> Result<Option<OwnedFd>> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u32>().ok());
    if number("LISTEN_PID") != Some(std::process::id()) {
        return Ok(None);
    }
    match number("LISTEN_FDS") {
        None | Some(0) => return Ok(None),
        Some(1) => {}
        Some(_) => return Err(Error::Protocol { violation: "systemd passed more than one socket" }),
    }
    if IS_TAKEN.swap(true, Ordering::Relaxed) {
        return Ok(None);
    }
    {
        // SAFETY: The descriptor is only borrowed for the two calls, which fail if it is not open.
        let fd = unsafe { BorrowedFd::borrow_raw(FIRST) };
        call("fcntl", || rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC))?;
        call("ioctl", || rustix::io::ioctl_fionbio(fd, true))?;
    }
    // SAFETY: `fcntl` has shown that the descriptor is open. Its number belongs to the caller of `exec` by the convention of
    // systemd, which the variables announce for this process id, so no other code of this process owns it. `IS_TAKEN` excludes
    // a second owner.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(FIRST) }))
}
