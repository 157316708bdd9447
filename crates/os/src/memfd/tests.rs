//! Tests of memory files: sealing, the checks on import, and freeing pages.

use super::*;

const LEN: usize = 64 << 10;

fn unsealed(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

#[test]
fn a_new_file_is_resident_private_and_cannot_be_resized() {
    let memory = Memfd::create("test", LEN).unwrap();
    let stat = rustix::fs::fstat(&memory).unwrap();
    assert_eq!(u64::try_from(stat.st_size), Ok(LEN as u64));
    assert!(u64::try_from(stat.st_blocks).unwrap() * 512 >= LEN as u64, "{} blocks", stat.st_blocks);
    assert_eq!(stat.st_mode & 0o777, 0o600);
    assert_eq!(rustix::fs::ftruncate(&memory, 0), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&memory, 2 * LEN as u64), Err(Errno::PERM));
}

#[test]
fn a_file_of_large_pages_has_the_length_mode_and_seals_of_any_other() {
    let lens = [LEN, vm::LARGE_PAGE, 3 * vm::LARGE_PAGE + LEN, 130 << 20];
    for len in lens {
        let memory = Memfd::create_large("test", len).unwrap();
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert!(u64::try_from(stat.st_blocks).unwrap() * 512 >= len as u64, "{} blocks", stat.st_blocks);
        assert_eq!((usize::try_from(stat.st_size), stat.st_mode & 0o777), (Ok(len), 0o600));
        assert_eq!(rustix::fs::ftruncate(&memory, 0), Err(Errno::PERM));
        let map = map_without_inheritance(memory.as_fd(), len, Protection::ReadWrite).unwrap();
        for offset in (0..len).step_by(vm::LARGE_PAGE / 2).chain([len - 1]) {
            let mut seen = [1];
            map.bytes().read_at(offset, &mut seen).unwrap();
            assert_eq!(seen, [0]);
            map.bytes().write_at(offset, &[7]).unwrap();
        }
        drop(map);
        seal_writes(memory.as_fd()).unwrap();
    }
}

#[test]
fn a_sparse_file_has_its_full_length_and_no_pages() {
    let memory = Memfd::create_sparse("test", 1 << 40).unwrap();
    let stat = rustix::fs::fstat(&memory).unwrap();
    assert_eq!((stat.st_size, stat.st_blocks, stat.st_mode & 0o777), (1 << 40, 0, 0o600));
    let again = Memfd::import(memory.into_fd(), 1 << 40).unwrap();
    assert!(again.is_writable());
    assert_eq!(Memfd::create_sparse("test", 0).unwrap_err(), Error::ZeroLength);
}

#[test]
fn only_the_first_pages_of_a_partly_filled_file_are_resident() {
    let blocks = |filled| {
        let memory = Memfd::create_partly_filled("test", LEN, filled).unwrap();
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert_eq!(u64::try_from(stat.st_size), Ok(LEN as u64));
        assert_eq!(rustix::fs::ftruncate(&memory, 0), Err(Errno::PERM));
        u64::try_from(stat.st_blocks).unwrap() * 512
    };
    assert_eq!(blocks(0), 0);
    assert!((4096..LEN as u64).contains(&blocks(4096)));
    assert!(blocks(LEN) >= LEN as u64);
    let beyond = Memfd::create_partly_filled("test", LEN, LEN + 1).unwrap_err();
    assert_eq!(beyond, Error::OutOfRange { offset: 0, len: LEN + 1, size: LEN });
}

#[test]
fn a_write_sealed_file_cannot_be_written() {
    let memory = Memfd::create("test", LEN).unwrap();
    let reader = SharedMap::map_file(memory.read_only_fd().unwrap().as_fd(), LEN, Protection::Read);
    let writer = map_without_inheritance(memory.as_fd(), LEN, Protection::ReadWrite).unwrap();
    let busy = Error::Call { call: "fcntl", errno: Errno::BUSY };
    assert_eq!(seal_writes(memory.as_fd()), Err(busy));
    assert_eq!(is_write_sealed(memory.as_fd()), Ok(false));
    drop(writer);
    assert_eq!(seal_writes(memory.as_fd()), Ok(()), "read-only mappings do not prevent sealing: {reader:?}");
    assert_eq!(seal_writes(memory.as_fd()), Ok(()), "sealing again succeeds");
    assert_eq!(is_write_sealed(memory.read_only_fd().unwrap().as_fd()), Ok(true));
    assert_eq!(rustix::io::write(&memory, b"x"), Err(Errno::PERM));
    assert!(!Memfd::import(memory.share_fd().unwrap(), LEN).unwrap().is_writable());
}

#[test]
fn every_descriptor_is_close_on_exec() {
    let memory = Memfd::create("test", LEN).unwrap();
    let others = [memory.share_fd().unwrap(), memory.read_only_fd().unwrap()];
    for fd in others.iter().map(AsFd::as_fd).chain([memory.as_fd()]) {
        assert_eq!(rustix::io::fcntl_getfd(fd), Ok(rustix::io::FdFlags::CLOEXEC));
    }
}

#[test]
fn a_new_file_cannot_be_made_executable_if_the_kernel_supports_the_seal() {
    let sealed = rustix::fs::memfd_create("test", MemfdFlags::NOEXEC_SEAL).is_ok();
    let memory = Memfd::create("test", LEN).unwrap();
    let executable = rustix::fs::fchmod(&memory, Mode::RWXU);
    assert_eq!(executable, if sealed { Err(Errno::PERM) } else { Ok(()) });
}

#[cfg(feature = "test-hooks")]
#[test]
fn memory_is_created_without_the_noexec_seal_if_the_kernel_refuses_it() {
    // The test runs in a child process, since a process remembers that the kernel refused `MFD_NOEXEC_SEAL`.
    let child = crate::fork::child::fork(|| {
        let armed = crate::fault::arm(1, Errno::INVAL);
        let created = Memfd::create("test", LEN);
        let (refused, first) = (created.is_err(), armed.fired());
        drop(armed);
        u8::from(refused || first != Some("memfd_create") || Memfd::create("test", LEN).is_err())
    });
    assert_eq!(child.wait(), crate::fork::child::ExitStatus::Exited(0));
}

#[cfg(feature = "test-hooks")]
#[test]
fn an_interrupted_allocation_is_completed_in_steps() {
    for len in [LEN, STEP_AFTER_INTERRUPT, STEP_AFTER_INTERRUPT + LEN] {
        let armed = crate::fault::arm(2, Errno::INTR);
        let memory = Memfd::create("test", len).unwrap();
        assert_eq!(armed.fired(), Some("fallocate"));
        drop(armed);
        let stat = rustix::fs::fstat(&memory).unwrap();
        assert_eq!(usize::try_from(stat.st_size), Ok(len));
        assert!(usize::try_from(stat.st_blocks).unwrap() * 512 >= len, "{} blocks", stat.st_blocks);
    }
}

#[test]
fn a_file_sealed_against_writing_is_imported_read_only() {
    for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
        let fd = unsealed(LEN as u64);
        rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS | seal).unwrap();
        assert!(!Memfd::import(fd, LEN).unwrap().is_writable(), "{seal:?}");
    }
}

#[test]
fn a_file_with_the_default_mode_gets_mode_0600_before_it_is_shared() {
    let fd = unsealed(LEN as u64);
    rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS).unwrap();
    let memory = Memfd::import(fd, LEN).unwrap();
    let sent = memory.read_only_fd().unwrap();
    assert_eq!(rustix::fs::fstat(&sent).unwrap().st_mode & 0o777, 0o600);
}

#[test]
fn a_file_bound_to_a_node_has_its_length_and_seals() {
    let memory = Memfd::create_near("test", LEN, Some(0)).unwrap();
    let again = Memfd::import(memory.share_fd().unwrap(), LEN).unwrap();
    assert!(again.is_writable());
}

#[cfg(feature = "test-hooks")]
#[test]
fn memory_is_bound_before_it_is_allocated_and_private_before_it_is_returned() {
    let calls = (1..).map_while(|nth| {
        let armed = crate::fault::arm(nth, Errno::NFILE);
        let _ = Memfd::create_near("test", LEN, Some(0));
        armed.fired()
    });
    let expected = ["memfd_create", "ftruncate", "mmap", "mbind", "munmap", "fallocate", "fchmod", "fcntl"];
    assert_eq!(calls.collect::<Vec<_>>(), expected);
}

#[test]
fn a_node_that_does_not_exist_is_refused() {
    let error = Memfd::create_near("test", LEN, Some(1000)).unwrap_err();
    assert_eq!(error, Error::Call { call: "mbind", errno: Errno::INVAL });
}

#[test]
fn discarded_memory_is_freed_at_once_and_reads_as_zero() {
    let memory = Memfd::create("test", LEN).unwrap();
    let map = SharedMap::create(&memory, Protection::ReadWrite).unwrap();
    map.bytes().write_at(0, b"x").unwrap();
    discard(memory.as_fd()).unwrap();
    assert_eq!(rustix::fs::fstat(&memory).unwrap().st_blocks, 0);
    let mut read = [1];
    map.bytes().read_at(0, &mut read).unwrap();
    assert_eq!((read, len_of(memory.as_fd())), ([0], Ok(LEN)));
    drop(map);
    seal_writes(memory.as_fd()).unwrap();
    assert_eq!(discard(memory.as_fd()), Err(Error::Call { call: "fallocate", errno: Errno::PERM }));
}

#[test]
fn zero_bytes_are_refused_by_create_and_import() {
    assert_eq!(Memfd::create("test", 0).unwrap_err(), Error::ZeroLength);
    assert_eq!(Memfd::import(unsealed(0), 0).unwrap_err(), Error::ZeroLength);
}

#[test]
fn import_reports_the_kind_of_a_foreign_descriptor() {
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    assert_eq!(Memfd::import(pipe, LEN).unwrap_err(), Error::NotAMemfd { found: FileKind::Pipe });
    let null = std::fs::File::open("/dev/null").unwrap();
    assert_eq!(Memfd::import(null.into(), LEN).unwrap_err(), Error::NotAMemfd { found: FileKind::Device });
    let folder = std::fs::File::open("/proc/self").unwrap();
    assert_eq!(
        Memfd::import(folder.into(), LEN).unwrap_err(),
        Error::NotAMemfd { found: FileKind::Directory }
    );
}

#[test]
fn import_refuses_huge_pages() {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let fd = rustix::fs::memfd_create("huge", flags).unwrap();
    let len = 2 << 20;
    // A hugetlbfs file can be given a length even if no huge page is available.
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS).unwrap();
    assert_eq!(Memfd::import(fd, len).unwrap_err(), Error::NotAMemfd { found: FileKind::HugePages });
}

#[test]
fn import_reports_the_missing_seals() {
    for (seals, missing) in [
        (SealFlags::empty(), "F_SEAL_SHRINK and F_SEAL_GROW"),
        (SealFlags::SHRINK, "F_SEAL_GROW"),
        (SealFlags::GROW, "F_SEAL_SHRINK"),
    ] {
        let fd = unsealed(LEN as u64);
        rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
        assert_eq!(Memfd::import(fd, LEN).unwrap_err(), Error::Unsealed { missing });
    }
}

#[test]
fn import_refuses_an_unexpected_length() {
    for expected_len in [LEN - 4096, LEN + 4096] {
        let fd = Memfd::create("test", LEN).unwrap().into_fd();
        let expected = Error::WrongLength { expected: expected_len, actual: LEN };
        assert_eq!(Memfd::import(fd, expected_len).unwrap_err(), expected);
    }
}

#[test]
fn a_read_only_descriptor_stays_read_only_when_it_is_shared_again() {
    let memory = Memfd::create("test", LEN).unwrap();
    let reader = Memfd::import(memory.read_only_fd().unwrap(), LEN).unwrap();
    let again = Memfd::import(reader.share_fd().unwrap(), LEN).unwrap();
    assert!(!reader.is_writable() && !again.is_writable());
    assert_eq!(rustix::io::write(&again, b"x"), Err(Errno::BADF));
}
