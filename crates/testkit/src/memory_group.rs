//! A control group with a memory limit, of the version that this machine has, for tests that need a real one.
//!
//! Only root, or a user to whom groups were delegated, can make one: [`MemoryGroup::create`] says why where it cannot be made.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wholemem_os::Deadline;

/// A group, removed when dropped. Processes in it must have been told to end by then.
#[derive(Debug)]
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes a group whose processes may use so many bytes together.
    ///
    /// # Errors
    /// Why this machine does not let this user make one.
    pub fn create(name: &str, limit: usize) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let field = |of: &str| own.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(of));
        let inside = |root: &str, path: &str| Path::new(root).join(path.trim_start_matches('/'));
        let (above, file) = match (field("memory:"), field(":")) {
            (Some(path), _) => (inside("/sys/fs/cgroup/memory", path), "memory.limit_in_bytes"),
            // In version 2, a group with processes has no groups with limits below it: it is made beside this one.
            (None, Some(path)) => {
                let own = inside("/sys/fs/cgroup", path);
                let above = if path == "/" { own.clone() } else { own.with_file_name("") };
                (above, "memory.max")
            }
            (None, None) => return Err("this process is in no control group".to_owned()),
        };
        let folder = above.join(format!("wholemem-{name}-{}", std::process::id()));
        let refused = |error: std::io::Error| format!("no control group `{}`: {error}", folder.display());
        fs::create_dir(&folder).map_err(refused)?;
        let group = Self(folder.clone());
        if !folder.join(file).exists() {
            return Err(format!("`{}` has no memory controller", above.display()));
        }
        fs::write(folder.join(file), limit.to_string()).map_err(refused)?;
        Ok(group)
    }

    /// The folder of the group, for processes that are to join it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Moves this process, and so the children that it starts from now on, into the group with this folder.
    ///
    /// # Panics
    /// When the kernel refuses.
    pub fn join(folder: &Path) {
        let joined = fs::write(folder.join("cgroup.procs"), std::process::id().to_string());
        joined.expect("a process can be moved to a group of its own user");
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Processes that were killed leave it when the kernel has ended them.
        let deadline = Deadline::after(Duration::from_secs(60));
        while fs::remove_dir(&self.0).is_err() && !deadline.has_passed() {
            std::thread::yield_now();
        }
    }
}
