//! `cargo xtask install`: installs the library for C and C++, the headers and the program into a folder.
//!
//! | module | contents |
//! |---|---|
//! | [`library`] | builds the shared and the static library, and checks them |
//! | [`layout`] | the files of an installation |
//! | [`exports`] | the exported symbols |
//!
//! Guarantees: a file is replaced by a rename, so running programs keep the version that they have loaded. A file that has not changed
//! is not written. The manifest lists the files of the installation; the next installation removes those that it no longer has, and
//! `--uninstall` removes all of them and no other file.

pub(crate) mod exports;
pub(crate) mod layout;
pub(crate) mod library;

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use layout::{Content, InstalledFile};

/// The path of the manifest in the prefix.
const MANIFEST: &str = "share/wholemem/manifest.txt";

/// The name of the folders that an installation creates and `--uninstall` removes. Other folders are shared with other software.
const OWN_FOLDER: &str = "wholemem";

#[derive(Args, Debug)]
pub(crate) struct InstallArguments {
    /// The folder to install to: `bin`, `include`, `lib` and `share` are in it.
    #[arg(long, value_name = "DIR", default_value = "/usr/local")]
    prefix: PathBuf,
    /// Install to this folder followed by the prefix, as packagers need it.
    #[arg(long, value_name = "DIR")]
    destdir: Option<PathBuf>,
    /// Remove the files that an earlier installation listed in its manifest.
    #[arg(long)]
    uninstall: bool,
}

/// Installs or uninstalls. Relative paths are relative to the folder that the command was started in.
pub(crate) fn run(arguments: &InstallArguments, started_in: &Path) -> Result<()> {
    let destdir = arguments.destdir.as_ref().map(|destdir| started_in.join(destdir));
    let root = root(&started_in.join(&arguments.prefix), destdir.as_deref());
    if arguments.uninstall { uninstall(&root) } else { install(&root) }
}

/// Returns the folder that files are written to.
pub(crate) fn root(prefix: &Path, destdir: Option<&Path>) -> PathBuf {
    match destdir {
        // `join` would replace the destination by an absolute prefix.
        Some(destdir) => {
            let normal = prefix.components().filter(|part| !matches!(part, Component::RootDir));
            destdir.join(normal.collect::<PathBuf>())
        }
        None => prefix.to_owned(),
    }
}

/// Builds the libraries and the program, and installs them into a folder.
pub(crate) fn install(root: &Path) -> Result<()> {
    // An error of permissions is reported before the build, which takes minutes.
    check_writable(root)?;
    let built = library::build()?;
    install_files(root, &layout::files(&built)?)?;
    println!("installed in {}", root.display());
    for (path, word) in [("lib/pkgconfig", "PKG_CONFIG_PATH"), ("lib", "LD_LIBRARY_PATH")] {
        println!("hint: outside of the folders of the system, set {word}={}", root.join(path).display());
    }
    println!("hint: for CMake, set CMAKE_PREFIX_PATH={}", root.display());
    Ok(())
}

fn check_writable(root: &Path) -> Result<()> {
    let probe = root.join(format!(".wholemem-{}", std::process::id()));
    let written =
        fs::create_dir_all(root).and_then(|()| fs::write(&probe, "")).and_then(|()| fs::remove_file(&probe));
    written.with_context(|| {
        format!(
            "cannot write to {}\nhint: name a folder that you may write to with `--prefix`, or run the command as root",
            root.display()
        )
    })
}

fn install_files(root: &Path, files: &[InstalledFile]) -> Result<()> {
    let old = manifest(root)?.unwrap_or_default();
    let new: BTreeSet<String> = files.iter().map(|file| file.path.clone()).collect();
    // All files that can be on the disk after an interruption are in the manifest.
    write_manifest(root, old.union(&new))?;
    for file in files {
        let state = if place(root, file)? { "installed" } else { "unchanged" };
        println!("{state}  {}", file.path);
    }
    for path in old.difference(&new) {
        remove(root, path)?;
    }
    write_manifest(root, new.iter())
}

/// Writes a file of the installation, unless it has its content already. Returns whether the file was written.
fn place(root: &Path, file: &InstalledFile) -> Result<bool> {
    let target = root.join(&file.path);
    let folder = target.parent().context("the path of a file has no parent folder")?;
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let name = target.file_name().context("the path of a file has no name")?.to_string_lossy();
    let temporary = folder.join(format!(".{name}.{}", std::process::id()));
    let cannot_write = || format!("cannot write {}", target.display());
    match &file.content {
        Content::Link(to) => {
            if fs::read_link(&target).is_ok_and(|old| old == Path::new(to)) {
                return Ok(false);
            }
            symlink(to, &temporary).with_context(cannot_write)?;
        }
        Content::Bytes(bytes) => {
            let is_regular = fs::symlink_metadata(&target).is_ok_and(|data| data.is_file());
            let mode = |path: &Path| fs::metadata(path).map(|data| data.permissions().mode() & 0o7777);
            if is_regular
                && fs::read(&target).is_ok_and(|old| old == *bytes)
                && mode(&target).is_ok_and(|mode| mode == file.mode)
            {
                return Ok(false);
            }
            fs::write(&temporary, bytes).with_context(cannot_write)?;
            fs::set_permissions(&temporary, fs::Permissions::from_mode(file.mode))
                .with_context(cannot_write)?;
        }
    }
    fs::rename(&temporary, &target).with_context(cannot_write)?;
    Ok(true)
}

pub(crate) fn uninstall(root: &Path) -> Result<()> {
    let Some(files) = manifest(root)? else {
        bail!("no installation of wholemem in {}: {MANIFEST} is missing", root.display());
    };
    for path in &files {
        remove(root, path)?;
    }
    remove(root, MANIFEST)?;
    println!("uninstalled from {}", root.display());
    Ok(())
}

/// Removes a file, and the folders named after us that are empty then. A file that does not exist is skipped.
fn remove(root: &Path, path: &str) -> Result<()> {
    let file = root.join(path);
    match fs::remove_file(&file) {
        Ok(()) => println!("removed    {path}"),
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("cannot remove {}", file.display())),
    }
    let own = file.ancestors().skip(1).take_while(|folder| *folder != root);
    for folder in own.filter(|folder| folder.file_name().is_some_and(|name| name == OWN_FOLDER)) {
        // The folder stays if it has other files.
        drop(fs::remove_dir(folder));
    }
    Ok(())
}

/// Returns the files in the manifest of an installation, if there is one.
fn manifest(root: &Path) -> Result<Option<BTreeSet<String>>> {
    let path = root.join(MANIFEST);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let files: BTreeSet<_> = text.lines().map(str::to_owned).collect();
    for file in &files {
        let is_inside = Path::new(file).components().all(|part| matches!(part, Component::Normal(_)));
        ensure!(is_inside && !file.is_empty(), "{}: `{file}` is not a path in the prefix", path.display());
    }
    Ok(Some(files))
}

fn write_manifest<'a>(root: &Path, files: impl Iterator<Item = &'a String>) -> Result<()> {
    let text: String = files.map(|file| format!("{file}\n")).collect();
    place(
        root,
        &InstalledFile { path: MANIFEST.to_owned(), content: Content::Bytes(text.into_bytes()), mode: 0o644 },
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("wholemem-install-{name}-{}", std::process::id()));
            fs::create_dir(&folder).unwrap();
            Self(folder)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    fn file(path: &str, text: &str) -> InstalledFile {
        InstalledFile { path: path.to_owned(), content: Content::Bytes(text.into()), mode: 0o644 }
    }

    fn link(path: &str, to: &str) -> InstalledFile {
        InstalledFile { path: path.to_owned(), content: Content::Link(to.to_owned()), mode: 0o777 }
    }

    #[test]
    fn the_destination_precedes_an_absolute_prefix() {
        let prefix = Path::new("/usr/local");
        assert_eq!(root(prefix, None), prefix);
        assert_eq!(root(prefix, Some(Path::new("/tmp/package"))), Path::new("/tmp/package/usr/local"));
    }

    #[test]
    fn a_second_installation_writes_nothing() {
        let folder = Folder::new("twice");
        let files = [file("lib/libx.so.0.1.0", "x"), link("lib/libx.so.0", "libx.so.0.1.0")];
        install_files(&folder.0, &files).unwrap();
        let inode = |path: &str| {
            let data = fs::symlink_metadata(folder.0.join(path)).unwrap();
            std::os::unix::fs::MetadataExt::ino(&data)
        };
        let before = files.each_ref().map(|file| inode(&file.path));
        install_files(&folder.0, &files).unwrap();
        assert_eq!(files.each_ref().map(|file| inode(&file.path)), before);
        install_files(&folder.0, &[file("lib/libx.so.0.1.0", "y")]).unwrap();
        assert_ne!(inode("lib/libx.so.0.1.0"), before[0]);
    }

    #[test]
    fn files_of_the_previous_version_are_removed_and_others_stay() {
        let folder = Folder::new("stale");
        install_files(
            &folder.0,
            &[file("include/wholemem/old.hpp", "a"), file("include/wholemem/a.hpp", "a")],
        )
        .unwrap();
        fs::write(folder.0.join("include/other.h"), "of other software").unwrap();
        install_files(&folder.0, &[file("include/wholemem/a.hpp", "b")]).unwrap();
        assert!(!folder.0.join("include/wholemem/old.hpp").exists());
        uninstall(&folder.0).unwrap();
        assert!(!folder.0.join("include/wholemem").exists() && !folder.0.join("share/wholemem").exists());
        assert!(folder.0.join("include/other.h").exists());
        let error = uninstall(&folder.0).unwrap_err().to_string();
        let expected =
            format!("no installation of wholemem in {}: {MANIFEST} is missing", folder.0.display());
        assert_eq!(error, expected);
    }

    #[test]
    fn a_manifest_cannot_name_files_outside_of_the_prefix() {
        let folder = Folder::new("outside");
        install_files(&folder.0, &[]).unwrap();
        for path in ["/etc/passwd", "../x", ""] {
            fs::write(folder.0.join(MANIFEST), format!("{path}\n")).unwrap();
            let error = uninstall(&folder.0).unwrap_err().to_string();
            assert!(error.ends_with(&format!("`{path}` is not a path in the prefix")), "{error}");
        }
    }
}
