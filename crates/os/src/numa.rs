//! Which memory is near which processors, and putting memory there.
//!
//! What it keeps true: a machine whose kernel knows no NUMA has one node, number 0, with all of its memory. What it
//! will not do: move pages that are already somewhere; bind memory before it is first touched or allocated.
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

const FOLDER: &str = "/sys/devices/system/node";

/// The largest node number that Linux can be built for, and one more.
const MAX_NODES: usize = 1024;

const WORD_BITS: usize = c_ulong::BITS as usize;

/// A part of the machine: memory, and the processors it is near.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Node {
    /// Its number. Numbers may have gaps.
    pub id: u32,
    /// How much memory it has: none, for a node of processors only.
    pub memory_bytes: usize,
    /// The numbers of its processors: none, for a node of memory only.
    pub cpus: Vec<u32>,
}

/// The nodes of this machine that are online, by number.
pub fn nodes() -> Result<Vec<Node>> {
    let mut nodes = nodes_in(Path::new(FOLDER))?;
    if let [only] = &mut nodes[..] {
        // Where memory comes and goes with a virtual machine, the node's own count lags behind.
        only.memory_bytes = only.memory_bytes.max(total_memory());
    }
    Ok(nodes)
}

fn total_memory() -> usize {
    let info = rustix::system::sysinfo();
    let len = u64::from(info.mem_unit).checked_mul(info.totalram);
    to_usize(len.expect("a machine has less memory than an address space"))
}

fn nodes_in(folder: &Path) -> Result<Vec<Node>> {
    let online = match read_text(&folder.join("online")) {
        Err(Error::Call { call: "open", errno: Errno::NOENT }) => return Ok(vec![only_node()?]),
        text => text?,
    };
    let unknown = |what| Error::UnknownFormat { what };
    let ids = parse_list(&online).ok_or_else(|| unknown("NUMA nodes"))?;
    ids.into_iter()
        .map(|id| {
            let folder = folder.join(format!("node{id}"));
            let memory = parse_memory(&read_text(&folder.join("meminfo"))?);
            let cpus = parse_list(&read_text(&folder.join("cpulist"))?);
            Ok(Node {
                id,
                memory_bytes: memory.ok_or_else(|| unknown("memory of a NUMA node"))?,
                cpus: cpus.ok_or_else(|| unknown("processors of a NUMA node"))?,
            })
        })
        .collect()
}

/// The processors on which this thread may run.
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

fn only_node() -> Result<Node> {
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
    String::from_utf8(bytes).map_err(|_| Error::UnknownFormat { what: "NUMA nodes" })
}

/// Numbers as the kernel lists them: `0-3,8`, or nothing.
fn parse_list(text: &str) -> Option<Vec<u32>> {
    /// More than any kernel has of anything: a longer list is not one.
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

/// The bytes in the line `Node 0 MemTotal:  4284996 kB`.
fn parse_memory(text: &str) -> Option<usize> {
    let line = text.lines().find(|line| line.contains(" MemTotal:"))?;
    let (_, amount) = line.split_once(':')?;
    let kilobytes: usize = parse_number(amount.trim().strip_suffix(" kB")?)?;
    kilobytes.checked_mul(1024)
}

/// Digits only, where `parse` alone would take a sign.
fn parse_number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

/// Has all pages of a range come from the memory of one node, from now on.
///
/// Pages that are there already stay where they are. For a shared map of a memory file the rule belongs to the
/// file's pages, whichever process touches them first. When the node's memory is full, touching a page fails as
/// when all memory is full. A node that does not exist is `EINVAL`, and so is an address within a page.
///
/// # Safety
///
/// The range is mapped by the caller and stays so during the call: another owner's memory would silently be bound.
#[doc(alias = "mbind")]
#[doc(alias = "MPOL_BIND")]
pub unsafe fn bind(address: NonNull<u8>, len: usize, node: u32) -> Result<()> {
    let mut mask: [c_ulong; MAX_NODES / WORD_BITS] = [0; MAX_NODES / WORD_BITS];
    let node = node as usize;
    let Some(word) = mask.get_mut(node / WORD_BITS) else {
        return Err(Error::Call { call: "mbind", errno: Errno::INVAL });
    };
    *word |= 1 << (node % WORD_BITS);
    // Of the number of bits it is told, the kernel takes one less.
    let (mode, bits, flags) = (c_long::from(libc::MPOL_BIND), MAX_NODES + 1, 0 as c_long);
    call_libc("mbind", || {
        // SAFETY: the mask has the bits it is said to have and outlives the call, which touches no other memory of
        // ours: it changes where pages of the range will come from, and the caller answers for the range.
        unsafe { libc::syscall(libc::SYS_mbind, address.as_ptr(), len, mode, mask.as_ptr(), bits, flags) }
    })?;
    Ok(())
}

/// The node that holds the page at an address of this process, or nothing when no page is there yet, or none
/// that this process has touched.
#[doc(alias = "move_pages")]
pub fn node_of_page(address: NonNull<u8>) -> Result<Option<u32>> {
    let pages: [*const c_void; 1] = [address.as_ptr().cast()];
    let mut status: [c_int; 1] = [0];
    // Without a list of nodes to move to, the call only tells.
    let (this_process, nodes, flags) = (0 as c_long, null::<c_int>(), 0 as c_long);
    call_libc("move_pages", || {
        let (count, pages, status) = (pages.len(), pages.as_ptr(), status.as_mut_ptr());
        // SAFETY: `pages` has `count` readable entries and `status` as many writable ones; the address itself is
        // only looked up.
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

    /// A few pages that are gone when this is dropped.
    struct Map {
        address: NonNull<u8>,
        len: usize,
    }

    impl Map {
        fn create(pages: usize) -> Self {
            let len = pages * rustix::param::page_size();
            let rights = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: takes memory that nobody has.
            let address = unsafe { mmap_anonymous(std::ptr::null_mut(), len, rights, MapFlags::SHARED) };
            Self { address: NonNull::new(address.expect("mmap").cast()).expect("not null"), len }
        }

        fn bind(&self, node: u32) -> Result<()> {
            // SAFETY: the range is ours.
            unsafe { bind(self.address, self.len, node) }
        }
    }

    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: mapped above with this length, and used no more.
            unsafe { munmap(self.address.as_ptr().cast(), self.len) }.expect("munmap");
        }
    }

    #[test]
    fn lists_of_the_kernel_are_understood() {
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
    fn memory_is_read_from_the_line_of_its_total() {
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
        fn a_list_written_as_ranges_reads_as_its_numbers(numbers in btree_set(0..200_u32, 0..100)) {
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
        fn no_text_makes_the_parsers_panic(text in "[0-9,\\- MemTotal:kB\n]{0,40}") {
            let _ = parse_list(&text);
            let _ = parse_memory(&text);
        }
    }

    /// A folder as the kernel would show it, gone when dropped.
    struct Folder(PathBuf);

    impl Folder {
        fn create(name: &str, files: &[(&str, &str)]) -> Self {
            let folder = std::env::temp_dir().join(format!("wholemem-numa-{}-{name}", std::process::id()));
            for (file, text) in files {
                let path = folder.join(file);
                fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
                fs::write(path, text).expect("a file");
            }
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("remove the folder");
        }
    }

    #[test]
    fn nodes_with_gaps_without_memory_and_without_processors_are_read() {
        let folder = Folder::create(
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
    fn what_is_not_understood_is_named() {
        let good = [("online", "0"), ("node0/meminfo", "Node 0 MemTotal: 2 kB"), ("node0/cpulist", "0")];
        for (at, name, what) in [
            (0, "online", "NUMA nodes"),
            (1, "meminfo", "memory of a NUMA node"),
            (2, "cpulist", "processors of a NUMA node"),
        ] {
            let mut files = good;
            files[at].1 = "?";
            let folder = Folder::create(name, &files);
            assert_eq!(nodes_in(&folder.0), Err(Error::UnknownFormat { what }));
        }
    }

    #[test]
    fn a_node_that_vanishes_is_an_error_and_not_a_machine_without_nodes() {
        let folder =
            Folder::create("vanished", &[("online", "0"), ("node0/meminfo", "Node 0 MemTotal: 2 kB")]);
        assert_eq!(nodes_in(&folder.0), Err(Error::Call { call: "open", errno: Errno::NOENT }));
    }

    #[test]
    fn a_machine_without_the_folder_has_one_node_with_everything() {
        let nodes = nodes_in(Path::new("/does/not/exist")).expect("a node");
        let [node] = &nodes[..] else { panic!("{nodes:?}") };
        assert_eq!(node.id, 0);
        assert!(node.memory_bytes > 0);
        let usable = std::thread::available_parallelism().expect("a number").get();
        assert!(node.cpus.len() >= usable, "{} processors, {usable} usable", node.cpus.len());
    }

    #[test]
    fn a_page_of_bound_memory_is_on_its_node_once_it_is_touched() {
        for node in nodes().expect("nodes").iter().filter(|node| node.memory_bytes > 0) {
            let map = Map::create(4);
            map.bind(node.id).expect("bind");
            assert_eq!(node_of_page(map.address), Ok(None));
            // SAFETY: the page is ours and writable.
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
    fn an_address_where_nothing_is_mapped_has_no_node() {
        let nowhere = NonNull::without_provenance(std::num::NonZero::new(4096).expect("not zero"));
        assert_eq!(node_of_page(nowhere), Err(Error::Call { call: "move_pages", errno: Errno::FAULT }));
    }
}
