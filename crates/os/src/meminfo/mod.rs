//! Available memory: the minimum of the memory that the machine has free and the memory that the control groups of
//! this process allow.
//!
//! On Linux, filling more memory than is available does not fail: the kernel kills a process, perhaps this one. So
//! code that fills much memory first reads how much is available. Other processes allocate and free memory
//! concurrently, so the value is only an estimate.

mod cgroup;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::call::call;
use crate::{Errno, Error, Result, Size};
use cgroup::ControlGroups;

/// The number of bytes of memory that were available when it was read, and the limit that applies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// The number of available bytes of memory.
    pub len: usize,
    /// The limit that leaves the least memory: that of the machine or of a control group.
    pub limit: MemoryLimit,
}

/// A limit on the memory of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryLimit {
    /// The limit is the memory of the machine.
    Machine,
    /// The limit is that of a control group that contains the process.
    Group {
        /// The path of the control group, as in `/proc/self/cgroup`.
        path: PathBuf,
        /// The memory limit of the control group in bytes.
        len: usize,
    },
}

impl fmt::Display for Available {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            MemoryLimit::Machine => write!(f, "only {} are available on this machine", Size(self.len)),
            MemoryLimit::Group { path, len } => {
                let (left, len, path) = (Size(self.len), Size(*len), path.display());
                write!(f, "only {left} are left of the {len} that control group `{path}` may use")
            }
        }
    }
}

/// Reads the available memory repeatedly, from files in `/proc` and `/sys` that it keeps open.
///
/// ```
/// use wholemem_os::meminfo::MemoryProbe;
///
/// let mut probe = MemoryProbe::open()?;
/// assert!(probe.read()?.len > 0);
/// # Ok::<(), wholemem_os::Error>(())
/// ```
#[derive(Debug)]
pub struct MemoryProbe {
    machine: File,
    groups: ControlGroups,
    text: TextBuffer,
}

impl MemoryProbe {
    /// Opens the files with the available memory of the machine and of the control groups of this process.
    ///
    /// # Errors
    /// `open` when `/proc` is not mounted.
    pub fn open() -> Result<Self> {
        Self::open_at(Path::new("/"))
    }

    /// Opens the files with the available memory below another root directory, for tests.
    fn open_at(root: &Path) -> Result<Self> {
        let machine = call("open", || File::open(root.join("proc/meminfo")).map_err(|error| errno(&error)))?;
        Ok(Self { machine, groups: ControlGroups::find(root), text: TextBuffer::default() })
    }

    /// Reads the available memory. If this process was moved to other control groups, the limits of those groups
    /// apply.
    ///
    /// # Errors
    /// `pread` if the kernel does not report the available memory of the machine.
    pub fn read(&mut self) -> Result<Available> {
        let text = call("pread", || self.text.read(&self.machine).map_err(|error| errno(&error)))?;
        let machine =
            field(text, "MemAvailable").ok_or(Error::Call { call: "pread", errno: Errno::NODATA })?;
        let machine = Available { len: machine, limit: MemoryLimit::Machine };
        let group = self.groups.tightest(&mut self.text);
        Ok(group.filter(|group| group.len < machine.len).unwrap_or(machine))
    }
}

/// Returns the number of bytes of memory that are available now.
///
/// # Errors
/// As [`MemoryProbe::open`] and [`MemoryProbe::read`].
pub fn available() -> Result<usize> {
    Ok(MemoryProbe::open()?.read()?.len)
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// A reusable buffer for the text of files in `/proc` and `/sys`.
#[derive(Debug, Default)]
struct TextBuffer(Vec<u8>);

impl TextBuffer {
    /// Reads the text of a file from its beginning. The kernel generates the text of some files anew for each read,
    /// which is slow, so a short read counts as the end of the file.
    fn read(&mut self, file: &File) -> io::Result<&str> {
        const STEP: usize = 8 << 10;
        let mut len = 0;
        loop {
            self.0.resize(len + STEP, 0);
            match file.read_at(&mut self.0[len..], len as u64) {
                Ok(read) if read < STEP => break len += read,
                Ok(read) => len += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        str::from_utf8(&self.0[..len]).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

/// Returns the value of a field of `/proc/meminfo` in bytes.
fn field(text: &str, name: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kibibytes: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_memory_available() {
        assert!(available().unwrap() > 0);
    }

    #[test]
    fn a_field_is_matched_by_its_whole_name() {
        let text = "MemTotal:       24603652 kB\nMemAvailableX:  1 kB\nMemAvailable:   24000000 kB\n";
        assert_eq!(field(text, "MemAvailable"), Some(24_000_000 << 10));
        assert_eq!(field(text, "SwapFree"), None);
        assert_eq!(field("MemAvailable: many kB", "MemAvailable"), None);
    }

    #[test]
    fn the_text_of_a_reading_names_its_limit() {
        let machine = Available { len: 3 << 20, limit: MemoryLimit::Machine };
        assert_eq!(machine.to_string(), "only 3 MiB are available on this machine");
        let limit = MemoryLimit::Group { path: "/jobs/7".into(), len: 200 << 20 };
        let group = Available { len: 0, limit };
        assert_eq!(
            group.to_string(),
            "only 0 B are left of the 200 MiB that control group `/jobs/7` may use"
        );
    }
}
