//! Packet sockets (`SOCK_SEQPACKET`) between processes of one node: packets have boundaries and carry file
//! descriptors.
//!
//! ```text
//!   a                                            b
//!   send(bytes, fds)  --- at most 68 KiB --->    recv_with_fds(buffer, max_fds)
//!                         and 64 descriptors
//!
//!   send_tagged       --- 64 of 150 -------->    recv_tagged(limit)
//!   (any number,      <-- received 64 -------    one batch is in flight at a time, since the kernel
//!    each with a key) --- 64 of 150 -------->    counts descriptors in flight against the user's limit
//!                     <-- received 128 ------
//!                     --- 22 of 150 -------->
//!                     <-- received 150 ------
//! ```
//!
//! Guarantees: a packet arrives whole or is an error; a descriptor arrives open and close-on-exec, or is closed; no
//! wait exceeds its [`Deadline`](crate::Deadline); no write raises `SIGPIPE`. The file description of a connection is
//! never made non-blocking, since other processes may share it.
//!
//! A socket does not authenticate its peer, and does not report its death: it stays open as long as any forked child
//! of the peer holds it; see [`pidfd`](crate::pidfd) and [`robust`](crate::robust).
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
