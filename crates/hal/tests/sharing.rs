//! Tests of sharing memory and events between processes: transfer, lifetime, protection and release.

#![allow(unsafe_code, reason = "changes of maps and stores by address are unsafe")]
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use wholemem_hal::{
    Allocation, Backend, Device, Event, EventHandle, EventKind, HandleKind, HostConfig, Rights, ShareHandle,
};
use wholemem_os::{Deadline, vm};
use wholemem_testkit::{Census, Ranks, exhaustive, skipped, test_name};

const LEN: usize = 256 << 10;

fn device() -> Device {
    Backend::host(HostConfig::default()).unwrap().device(0).unwrap()
}

fn export(memory: &Allocation, rights: Rights) -> OwnedFd {
    memory.export(HandleKind::Fd, rights).unwrap().into_fd().unwrap()
}

fn import(device: &Device, mut fds: Vec<OwnedFd>) -> Allocation {
    Allocation::import(device, ShareHandle::from(fds.remove(0)), LEN).unwrap()
}

#[test]
fn writes_are_visible_to_another_process() {
    Ranks::of(2).run(test_name!(), |rank| {
        let device = device();
        if rank.id() == 0 {
            let memory = device.allocate(LEN).unwrap();
            let map = memory.map(Rights::ReadWrite).unwrap();
            rank.send(1, b"memory", &[export(&memory, Rights::ReadWrite).as_fd()]);
            map.bytes().unwrap().write_at(LEN - 5, b"hello").unwrap();
            rank.barrier();
            rank.barrier();
            let mut answer = [0; 5];
            map.bytes().unwrap().read_at(0, &mut answer).unwrap();
            assert_eq!(&answer, b"world");
        } else {
            let map = import(&device, rank.recv(0).1).map(Rights::ReadWrite).unwrap();
            rank.barrier();
            let mut seen = [0; 5];
            map.bytes().unwrap().read_at(LEN - 5, &mut seen).unwrap();
            assert_eq!(&seen, b"hello");
            map.bytes().unwrap().write_at(0, b"world").unwrap();
            rank.barrier();
        }
    });
}

#[test]
fn memory_outlives_the_process_that_created_it() {
    Ranks::of(3).killed(0).run(test_name!(), |rank| {
        let device = device();
        match rank.id() {
            0 => {
                let memory = device.allocate(LEN).unwrap();
                memory.map(Rights::ReadWrite).unwrap().bytes().unwrap().fill(0xA5).unwrap();
                rank.send(1, b"memory", &[export(&memory, Rights::ReadWrite).as_fd()]);
                rank.wait_to_be_killed();
            }
            1 => {
                // Rank 1 holds only the descriptor of the memory, without a mapping; the descriptor keeps the memory
                // alive.
                let (_, fds) = rank.recv(0);
                rank.kill(0);
                rank.send(2, b"memory", &[fds[0].as_fd()]);
                drop(fds);
                assert_eq!(rank.recv(2).0, b"seen");
            }
            _ => {
                let map = import(&device, rank.recv(1).1).map(Rights::Read).unwrap();
                let mut seen = vec![0; LEN];
                map.bytes().unwrap().read_at(0, &mut seen).unwrap();
                assert!(seen.iter().all(|&byte| byte == 0xA5));
                rank.send(1, b"seen", &[]);
            }
        }
    });
}

#[test]
fn ten_thousand_shares_leak_no_descriptors_or_maps() {
    let rounds = if exhaustive() { 100_000 } else { 10_000 };
    Ranks::of(2).run(test_name!(), |rank| {
        let device = device();
        let mut before = None;
        for round in 0..rounds {
            if rank.id() == 0 {
                let memory = device.allocate(LEN).unwrap();
                let map = memory.map(Rights::ReadWrite).unwrap();
                rank.send(1, b"memory", &[export(&memory, Rights::ReadWrite).as_fd()]);
                map.bytes().unwrap().write_at(0, b"x").unwrap();
                assert_eq!(rank.recv(1).0, b"done");
            } else {
                let map = import(&device, rank.recv(0).1).map(Rights::ReadWrite).unwrap();
                map.bytes().unwrap().write_at(LEN - 1, b"x").unwrap();
                drop(map);
                rank.send(0, b"done", &[]);
            }
            // After the first round, a process has every descriptor and map that it keeps.
            if round == 0 {
                before = Some(Census::take());
            }
        }
        Census::take().assert_same_as(&before.unwrap(), "after all rounds");
    });
}

#[test]
fn a_process_waits_for_an_event_of_another_process() {
    Ranks::of(2).run(test_name!(), |rank| {
        let device = device();
        let stream = device.stream().unwrap();
        if rank.id() == 0 {
            let memory = device.allocate(LEN).unwrap();
            let map = memory.map(Rights::ReadWrite).unwrap();
            let event = Event::create(&device, EventKind::Shared).unwrap();
            let EventHandle::Fd(handle) = event.export().unwrap() else { panic!("not a descriptor") };
            stream.fill(&map.all(), 7).unwrap();
            stream.record(&event).unwrap();
            rank.send(1, b"both", &[export(&memory, Rights::Read).as_fd(), handle.as_fd()]);
            assert_eq!(rank.recv(1).0, b"seen");
        } else {
            let (_, mut fds) = rank.recv(0);
            let event = Event::import(&device, EventHandle::Fd(fds.pop().unwrap())).unwrap();
            let map = import(&device, fds).map(Rights::Read).unwrap();
            stream.await_event(&event).unwrap();
            let mut seen = vec![0; LEN];
            stream.read(&map.all(), &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == 7));
            rank.send(0, b"seen", &[]);
        }
    });
}

/// The user id of an unprivileged user.
const UNPRIVILEGED_ID: u32 = 65_534;

#[test]
fn another_user_cannot_write_through_a_read_only_descriptor() {
    if !Ranks::can_change_user() {
        return skipped("only root can start a process as another user");
    }
    Ranks::of(2).as_user(1, UNPRIVILEGED_ID).run(test_name!(), |rank| {
        let device = device();
        if rank.id() == 0 {
            let memory = device.allocate(LEN).unwrap();
            let map = memory.map(Rights::ReadWrite).unwrap();
            map.bytes().unwrap().fill(0x11).unwrap();
            // As a control, the test shows that the same attacks succeed on a memory file without the seals and mode
            // of this crate.
            let plain = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&plain, LEN as u64).unwrap();
            let plain = reopen(&plain, OFlags::RDONLY).unwrap();
            // `foreign` is memory with the kernel's default mode, which is imported and then exported again.
            let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
            let foreign = rustix::fs::memfd_create("foreign", flags).unwrap();
            rustix::fs::ftruncate(&foreign, LEN as u64).unwrap();
            let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW;
            rustix::fs::fcntl_add_seals(&foreign, seals).unwrap();
            let foreign = import(&device, vec![foreign]);
            let [ours, reexported] = [&memory, &foreign].map(|memory| export(memory, Rights::Read));
            rank.send(1, b"all", &[ours.as_fd(), reexported.as_fd(), plain.as_fd()]);
            assert_eq!(rank.recv(1).0, b"done");
            let mut seen = vec![0; LEN];
            map.bytes().unwrap().read_at(0, &mut seen).unwrap();
            assert!(seen.iter().all(|&byte| byte == 0x11), "the other user changed no byte");
            let mode = rustix::fs::fstat(export(&memory, Rights::Read)).unwrap().st_mode;
            assert_eq!(mode & 0o777, 0o600);
        } else {
            assert_eq!(rustix::process::geteuid().as_raw(), UNPRIVILEGED_ID);
            let (_, fds) = rank.recv(0);
            let [ours, reexported, plain] = &fds[..] else { panic!("not three descriptors") };
            assert_eq!(reopen(plain, OFlags::RDWR).map(drop), Ok(()), "the control can be reopened");
            attack(ours);
            attack(reexported);
            rank.send(0, b"done", &[]);
        }
    });
}

fn reopen(fd: &OwnedFd, flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(path, flags, rustix::fs::Mode::empty())
}

fn attack(fd: &OwnedFd) {
    use rustix::fs::{FallocateFlags, Mode, fallocate, fchmod, ftruncate};
    assert_eq!(reopen(fd, OFlags::RDWR).map(drop), Err(Errno::ACCESS), "reopening for writing");
    assert_eq!(fchmod(fd, Mode::from_raw_mode(0o777)), Err(Errno::PERM), "fchmod");
    assert_eq!(rustix::io::pwrite(fd, b"x", 0), Err(Errno::BADF), "pwrite");
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(fallocate(fd, punch, 0, 4096), Err(Errno::BADF), "punching a hole");
    assert_eq!(ftruncate(fd, 0), Err(Errno::INVAL), "ftruncate");

    let device = device();
    let memory =
        Allocation::import(&device, wholemem_os::memfd::share_fd(fd.as_fd()).unwrap().into(), LEN).unwrap();
    assert_eq!(memory.rights(), Rights::Read);
    let map = memory.map(Rights::Read).unwrap();
    let bytes = map.bytes().unwrap();
    assert_eq!(bytes.write_at(0, b"x"), Err(wholemem_os::Error::ReadOnly));
    // SAFETY: the mapping belongs to this test; if the call succeeds, the test fails.
    let widened = unsafe { vm::protect(bytes.as_ptr(), LEN, vm::Protection::ReadWrite) };
    assert_eq!(widened, Err(wholemem_os::Error::Call { call: "mprotect", errno: Errno::ACCESS }));
    // SAFETY: the kernel checks the access rights of the page before it stores a byte.
    assert!(!unsafe { vm::try_store(bytes.as_ptr()) }, "a store to the mapping");
    // SAFETY: without a fixed address `mmap` replaces no mapping, and a failed call maps nothing.
    let again = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            LEN,
            rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
            rustix::mm::MapFlags::SHARED,
            fd,
            0,
        )
    };
    assert_eq!(again.map(drop), Err(Errno::ACCESS), "a writable mapping");
}

#[test]
fn a_wait_for_an_event_that_never_completes_times_out() {
    let device = device();
    let never = wholemem_hal::host::HostEvent::shared().unwrap();
    never.set_latest(never.next_ticket());
    let event = Event::import(&device, EventHandle::Fd(never.export().unwrap().unwrap())).unwrap();
    let attempt = wholemem_hal::Attempt::AwaitEvent;
    assert_eq!(event.wait(Deadline::NOW), Err(wholemem_hal::Error::TimedOut { attempt }));
    assert_eq!(event.is_done(), Ok(false));
}

#[test]
fn memory_behind_an_address_is_found_while_it_is_mapped() {
    let device = device();
    let backend = device.backend();
    let map = device.allocate(LEN).unwrap().map(Rights::ReadWrite).unwrap();
    let address = map.address();
    let block = backend.block_at(address + 5).unwrap();
    assert_eq!((block.address, block.len), (address, LEN));
    assert_eq!(backend.memory_id(address + LEN as u64 - 1).unwrap(), block.id);
    map.bytes().unwrap().write_at(100, b"found").unwrap();
    let found = Allocation::adopt(&device, address + 100, 5).unwrap();
    assert_eq!((found.len(), found[0].address, found[0].allocation.len()), (1, address, LEN));
    drop(map);
    // The adopted memory outlives the mapping; the address is no longer known.
    let again = found[0].allocation.map(Rights::ReadWrite).unwrap();
    let mut seen = [0; 5];
    again.bytes().unwrap().read_at(100, &mut seen).unwrap();
    assert_eq!(&seen, b"found");
    assert_ne!(backend.memory_id(again.address()).unwrap(), block.id);
    drop(again);
    assert_eq!(backend.memory_id(address).unwrap(), None);
    let error = backend.block_at(address).unwrap_err();
    assert!(matches!(error, wholemem_hal::Error::Unsupported { .. }), "{error}");
    assert!(Allocation::adopt(&device, address, 1).is_err());
}
