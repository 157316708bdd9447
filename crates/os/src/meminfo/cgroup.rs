//! Memory limits of control groups (cgroups), of version 1 and version 2.
//!
//! A process is in one group of each hierarchy, and the limits of that group and of its ancestors apply. The memory
//! controller is in one hierarchy: in its own of version 1, or in the unified one of version 2. Both are read; the
//! one without the controller has no limits.
//!
//! ```text
//!   /proc/self/cgroup      4:memory:/jobs/7          the group of this process
//!   /proc/self/mountinfo   ... /jobs /sys/fs/cgroup/memory ... - cgroup ... memory
//!                              root  mount point            type        options
//!   group = mount point + (path of the group - root) = /sys/fs/cgroup/memory/7
//! ```
//!
//! Inactive page cache counts as used by a group, but the kernel frees it before it kills a process, so it is
//! available.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::{Available, MemoryLimit, TextBuffer};

/// The smallest memory limit of a cgroup that means "no limit": version 1 represents no limit as the largest number
/// of whole pages, and no machine has this much memory.
const UNLIMITED: usize = 1 << 62;

/// The names of the file system and the files of one version of control groups.
#[derive(Debug, Clone, Copy)]
struct CgroupVersion {
    filesystem: &'static str,
    /// The name in the controllers field (the second) of the line of `/proc/self/cgroup` that has the process's memory cgroup;
    /// empty for version 2.
    controllers: &'static str,
    limit: &'static str,
    usage: &'static str,
    /// The field of a cgroup's `memory.stat` with the inactive page cache, including that of descendant groups.
    idle_cache: &'static str,
    /// The name of the file that shows whether the memory usage of a control group includes its descendants; `None` if it always
    /// does.
    hierarchy: Option<&'static str>,
}

const VERSIONS: [CgroupVersion; 2] = [
    CgroupVersion {
        filesystem: "cgroup",
        controllers: "memory",
        limit: "memory.limit_in_bytes",
        usage: "memory.usage_in_bytes",
        idle_cache: "total_inactive_file",
        hierarchy: Some("memory.use_hierarchy"),
    },
    CgroupVersion {
        filesystem: "cgroup2",
        controllers: "",
        limit: "memory.max",
        usage: "memory.current",
        idle_cache: "inactive_file",
        hierarchy: None,
    },
];

/// The control groups whose memory limits apply to this process, with their files open.
#[derive(Debug)]
pub(super) struct ControlGroups {
    root: PathBuf,
    /// The open file `/proc/self/cgroup`, and the text that it had when the control groups were found.
    membership: Option<(File, String)>,
    groups: Vec<ControlGroup>,
}

#[derive(Debug)]
struct ControlGroup {
    path: PathBuf,
    limit: File,
    usage: File,
    stat: Option<File>,
    idle_cache: &'static str,
}

impl ControlGroups {
    /// Finds the control groups of this process from the files below a root directory. If the files cannot be read,
    /// no limits apply.
    pub(super) fn find(root: &Path) -> Self {
        let membership = File::open(root.join("proc/self/cgroup")).ok().and_then(|file| {
            let text = TextBuffer::default().read(&file).ok()?.to_owned();
            Some((file, text))
        });
        let own = membership.as_ref().map_or("", |(_, text)| text);
        let mounts = fs::read_to_string(root.join("proc/self/mountinfo")).unwrap_or_default();
        let groups = VERSIONS.iter().filter_map(|version| version.groups(root, own, &mounts));
        let groups = groups.flatten().collect();
        Self { root: root.to_owned(), membership, groups }
    }

    /// Returns the memory that is available in the control group that leaves the least.
    pub(super) fn tightest(&mut self, text: &mut TextBuffer) -> Option<Available> {
        if self.has_moved(text) {
            *self = Self::find(&self.root);
        }
        self.groups.iter().filter_map(|group| group.available(text)).min_by_key(|available| available.len)
    }

    /// Returns whether this process was moved to other control groups since its groups were found.
    fn has_moved(&self, text: &mut TextBuffer) -> bool {
        let Some((file, before)) = &self.membership else { return false };
        text.read(file).is_ok_and(|now| now != before)
    }
}

impl CgroupVersion {
    /// Opens the control groups of this cgroup version whose memory limits apply, from the process's own group
    /// upwards.
    fn groups(self, root: &Path, membership: &str, mounts: &str) -> Option<Vec<ControlGroup>> {
        let path = membership.lines().find_map(|line| self.own_group(line))?;
        let (mount, below) = mounts.lines().find_map(|line| {
            let mount = self.mount(line)?;
            let below = Path::new(path).strip_prefix(&mount.root).ok()?.to_owned();
            Some((mount, below))
        })?;
        let top = root.join(mount.point.strip_prefix("/").ok()?);
        let mut groups = Vec::new();
        for below in below.ancestors() {
            let directory = top.join(below);
            let is_own = groups.is_empty();
            if !is_own && self.hierarchy.is_some_and(|file| is_zero(&directory.join(file))) {
                break;
            }
            // `components` removes the trailing slash that joining an empty path adds.
            let path = mount.root.join(below).components().collect::<PathBuf>();
            groups.push((directory, path));
        }
        let open = |(directory, path): (PathBuf, PathBuf)| {
            Some(ControlGroup {
                limit: File::open(directory.join(self.limit)).ok()?,
                usage: File::open(directory.join(self.usage)).ok()?,
                stat: File::open(directory.join("memory.stat")).ok(),
                idle_cache: self.idle_cache,
                path,
            })
        };
        Some(groups.into_iter().filter_map(open).collect())
    }

    /// Returns the control group's path in a line of `/proc/self/cgroup`, if the line is of the hierarchy with the
    /// memory controller.
    fn own_group(self, line: &str) -> Option<&str> {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        controllers.split(',').any(|name| name == self.controllers).then_some(path)
    }

    /// Returns the mount in a line of `/proc/self/mountinfo`, if it is the hierarchy with the memory controller.
    fn mount(self, line: &str) -> Option<Mount> {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut fields = filesystem.split(' ');
        let (kind, _, options) = (fields.next()?, fields.next()?, fields.next()?);
        let has_controller =
            self.controllers.is_empty() || options.split(',').any(|option| option == self.controllers);
        if kind != self.filesystem || !has_controller {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        Some(Mount { root: unescaped(fields.next()?), point: unescaped(fields.next()?) })
    }
}

/// A mounted cgroup hierarchy, or a mounted subtree of one.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// The path of the control group that is visible at the mount point.
    root: PathBuf,
    point: PathBuf,
}

/// Decodes a path of `/proc/self/mountinfo`, where special characters are octal codes: a space is `\040`.
fn unescaped(text: &str) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&first, tail)) = rest.split_first() {
        let digits = if first == b'\\' { tail.get(..3) } else { None };
        let code = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(bytes).into()
}

fn is_zero(file: &Path) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.trim() == "0")
}

impl ControlGroup {
    /// Returns the memory that the limit of the control group leaves, or `None` if the group has no limit or was
    /// removed.
    fn available(&self, text: &mut TextBuffer) -> Option<Available> {
        let mut number = |file: &File| text.read(file).ok()?.trim().parse::<usize>().ok();
        let len = number(&self.limit).filter(|limit| *limit < UNLIMITED)?;
        let used = number(&self.usage)?;
        let idle = self.stat.as_ref().and_then(|stat| {
            let lines = text.read(stat).ok()?;
            let idle =
                lines.lines().find_map(|line| line.strip_prefix(self.idle_cache)?.strip_prefix(' '))?;
            idle.trim().parse::<usize>().ok()
        });
        let left = len.saturating_sub(used.saturating_sub(idle.unwrap_or(0)));
        Some(Available { len: left, limit: MemoryLimit::Group { path: self.path.clone(), len } })
    }
}

#[cfg(test)]
mod tests {
    use super::super::MemoryProbe;
    use super::*;

    const MIB: usize = 1 << 20;
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";
    const V1_CPU: &str = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n";
    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID_V2: &str = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    /// A temporary directory with the `/proc` and `/sys` files of a fake machine, removed on drop.
    struct FakeRoot(PathBuf);

    impl FakeRoot {
        fn new(name: &str, membership: &str, mounts: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("wholemem-meminfo-{}-{name}", std::process::id()));
            let root = Self(folder);
            root.write("proc/meminfo", "MemAvailable: 1048576 kB\n");
            root.write("proc/self/cgroup", membership);
            root.write("proc/self/mountinfo", mounts);
            root
        }

        fn write(&self, file: &str, text: &str) {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().expect("a directory")).expect("a directory");
            fs::write(path, text).expect("a file");
        }

        /// Writes the memory files of a control group of version 1; sizes are in MiB.
        fn v1(&self, folder: &str, limit: usize, used: usize, idle: usize) {
            let folder = format!("sys/fs/cgroup/memory{folder}");
            self.write(&format!("{folder}/memory.limit_in_bytes"), &format!("{}\n", limit * MIB));
            self.write(&format!("{folder}/memory.usage_in_bytes"), &format!("{}\n", used * MIB));
            let stat = format!("cache 5\ninactive_file 3\ntotal_inactive_file {}\ntotal_x 1\n", idle * MIB);
            self.write(&format!("{folder}/memory.stat"), &stat);
            self.write(&format!("{folder}/memory.use_hierarchy"), "1\n");
        }

        /// Writes the memory files of a control group of version 2: `limit` as text in bytes, `used` and `idle` in
        /// MiB.
        fn v2(&self, folder: &str, limit: &str, used: usize, idle: usize) {
            let folder = format!("sys/fs/cgroup{folder}");
            self.write(&format!("{folder}/memory.max"), limit);
            self.write(&format!("{folder}/memory.current"), &format!("{}\n", used * MIB));
            self.write(&format!("{folder}/memory.stat"), &format!("anon 1\ninactive_file {}\n", idle * MIB));
        }

        fn probe(&self) -> MemoryProbe {
            MemoryProbe::open_at(&self.0).unwrap()
        }

        fn read(&self) -> Available {
            self.probe().read().unwrap()
        }
    }

    impl Drop for FakeRoot {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).expect("remove the directory");
        }
    }

    fn of_group(path: &str, left: usize, limit: usize) -> Available {
        Available { len: left * MIB, limit: MemoryLimit::Group { path: path.into(), len: limit * MIB } }
    }

    const OF_MACHINE: Available = Available { len: 1 << 30, limit: MemoryLimit::Machine };

    #[test]
    fn available_memory_of_version_1_includes_inactive_page_cache() {
        let root = FakeRoot::new("v1", "5:cpu:/other\n4:memory:/jobs/7\n0::/\n", &[V1_CPU, V1].concat());
        root.v1("/jobs/7", 200, 150, 30);
        assert_eq!(root.read(), of_group("/jobs/7", 80, 200));
    }

    #[test]
    fn the_ancestor_with_the_least_memory_left_is_reported() {
        let root = FakeRoot::new("above", "4:memory,other:/a/b/c\n", V1);
        root.v1("/a/b/c", 800, 100, 0);
        root.v1("/a/b", 500, 480, 10);
        root.v1("/a", 600, 490, 0);
        assert_eq!(root.read(), of_group("/a/b", 30, 500));
        // Without `memory.use_hierarchy`, the usage of a control group does not include that of its descendants.
        root.write("sys/fs/cgroup/memory/a/b/memory.use_hierarchy", "0\n");
        assert_eq!(root.read(), of_group("/a/b/c", 700, 800));
    }

    #[test]
    fn the_largest_number_of_version_1_means_no_limit() {
        let root = FakeRoot::new("none", "4:memory:/a\n", V1);
        root.v1("/a", 1, 0, 0);
        root.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(root.read(), OF_MACHINE);
    }

    #[test]
    fn a_mounted_subtree_begins_at_its_root_group() {
        let mounts = "35 31 0:32 /docker/ab\\040c /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
        let root = FakeRoot::new("part", "4:memory:/docker/ab c/inner\n", mounts);
        root.v1("/inner", 300, 100, 0);
        root.v1("", 250, 150, 0);
        assert_eq!(root.read(), of_group("/docker/ab c", 100, 250));
        root.write("proc/self/cgroup", "4:memory:/elsewhere\n");
        assert_eq!(root.read(), OF_MACHINE, "the group is outside of the mount");
    }

    #[test]
    fn the_limits_of_version_2_are_read_from_any_mount_point() {
        let root = FakeRoot::new("v2", "0::/system.slice/x.service\n", V2);
        root.v2("/system.slice/x.service", "max\n", 70, 10);
        root.v2("/system.slice", "104857600\n", 70, 10);
        assert_eq!(root.read(), of_group("/system.slice", 40, 100));
        root.v2("/system.slice", "max\n", 70, 10);
        assert_eq!(root.read(), OF_MACHINE);
        let hybrid = FakeRoot::new("hybrid", "4:memory:/one\n0::/two\n", &[HYBRID_V2, V1].concat());
        hybrid.v1("/one", 200, 150, 0);
        assert_eq!(hybrid.read(), of_group("/one", 50, 200), "version 2 lacks the memory controller here");
        hybrid.v2("/unified/two", "104857600\n", 80, 0);
        assert_eq!(hybrid.read(), of_group("/two", 20, 100));
    }

    #[test]
    fn a_probe_reads_current_values_and_follows_its_process_to_another_group() {
        let root = FakeRoot::new("moved", "4:memory:/a\n", V1);
        root.v1("/a", 200, 150, 0);
        root.v1("/b", 200, 10, 0);
        let mut probe = root.probe();
        assert_eq!(probe.read().unwrap(), of_group("/a", 50, 200));
        root.write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "210763776\n");
        assert_eq!(probe.read().unwrap().len, 0, "usage exceeds the limit");
        root.write("proc/self/cgroup", "4:memory:/b\n");
        assert_eq!(probe.read().unwrap(), of_group("/b", 190, 200));
    }

    #[test]
    fn missing_or_malformed_files_mean_no_limit() {
        let root = FakeRoot::new("missing", "nonsense\n4:memory:/a\n", &["x - y\n", V1].concat());
        assert_eq!(root.read(), OF_MACHINE);
        root.v1("/a", 10, 5, 0);
        root.write("sys/fs/cgroup/memory/a/memory.stat", "total_inactive_file many\n");
        assert_eq!(root.read(), of_group("/a", 5, 10));
        root.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "\n");
        assert_eq!(root.read(), OF_MACHINE);
    }
}
