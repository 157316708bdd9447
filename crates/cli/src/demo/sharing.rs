//! The first chapter: memory that a second process creates, that this one maps, and that stays when its creator dies.
//!
//! ```text
//!   creator                                  this process
//!   create, map   ---- file descriptor --->  import, map
//!   fill                                     check every byte
//!   killed                                   check every byte again
//!                                            drop all: nothing is left
//! ```

use std::fs;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use wholemem_command::link::Link;
use wholemem_command::peer::Peer;
use wholemem_command::peer::PeerRole;
use wholemem_command::size::Rough;
use wholemem_hal::{Allocation, Device, HandleKind, Mapping, Rights};

use super::stage::{Done, Stage};
use super::{Pattern, Setting};

/// What the creator is asked to do.
#[derive(Debug, Serialize, Deserialize)]
enum Request {
    Create { len: usize },
    Map,
    Fill { seed: u64 },
}

/// That it did it, and how long it took.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    nanos: u64,
}

impl Answer {
    fn since(start: Instant) -> Self {
        Self { nanos: u64::try_from(start.elapsed().as_nanos()).expect("shorter than 584 years") }
    }

    fn time(&self) -> Duration {
        Duration::from_nanos(self.nanos)
    }
}

/// Plays the second process.
pub(crate) fn creator(link: &Link, device: &Device) -> Result<()> {
    let Request::Create { len } = link.hear()? else { return out_of_turn() };
    let start = Instant::now();
    let memory = device.allocate(len)?;
    link.say(&Answer::since(start))?;

    let Request::Map = link.hear()? else { return out_of_turn() };
    let start = Instant::now();
    let map = memory.map(Rights::ReadWrite)?;
    enter_pages(&map);
    let handle = memory.export(HandleKind::Fd, Rights::ReadWrite)?;
    let handle = handle.into_fd().context("the memory does not travel as a file descriptor")?;
    link.say_with_fd(&Answer::since(start), handle.as_fd())?;

    let Request::Fill { seed } = link.hear()? else { return out_of_turn() };
    let stream = device.stream()?;
    let start = Instant::now();
    Pattern::new(seed).write(&stream, &map)?;
    link.say(&Answer::since(start))?;

    // Stays, with the memory mapped, until it is killed.
    link.hear::<()>()
}

fn out_of_turn() -> Result<()> {
    anyhow::bail!("it was asked out of turn")
}

/// Some twenty times faster than touching each page first when it is used, and no loss where it cannot be.
fn enter_pages(map: &Mapping) {
    let _ = map.populate();
}

/// Plays the chapter.
pub(super) fn play(stage: &mut Stage, setting: &Setting) -> Result<()> {
    let Setting { device, len, pattern } = setting;
    let len = *len;
    let before = Holdings::count()?;
    let own = std::process::id();

    let mut peer = stage.step("create", || {
        let mut peer = Peer::start(PeerRole::Creator, device.backend().kind())?;
        let answer: Answer = peer.with(|link| {
            link.say(&Request::Create { len })?;
            link.hear()
        })?;
        let what = format!("process {} created {} on {}", peer.id(), Rough(len), device.label());
        Ok((peer, Done::new(what).took(answer.time())))
    })?;
    let creator = peer.id();

    let handle = stage.step("send", || {
        let (answer, handle) = peer.with(|link| {
            link.say(&Request::Map)?;
            link.hear_with_fd::<Answer>()
        })?;
        let what = format!("process {creator} mapped it, entered its pages, and sent a file descriptor");
        Ok((handle, Done::new(what).took(answer.time())))
    })?;

    let map = stage.step("import", || {
        let memory = Allocation::import(device, handle.into(), len)?;
        let map = memory.map(Rights::ReadWrite)?;
        enter_pages(&map);
        let what = format!("process {own}, this one, took it over and mapped it too");
        Ok((map, Done::new(what)))
    })?;

    stage.step("fill", || {
        let answer: Answer = peer.with(|link| {
            link.say(&Request::Fill { seed: pattern.seed() })?;
            link.hear()
        })?;
        let what = format!("process {creator} wrote bytes of seed {}", pattern.seed());
        Ok(((), Done::new(what).took(answer.time()).moved(len)))
    })?;

    let stream = device.stream()?;
    stage.step("verify", || {
        pattern.check(&stream, &map, "verify")?;
        let what = format!("process {own} found all {len} bytes as they should be");
        Ok(((), Done::new(what).moved(len)))
    })?;

    stage.step("kill", || {
        peer.kill()?;
        let what = format!("process {creator} got SIGKILL, and is dead");
        Ok(((), Done::new(what)))
    })?;

    stage.step("verify-again", || {
        pattern.check(&stream, &map, "verify again")?;
        let what = format!("its memory is still here: all {len} bytes are as before");
        Ok(((), Done::new(what).moved(len)))
    })?;

    stage.step("give-back", || {
        drop((stream, map));
        let left = device.backend().collect();
        ensure!(left == 0, "{left} things could not be given back");
        let after = Holdings::count()?;
        let Holdings { files, maps } = after;
        ensure!(
            after == before,
            "{files} file descriptors and {maps} maps are held, and {} and {} were before",
            before.files,
            before.maps
        );
        let what = format!("{files} open files and {maps} maps of our memory, as before");
        Ok(((), Done::new(what)))
    })
}

/// What this process holds of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holdings {
    files: usize,
    /// Maps of memory made by this library, which carry its name.
    maps: usize,
}

impl Holdings {
    fn count() -> Result<Self> {
        let files = fs::read_dir("/proc/self/fd").context("cannot count open files")?.count();
        let maps = fs::read_to_string("/proc/self/maps").context("cannot count maps")?;
        // The reader of the folder is one of the files in it, this time and every time.
        Ok(Self { files, maps: our_maps(&maps) })
    }
}

fn our_maps(text: &str) -> usize {
    text.lines().filter(|line| line.contains("/memfd:wholemem")).count()
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    #[test]
    fn maps_of_our_memory_are_told_from_others() {
        let text = "\
            7f00-7f01 rw-s 00000000 00:01 1034 /memfd:wholemem (deleted)\n\
            7f01-7f02 rw-p 00000000 00:00 0\n\
            7f02-7f03 ---s 00000000 00:01 1035 /memfd:wholemem (deleted)\n\
            7f03-7f04 r--p 00000000 00:01 99 /usr/bin/wholemem\n";
        assert_eq!(our_maps(text), 2);
    }

    #[test]
    fn a_map_that_is_held_is_counted() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let _map = device.allocate(64 << 10).unwrap().map(Rights::Read).unwrap();
        let held = Holdings::count().unwrap();
        assert!(held.maps >= 1 && held.files >= 1, "{held:?}");
    }

    #[test]
    fn the_creator_does_what_it_is_asked_in_turn() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let (here, there) = Link::pair().unwrap();
        let len = 64 << 10;
        std::thread::scope(|scope| {
            let creator = scope.spawn(|| creator(&there, &device));
            here.say(&Request::Create { len }).unwrap();
            here.hear::<Answer>().unwrap();
            here.say(&Request::Map).unwrap();
            let (_, handle) = here.hear_with_fd::<Answer>().unwrap();
            let map = Allocation::import(&device, handle.into(), len).unwrap().map(Rights::Read).unwrap();
            here.say(&Request::Fill { seed: 3 }).unwrap();
            here.hear::<Answer>().unwrap();
            Pattern::new(3).check(&device.stream().unwrap(), &map, "test").unwrap();
            here.say(&()).unwrap();
            creator.join().unwrap().unwrap();
        });
    }

    #[test]
    fn the_creator_refuses_what_is_out_of_turn() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let (here, there) = Link::pair().unwrap();
        here.say(&Request::Map).unwrap();
        assert_eq!(creator(&there, &device).unwrap_err().to_string(), "it was asked out of turn");
    }
}
