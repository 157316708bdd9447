//! Atomic replacement of files: the new file is written next to the old one, then renamed.
//!
//! If the new file cannot be completed, because the disk is full or its writer stops, the old file is unchanged and
//! no other file is left. The new file gets the mode of the old one, and its owner if the kernel allows this process
//! to change it. Hard links, the access control list and extended attributes are not copied.
//!
//! Some files are overwritten in place instead, as [`File::create`] does: files that are not regular, such as pipes
//! and devices; descriptors of a process, such as `/dev/stdout`; and files in a directory where this process may not
//! create files.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Uid};

/// The maximum number of symbolic links that are followed to the file that is replaced: the same as in the kernel.
const MAX_LINKS: usize = 40;

/// The maximum number of names that are tried for the temporary file.
const MAX_NAMES: u32 = 100;

/// A new file that is being written, and that replaces the file at its path on [`commit`](Self::commit). Dropping it
/// without a commit discards the new file.
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
    temporary: Option<TemporaryFile>,
}

/// A temporary file, and the path of the file that it replaces.
#[derive(Debug)]
struct TemporaryFile {
    path: PathBuf,
    target: PathBuf,
    /// True if a file exists at the path that is replaced.
    is_replacing: bool,
}

impl Replacement {
    /// Creates a new file that replaces the one at `path` later. If the path is a symbolic link, the file that it
    /// points to is replaced.
    ///
    /// # Errors
    /// The same as [`File::create`].
    pub fn create(path: &Path) -> io::Result<Self> {
        let old = match fs::metadata(path) {
            Ok(old) if !old.is_file() => return Self::in_place(path),
            Ok(old) => Some(old),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let Some(target) = target(path)? else { return Self::in_place(path) };
        if old.is_some() {
            // Opening the old file checks that this process may write it: otherwise the file must not be replaced.
            OpenOptions::new().write(true).open(&target)?;
        }
        let (new_path, file) = match create_temporary(&target, old.is_some()) {
            Ok(created) => created,
            Err(error) if is_permission_error(&error) && old.is_some() => return Self::in_place(path),
            Err(error) => return Err(error),
        };
        let is_replacing = old.is_some();
        let temporary = TemporaryFile { path: new_path, target, is_replacing };
        let replacement = Self { file, temporary: Some(temporary) };
        if let Some(old) = old {
            let (user, group) = (Uid::from_raw(old.uid()), Gid::from_raw(old.gid()));
            // The owner is changed before the mode, since a change of the owner clears mode bits.
            let _ = rustix::fs::fchown(replacement.file.as_fd(), Some(user), Some(group));
            replacement.file.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
        }
        Ok(replacement)
    }

    fn in_place(path: &Path) -> io::Result<Self> {
        Ok(Self { file: File::create(path)?, temporary: None })
    }

    /// Returns true if the old file stays unchanged until [`commit`](Self::commit), false if it is overwritten in
    /// place.
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        self.temporary.is_some()
    }

    /// Returns the file that is being written.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Renames the new file to its path, so that it replaces the old file.
    ///
    /// # Errors
    /// The error of `fdatasync` or `rename`. The old file is then unchanged.
    pub fn commit(mut self) -> io::Result<()> {
        let Some(TemporaryFile { path, target, is_replacing }) = self.temporary.take() else { return Ok(()) };
        // Some file systems report a full disk only when the data is written back.
        let synced = if is_replacing { self.file.sync_data() } else { Ok(()) };
        synced.and_then(|()| fs::rename(&path, target)).inspect_err(|_| {
            let _ = fs::remove_file(&path);
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
        if let Some(TemporaryFile { path, .. }) = &self.temporary {
            let _ = fs::remove_file(path);
        }
    }
}

/// Resolves the symbolic links of a path. Returns `None` if a link leads through `/proc`, where links refer to open
/// files.
fn target(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        // The directory of the path may be a symbolic link itself, such as `/dev/fd`.
        let folder = path.parent().and_then(|folder| folder.canonicalize().ok());
        if folder.unwrap_or_else(|| path.clone()).starts_with("/proc") {
            return Ok(None);
        }
        match fs::read_link(&path) {
            Ok(link) => path = path.parent().unwrap_or_else(|| Path::new("")).join(link),
            // The path is not a symbolic link, or no file exists there yet.
            Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::NotFound) => {
                return Ok(Some(path));
            }
            Err(error) => return Err(error),
        }
    }
    Err(rustix::io::Errno::LOOP.into())
}

/// Creates a temporary file with an unused name next to the target. If `is_private`, only the user of this process
/// can access the file, until its mode is changed.
fn create_temporary(target: &Path, is_private: bool) -> io::Result<(PathBuf, File)> {
    let mode = if is_private { 0o600 } else { 0o666 };
    let name = target.file_name().ok_or(io::ErrorKind::NotFound)?;
    let mut number = 0;
    loop {
        // The temporary name contains only the beginning of the target's name, which may already have the maximum
        // length.
        let start: String = name.to_string_lossy().chars().take(40).collect();
        let partial = target.with_file_name(format!(".{start}.{}-{number}.partial", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&partial) {
            Ok(file) => return Ok((partial, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < MAX_NAMES => number += 1,
            Err(error) => return Err(error),
        }
    }
}

fn is_permission_error(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A temporary directory that is removed with its contents on drop.
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
    fn a_temporary_file_that_gets_another_mode_is_private_until_then() {
        let folder = Folder::new("private");
        let mode = |is_private| {
            let (path, file) = create_temporary(&folder.path("file"), is_private).unwrap();
            fs::remove_file(path).unwrap();
            file.metadata().unwrap().mode() & 0o777
        };
        assert_eq!(mode(true), 0o600);
        fs::write(folder.path("plain"), b"").unwrap();
        assert_eq!(mode(false), fs::metadata(folder.path("plain")).unwrap().mode() & 0o777);
    }

    #[test]
    fn the_old_file_is_unchanged_until_the_new_one_is_committed() {
        let folder = Folder::new("complete");
        let path = folder.path("file");
        replace(&path, b"old").unwrap();
        let mut file = Replacement::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        assert_eq!((fs::read(&path).unwrap(), file.is_atomic()), (b"old".to_vec(), true));
        drop(file);
        assert_eq!((fs::read(&path).unwrap(), folder.names()), (b"old".to_vec(), vec!["file".to_owned()]));
        let file = Replacement::create(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::create_dir_all(path.join("in the way")).unwrap();
        assert!(file.commit().is_err());
        assert_eq!(folder.names(), ["file"]);
    }

    #[test]
    fn a_replacement_has_the_mode_of_the_old_file_and_a_new_file_the_default_mode() {
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
    fn a_symbolic_link_stays_and_its_target_is_replaced() {
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
    fn files_that_are_not_regular_are_written_in_place() {
        let folder = Folder::new("device");
        replace(Path::new("/dev/null"), b"x").unwrap();
        assert!(!Replacement::create(Path::new("/dev/null")).unwrap().is_atomic());
        let file = File::create(folder.path("open")).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        symlink(format!("/proc/self/fd/{number}"), folder.path("link")).unwrap();
        replace(&folder.path("link"), b"through a descriptor").unwrap();
        assert_eq!(file.metadata().unwrap().len(), 20, "the open file is written, not a new one");
        let error = replace(&folder.0, b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        let error = replace(&folder.path("missing/file"), b"").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn temporary_names_that_exist_or_are_long_are_handled() {
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
