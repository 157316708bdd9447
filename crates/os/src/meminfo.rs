//! How much memory there is to be had, by the machine and by the control group this process is in.
//!
//! Filling memory that is not there does not fail on Linux: some process, perhaps this one, is killed. So whoever is
//! about to fill much of it looks here first. What is available changes with every other process; this is a look, not
//! a promise.

use std::fs;
use std::io;
use std::path::Path;

use crate::call::call;
use crate::{Errno, Error, Result};

/// The bytes that could be filled now without pushing anybody out.
///
/// # Errors
/// `open` when `/proc` is not mounted.
pub fn available() -> Result<usize> {
    let text = call("open", || read("/proc/meminfo"))?;
    let machine = field(&text, "MemAvailable").ok_or(Error::Call { call: "open", errno: Errno::NODATA })?;
    Ok(group_room().map_or(machine, |room| room.min(machine)))
}

fn read(path: impl AsRef<Path>) -> rustix::io::Result<String> {
    fs::read_to_string(path).map_err(|error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// A line of `/proc/meminfo`, in bytes.
fn field(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// What the tightest limit leaves, of this process's control group and of those above it.
fn group_room() -> Option<usize> {
    let own = read("/proc/self/cgroup").ok()?;
    let path = group_path(&own)?;
    let root = Path::new("/sys/fs/cgroup");
    let group = root.join(path.trim_start_matches('/'));
    let rooms = group.ancestors().take_while(|folder| folder.starts_with(root)).filter_map(|folder| {
        let limit: usize = read(folder.join("memory.max")).ok()?.trim().parse().ok()?;
        let used: usize = read(folder.join("memory.current")).ok()?.trim().parse().ok()?;
        Some(limit.saturating_sub(used))
    });
    rooms.min()
}

/// The path of the unified hierarchy in `/proc/self/cgroup`.
fn group_path(text: &str) -> Option<&str> {
    text.lines().find_map(|line| line.strip_prefix("0::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_some_memory_left() {
        assert!(available().unwrap() > 0);
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "MemTotal:       24603652 kB\nMemAvailableX:  1 kB\nMemAvailable:   24000000 kB\n";
        assert_eq!(field(text, "MemAvailable"), Some(24_000_000 << 10));
        assert_eq!(field(text, "SwapFree"), None);
        assert_eq!(field("MemAvailable: many kB", "MemAvailable"), None);
    }

    #[test]
    fn the_unified_group_is_told_from_the_old_ones() {
        assert_eq!(
            group_path("4:memory:/old\n0::/system.slice/x.service\n"),
            Some("/system.slice/x.service")
        );
        assert_eq!(group_path("4:memory:/old\n"), None);
    }
}
