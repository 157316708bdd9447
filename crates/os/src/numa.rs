//! NUMA nodes: their memory and processors, and binding memory to a node.
//!
//! If the kernel does not support NUMA, the machine has one node, number 0, with all of its memory. Pages that are
//! already allocated are not moved: memory is bound before it is first accessed or allocated.
//!
//! ```
//! use wholemem_os::numa;
//!
//! let nodes = numa::nodes()?;
//! assert!(nodes.iter().any(|node| node.memory_bytes > 0));
//! assert!(nodes.iter().any(|node| !node.cpus.is_empty()));
//! # Ok::<(), wholemem_os::Error>(())
//! ```

use std::ffi::{c_int, c_long, c_ulong, c_void};
use std::path::Path;
use std::ptr::{NonNull, null};

use rustix::fs::{Mode, OFlags};
use rustix::thread::CpuSet;

use crate::call::{call, call_libc};
use crate::width::to_usize;
use crate::{Errno, Error, Result};

const DIRECTORY: &str = "/sys/devices/system/node";

/// One more than the largest NUMA node number that Linux can be built for.
const MAX_NODES: usize = 1024;

const WORD_BITS: usize = c_ulong::BITS as usize;

/// A NUMA node: memory, and the processors that are near it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Node {
    /// The number of the NUMA node. Node numbers may have gaps.
    pub id: u32,
    /// The size of the node's memory in bytes: zero for a node that has processors only.
    pub memory_bytes: usize,
    /// The numbers of the node's processors: empty for a node that has memory only.
    pub cpus: Vec<u32>,
}

/// Returns the online NUMA nodes of this machine, ordered by number.
pub fn nodes() -> Result<Vec<Node>> {
    let mut nodes = nodes_in(Path::new(DIRECTORY))?;
    if let [only] = &mut nodes[..] {
        // After memory was hot-plugged into a virtual machine, the kernel updates the memory size of the node late.
        only.memory_bytes = only.memory_bytes.max(total_memory());
    }
    Ok(nodes)
}

fn total_memory() -> usize {
    let info = rustix::system::sysinfo();
    let len = u64::from(info.mem_unit).checked_mul(info.totalram);
    to_usize(len.expect("a machine has less memory than an address space"))
}

fn nodes_in(directory: &Path) -> Result<Vec<Node>> {
    let online = match read_text(&directory.join("online")) {
        Err(Error::Call { call: "open", errno: Errno::NOENT }) => return Ok(vec![single_node()?]),
        text => text?,
    };
    let unknown = |subject| Error::UnknownFormat { subject };
    let ids = parse_list(&online).ok_or_else(|| unknown("NUMA nodes"))?;
    ids.into_iter()
        .map(|id| {
            let directory = directory.join(format!("node{id}"));
            let memory = parse_memory(&read_text(&directory.join("meminfo"))?);
            let cpus = parse_list(&read_text(&directory.join("cpulist"))?);
            Ok(Node {
                id,
                memory_bytes: memory.ok_or_else(|| unknown("memory of a NUMA node"))?,
                cpus: cpus.ok_or_else(|| unknown("processors of a NUMA node"))?,
            })
        })
        .collect()
}

/// Returns the processors on which the calling thread may run.
///
/// ```
/// assert!(!wholemem_os::numa::usable_cpus()?.is_empty());
/// # Ok::<(), wholemem_os::Error>(())
/// ```
///
/// # Errors
/// [`Error::Call`].
pub fn usable_cpus() -> Result<Vec<u32>> {
    let usable = call("sched_getaffinity", || rustix::thread::sched_getaffinity(None))?;
    Ok((0..).take(CpuSet::MAX_CPU).filter(|cpu| usable.is_set(*cpu as usize)).collect())
}

fn single_node() -> Result<Node> {
    Ok(Node { id: 0, memory_bytes: total_memory(), cpus: usable_cpus()? })
}

fn read_text(path: &Path) -> Result<String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = call("open", || rustix::fs::open(path, flags, Mode::empty()))?;
    let mut bytes = Vec::new();
    loop {
        let mut part = [0; 4096];
        match call("read", || rustix::io::read(&file, &mut part)) {
            Ok(0) => break,
            Ok(len) => bytes.extend_from_slice(&part[..len]),
            Err(Error::Call { errno: Errno::INTR, .. }) => {}
            Err(error) => return Err(error),
        }
    }
    String::from_utf8(bytes).map_err(|_| Error::UnknownFormat { subject: "NUMA nodes" })
}

/// Parses a list of numbers in the kernel's format, such as `0-3,8`. The list may be empty.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    /// A limit above every number in the kernel's lists, so that an invalid range cannot exhaust memory.
    const MAX: u32 = 1 << 20;
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (parse_number(first)?, parse_number(last)?);
        let follows = numbers.last().is_none_or(|before| *before < first);
        if !follows || last < first || last >= MAX {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// Parses the memory size of a NUMA node in bytes from the line `Node 0 MemTotal:  4284996 kB`.
fn parse_memory(text: &str) -> Option<usize> {
    let line = text.lines().find(|line| line.contains(" MemTotal:"))?;
    let (_, amount) = line.split_once(':')?;
    let kilobytes: usize = parse_number(amount.trim().strip_suffix(" kB")?)?;
    kilobytes.checked_mul(1024)
}

/// Parses a number that consists of digits only: `str::parse` alone would accept a sign.
fn parse_number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Binds an address range to a NUMA node: all pages that are allocated from now on come from the memory of the node.
///
/// Pages that are allocated already stay where they are. For a shared mapping of a memory file the policy applies to
/// the file's pages, whichever process accesses them first. If the node's memory is full, accessing a page fails as
/// if all memory were full. If the node does not exist, or the address is not a multiple of the page size, the error
/// is `EINVAL`.
///
/// # Safety
///
/// The caller has mapped the range, and it stays mapped during the call: otherwise another owner's memory would be
/// bound.
#[doc(alias = "mbind")]
#[doc(alias = "MPOL_BIND")]
pub unsafe fn bind(address: NonNull<u8>, len: usize, node: u32) -> Result<()> {
    let mut mask: [c_ulong; MAX_NODES / WORD_BITS] = [0; MAX_NODES / WORD_BITS];
    let node = node as usize;
    let Some(word) = mask.get_mut(node / WORD_BITS) else {
        return Err(Error::Call { call: "mbind", errno: Errno::INVAL });
    };
    *word |= 1 << (node % WORD_BITS);
    // `mbind` uses one bit less than the number of bits that it is passed.
    let (mode, bits, flags) = (c_long::from(libc::MPOL_BIND), MAX_NODES + 1, 0 as c_long);
    call_libc("mbind", || {
        // SAFETY: `mask` has the given number of bits and outlives the call, which accesses no other memory: it
        // changes where pages of the range are allocated, and the caller of `bind` guarantees that the range is its
        // own.
        unsafe { libc::syscall(libc::SYS_mbind, address.as_ptr(), len, mode, mask.as_ptr(), bits, flags) }
    })?;
    Ok(())
}

/// Returns the NUMA node of the page at an address, or `None` if no page is allocated there or this process has not
/// accessed the page.
#[doc(alias = "move_pages")]
pub fn node_of_page(address: NonNull<u8>) -> Result<Option<u32>> {
    let pages: [*const c_void; 1] = [address.as_ptr().cast()];
    let mut status: [c_int; 1] = [0];
    // Without a list of target nodes, `move_pages` only queries the nodes of the pages.
    let (this_process, nodes, flags) = (0 as c_long, null::<c_int>(), 0 as c_long);
    call_libc("move_pages", || {
        let (count, pages, status) = (pages.len(), pages.as_ptr(), status.as_mut_ptr());
        // SAFETY: `pages` has `count` readable entries and `status` as many writable ones; the kernel only looks up
        // the address in `pages`.
        unsafe { libc::syscall(libc::SYS_move_pages, this_process, count, pages, nodes, status, flags) }
    })?;
    let [status] = status;
    match u32::try_from(status) {
        Ok(node) => Ok(Some(node)),
        Err(_) if status == -libc::ENOENT => Ok(None),
        Err(_) => Err(Error::Call { call: "move_pages", errno: Errno::from_raw_os_error(-status) }),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use proptest::collection::btree_set;
    use proptest::prelude::*;
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    use super::*;

    /// A mapping of a few pages, which is unmapped on drop.
    struct Map {
        address: NonNull<u8>,
        len: usize,
    }

    impl Map {
        fn create(pages: usize) -> Self {
            let len = pages * rustix::param::page_size();
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: without a fixed address the kernel picks a free range, so no mapping is replaced.
            let address = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::SHARED) };
            Self { address: NonNull::new(address.expect("mmap").cast()).expect("not null"), len }
        }

        fn bind(&self, node: u32) -> Result<()> {
            // SAFETY: the range is the mapping of this test, which exists until `self` is dropped.
            unsafe { bind(self.address, self.len, node) }
        }
    }

    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: the range was mapped by `create` with this length, and is not used any more.
            unsafe { munmap(self.address.as_ptr().cast(), self.len) }.expect("munmap");
        }
    }

    #[test]
    fn lists_in_the_kernels_format_are_parsed() {
        for (text, numbers) in [
            ("", vec![]),
            ("\n", vec![]),
            ("0\n", vec![0]),
            ("0-3,8\n", vec![0, 1, 2, 3, 8]),
            ("5,7-7,9-10", vec![5, 7, 9, 10]),
        ] {
            assert_eq!(parse_list(text), Some(numbers), "{text:?}");
        }
        for text in
            ["x", ",", "0,", "1-", "-1", "3-1", "1,1", "2-4,3", "+1", "0-4294967295", "0-1048576", "0 1"]
        {
            assert_eq!(parse_list(text), None, "{text:?}");
        }
    }

    #[test]
    fn memory_is_parsed_from_the_total_line() {
        let text = "\nNode 3 MemTotal:        4284996 kB\nNode 3 MemFree:         4118732 kB\n";
        assert_eq!(parse_memory(text), Some(4_284_996 * 1024));
        assert_eq!(parse_memory("Node 0 MemTotal: 0 kB"), Some(0));
        for text in [
            "",
            "Node 0 MemFree: 1 kB",
            "Node 0 MemTotal: 1",
            "Node 0 MemTotal: -1 kB",
            "Node 0 MemTotal:  kB",
            "Node 0 MemTotal: 18446744073709551615 kB",
        ] {
            assert_eq!(parse_memory(text), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_list_written_as_ranges_parses_to_its_numbers(numbers in btree_set(0..200_u32, 0..100)) {
            let mut ranges: Vec<(u32, u32)> = Vec::new();
            for number in &numbers {
                match ranges.last_mut() {
                    Some((_, last)) if *last + 1 == *number => *last = *number,
                    _ => ranges.push((*number, *number)),
                }
            }
            let text: Vec<String> = ranges
                .iter()
                .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
                .collect();
            prop_assert_eq!(parse_list(&text.join(",")), Some(numbers.into_iter().collect()));
        }

        #[test]
        fn the_parsers_never_panic(text in "[0-9,\\- MemTotal:kB\n]{0,40}") {
            let _ = parse_list(&text);
            let _ = parse_memory(&text);
        }
    }

    /// A temporary directory with the files of `/sys/devices/system/node`, removed on drop.
    struct SysDirectory(PathBuf);

    impl SysDirectory {
        fn create(name: &str, files: &[(&str, &str)]) -> Self {
            let folder = std::env::temp_dir().join(format!("wholemem-numa-{}-{name}", std::process::id()));
            for (file, text) in files {
                let path = folder.join(file);
                fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
                fs::write(path, text).expect("a file");
            }
            Self(folder)
        }
    }

    impl Drop for SysDirectory {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("remove the directory");
        }
    }

    #[test]
    fn nodes_with_gaps_without_memory_and_without_processors_are_read() {
        let folder = SysDirectory::create(
            "gaps",
            &[
                ("online", "0,2-3\n"),
                ("node0/meminfo", "Node 0 MemTotal: 2 kB\n"),
                ("node0/cpulist", "0-1,4\n"),
                ("node2/meminfo", "Node 2 MemTotal: 3 kB\n"),
                ("node2/cpulist", "\n"),
                ("node3/meminfo", "Node 3 MemTotal: 0 kB\n"),
                ("node3/cpulist", "2\n"),
            ],
        );
        let expected = vec![
            Node { id: 0, memory_bytes: 2048, cpus: vec![0, 1, 4] },
            Node { id: 2, memory_bytes: 3072, cpus: vec![] },
            Node { id: 3, memory_bytes: 0, cpus: vec![2] },
        ];
        assert_eq!(nodes_in(&folder.0), Ok(expected));
    }

    #[test]
    fn an_error_names_the_data_that_cannot_be_parsed() {
        let good = [("online", "0"), ("node0/meminfo", "Node 0 MemTotal: 2 kB"), ("node0/cpulist", "0")];
        for (at, name, subject) in [
            (0, "online", "NUMA nodes"),
            (1, "meminfo", "memory of a NUMA node"),
            (2, "cpulist", "processors of a NUMA node"),
        ] {
            let mut files = good;
            files[at].1 = "?";
            let folder = SysDirectory::create(name, &files);
            assert_eq!(nodes_in(&folder.0), Err(Error::UnknownFormat { subject }));
        }
    }

    #[test]
    fn a_node_without_its_files_is_an_error() {
        let folder =
            SysDirectory::create("vanished", &[("online", "0"), ("node0/meminfo", "Node 0 MemTotal: 2 kB")]);
        assert_eq!(nodes_in(&folder.0), Err(Error::Call { call: "open", errno: Errno::NOENT }));
    }

    #[test]
    fn a_machine_without_numa_support_has_one_node() {
        let nodes = nodes_in(Path::new("/does/not/exist")).expect("a node");
        let [node] = &nodes[..] else { panic!("{nodes:?}") };
        assert_eq!(node.id, 0);
        assert!(node.memory_bytes > 0);
        let usable = std::thread::available_parallelism().expect("a number").get();
        assert!(node.cpus.len() >= usable, "{} processors, {usable} usable", node.cpus.len());
    }

    #[test]
    fn a_page_of_bound_memory_is_on_its_node_once_it_is_accessed() {
        for node in nodes().expect("nodes").iter().filter(|node| node.memory_bytes > 0) {
            let map = Map::create(4);
            map.bind(node.id).expect("bind");
            assert_eq!(node_of_page(map.address), Ok(None));
            // SAFETY: the page belongs to the mapping of this test, which is writable.
            unsafe { map.address.as_ptr().write_volatile(1) };
            assert_eq!(node_of_page(map.address), Ok(Some(node.id)));
        }
    }

    #[test]
    fn binding_to_a_node_that_does_not_exist_is_refused() {
        let map = Map::create(1);
        let ids: Vec<u32> = nodes().expect("nodes").iter().map(|node| node.id).collect();
        for node in [1, 63, 64, 1023, 1024, u32::MAX].into_iter().filter(|node| !ids.contains(node)) {
            let error = Error::Call { call: "mbind", errno: Errno::INVAL };
            assert_eq!(map.bind(node), Err(error), "node {node}");
        }
    }

    #[test]
    fn the_node_of_an_unmapped_address_is_an_error() {
        let nowhere = NonNull::without_provenance(std::num::NonZero::new(4096).expect("not zero"));
        assert_eq!(node_of_page(nowhere), Err(Error::Call { call: "move_pages", errno: Errno::FAULT }));
    }
}
