//! A cgroup (version 1 or 2) with a memory limit, for tests that need a real memory limit.
//!
//! Only root, or a user with delegated cgroups, can create one: otherwise [`MemoryGroup::create`] returns the reason.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use wholemem_os::Deadline;

/// A cgroup that is removed on drop. All processes in it must have been killed by then.
#[derive(Debug)]
pub struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Creates a cgroup whose processes may use `limit` bytes together.
    ///
    /// # Errors
    /// The reason why this user cannot create one on this machine.
    pub fn create(name: &str, limit: usize) -> Result<Self, String> {
        let own = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let field = |of: &str| own.lines().find_map(|line| line.split_once(':')?.1.strip_prefix(of));
        let inside = |root: &str, path: &str| Path::new(root).join(path.trim_start_matches('/'));
        let (parent, file) = match (field("memory:"), field(":")) {
            (Some(path), _) => (inside("/sys/fs/cgroup/memory", path), "memory.limit_in_bytes"),
            // In cgroup version 2, a group that contains processes cannot have child groups with limits. So the new
            // group is a sibling of this process's group.
            (None, Some(path)) => {
                let own = inside("/sys/fs/cgroup", path);
                let parent = if path == "/" { own.clone() } else { own.with_file_name("") };
                (parent, "memory.max")
            }
            (None, None) => return Err("this process is in no cgroup".to_owned()),
        };
        let folder = parent.join(format!("wholemem-{name}-{}", std::process::id()));
        let refused =
            |error: std::io::Error| format!("cannot create the cgroup `{}`: {error}", folder.display());
        fs::create_dir(&folder).map_err(refused)?;
        let group = Self(folder.clone());
        if !folder.join(file).exists() {
            return Err(format!("`{}` has no memory controller", parent.display()));
        }
        fs::write(folder.join(file), limit.to_string()).map_err(refused)?;
        Ok(group)
    }

    /// Returns the folder of the cgroup, which processes need to join it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Moves this process, and with it the child processes that it starts later, into the cgroup with this folder.
    ///
    /// # Panics
    /// If the kernel refuses.
    pub fn join(folder: &Path) {
        let joined = fs::write(folder.join("cgroup.procs"), std::process::id().to_string());
        joined.expect("cannot move this process to the cgroup");
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The cgroup cannot be removed until the kernel has finished the exit of its killed processes.
        let deadline = Deadline::after(Duration::from_secs(60));
        while fs::remove_dir(&self.0).is_err() && !deadline.has_passed() {
            std::thread::yield_now();
        }
    }
}
