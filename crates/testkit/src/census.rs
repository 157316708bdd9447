//! Lists the kernel resources of this process, to compare them before and after an operation.
//!
//! Other threads open files and map memory too, so a census is only meaningful in a separate process: see
//! [`crate::ranks`].

use std::collections::BTreeMap;
use std::fs;

/// The file descriptors and mappings of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Census {
    /// The link target in `/proc/self/fd` of each open file descriptor.
    pub fds: BTreeMap<u32, String>,
    /// The number of mappings with each combination of access rights, backing file and length. The C library's heap and
    /// stacks are excluded, because they change with every allocation.
    pub maps: BTreeMap<(String, String, u64), usize>,
}

impl Census {
    /// Records the current file descriptors and mappings of this process.
    ///
    /// # Panics
    /// If `/proc` cannot be read.
    #[must_use]
    pub fn take() -> Self {
        Self { fds: fds(), maps: maps() }
    }

    /// Asserts that this census equals the census `before`. The panic message lists the added and removed descriptors
    /// and mappings.
    ///
    /// # Panics
    /// If the two differ.
    pub fn assert_same_as(&self, before: &Self, when: &str) {
        let list = |from: &Self, other: &Self| {
            let fds = from.fds.iter().filter(|entry| other.fds.get(entry.0) != Some(entry.1));
            let maps = from.maps.iter().filter(|entry| other.maps.get(entry.0) != Some(entry.1));
            let fds = fds.map(|(fd, target)| format!("fd {fd} {target}"));
            fds.chain(maps.map(|(map, count)| format!("{count} x {map:?}"))).collect::<Vec<_>>()
        };
        let (added, removed) = (list(self, before), list(before, self));
        assert!(added.is_empty() && removed.is_empty(), "{when}: added {added:#?}, removed {removed:#?}");
    }
}

fn fds() -> BTreeMap<u32, String> {
    let folder = fs::read_dir("/proc/self/fd").expect("/proc is mounted");
    let entries = folder.filter_map(|entry| {
        let entry = entry.expect("/proc/self/fd can be listed");
        let fd = entry.file_name().to_str()?.parse().ok()?;
        let target = fs::read_link(entry.path()).ok()?.display().to_string();
        // Skip the descriptor of the directory listing itself.
        (!target.ends_with("/fd")).then_some((fd, target))
    });
    entries.collect()
}

fn maps() -> BTreeMap<(String, String, u64), usize> {
    let text = fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
    let mut maps = BTreeMap::new();
    for line in text.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (range, rights) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let backing = fields.nth(3).unwrap_or_default();
        let (start, end) = range.split_once('-').expect("a range of addresses");
        let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).expect("hexadecimal"));
        let is_private_memory = backing.is_empty() && rights == "rw-p";
        if !is_private_memory && !backing.starts_with("[heap") && !backing.starts_with("[stack") {
            *maps.entry((rights.to_owned(), backing.to_owned(), end - start)).or_default() += 1;
        }
    }
    maps
}
