//! Part 1 of the demo: a second process creates memory, this process maps it, and the memory outlives its creator.
//!
//! ```text
//!   creator                                  this process
//!   create, map   ---- file descriptor --->  import, map
//!   fill                                     verify every byte
//!   killed                                   verify every byte again
//!                                            unmap: no descriptor and no mapping is left
//! ```

use std::fs;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use wholemem_command::link::PeerLink;
use wholemem_command::peer::PeerProcess;
use wholemem_command::peer::PeerRole;
use wholemem_command::size::RoundedSize;
use wholemem_hal::{Allocation, Device, HandleKind, Mapping, Rights};

use super::step::{StepRecorder, StepResult};
use super::{DemoContext, Pattern};

/// A request to the second process of the demo, the creator of the memory. The requests are sent in this order.
#[derive(Debug, Serialize, Deserialize)]
enum CreatorRequest {
    Create { len: usize },
    Map,
    Fill { seed: u64 },
}

/// The reply of the second process to a request: the time that the request took.
#[derive(Debug, Serialize, Deserialize)]
struct CreatorReply {
    nanos: u64,
}

impl CreatorReply {
    fn since(start: Instant) -> Self {
        Self { nanos: u64::try_from(start.elapsed().as_nanos()).expect("shorter than 584 years") }
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }
}

/// Runs the second process of the demo, which creates the memory.
pub(crate) fn creator(link: &PeerLink, device: &Device) -> Result<()> {
    let CreatorRequest::Create { len } = link.receive()? else { return unexpected_request() };
    let start = Instant::now();
    let memory = device.allocate(len)?;
    link.send(&CreatorReply::since(start))?;

    let CreatorRequest::Map = link.receive()? else { return unexpected_request() };
    let start = Instant::now();
    let map = memory.map(Rights::ReadWrite)?;
    populate(&map);
    let handle = memory.export(HandleKind::Fd, Rights::ReadWrite)?;
    let handle = handle.into_fd().context("the memory was not exported as a file descriptor")?;
    link.send_with_fd(&CreatorReply::since(start), handle.as_fd())?;

    let CreatorRequest::Fill { seed } = link.receive()? else { return unexpected_request() };
    let stream = device.stream()?;
    let start = Instant::now();
    Pattern::new(seed).write(&stream, &map)?;
    link.send(&CreatorReply::since(start))?;

    // Waits, with the memory mapped, until this process is killed.
    link.receive::<()>()
}

fn unexpected_request() -> Result<()> {
    anyhow::bail!("the process that creates the memory received an unexpected request")
}

/// Maps all pages of a mapping at once, about twenty times faster than a page fault for each. Errors are ignored: the pages are
/// then mapped on first use.
fn populate(map: &Mapping) {
    let _ = map.populate();
}

/// Runs part 1 of the demo: memory is shared with a second process, and outlives it.
pub(super) fn run(recorder: &mut StepRecorder, context: &DemoContext) -> Result<()> {
    let DemoContext { device, len, pattern } = context;
    let len = *len;
    let before = ResourceCount::count()?;
    let own = std::process::id();

    let mut peer = recorder.step("create", || {
        let mut peer = PeerProcess::start(PeerRole::Creator, device.backend().kind())?;
        let reply: CreatorReply = peer.with_link(|link| {
            link.send(&CreatorRequest::Create { len })?;
            link.receive()
        })?;
        let text = format!("process {} created {} on {}", peer.id(), RoundedSize(len), device.label());
        Ok((peer, StepResult::new(text).took(reply.time())))
    })?;
    let creator = peer.id();

    let handle = recorder.step("send", || {
        let (reply, handle) = peer.with_link(|link| {
            link.send(&CreatorRequest::Map)?;
            link.receive_with_fd::<CreatorReply>()
        })?;
        let text = format!("process {creator} mapped the memory, populated it, and sent a file descriptor");
        Ok((handle, StepResult::new(text).took(reply.time())))
    })?;

    let map = recorder.step("import", || {
        let memory = Allocation::import(device, handle.into(), len)?;
        let map = memory.map(Rights::ReadWrite)?;
        populate(&map);
        let text = format!("process {own}, this process, imported and mapped the memory");
        Ok((map, StepResult::new(text)))
    })?;

    recorder.step("fill", || {
        let reply: CreatorReply = peer.with_link(|link| {
            link.send(&CreatorRequest::Fill { seed: pattern.seed() })?;
            link.receive()
        })?;
        let text = format!("process {creator} wrote a pattern with seed {}", pattern.seed());
        Ok(((), StepResult::new(text).took(reply.time()).moved(len)))
    })?;

    let stream = device.stream()?;
    recorder.step("verify", || {
        pattern.check(&stream, &map, "verify")?;
        let text = format!("process {own} verified all {len} bytes");
        Ok(((), StepResult::new(text).moved(len)))
    })?;

    recorder.step("kill", || {
        peer.kill()?;
        let text = format!("process {creator} was killed with SIGKILL");
        Ok(((), StepResult::new(text)))
    })?;

    recorder.step("verify-again", || {
        pattern.check(&stream, &map, "verify again")?;
        let text = format!("the memory is still mapped: all {len} bytes are unchanged");
        Ok(((), StepResult::new(text).moved(len)))
    })?;

    recorder.step("give-back", || {
        drop((stream, map));
        let left = device.backend().collect();
        ensure!(left == 0, "{left} resources of the backend could not be released");
        let after = ResourceCount::count()?;
        let ResourceCount { files, maps } = after;
        ensure!(
            after == before,
            "{files} file descriptors and {maps} mappings are left, but there were {old_files} and {old_maps} before",
            old_files = before.files,
            old_maps = before.maps
        );
        let text = format!("{files} open files and {maps} mappings of wholemem, as before the demo");
        Ok(((), StepResult::new(text)))
    })
}

/// The numbers of open files and of wholemem's mappings in this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ResourceCount {
    files: usize,
    /// The number of mappings of wholemem's memory files, which are found by name.
    maps: usize,
}

impl ResourceCount {
    fn count() -> Result<Self> {
        let files = fs::read_dir("/proc/self/fd").context("cannot count open files")?.count();
        let maps = fs::read_to_string("/proc/self/maps").context("cannot count mappings")?;
        // The descriptor with which /proc/self/fd is read is counted too, in every call.
        Ok(Self { files, maps: count_own_maps(&maps) })
    }
}

fn count_own_maps(text: &str) -> usize {
    text.lines().filter(|line| line.contains("/memfd:wholemem")).count()
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    #[test]
    fn only_mappings_of_wholemem_are_counted() {
        let text = "\
            7f00-7f01 rw-s 00000000 00:01 1034 /memfd:wholemem (deleted)\n\
            7f01-7f02 rw-p 00000000 00:00 0\n\
            7f02-7f03 ---s 00000000 00:01 1035 /memfd:wholemem (deleted)\n\
            7f03-7f04 r--p 00000000 00:01 99 /usr/bin/wholemem\n";
        assert_eq!(count_own_maps(text), 2);
    }

    #[test]
    fn a_mapping_of_this_process_is_counted() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let _map = device.allocate(64 << 10).unwrap().map(Rights::Read).unwrap();
        let held = ResourceCount::count().unwrap();
        assert!(held.maps >= 1 && held.files >= 1, "{held:?}");
    }

    #[test]
    fn the_creator_serves_requests_in_order() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let (here, there) = PeerLink::pair().unwrap();
        let len = 64 << 10;
        std::thread::scope(|scope| {
            let creator = scope.spawn(|| creator(&there, &device));
            here.send(&CreatorRequest::Create { len }).unwrap();
            here.receive::<CreatorReply>().unwrap();
            here.send(&CreatorRequest::Map).unwrap();
            let (_, handle) = here.receive_with_fd::<CreatorReply>().unwrap();
            let map = Allocation::import(&device, handle.into(), len).unwrap().map(Rights::Read).unwrap();
            here.send(&CreatorRequest::Fill { seed: 3 }).unwrap();
            here.receive::<CreatorReply>().unwrap();
            Pattern::new(3).check(&device.stream().unwrap(), &map, "test").unwrap();
            here.send(&()).unwrap();
            creator.join().unwrap().unwrap();
        });
    }

    #[test]
    fn the_creator_rejects_requests_out_of_order() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let (here, there) = PeerLink::pair().unwrap();
        here.send(&CreatorRequest::Map).unwrap();
        assert_eq!(
            creator(&there, &device).unwrap_err().to_string(),
            "the process that creates the memory received an unexpected request"
        );
    }
}
