//! Files that are replaced whole or not at all: written beside the old one, then renamed.
//!
//! If the new file cannot be completed, because the disk is full or its writer gives up, the old one is as it was and nothing is left
//! beside it. The new file has the mode of the old one, and its owner where the kernel lets this process give files away; hard
//! links to the old one, its access control list and its extended attributes stay with the old one.
//!
//! Written in place, as [`File::create`] does: what is no regular file, such as a pipe or a device; a descriptor of a process,
//! such as `/dev/stdout`; and a file in a folder where this process may not make others.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Uid};

/// As many links as the kernel follows.
const MOST_LINKS: usize = 40;

/// How many names for the new file are tried.
const MOST_NAMES: u32 = 100;

/// A file that is being written, and takes its place when it is complete. Dropping it leaves what was there.
///
/// ```
/// use std::io::Write;
/// use wholemem_os::replace::Replacement;
///
/// let path = std::env::temp_dir().join(format!("wholemem-example-{}", std::process::id()));
/// std::fs::write(&path, b"old")?;
/// let mut file = Replacement::create(&path)?;
/// file.write_all(b"new")?;
/// assert_eq!(std::fs::read(&path)?, b"old");
/// file.commit()?;
/// assert_eq!(std::fs::read(&path)?, b"new");
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Replacement {
    file: File,
    beside: Option<Beside>,
}

/// Where a file is written, and where it belongs.
#[derive(Debug)]
struct Beside {
    partial: PathBuf,
    target: PathBuf,
    /// Whether there is a file that would be lost.
    is_replacing: bool,
}

impl Replacement {
    /// Begins a file that is to be at a path. If a symbolic link is there, its target is replaced.
    ///
    /// # Errors
    /// What the kernel said: the same as for [`File::create`].
    pub fn create(path: &Path) -> io::Result<Self> {
        let old = match fs::metadata(path) {
            Ok(old) if !old.is_file() => return Self::in_place(path),
            Ok(old) => Some(old),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let Some(target) = target(path)? else { return Self::in_place(path) };
        if old.is_some() {
            // A file that this process may not write is not replaced either.
            OpenOptions::new().write(true).open(&target)?;
        }
        let (partial, file) = match create_beside(&target, old.is_some()) {
            Ok(created) => created,
            Err(error) if may_not(&error) && old.is_some() => return Self::in_place(path),
            Err(error) => return Err(error),
        };
        let is_replacing = old.is_some();
        let replacement = Self { file, beside: Some(Beside { partial, target, is_replacing }) };
        if let Some(old) = old {
            let (user, group) = (Uid::from_raw(old.uid()), Gid::from_raw(old.gid()));
            // Before the mode, since it takes away some of that.
            let _ = rustix::fs::fchown(replacement.file.as_fd(), Some(user), Some(group));
            replacement.file.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
        }
        Ok(replacement)
    }

    fn in_place(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::create(path)?, beside: None })
    }

    /// Whether nothing that was there is touched before the file is complete.
    #[must_use]
    pub fn is_beside(&self) -> bool {
        self.beside.is_some()
    }

    /// The file that is being written.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// What `fdatasync` and `rename` said. What was there is as it was then.
    pub fn commit(mut self) -> io::Result<()> {
        let Some(Beside { partial, target, is_replacing }) = self.beside.take() else { return Ok(()) };
        // Some file systems say only now that the disk is full.
        let synced = if is_replacing { self.file.sync_data() } else { Ok(()) };
        synced.and_then(|()| fs::rename(&partial, target)).inspect_err(|_| {
            let _ = fs::remove_file(&partial);
        })
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        if let Some(Beside { partial, .. }) = &self.beside {
            let _ = fs::remove_file(partial);
        }
    }
}

/// What a path leads to through symbolic links; `None` if it leads through those of `/proc`, which name open files.
fn target(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..MOST_LINKS {
        // Also through a folder that is a link itself, such as `/dev/fd`.
        let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
        if folder.unwrap_or_else(|| path.clone()).starts_with("/proc") {
            return Ok(None);
        }
        match fs::read_link(&path) {
            Ok(link) => path = path.parent().unwrap_or_else(|| Path::new("")).join(link),
            // No link, or nothing there yet.
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound) => {
                return Ok(Some(path));
            }
            Err(error) => return Err(error),
        }
    }
    Err(rustix::io::Errno::LOOP.into())
}

/// Makes a file beside another, under a name that none has. A private one is for this process's user alone, until it gets
/// another mode.
fn create_beside(target: &Path, is_private: bool) -> io::Result<(PathBuf, File)> {
    let mode = if is_private { 0o600 } else { 0o666 };
    let name = target.file_name().ok_or(io::ErrorKind::NotFound)?;
    let mut number = 0;
    loop {
        // A name as long as a name may be leaves no room for more.
        let start: String = name.to_string_lossy().chars().take(40).collect();
        let partial = target.with_file_name(format!(".{start}.{}-{number}.partial", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial) {
            Ok(file) => return Ok((partial, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < MOST_NAMES => number += 1,
            Err(error) => return Err(error),
        }
    }
}

fn may_not(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder that is gone when dropped, and has to be empty but for what a test names.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("wholemem-replace-{}-{name}", std::process::id()));
            fs::create_dir(&folder).unwrap();
            Self(folder)
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        fn names(&self) -> Vec<String> {
            let names = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = names.map(|name| name.into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut file = Replacement::create(path)?;
        file.write_all(bytes)?;
        file.commit()
    }

    #[test]
    fn a_file_that_gets_the_mode_of_another_is_private_before() {
        let folder = Folder::new("private");
        let mode = |is_private| {
            let (path, file) = create_beside(&folder.path("file"), is_private).unwrap();
            fs::remove_file(path).unwrap();
            file.metadata().unwrap().mode() & 0o777
        };
        assert_eq!(mode(true), 0o600);
        fs::write(folder.path("plain"), b"").unwrap();
        assert_eq!(mode(false), fs::metadata(folder.path("plain")).unwrap().mode() & 0o777);
    }

    #[test]
    fn the_old_file_is_there_until_the_new_one_is_complete() {
        let folder = Folder::new("complete");
        let path = folder.path("file");
        replace(&path, b"old").unwrap();
        let mut file = Replacement::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), file.is_beside()), (b"old".to_vec(), true));
        drop(file);
        assert_eq!((fs::read(&path).unwrap(), folder.names()), (b"old".to_vec(), vec!["file".to_owned()]));
        let file = Replacement::create(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::create_dir_all(path.join("in the way")).unwrap();
        assert!(file.commit().is_err());
        assert_eq!(folder.names(), ["file"]);
    }

    #[test]
    fn the_mode_of_the_old_file_stays_and_that_of_a_new_one_is_the_usual() {
        let folder = Folder::new("mode");
        let path = folder.path("file");
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        File::create(folder.path("usual")).unwrap();
        replace(&path, b"1").unwrap();
        assert_eq!(mode(&path), mode(&folder.path("usual")));
        fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        replace(&path, b"2").unwrap();
        assert_eq!((mode(&path), fs::read(&path).unwrap()), (0o640, b"2".to_vec()));
    }

    #[test]
    fn a_link_stays_and_what_it_leads_to_is_replaced() {
        let folder = Folder::new("link");
        fs::create_dir(folder.path("far")).unwrap();
        symlink("second", folder.path("first")).unwrap();
        symlink("far/file", folder.path("second")).unwrap();
        for bytes in [b"1", b"2"] {
            replace(&folder.path("first"), bytes).unwrap();
            assert_eq!(fs::read(folder.path("far/file")).unwrap(), bytes);
            assert_eq!(folder.names(), ["far", "first", "second"]);
        }
        symlink("round", folder.path("round")).unwrap();
        let error = replace(&folder.path("round"), b"").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::LOOP.raw_os_error()));
    }

    #[test]
    fn what_is_no_regular_file_is_written_in_place() {
        let folder = Folder::new("device");
        replace(Path::new("/dev/null"), b"x").unwrap();
        assert!(!Replacement::create(Path::new("/dev/null")).unwrap().is_beside());
        let file = File::create(folder.path("open")).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        symlink(format!("/proc/self/fd/{number}"), folder.path("link")).unwrap();
        replace(&folder.path("link"), b"through a descriptor").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 20, "the open file is written, and not another");
        let error = replace(&folder.0, b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        let error = replace(&folder.path("missing/file"), b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn names_that_are_taken_or_long_are_no_obstacle() {
        let folder = Folder::new("names");
        let taken = format!(".file.{}-0.partial", std::process::id());
        fs::write(folder.path(&taken), b"of another").unwrap();
        replace(&folder.path("file"), b"x").unwrap();
        assert_eq!(fs::read(folder.path(&taken)).unwrap(), b"of another");
        let long = "é".repeat(127);
        replace(&folder.path(&long), b"x").unwrap();
        assert_eq!(folder.names(), [taken, "file".to_owned(), long]);
    }
}
