//! Packets between two processes of one machine: they keep their boundaries, and carry file descriptors.
//!
//! ```text
//!   a                                            b
//!   send(bytes, fds)  --- at most 64 KiB --->    recv_with_fds(buffer, room)
//!                         and 64 descriptors
//!
//!   send_tagged       --- 64 of 150 -------->    recv_tagged(limit)
//!   (any number,      <-- took 64 -----------    one batch is in flight at a time, since the kernel
//!    each with a key) --- 64 of 150 -------->    counts what is in flight against the user's limit
//!                     <-- took 128 ----------
//!                     --- 22 of 150 -------->
//!                     <-- took 150 ----------
//! ```
//!
//! What it keeps true: a packet arrives whole or is an error; a descriptor arrives open and close-on-exec, or is
//! closed; no wait outlives its [`Deadline`](crate::Deadline); no write raises `SIGPIPE`. The file description is
//! never made non-blocking, since other processes may share it.
//!
//! What it will not do: find the peer, prove who it is, or tell that it died. A socket stays open as long as any
//! forked child of the peer holds it; see [`pidfd`](crate::pidfd) and [`robust`](crate::robust).
//!
//! ```
//! use std::os::fd::AsFd;
//! use wholemem_os::{Deadline, PacketSocket};
//!
//! let (here, there) = PacketSocket::pair()?;
//! let zero = std::fs::File::open("/dev/zero").unwrap();
//! here.send(b"take this", &[zero.as_fd()], Deadline::NEVER)?;
//!
//! let mut buffer = [0; 64];
//! let (len, fds) = there.recv_with_fds(&mut buffer, 1, Deadline::NEVER)?;
//! assert_eq!((&buffer[..len], fds.len()), (&b"take this"[..], 1));
//! # Ok::<(), wholemem_os::Error>(())
//! ```

mod listen;
mod socket;
mod tagged;
mod wire;

pub use listen::{Address, EncodedAddress, PacketListener};
pub use socket::{MAX_FDS, MAX_PACKET, PacketSocket};
