//! `wholemem bench share` and `wholemem bench hand` measure sending memory to a waiting process, which maps it and reads its
//! first and last byte. `share` includes the creation and the first export of the memory; `hand` does not.
//!
//! ```text
//!   this process                                 receiver
//!            prepare  ------------------------->  wait for memory
//!   start    create, export, send  --- fd ----->  receive, import, map, read first and last byte   end
//!            (`hand` starts after the memory was created and exported once)
//!            write other bytes there
//!            request  ------------------------->  read them again through the mapping, unmap
//!            compare, unmap
//! ```
//!
//! Both processes run on one core, unless `--any-core` is set. Across cores, most of the time of a small share would be the
//! wake-up of the second core, for both implementations, and it varies.

use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use wholemem_command::link::{self, PeerLink};
use wholemem_command::peer::PeerProcess;
use wholemem_command::peer::PeerRole;
use wholemem_command::terminal;
use wholemem_hal::limits::{RawDevice, host as limits};
use wholemem_hal::{Allocation, Device, HandleKind, Mapping, PinnedBuffer, Rights, Stream};
use wholemem_os::Deadline;

use super::alloc::raw_error;
use super::comparison::Comparison;
use super::sample::Implementation;
use super::sample::TimedRun;
use crate::args::SweepArgs;

/// A request to the receiver, the second process of `bench share`.
#[derive(Debug, Serialize, Deserialize)]
enum ReceiverRequest {
    /// Requests the receiver to wait for the file descriptor of shared memory, and to import and map the memory with this
    /// implementation (wholemem or raw calls).
    Receive(Implementation),
    /// Requests the receiver to read the first and the last byte again, and to unmap the memory.
    ReadAgain,
}

/// A reply of the receiver, the second process of `bench share`.
#[derive(Debug, Serialize, Deserialize)]
enum ReceiverReply {
    Waiting,
    /// The values of the first and last byte, and the time of the monotonic clock after they were read.
    Read {
        nanos: u64,
        ends: [u8; 2],
    },
    Seen {
        ends: [u8; 2],
    },
}

/// The maximum length of a reply of the receiver in bytes.
const MAX_REPLY: usize = 4096;

/// Handles to access memory of a device with wholemem and with raw calls, created before the measured time.
#[derive(Debug)]
struct DeviceAccess {
    device: Device,
    stream: Stream,
    /// Pinned buffer to which the first and the last byte of device memory are copied.
    stage: PinnedBuffer,
    raw: RawDevice,
}

impl DeviceAccess {
    fn of(device: &Device) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            stage: PinnedBuffer::create(device, 2)?,
            raw: RawDevice::of(device).map_err(raw_error)?,
        })
    }

    /// Returns the first and the last byte of a mapping. Reads them directly if the CPU can access the memory, otherwise by a
    /// copy.
    fn ends(&self, map: &Mapping) -> Result<[u8; 2]> {
        let (mut ends, last) = ([0; 2], map.len() - 1);
        if let Ok(bytes) = map.bytes() {
            let [first_seen, last_seen] = &mut ends;
            bytes.read_at(0, std::slice::from_mut(first_seen))?;
            bytes.read_at(last, std::slice::from_mut(last_seen))?;
            return Ok(ends);
        }
        let stage = self.stage.all();
        self.stream.copy(&stage.part(0, 1)?, &map.span(0, 1)?)?;
        self.stream.copy(&stage.part(1, 1)?, &map.span(last, 1)?)?;
        self.stream.synchronize(Deadline::NEVER)?;
        self.stage.bytes()?.read_at(0, &mut ends)?;
        Ok(ends)
    }

    fn set_ends(&self, map: &Mapping, ends: [u8; 2]) -> Result<()> {
        self.stream.write(&map.span(0, 1)?, &ends[..1])?;
        self.stream.write(&map.span(map.len() - 1, 1)?, &ends[1..])?;
        Ok(())
    }
}

/// The operation of `bench share` and `bench hand`: sends memory to another process. If `EXPORTED`, the memory was created and
/// exported before the measured time.
#[derive(Debug)]
pub(super) struct ShareComparison<const EXPORTED: bool> {
    access: DeviceAccess,
    peer: PeerProcess,
    pinned: Option<&'static str>,
    /// The value that is written to the first byte of shared memory, and its complement to the last byte. Incremented for each
    /// run.
    marks: u8,
}

impl<const EXPORTED: bool> ShareComparison<EXPORTED> {
    pub(super) fn start(device: Device, args: &SweepArgs) -> Result<Self> {
        // Pins this process before the receiver starts, which inherits the CPU affinity.
        let pinned = match (!args.any_core).then(pin_to_one_core).transpose() {
            Ok(None) => None,
            Ok(Some(())) => Some("one core"),
            Err(error) => {
                terminal::note(&format!("the processes are not pinned to a core: {error:#}"));
                None
            }
        };
        let peer = PeerProcess::start(PeerRole::Receiver, device.backend().kind())?;
        Ok(Self { access: DeviceAccess::of(&device)?, peer, pinned, marks: 0 })
    }
}

fn pin_to_one_core() -> Result<()> {
    let mut one = CpuSet::new();
    one.set(sched_getcpu());
    sched_setaffinity(None, &one).context("cannot set the CPU affinity")
}

/// Returns the time of the monotonic clock, which is the same in all processes of a machine.
fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}

impl<const EXPORTED: bool> Comparison for ShareComparison<EXPORTED> {
    const NAME: &'static str = if EXPORTED { "hand" } else { "share" };
    const TITLE: &'static str = if EXPORTED {
        "sending exported memory to a waiting process, which maps it and reads its first and last byte"
    } else {
        "allocating memory and sending it to a waiting process, which maps it and reads its first and last byte"
    };
    const RANKS: usize = 2;

    fn device(&self) -> &Device {
        &self.access.device
    }

    fn pinned(&self) -> Option<&'static str> {
        self.pinned
    }

    fn once(&mut self, implementation: Implementation, len: usize) -> Result<TimedRun> {
        self.marks = self.marks.wrapping_add(1);
        let marks = [self.marks, !self.marks];
        let access = &self.access;
        self.peer.with_link(|link| {
            link.send(&ReceiverRequest::Receive(implementation))?;
            let ReceiverReply::Waiting = link.receive()? else { return unexpected_reply() };
            // Yields the core, so that the receiver runs until it waits for the memory.
            std::thread::yield_now();
            match implementation {
                Implementation::Wholemem => share_with_wholemem(link, access, len, marks, EXPORTED),
                Implementation::Raw => share_with_raw_calls(link, access, len, marks, EXPORTED),
            }
        })
    }
}

fn share_with_wholemem(
    link: &PeerLink,
    access: &DeviceAccess,
    len: usize,
    marks: [u8; 2],
    exported: bool,
) -> Result<TimedRun> {
    let mut reply = [0; MAX_REPLY];
    let start = now();
    let memory = access.device.allocate(len)?;
    let start = if exported {
        drop(memory.export(HandleKind::Fd, Rights::ReadWrite)?);
        now()
    } else {
        start
    };
    let handle = memory.export(HandleKind::Fd, Rights::ReadWrite)?;
    let handle = handle.into_fd().context("the memory was not exported as a file descriptor")?;
    link.socket().send(&len.to_le_bytes(), &[handle.as_fd()], Deadline::NEVER)?;
    let reply_len = link.socket().recv(&mut reply, Deadline::NEVER)?;
    let read = link::decode(&reply[..reply_len])?;

    access.set_ends(&memory.map(Rights::ReadWrite)?, marks)?;
    finish_round(link, start, &read, marks)
}

fn share_with_raw_calls(
    link: &PeerLink,
    access: &DeviceAccess,
    len: usize,
    marks: [u8; 2],
    exported: bool,
) -> Result<TimedRun> {
    let (raw, mut reply) = (&access.raw, [0; MAX_REPLY]);
    let start = now();
    let made = raw.create(len).map_err(raw_error)?;
    let (start, handle) = if exported {
        let ahead = raw.export(&made).map_err(raw_error)?;
        let start = now();
        (start, limits::export(ahead.as_fd())?)
    } else {
        (start, raw.export(&made).map_err(raw_error)?)
    };
    limits::send(link.as_fd(), &len.to_le_bytes(), handle.as_fd())?;
    let (reply_len, _) = limits::recv(link.as_fd(), &mut reply)?;
    let read = link::decode(&reply[..reply_len])?;

    let map = raw.map(&made, len).map_err(raw_error)?;
    raw.set_ends(&map, marks).map_err(raw_error)?;
    finish_round(link, start, &read, marks)
}

/// Requests the first and last byte that the receiver reads after `marks` were written there, and verifies them.
fn finish_round(link: &PeerLink, start: Duration, read: &ReceiverReply, marks: [u8; 2]) -> Result<TimedRun> {
    let &ReceiverReply::Read { nanos, ends } = read else { return unexpected_reply() };
    link.send(&ReceiverRequest::ReadAgain)?;
    let ReceiverReply::Seen { ends: seen } = link.receive()? else { return unexpected_reply() };
    let mismatch = if ends != [0, 0] {
        Some(format!("the receiver read {ends:?} at the ends of new memory"))
    } else if seen != marks {
        Some(format!("the receiver read {seen:?} at the ends, where {marks:?} was written"))
    } else {
        None
    };
    let end = Duration::from_nanos(nanos);
    let took = end.checked_sub(start).context("the receiver's time is before the start")?;
    Ok(TimedRun { took, mismatch })
}

fn unexpected_reply<T>() -> Result<T> {
    anyhow::bail!("the other process of the benchmark sent an unexpected message")
}

/// Runs the second process, which maps the memory that `bench share` and `bench hand` send.
///
/// # Errors
/// If the first process has closed the connection, or the error of a call.
pub fn receiver(link: &PeerLink, device: &Device) -> Result<()> {
    let access = DeviceAccess::of(device)?;
    loop {
        let ReceiverRequest::Receive(implementation) = link.receive()? else { return unexpected_reply() };
        link.send(&ReceiverReply::Waiting)?;
        match implementation {
            Implementation::Wholemem => receive_with_wholemem(link, &access)?,
            Implementation::Raw => receive_with_raw_calls(link, &access)?,
        }
    }
}

fn receive_with_wholemem(link: &PeerLink, access: &DeviceAccess) -> Result<()> {
    let mut bytes = [0; size_of::<usize>()];
    let (_, mut files) = link.socket().recv_with_fds(&mut bytes, 1, Deadline::NEVER)?;
    let file = files.pop().context("the packet has no file descriptor")?;
    let memory = Allocation::import(&access.device, file.into(), usize::from_le_bytes(bytes))?;
    let map = memory.map(Rights::ReadWrite)?;
    let ends = access.ends(&map)?;
    report(link, now(), ends)?;

    let ReceiverRequest::ReadAgain = link.receive()? else { return unexpected_reply() };
    let ends = access.ends(&map)?;
    drop((map, memory));
    link.send(&ReceiverReply::Seen { ends })
}

fn receive_with_raw_calls(link: &PeerLink, access: &DeviceAccess) -> Result<()> {
    let (raw, mut bytes) = (&access.raw, [0; size_of::<usize>()]);
    let (_, file) = limits::recv(link.as_fd(), &mut bytes)?;
    let made = raw.import(file.context("the packet has no file descriptor")?).map_err(raw_error)?;
    let map = raw.map(&made, usize::from_le_bytes(bytes)).map_err(raw_error)?;
    let ends = raw.ends(&map).map_err(raw_error)?;
    report(link, now(), ends)?;

    let ReceiverRequest::ReadAgain = link.receive()? else { return unexpected_reply() };
    let ends = raw.ends(&map).map_err(raw_error)?;
    drop((map, made));
    link.send(&ReceiverReply::Seen { ends })
}

fn report(link: &PeerLink, end: Duration, ends: [u8; 2]) -> Result<()> {
    let nanos = u64::try_from(end.as_nanos()).expect("shorter than 584 years");
    ensure!(nanos < u64::MAX, "the time of the monotonic clock in nanoseconds does not fit in 64 bits");
    link.send(&ReceiverReply::Read { nanos, ends })
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    const LEN: usize = 64 << 10;

    fn device() -> Device {
        Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
    }

    #[test]
    fn shared_memory_of_both_implementations_shows_later_writes() {
        let (device, (here, there)) = (device(), PeerLink::pair().unwrap());
        let access = DeviceAccess::of(&device).unwrap();
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| receiver(&there, &device));
            for implementation in [Implementation::Wholemem, Implementation::Raw] {
                here.send(&ReceiverRequest::Receive(implementation)).unwrap();
                let ReceiverReply::Waiting = here.receive().unwrap() else { panic!("unexpected reply") };
                let timed = match implementation {
                    Implementation::Wholemem => share_with_wholemem(&here, &access, LEN, [3, 4], false),
                    Implementation::Raw => share_with_raw_calls(&here, &access, LEN, [5, 6], true),
                };
                assert_eq!(timed.unwrap().mismatch, None, "{implementation:?}");
            }
            here.send(&ReceiverRequest::ReadAgain).unwrap();
            assert!(receiver.join().unwrap().is_err(), "there is no memory to read");
        });
    }

    /// Returns the result of a round in which the receiver read `ends` in new memory, and `seen` after later writes.
    fn finished(ends: [u8; 2], seen: [u8; 2]) -> Result<TimedRun> {
        let (here, there) = PeerLink::pair()?;
        there.send(&ReceiverReply::Seen { ends: seen })?;
        finish_round(&here, Duration::from_nanos(100), &ReceiverReply::Read { nanos: 350, ends }, [3, 4])
    }

    #[test]
    fn the_time_ends_when_the_receiver_has_read_the_memory() {
        let timed = finished([0, 0], [3, 4]).unwrap();
        assert_eq!((timed.took, timed.mismatch), (Duration::from_nanos(250), None));
    }

    #[test]
    fn a_receiver_that_reads_other_bytes_is_detected() {
        let mismatch = |ends, seen| finished(ends, seen).unwrap().mismatch.unwrap();
        assert_eq!(mismatch([0, 9], [3, 4]), "the receiver read [0, 9] at the ends of new memory");
        assert_eq!(
            mismatch([0, 0], [3, 0]),
            "the receiver read [3, 0] at the ends, where [3, 4] was written"
        );
    }
}
